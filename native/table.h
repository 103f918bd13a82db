// The live table: one 64-bit word an entry holds a ticket's whole state; every hand-over is one CAS on it.
//
// Invariant: at most one process owns a ticket, because each transition names the exact word that it replaces, and that
// word carries the entry's generation (raised at each reuse), the attempt and the deaths: a stale owner's CAS fails.
//
//   FREE -> READY                   the admitter (release store: it alone leaves FREE)
//   READY -> RUNNING                any worker
//   RUNNING -> RUNNING, READY, PUBLISHING, FILTERED, FAILED      the owning worker
//   RUNNING, PUBLISHING -> READY, FAILED                         recover(), after the owner's proven death
//   PUBLISHING -> DONE              the taker
//   DONE, FILTERED, FAILED -> FREE  the admitter
#pragma once

#include <time.h>

#include <optional>
#include <unordered_set>
#include <vector>

#include "segment.h"

namespace mprollout {

enum State : std::uint64_t { FREE, READY, RUNNING, PUBLISHING, DONE, FILTERED, FAILED };

constexpr std::uint64_t kMaxAttempt = 255, kMaxDeaths = 255, kMaxReason = 4095;

// {state:4, attempt:8, deaths:8, worker:8, reason:12, generation:24}, state in the lowest bits.
struct Entry {
    std::uint64_t state, attempt, deaths, worker, reason, generation;

    static constexpr Entry unpack(std::uint64_t w) {
        return {w & 0xf, w >> 4 & 0xff, w >> 12 & 0xff, w >> 20 & 0xff, w >> 28 & 0xfff, w >> 40};
    }
    constexpr std::uint64_t pack() const {
        return (state & 0xf) | (attempt & 0xff) << 4 | (deaths & 0xff) << 12 | (worker & 0xff) << 20 |
               (reason & 0xfff) << 28 | generation << 40;
    }
};
static_assert(Entry::unpack(Entry{6, 255, 254, 63, 4095, 0xffffff}.pack()).generation == 0xffffff);
static_assert(Entry::unpack(Entry{6, 255, 254, 63, 4095, 0xffffff}.pack()).reason == 4095);
static_assert(Entry{1, 2, 3, 4, 5, 6}.pack() == (1ULL | 2ULL << 4 | 3ULL << 12 | 4ULL << 20 | 5ULL << 28 | 6ULL << 40));

constexpr State state_of(std::uint64_t word) { return static_cast<State>(word & 0xf); }

// acq_rel: releases what the owner wrote before (payload, descriptor) to the next owner's acquire of the same word, and
// acquires what the previous owner released.
inline bool hand_over(Word& word, std::uint64_t expected, std::uint64_t desired) {
    return word.compare_exchange_strong(expected, desired, std::memory_order_acq_rel, std::memory_order_acquire);
}

// ---- finding READY and ended entries without a look at all
//
// Both are hints: what a word says is true, and each hand-over is an exact CAS of it. What a hint must not do is to hide a
// word for ever. `admissions` holds {generation, entry} in the order of admission, which is that of the tickets;
// `front` = {shakes, position} is the first admission that may still be READY:
//
//   READY of this admission at a position in [front, admitted)   or   `shakes` is raised after the word became READY
//
// The second is for what comes back to READY (give_back, recover) and what is admitted out of the order of tickets: whoever
// sees another number of shakes than before looks at every word, until all that is READY lies in the window again.
// Why no pass hides a word: front moves by a CAS that names the shakes, too. One that passes an admission saw it not READY
// after it read `front`; if it became READY again before the pass, then it is followed by a shake, which fails the CAS, or
// comes later than it, and is seen by all. One that stops or dies between its word and its hint is covered by the safety
// look of 50 ms, and at the latest by the shake of recover() or of the next taker or admitter.
constexpr std::int64_t kSafetyLookNs = 50'000'000;

struct Front {
    std::uint64_t shakes, position;

    static constexpr Front unpack(std::uint64_t w) { return {w >> 48, w & ((1ULL << 48) - 1)}; }
};
constexpr std::uint64_t kShake = 1ULL << 48;  // 2^48 admissions: 9 years at a million a second

struct Admission {
    std::uint64_t entry, generation;

