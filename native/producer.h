// A worker's handle: reserve, claim, publish, retry, end.
//
// Invariant: every open claim owns a descriptor and max_group_bytes, so publish never waits and a retry never lacks room.
// All of that is private to the process; a successor rebuilds it from the descriptors.
#pragma once

#include <cstdlib>
#include <deque>
#include <span>

#include "arena.h"
#include "ring.h"

namespace mprollout {

// What a published field is made from: anything with `bytes` and a write(to) of exactly so many. write() may throw: nothing
// was published then, and the claim stands.
struct Field {
    const void* data;
    std::uint64_t bytes;

    void write(unsigned char* to) const {
        if (bytes != 0) std::memcpy(to, data, bytes);
    }
};

// A payload: PayloadHeader, then one FieldPlace a field, then the fields, each at a multiple of kUnit.
struct PayloadHeader {
    std::uint32_t fields, reserved;
    std::uint64_t ticket;
};
struct FieldPlace {
    std::uint64_t offset, bytes;  // from the start of the extent
};
static_assert(sizeof(PayloadHeader) == 16 && sizeof(FieldPlace) == 16);

template <class Source>
std::uint64_t payload_bytes(std::span<const Source> fields) {
    std::uint64_t at = sizeof(PayloadHeader) + fields.size() * sizeof(FieldPlace);
    for (const Source& f : fields) at = round_up(at, kUnit) + f.bytes;
    return round_up(at, kUnit);
}

template <class Source>
void write_payload(unsigned char* to, std::uint64_t ticket, std::span<const Source> fields) {
    const PayloadHeader header{static_cast<std::uint32_t>(fields.size()), 0, ticket};
    std::memcpy(to, &header, sizeof header);
    std::uint64_t at = sizeof header + fields.size() * sizeof(FieldPlace);
    for (std::size_t i = 0; i < fields.size(); ++i) {
        at = round_up(at, kUnit);
        const FieldPlace place{at, fields[i].bytes};
        std::memcpy(to + sizeof header + i * sizeof place, &place, sizeof place);
        fields[i].write(to + at);
        at += place.bytes;
    }
}

constexpr int kPoison = 0xee;

// Of the copies of a claim one is used.
struct Claim {
    std::uint64_t entry, word, ticket, descriptor, extent;
    std::string_view prompt;  // in the segment, until the ticket ends: copy it at once
    const void* owner;        // the Producer; nullptr: this handle is dead
};

class Producer {
public:
    Producer(MappingPtr mapping, std::uint64_t worker)
        : m_(std::move(mapping)),
          worker_(worker),
          arena_(m_->arena_room(), m_->shape().max_group_bytes),
          extents_(m_->shape().descriptors) {
        check_range("Producer: worker", worker, 0, m_->shape().workers - 1);
        incarnation_ = m_->control(worker).incarnation.fetch_add(1, std::memory_order_relaxed) + 1;
        const std::vector<char> live = live_descriptors(*m_, worker);
        for (std::uint64_t d = live.size(); d-- > 0;) {
            if (!live[d]) {
                free_.push_back(d);
                continue;
            }
            Descriptor& x = m_->descriptor(worker, d);
            const Extent held = extents_[d] = {read_once(x.extent_offset), read_once(x.extent_bytes)};
            if (!arena_.occupy(held.offset, held.bytes))
                throw SegmentError(text("arena ", worker, ": expected descriptor ", d,
                                        " to hold an extent of its own, got offset ", held.offset, " and ", held.bytes,
                                        " bytes"));
            live_.push_back(d);
        }
        const char* poison = std::getenv("MPROLLOUT_POISON");
        poison_ = poison != nullptr && std::strcmp(poison, "1") == 0;
    }

    std::optional<Claim> claim() {
        check_process();
        if (superseded())
            throw std::runtime_error(text("claim: expected incarnation ", incarnation_, " of worker ", worker_,
                                          " to be the last, got ",
                                          m_->control(worker_).incarnation.load(std::memory_order_relaxed)));
        starved_ = false;
        // [K2] [K3] of the model: a look at the words, then at a record
        auto ready = finder_.find(*m_);
        if (!ready) return std::nullopt;
        // [K1]
        const auto extent = reserve();
        if (!extent) {
            starved_ = true;
            return std::nullopt;
        }
        for (; ready; ready = finder_.find(*m_)) {
            Entry mine = Entry::unpack(ready->word);
            mine.state = RUNNING;
            mine.worker = worker_;
            // [K4]
            if (!hand_over(m_->table_word(ready->entry), ready->word, mine.pack())) continue;
            const std::uint64_t bytes = std::min(ready->prompt_bytes, m_->shape().max_prompt_bytes);
            const Claim claim{ready->entry, mine.pack(), ready->ticket,
                              free_.back(), *extent,     {reinterpret_cast<char*>(m_->prompt(ready->entry)), bytes},
                              this};
            free_.pop_back();
            ++claims_;
            return claim;
        }
        arena_.free(*extent, arena_.allocation());
        return std::nullopt;
    }

