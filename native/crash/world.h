// One small ring, and everything that must be true of it after whatever happened: the oracle of the crash-point test.
//
// It counts from outside: which tickets were admitted, how each one ended, in which order and by whose hand the groups came
// out, and whether afterwards every worker can once more fill every entry, descriptor and byte.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <set>

#include "consumer.h"
#include "tracee.h"

namespace crash {

using namespace mprollout;

constexpr std::uint64_t kWorkers = 3, kEntries = 4, kCells = 4, kDescriptors = 4, kGroup = 1024, kArena = 4 * kGroup;
constexpr std::uint64_t kHelper = 2;  // the worker that the parent itself plays; the children are 0 and 1
constexpr std::uint64_t kMaxDeathsAllowed = 250, kReason = 7;
// The last cell of the last lap before the tags wrap.
constexpr std::uint64_t kLastTag = (kTags - 1) * kCells - 1;

inline Shape shape() { return {kWorkers, kEntries, kCells, kDescriptors, kArena, kGroup, 64, 0}; }

// What a child tells the parent beside the ring. Not compared when a child is recorded.
struct Notes {
    std::atomic<std::uint64_t> releasing, released;  // bit masks of tickets
    std::atomic<std::uint64_t> answer;               // of the call between the markers
};

inline Notes& notes() {
    static auto* shared =
        static_cast<Notes*>(::mmap(nullptr, sizeof(Notes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    return *shared;
}

class World {
public:
    // The ring as it is when `position` groups have gone through it.
    World(MappingPtr mapping, std::uint64_t position) : m(reset(std::move(mapping), position)), admitter(m) {
        start_ = next_ = position;
        new (&notes()) Notes{};
    }

    // A child of this ring. Traced: it stops at its markers.
    template <class Body>
    std::unique_ptr<Tracee> child(bool traced, Body body) const {
        const auto low = reinterpret_cast<std::uint64_t>(&m->hot()) - m->offsets().hot;
        return std::make_unique<Tracee>(Range{low, low + m->offsets().size}, low + m->offsets().arenas, traced, body);
    }

    // ---- what parents and children do with a ring

    // False: the table is full.
    bool admit(unsigned count = 1) {
        for (; count > 0; --count) {
            if (!admitter.admit(static_cast<std::int64_t>(tickets_), std::to_string(tickets_))) return false;
            if (++tickets_ > 60) throw Failure("too many tickets for the masks in Notes");
        }
        return true;
    }

    static std::optional<Claim> claim(Producer& p) {
        std::optional<Claim> c = p.claim();
        CHECK(!c || c->prompt == std::to_string(c->ticket) || !p.current(*c));  // not: the ticket was taken away
        return c;
    }

    // The payload names its author, {worker, incarnation}, and no two authors write the same words.
    static bool publish(Producer& p, std::uint64_t worker, Claim& c) {
        const std::uint64_t author = worker | p.incarnation() << 8, ticket = c.ticket;
        std::array<std::uint64_t, 4> words{author};
        for (std::uint64_t i = 1; i < words.size(); ++i) words[i] = word(ticket, author, i);
        const Field fields[] = {{&ticket, 8}, {words.data(), 8 * (2 + ticket % 3)}, {nullptr, 0}};
        return p.publish(c, fields);
    }

    // What a child taker must use, so that the parent knows which groups may be gone.
    static void release(const Taker& taker, const Taken& t) {
        notes().releasing.fetch_or(1ULL << t.ticket);
        mprollout::release(taker, t);
        const std::uint64_t now = taker.mapping->descriptor(t.worker, t.descriptor).word.load();
        if ((now & kStateMask) == kReleased) notes().released.fetch_or(1ULL << t.ticket);
    }

    // ---- the parent's own part

    Producer& helper() {
        if (!helper_) helper_.emplace(m, kHelper);
        return *helper_;
    }
    Consumer& taker() {
        if (!taker_) {
            taker_.emplace(m, -1);
            CHECK(m->hot().wake_at.load() == kNever);  // whoever slept before is gone
        }
        return *taker_;
    }
    void close_taker() { taker_.reset(); }

    // The helper publishes one group, if there is a READY ticket.
    bool publish_one() {
        std::optional<Claim> c = claim(helper());
        if (c) publish_now(helper(), kHelper, *c);
        return c.has_value();
    }

    // The helper works until the table is full, in whatever memory was given back.
    void fill_up() {
        do sweep();
        while (admit() && publish_one());
    }

    // By any worker, played by the parent: its place among the other publications is known.
    void publish_now(Producer& p, std::uint64_t worker, Claim& c) {
        stamps_[c.ticket] = clock_ += 2;
        CHECK(publish(p, worker, c));
    }

    // Takes all there is, checks it, delivers it and gives it back; or keeps the last one's lease and watches its bytes.
    void drain(bool keep_last = false) {
        std::optional<Taken> last;
        while (auto t = taker().take()) {
            receive(*t);
            if (last) give_back(*last);
            last = t;
        }
        if (last && keep_last) held_.push_back(*last);
        if (last && !keep_last) give_back(*last);
        sweep();
    }

    void sweep() {
        for (const Ended& e : admitter.sweep()) CHECK(ended_.emplace(e.ticket, e.entry.state).second);
    }

    // A whole lap of the ring and more, while somebody is stopped. Two at a time, so that groups also wait. At the end a
    // lease is held, two groups wait, and the other entries that he may have looked at are READY with another ticket.
    void lap() {
        drain(true);
        for (std::uint64_t i = 0; i <= kCells; ++i) {
            admit(2);
            while (publish_one()) {
            }
            drain();
        }
        admit(kEntries);
        publish_one();
        publish_one();
    }

    // As the keeper, after the proven end of a worker's process; twice, as if the first keeper had been cut. `at_once`:
    // nobody has published since he last did. Returns how many tickets had to be taken back.
    std::size_t recover_worker(std::uint64_t worker, bool at_once = true) {
        const std::uint64_t author = worker | m->control(worker).incarnation.load() << 8;
        const Recovered first = recover(*m, worker, kMaxDeathsAllowed, kReason, true);
        const Recovered second = recover(*m, worker, kMaxDeathsAllowed, kReason, true);
        CHECK(first.failed.empty() && second.failed.empty() && second.reissued.empty());
        CHECK(first.published == second.published);
        CHECK((m->hot().idle.load() >> worker & 1) == 0);
        for (std::uint64_t t : first.published) {
            CHECK(!forbidden_.contains({t, author}));
            author_.emplace(t, author);  // known already: an earlier incarnation's
            if (at_once)
                stamps_.emplace(t, clock_ + 1);  // behind all that the parent published before, ahead of what it will
        }
        for (std::uint64_t t : first.reissued) {
            CHECK(!author_.contains(t));
            forbidden_.insert({t, author});
        }
        return first.reissued.size();
    }

    // Whether one of this worker's tickets is neither its own nor the index's: only a proven death may touch it.
    bool half_published(std::uint64_t worker) const {
        std::set<std::pair<std::uint64_t, std::uint64_t>> named;
        const auto live = live_descriptors(*m, worker);
        for (std::uint64_t d = 0; d < live.size(); ++d)
            if (live[d]) named.emplace(m->descriptor(worker, d).entry, m->descriptor(worker, d).table_word);
        for (std::uint64_t e = 0; e < kEntries; ++e) {
            const std::uint64_t w = m->table_word(e).load();
            if (state_of(w) == PUBLISHING && Entry::unpack(w).worker == worker && !named.contains({e, w})) return true;
        }
        return false;
    }

    void allow_filtered(std::uint64_t ticket) { may_filter_.insert(ticket); }

    // All processes but this one are gone: every ticket ends, then every worker fills the ring from its whole capacity.
    void finish() {
        drain();
        {
            std::vector<Producer> workers;
            for (std::uint64_t w = 0; w < kWorkers; ++w) {
                recover_worker(w);
                workers.emplace_back(m, w);
            }
            helper_.reset();
            for (std::uint64_t round = 0; ended_.size() < tickets_; ++round) {
                CHECK(round < 4 * kEntries);  // a ticket that no longer ends
                const std::uint64_t w = round % kWorkers;
                if (std::optional<Claim> c = claim(workers[w])) publish_now(workers[w], w, *c);
                drain();
            }
        }
        for (const Taken& t : held_) {
            CHECK(payload(t) == seen_.at(t.ticket));
            give_back(t);
        }
        held_.clear();
        for (std::uint64_t w = 0; w < kWorkers; ++w) fill(w);
        CHECK(snapshot(*m).empty() && m->hot().idle.load() == 0 && m->hot().wake_at.load() == kNever);
        std::uint64_t filtered = 0;
        for (const auto& [ticket, end] : ended_) {
            const bool gone = seen_.contains(ticket) || (notes().releasing.load() >> ticket & 1) != 0;
            CHECK(end == DONE ? gone : end == FILTERED && may_filter_.contains(ticket) && !gone);
            filtered += end == FILTERED;
        }
        // No cell lost, none doubled.
        CHECK(m->hot().head.load() == m->hot().tail.load());
        CHECK(m->hot().tail.load() - start_ == tickets_ - filtered);
        close_taker();
    }

    MappingPtr m;
    Admitter admitter;

private:
    static MappingPtr reset(MappingPtr m, std::uint64_t position) {
        auto* base = reinterpret_cast<unsigned char*>(&m->hot()) - m->offsets().hot;
        std::memset(base + kHeaderBytes, 0, m->offsets().size - kHeaderBytes);
        m->hot().wake_at.store(kNever);
        m->hot().tail.store(position);
        m->hot().head.store(position);
        for (std::uint64_t p = position - std::min(position, kCells); p < position; ++p)
            m->cell(p).store(Cell{tag_at(*m, p), 0, 0, 0}.pack());
        if (position > kCells)
            for (std::uint64_t w = 0; w < kWorkers; ++w) m->control(w).sequence.store(kSequences);
        return m;
    }

    static std::uint64_t word(std::uint64_t ticket, std::uint64_t author, std::uint64_t i) {
        return (ticket * 64 + i) * 0x9e3779b97f4a7c15ULL ^ author;
    }

    // The author, when every byte is his and of this ticket.
    static std::uint64_t payload(const Taken& t) {
        std::uint64_t ticket, author;
        CHECK(t.fields == 3 && field(t, 0).bytes == 8 && field(t, 2).bytes == 0);
        std::memcpy(&ticket, field(t, 0).data, 8);
        CHECK(ticket == t.ticket && field(t, 1).bytes == 8 * (2 + ticket % 3));
        std::memcpy(&author, field(t, 1).data, 8);
        CHECK((author & 0xff) == t.worker);
        for (std::uint64_t i = 1; i < 2 + ticket % 3; ++i) {
            std::uint64_t got;
            std::memcpy(&got, static_cast<const unsigned char*>(field(t, 1).data) + 8 * i, 8);
            CHECK(got == word(ticket, author, i));
        }
        return author;
    }

    void receive(const Taken& t) {
        const std::uint64_t author = payload(t);
        CHECK(t.position >= next_);  // FIFO, and each place once
        next_ = t.position + 1;
        CHECK(t.ticket < tickets_ && seen_.emplace(t.ticket, author).second);
        CHECK((notes().released.load() >> t.ticket & 1) == 0);  // given back, so it may be overwritten
        CHECK(!forbidden_.contains({t.ticket, author}));
        if (author_.contains(t.ticket)) CHECK(author_[t.ticket] == author);
        if (const auto stamp = stamps_.find(t.ticket); stamp != stamps_.end()) {
            CHECK(stamp->second >= last_stamp_);  // in the order in which they were published
            last_stamp_ = stamp->second;
        }
        if (!delivered(*m, t)) deliver(*m, t);
        CHECK(delivered(*m, t));
    }

    void give_back(const Taken& t) {
        Word& word = m->descriptor(t.worker, t.descriptor).word;
        CHECK(payload(t) == seen_.at(t.ticket));
        CHECK(word.load() == taken_by(taker().taker()->epoch));  // still this taker's
        mprollout::release(*taker().taker(), t);
        CHECK(word.load() == kReleased);
    }

    // Every entry, every descriptor, every byte of the arena, in one worker's hands, in order, and back.
    void fill(std::uint64_t worker) {
        Producer p(m, worker);
        CHECK(p.free_bytes() == m->arena_room());
        std::vector<Claim> claims;
        CHECK(admit(kEntries));
        for (std::uint64_t i = 0; i < kEntries; ++i) {
            const std::optional<Claim> c = claim(p);
            CHECK(c);
            claims.push_back(*c);
        }
        for (Claim& c : claims) publish_now(p, worker, c);
        drain();
        CHECK(ended_.size() == tickets_ && p.free_bytes() == m->arena_room());
    }

    std::optional<Producer> helper_;
    std::optional<Consumer> taker_;
    std::vector<Taken> held_;
    std::uint64_t tickets_ = 0, start_ = 0, next_ = 0, clock_ = 0, last_stamp_ = 0;
    std::map<std::uint64_t, std::uint64_t> seen_, ended_, stamps_;  // ticket -> author, state, order of publication
    std::map<std::uint64_t, std::uint64_t> author_;                 // of what recover() found published
    std::set<std::pair<std::uint64_t, std::uint64_t>> forbidden_;   // {ticket, author}: taken away from him
    std::set<std::uint64_t> may_filter_;
};

}  // namespace crash