    static constexpr Admission unpack(std::uint64_t w) { return {w & (kMaxEntries - 1), w >> 20}; }
    constexpr std::uint64_t pack() const { return generation << 20 | entry; }
    constexpr bool ready(std::uint64_t word) const {
        return state_of(word) == READY && Entry::unpack(word).generation == generation;
    }
};
static_assert(kMaxEntries == 1 << 20);

inline std::int64_t now_ns() {
    timespec t{};
    ::clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<std::int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// After a word became READY out of the window. seq_cst: see Finder.
inline void shake(const Mapping& m) { m.hot().front.fetch_add(kShake, std::memory_order_seq_cst); }

// After a word became DONE, FILTERED or FAILED. seq_cst: bit, then summary; the sweep clears the summary, then the bits. One
// of both sees the other, so a summary bit that stands already need not be written.
inline void note_ended(const Mapping& m, std::uint64_t entry) {
    const std::uint64_t word = entry / 64;
    m.ended_word(word).fetch_or(1ULL << entry % 64, std::memory_order_seq_cst);
    Word& summary = m.ended_summary(word / 64);
    if ((summary.load(std::memory_order_seq_cst) >> word % 64 & 1) == 0)
        summary.fetch_or(1ULL << word % 64, std::memory_order_seq_cst);
}

struct Ready {
    std::uint64_t entry, word, ticket, prompt_bytes;
};

// A record is proven only by the CAS that follows: it is written once a generation, before READY, so if the CAS finds the
// same word, the record read in between was that generation's.
inline Ready ready_at(const Mapping& m, std::uint64_t entry, std::uint64_t word) {
    const Record& r = m.record(entry);
    return {entry, word, r.ticket.load(std::memory_order_relaxed), r.prompt_bytes.load(std::memory_order_relaxed)};
}

// The first admission of the window, if it is READY. Else front moves past it: `passed` says to look again. `admitted_seen`:
// an `admitted` that the caller has read before; it only grows, and is read again when the window seems empty.
inline std::optional<Ready> front_ready(const Mapping& m, std::uint64_t& admitted_seen, std::uint64_t& shakes,
                                        bool& passed) {
    Hot& hot = m.hot();
    // seq_cst, here and below: pairs with admit's stores (READY, then admitted) and idle_workers' load behind them: set_idle,
    // then this look; one of both sees the other.
    std::uint64_t front = hot.front.load(std::memory_order_seq_cst);
    const Front at = Front::unpack(front);
    shakes = at.shakes;
    passed = false;
    if (at.position >= admitted_seen) admitted_seen = hot.admitted.load(std::memory_order_seq_cst);
    if (at.position >= admitted_seen) return std::nullopt;
    const Admission a = Admission::unpack(m.admission(at.position).load(std::memory_order_relaxed));
    if (a.entry >= m.shape().entries) throw SegmentError(text("admission ", at.position, ": got entry ", a.entry));
    const std::uint64_t word = m.table_word(a.entry).load(std::memory_order_seq_cst);
    if (a.ready(word)) return ready_at(m, a.entry, word);
    // Fails, too, if another has passed it and the cell was used again.
    hot.front.compare_exchange_strong(front, front + 1, std::memory_order_seq_cst);
    passed = true;
    return std::nullopt;
}

// A worker's look for the READY entry with the lowest ticket.
class Finder {
public:
    std::optional<Ready> find(const Mapping& m) {
        for (std::uint64_t passes = 1;; ++passes) {
            bool passed;
            std::uint64_t shakes;
            const auto ready = front_ready(m, admitted_seen_, shakes, passed);
            if (shakes != seen_) return look_at_all(m);
            if (ready) return ready;
            if (!passed) break;
            if (passes % kPassesUntilCheck == 0) check_window(m);
        }
        return now_ns() < next_look_ns_ ? std::nullopt : look_at_all(m);
    }

private:
    static constexpr std::uint64_t kPassesUntilCheck = 1024;

    // A corrupt window could be passed for years. front only grows: that it stood still says that both belong together.
    static void check_window(const Mapping& m) {
        const std::uint64_t front = m.hot().front.load(std::memory_order_seq_cst),
                            admitted = m.hot().admitted.load(std::memory_order_seq_cst),
                            at = Front::unpack(front).position;
        if (admitted > at && admitted - at > m.shape().cells && m.hot().front.load(std::memory_order_seq_cst) == front)
            throw SegmentError(
                text("admissions: expected at most ", m.shape().cells, " from front ", at, ", got ", admitted - at));
    }

    std::optional<Ready> look_at_all(const Mapping& m) {
        next_look_ns_ = now_ns() + kSafetyLookNs;
        const Front before = Front::unpack(m.hot().front.load(std::memory_order_seq_cst));
        std::vector<Ready> ready;
        for (std::uint64_t e = 0; e < m.shape().entries; ++e) {
            // [K2] [K3] of the model
            const std::uint64_t word = m.table_word(e).load(std::memory_order_seq_cst);
            if (state_of(word) == READY) ready.push_back(ready_at(m, e, word));
        }
        if (ready.empty()) {
            seen_ = before.shakes;
            return std::nullopt;
        }
        std::vector<std::uint64_t> window(m.shape().entries, ~0ULL);  // generation by entry
        const std::uint64_t admitted = m.hot().admitted.load(std::memory_order_seq_cst);
        for (std::uint64_t p = before.position; p < admitted && p < before.position + m.shape().cells; ++p) {
            const Admission a = Admission::unpack(m.admission(p).load(std::memory_order_relaxed));
            if (a.entry < window.size()) window[a.entry] = a.generation;
        }
        const bool all = std::all_of(ready.begin(), ready.end(), [&](const Ready& r) {
            return window[r.entry] == Entry::unpack(r.word).generation;
        });
        seen_ = all ? before.shakes : ~0ULL;
        return *std::min_element(ready.begin(), ready.end(),
                                 [](const Ready& a, const Ready& b) { return a.ticket < b.ticket; });
    }

    std::uint64_t seen_ = ~0ULL;  // shakes after which all that is READY lay in the window
    std::uint64_t admitted_seen_ = 0;
    std::int64_t next_look_ns_ = 0;
};

struct Row {
    std::uint64_t ticket;
    Entry entry;
};

// Each row is consistent in itself: the word was the same before and after its ticket was read.
inline std::vector<Row> snapshot(const Mapping& m) {
    std::vector<Row> rows;
    for (std::uint64_t e = 0; e < m.shape().entries; ++e) {
        for (int tries = 0;; ++tries) {
            // acquire, twice: pairs with the admitter's store of READY; the second keeps the ticket's read in between.
            const std::uint64_t word = m.table_word(e).load(std::memory_order_acquire);
            if (state_of(word) == FREE) break;
            const std::uint64_t ticket = m.record(e).ticket.load(std::memory_order_acquire);
            if (m.table_word(e).load(std::memory_order_acquire) == word) {
                rows.push_back({ticket, Entry::unpack(word)});
                break;
            }
            if (tries == 100000)
                throw std::runtime_error(
                    text("table: expected entry ", e, " to hold still, got a change at each of ", tries, " looks"));
        }
    }
    return rows;
}

struct Ended {
    std::uint64_t ticket;
    Entry entry;
};

// The trainer's side: the only one that leaves FREE and returns to it.
class Admitter {
public:
    explicit Admitter(MappingPtr mapping) : m_(std::move(mapping)) {
        for (std::uint64_t e = m_->shape().entries; e-- > 0;) {
            // acquire: pairs with a previous admitter's store of READY, so that its record is seen.
            if (state_of(m_->table_word(e).load(std::memory_order_acquire)) == FREE) {
                free_.push_back(e);
                continue;
            }
            const std::uint64_t ticket = m_->record(e).ticket.load(std::memory_order_relaxed);
            live_.insert(ticket);
            next_in_order_ = std::max(next_in_order_, ticket + 1);
        }
        shake(*m_);  // a predecessor may have died between READY and its place in the window
    }

    bool admit(std::int64_t ticket, std::string_view prompt) {
        if (ticket < 0) throw std::invalid_argument(text("admit: expected a ticket >= 0, got ", ticket));
        const std::uint64_t t = static_cast<std::uint64_t>(ticket);
        check_process();
        if (prompt.size() > m_->shape().max_prompt_bytes)
            throw GroupTooLarge(text("admit: expected a prompt of at most max_prompt_bytes ",
                                     m_->shape().max_prompt_bytes, " bytes, got ", prompt.size(), " for ticket ",
                                     ticket));
        if (live_.contains(t))
            throw std::invalid_argument(
                text("admit: expected a ticket that is not live, got ", ticket, ", which stands in the table"));
        if (free_.empty()) return false;
        const std::uint64_t e = free_.back();
        Word& word = m_->table_word(e);
        Record& record = m_->record(e);
        Entry next{READY, 0, 0, 0, 0, Entry::unpack(word.load(std::memory_order_relaxed)).generation + 1};
        next.generation &= 0xffffff;
        // release: orders these after the FREE that this handle (or its predecessor) stored; see snapshot's second look.
        record.ticket.store(t, std::memory_order_release);
        record.prompt_bytes.store(prompt.size(), std::memory_order_relaxed);
        std::memcpy(m_->prompt(e), prompt.data(), prompt.size());
        // seq_cst: releases record and prompt to the claimer, and pairs with set_idle (see front_ready).
        word.store(next.pack(), std::memory_order_seq_cst);
        if (t < next_in_order_ || !append({e, next.generation})) shake(*m_);
        next_in_order_ = std::max(next_in_order_, t + 1);
        free_.pop_back();
        live_.insert(t);
        return true;
    }

    // Valid until the next sweep.
    const std::vector<Ended>& sweep() {
        check_process();
        ended_.clear();
        look_for(ended_);
        std::reverse(free_.end() - static_cast<std::ptrdiff_t>(ended_.size()),
                     free_.end());  // the lowest is used first
        return ended_;
    }

private:
    void look_for(std::vector<Ended>& ended) {
        const std::uint64_t shakes = Front::unpack(m_->hot().front.load(std::memory_order_seq_cst)).shakes;
        if (const std::int64_t now = now_ns(); shakes != seen_ || now >= next_look_ns_) {
            for (std::uint64_t e = 0; e < m_->shape().entries; ++e) collect(e, ended);
            seen_ = shakes;
            next_look_ns_ = now + kSafetyLookNs;
            return;
        }
        const EndedBits bits(m_->shape().entries);
        for (std::uint64_t s = 0; s < bits.summary; ++s) {
            if (m_->ended_summary(s).load(std::memory_order_relaxed) == 0) continue;
            // seq_cst: see note_ended()
            each_bit(m_->ended_summary(s).exchange(0, std::memory_order_seq_cst), [&](std::uint64_t i) {
                const std::uint64_t word = 64 * s + i;
                if (word < bits.words)
                    each_bit(m_->ended_word(word).exchange(0, std::memory_order_seq_cst),
                             [&](std::uint64_t j) { collect(64 * word + j, ended); });
            });
        }
    }

    void check_process() const {
        if (forks_before != forks_)
            throw std::runtime_error("Admitter: expected the process that made it, got its forked child");
    }

    // Into the window; false: a corrupt one is full (cells >= entries, and each READY entry stands in it once at most).
    bool append(Admission a) {
        Hot& hot = m_->hot();
        const std::uint64_t at = hot.admitted.load(std::memory_order_relaxed);  // this handle alone moves it
        const auto full = [&] { return at - front_seen_ >= m_->shape().cells; };
        for (bool passed = true; full();) {
            front_seen_ = Front::unpack(hot.front.load(std::memory_order_relaxed)).position;  // it only grows
            if (!full()) break;
            if (!passed || at - front_seen_ > m_->shape().cells) return false;
            std::uint64_t shakes, admitted = at;
            front_ready(*m_, admitted, shakes, passed);
        }
        // Released by the store behind it. Whoever still reads this cell for the position of a lap ago claims by an exact CAS,
        // and cannot pass it: front has moved.
        m_->admission(at).store(a.pack(), std::memory_order_relaxed);
        hot.admitted.store(at + 1, std::memory_order_seq_cst);  // pairs with front_ready's load
        return true;
    }

    void collect(std::uint64_t e, std::vector<Ended>& ended) {
        if (e >= m_->shape().entries) return;  // a corrupt bit
        Word& word = m_->table_word(e);
        // acquire: pairs with the hand_over that ended it.
        const std::uint64_t w = word.load(std::memory_order_acquire);
        const State state = state_of(w);
        if (state != DONE && state != FILTERED && state != FAILED) return;
        const std::uint64_t ticket = m_->record(e).ticket.load(std::memory_order_relaxed);
        ended.push_back({ticket, Entry::unpack(w)});
        // The generation stays until the next READY raises it. release: a snapshot that reads this FREE, or what follows, discards the old ticket.
        word.store(Entry{FREE, 0, 0, 0, 0, Entry::unpack(w).generation}.pack(), std::memory_order_release);
        free_.push_back(e);
        live_.erase(ticket);
    }

    template <class F>
    static void each_bit(std::uint64_t bits, F each) {
        for (; bits != 0; bits &= bits - 1) each(static_cast<std::uint64_t>(std::countr_zero(bits)));
    }

    MappingPtr m_;
    std::vector<std::uint64_t> free_;  // the last one used first: its words and its prompt are in cache
    std::unordered_set<std::uint64_t> live_;
    std::vector<Ended> ended_;  // kept: its memory is large enough to make malloc tidy up all small chunks each time
    std::uint64_t front_seen_ = 0;
    std::uint64_t next_in_order_ = 0;  // tickets from here on are admitted in order
    std::uint64_t seen_ = ~0ULL;       // shakes at the last look at all entries
    std::int64_t next_look_ns_ = 0;
    std::uint64_t forks_ = forks_before;
};

}  // namespace mprollout