    bool publish(Claim& claim, std::span<const Field> fields) { return publish_from<Field>(claim, fields); }

    template <class Source>
    bool publish_from(Claim& claim, std::span<const Source> fields) {
        if (!alive(claim)) return false;
        const std::uint64_t bytes = payload_bytes(fields);
        if (bytes > m_->shape().max_group_bytes)
            throw GroupTooLarge(text("publish: expected a group of at most max_group_bytes ",
                                     m_->shape().max_group_bytes, " bytes, got ", bytes, " for ticket ", claim.ticket));
        Descriptor& d = m_->descriptor(worker_, claim.descriptor);
        Entry next = Entry::unpack(claim.word);
        next.state = PUBLISHING;
        // [P1]
        // FREE first: from here to the index CAS this descriptor is no evidence for anything. release: the stores below may
        // not move above it for a recovery that follows a death in between (a kill is precise, a compiler is not).
        d.word.store(kFree, std::memory_order_release);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        // [P2]
        write_payload(m_->arena(worker_) + claim.extent, claim.ticket, fields);
        d.ticket = claim.ticket;
        d.table_word = next.pack();
        d.extent_offset = claim.extent;
        d.extent_bytes = bytes;
        d.entry = static_cast<std::uint32_t>(claim.entry);
        d.fields = static_cast<std::uint32_t>(fields.size());
        Word& word = m_->table_word(claim.entry);
        // [P3]
        if (!hand_over(word, claim.word, next.pack())) {
            drop(claim);
            return false;
        }
        Word& sequence = m_->control(worker_).sequence;
        const std::uint64_t mine = sequence.load(std::memory_order_relaxed) % kSequences + 1;
        // [P4]
        sequence.store(mine,
                       std::memory_order_relaxed);  // raised before use: a successor after a death does not repeat it
        if (enqueue(*m_, worker_, claim.descriptor, mine, head_seen_) == kNever) {
            // [P5]
            hand_over(word, next.pack(), claim.word);
            throw std::logic_error(text("publish: expected a free cell among ", m_->shape().cells, " for at most ",
                                        m_->shape().entries, " entries, got a full index"));
        }
        arena_.free(claim.extent + bytes, arena_.allocation() - bytes);
        live_.push_back(claim.descriptor);
        extents_[claim.descriptor] = {claim.extent, bytes};
        claim.owner = nullptr;
        --claims_;
        return true;
    }

    // A new handle owns the room; the old one is dead.
    std::optional<Claim> retry(Claim& claim) {
        if (!alive(claim)) return std::nullopt;
        Entry next = Entry::unpack(claim.word);
        if (next.attempt == kMaxAttempt)
            throw std::overflow_error(
                text("retry: expected at most ", kMaxAttempt, " retries, got one more for ticket ", claim.ticket));
        ++next.attempt;
        // [K5]
        if (!hand_over(m_->table_word(claim.entry), claim.word, next.pack())) {
            drop(claim);
            return std::nullopt;
        }
        Claim again = claim;
        again.word = next.pack();
        claim.owner = nullptr;
        return again;
    }

    bool give_back(Claim& claim) {
        if (!alive(claim)) return false;
        Entry next = Entry::unpack(claim.word);
        next.state = READY;
        next.worker = 0;
        // [K6]
        const bool done = hand_over(m_->table_word(claim.entry), claim.word, next.pack());
        if (done) shake(*m_);
        drop(claim);
        return done;
    }

    bool end(Claim& claim, std::uint64_t state, std::uint64_t reason) {
        if (state != FILTERED && state != FAILED)
            throw std::invalid_argument(
                text("end: expected state FILTERED (", FILTERED, ") or FAILED (", FAILED, "), got ", state));
        check_range("end: reason", reason, 0, kMaxReason);
        if (!alive(claim)) return false;
        Entry next = Entry::unpack(claim.word);
        next.state = state;
        next.reason = reason;
        // [K7] [N1] [N2] [N3]
        const bool done = hand_over(m_->table_word(claim.entry), claim.word, next.pack());
        if (done) note_ended(*m_, claim.entry);
        drop(claim);
        if (done) wake_taker(*m_);
        return done;
    }

    // seq_cst: say it, then look (claim: READY words and RELEASED descriptors); the trainer's side admits or releases,
    // then reads the mask. One of both sees the other.
    void set_idle(bool idle) {
        check_process();
        const std::uint64_t bit = 1ULL << worker_;
        if (idle)
            // [I1]; the claim that follows is [I2]
            m_->hot().idle.fetch_or(bit, std::memory_order_seq_cst);
        else
            m_->hot().idle.fetch_and(~bit, std::memory_order_seq_cst);
    }

    bool current(const Claim& claim) const {
        // acquire: pairs with the hand_over that took the ticket away.
        return claim.owner == this && !superseded() &&
               m_->table_word(claim.entry).load(std::memory_order_acquire) == claim.word;
    }

    bool starved_for_room() const { return starved_; }
    std::uint64_t claims() const { return claims_; }
    std::uint64_t incarnation() const { return incarnation_; }
    std::uint64_t free_bytes() {
        if (forks_before == forks_) reclaim(live_.size(), live_.size());
        return arena_.free_bytes();
    }

private:
    void check_process() const {
        if (forks_before != forks_)
            throw std::runtime_error(text("Producer of worker ", worker_,
                                          ": expected the process that made it, got its forked child ", ::getpid()));
    }

    bool superseded() const { return m_->control(worker_).incarnation.load(std::memory_order_relaxed) != incarnation_; }

    // Whether this handle may touch its extent. A stale one gives its room back here, before a byte was written.
    bool alive(Claim& claim) {
        check_process();
        if (claim.owner == nullptr) return false;
        if (claim.owner != this)
            throw std::invalid_argument(text("claim of ticket ", claim.ticket,
                                             ": expected one of this producer (worker ", worker_, "), got another's"));
        if (current(claim)) return true;
        drop(claim);
        return false;
    }

    void drop(Claim& claim) {
        give_room_back(claim.extent, arena_.allocation());
        free_.push_back(claim.descriptor);
        claim.owner = nullptr;
        --claims_;
    }

    // The extent; its descriptor is free_.back(). Released ones are collected now and then, all only when room lacks: a look
    // at one that is not released yet costs its line, and the taker, too.
    std::optional<std::uint64_t> reserve() {
        constexpr std::size_t kEvery = 8, kMost = 64, kMisses = 2;
        if (++reservations_ % kEvery == 0) reclaim(kMost, kMisses);
        for (int full = 0;; ++full) {
            if (!free_.empty())
                if (auto extent = arena_.allocate()) return extent;
            if (full == 1) return std::nullopt;
            reclaim(live_.size(), live_.size());
        }
    }

    // Oldest first: what is released in about the order of publication is found at the first look.
    void reclaim(std::size_t looks, std::size_t misses) {
        for (looks = std::min(looks, live_.size()); looks > 0; --looks) {
            const std::uint64_t d = live_.front();
            live_.pop_front();
            // [K1]
            // seq_cst: acquires the taker's last reads of the extent; and see set_idle.
            if (m_->descriptor(worker_, d).word.load(std::memory_order_seq_cst) == kReleased) {
                give_room_back(extents_[d].offset, extents_[d].bytes);
                free_.push_back(d);
                continue;
            }
            live_.push_back(d);
            if (misses-- <= 1) return;
        }
    }

    // Poisoned here and not by the taker: from RELEASED on, the memory is this worker's alone.
    void give_room_back(std::uint64_t extent, std::uint64_t bytes) {
        if (poison_) std::memset(m_->arena(worker_) + extent, kPoison, bytes);
        arena_.free(extent, bytes);
    }

    struct Extent {
        std::uint64_t offset, bytes;
    };

    MappingPtr m_;
    std::uint64_t worker_, incarnation_ = 0, claims_ = 0;
    Arena arena_;
    // By descriptor, of those in live_. This copy alone is believed: what others write into the segment moves no
    // write of this process.
    std::vector<Extent> extents_;
    Finder finder_;
    std::vector<std::uint64_t> free_;  // descriptors; a claimed one is in neither
    std::deque<std::uint64_t> live_;
    std::uint64_t head_seen_ = 0, reservations_ = 0;
    bool starved_ = false, poison_ = false;
    std::uint64_t forks_ = forks_before;
};

}  // namespace mprollout
