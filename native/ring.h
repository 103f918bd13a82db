// The FIFO index, the descriptors' words, and waiting. Model: model/ring.pml (spin), whose steps are the labels [E7] etc.
// here, in producer.h and in consumer.h; it assumes sequential consistency: the memory orders are argued where they stand.
//
// Invariant: the order of the groups is the order of the CASes on the index cells, and that CAS is the publication. All
// before it is private to its worker, all after it (tail, wake) can be done by anybody: a death leaves no hole and no lock.
#pragma once

#include <linux/futex.h>
#include <sched.h>

#include <set>
#include <utility>
#include <vector>

#include "table.h"

namespace mprollout {

// An index cell: {lap tag:24, worker:6, descriptor:14, sequence:20}, the tag highest. tag(position) is its lap + 1, so that
// zeroed memory reads as "the lap before the first".
//
// ABA: a publisher's CAS names the word that it read, with the tag of the previous lap. To be fooled it must sleep while
// the cell returns to that very word: a multiple of 2^24 laps later, filled by the same worker with the same descriptor and
// the same sequence. The sequences are an odd number, so even for one lone worker in a ring of one cell both agree again only
// after 2^24 * (2^20 - 1) publications: 5 years at 100,000 a second. None is 0, so no word of a publisher is zeroed memory.
struct Cell {
    std::uint64_t tag, worker, descriptor, sequence;

    static constexpr Cell unpack(std::uint64_t w) { return {w >> 40, w >> 34 & 0x3f, w >> 20 & 0x3fff, w & 0xfffff}; }
    constexpr std::uint64_t pack() const { return tag << 40 | worker << 34 | descriptor << 20 | sequence; }
};
constexpr std::uint64_t kTags = 1 << 24, kSequences = (1 << 20) - 1;  // sequences 1..kSequences
static_assert(kMaxWorkers == 1 << 6 && kMaxDescriptors == 1 << 14 && kSequences < 1 << 20 && kSequences % 2 == 1);
static_assert(Cell{5, 6, 7, 8}.pack() == (5ULL << 40 | 6ULL << 34 | 7ULL << 20 | 8ULL));

inline std::uint64_t tag_at(const Mapping& m, std::uint64_t position) {
    return (position / m.shape().cells + 1) % kTags;
}

// A descriptor's word: {state:2, epoch:62}; the epoch, in TAKEN only, says which taker holds it.
enum : std::uint64_t { kFree = 0, kTaken = 1, kReleased = 2, kStateMask = 3 };
constexpr std::uint64_t taken_by(std::uint64_t epoch) { return kTaken | epoch << 2; }

inline bool filled(const Mapping& m, std::uint64_t position) {
    // seq_cst: acquires what the publisher wrote before its CAS of the cell (payload, descriptor); as the look after arming, see fire().
    return Cell::unpack(m.cell(position).load(std::memory_order_seq_cst)).tag == tag_at(m, position);
}

// ---- waking the taker

// The two ways in which the taker may sleep. Both come behind the bump; the eventfd is for one that polls (Consumer.arm), and
// keeps what was written until it is read, so it needs no look at the sequence by the kernel.
inline void wake_sleeper(const Mapping& m) {
    ::syscall(SYS_futex, &m.hot().wake_sequence, FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
              0);  // shared between processes: not PRIVATE
    const std::uint64_t one = 1;
    if (m.taker_bell() >= 0) {
        [[maybe_unused]] const ssize_t n = ::write(m.taker_bell(), &one, sizeof one);  // EAGAIN: it rings already
    }
}

// News for the taker that is not a group (an ending, a fault, a recovery).
// seq_cst: bump, then look at wake_at; the taker arms wake_at, then looks at the sequence. One of both sees the other.
inline void wake_taker(const Mapping& m) {
    // [N1] disarm, before the bump: a taker that read the new sequence as `seen` and then armed must not be disarmed unseen
    m.hot().wake_at.store(kNever, std::memory_order_seq_cst);
    // [N2] bump
    m.hot().wake_sequence.fetch_add(1, std::memory_order_seq_cst);
    // [N3] wake, armed or not: a publisher may have died between its CAS of wake_at and its own wake
    wake_sleeper(m);
}

// After the tail was seen at `reached` or beyond. seq_cst: CAS(tail), won or lost, then this load; the taker arms wake_at,
// then looks at tail and cell. One of both sees the other (x86 would hide a weaker order here).
inline void fire(const Mapping& m, std::uint64_t reached) {
    // [F1]
    std::uint64_t armed = m.hot().wake_at.load(std::memory_order_seq_cst);
    if (armed == kNever || armed > reached) return;
    // [F2]
    if (!m.hot().wake_at.compare_exchange_strong(armed, kNever, std::memory_order_seq_cst)) return;
    // [F3] bump [F4] wake
    m.hot().wake_sequence.fetch_add(1, std::memory_order_seq_cst);
    wake_sleeper(m);
}

// ---- publishing

inline void advance_tail(const Mapping& m, std::uint64_t from) {
    // [E4] [E8] [T3] [A5]
    // seq_cst: see fire(). Result ignored: if it fails, another has helped.
    m.hot().tail.compare_exchange_strong(from, from + 1, std::memory_order_seq_cst);
}

inline void help_tail(const Mapping& m) {
    // [R4]
    const std::uint64_t t = m.hot().tail.load(std::memory_order_acquire);
    if (filled(m, t)) advance_tail(m, t);  // a filled cell at an old tail only makes the CAS fail
}

// Returns the position, or kNever when the ring is full, which cells >= entries excludes for published groups. `head_seen`: a
// head that the caller has read before. It only grows, so where an old one says that there is room, there is, and the
// line that the taker writes at each take is read once a lap only.
inline std::uint64_t enqueue(const Mapping& m, std::uint64_t worker, std::uint64_t descriptor, std::uint64_t sequence,
                             std::uint64_t& head_seen) {
    Hot& hot = m.hot();
    for (;;) {
        // [E1]
        const std::uint64_t t = hot.tail.load(std::memory_order_acquire);  // pairs with advance_tail
        Word& cell = m.cell(t);
        // [E2]
        std::uint64_t w = cell.load(std::memory_order_acquire);  // pairs with the CAS below
        // [E3]
        // Both this second load and the tag test stay: tags can wrap.
        if (hot.tail.load(std::memory_order_acquire) != t) continue;
        const std::uint64_t tag = tag_at(m, t), seen = Cell::unpack(w).tag;
        // [E4]
        if (seen == tag) {
            advance_tail(m, t);
            continue;
        }
        // [E5]
        // The tail stood at t around the look at the cell, so no lap but this one and the one before can stand in it.
        if (seen != (tag + kTags - 1) % kTags)
            throw SegmentError(text("index: expected a cell of lap tag ", (tag + kTags - 1) % kTags, " at position ", t,
                                    ", got ", seen));
        // [E6]
        // The tag alone does not see a full ring. acquire: pairs with the taker's release of head, behind which the old
        // group's TAKEN stands: whoever later finds this cell overwritten also finds TAKEN. Signed: a stale t may lie below head.
        const auto full = [&] {
            return static_cast<std::int64_t>(t - head_seen) >= static_cast<std::int64_t>(m.shape().cells);
        };
        if (full()) head_seen = hot.head.load(std::memory_order_acquire);
        if (full()) {
            if (hot.tail.load(std::memory_order_acquire) == t) return kNever;
            continue;
        }
        // [E7]
        // The publication. release: payload and descriptor, to the taker's and recovery's loads of the cell.
        if (!cell.compare_exchange_strong(w, Cell{tag, worker, descriptor, sequence}.pack(), std::memory_order_release,
                                          std::memory_order_relaxed))
            continue;
        // [E8]
        advance_tail(m, t);
        fire(m, t + 1);  // every publisher looks, whether it won or lost the tail
        return t;
    }
}

// ---- what a worker's descriptors hold, from single atomic words only

// live[d]: published and not released. Index first, then the words: the other order would free a group that is taken in
// between. The owner must be dead, or be the caller. acquire throughout: a cell pairs with its publisher's CAS; head with
// the taker's release (the overwritten cell's TAKEN is seen below); TAKEN and RELEASED with the taker's stores.
inline std::vector<char> live_descriptors(const Mapping& m, std::uint64_t worker) {
    std::vector<char> live(m.shape().descriptors, 0);
    // [L1]
    const std::uint64_t head = m.hot().head.load(std::memory_order_acquire);
    for (std::uint64_t i = 0; i < m.shape().cells; ++i) {
        // [L2]
        const Cell c = Cell::unpack(m.cell(head + i).load(std::memory_order_acquire));
        if (c.tag == tag_at(m, head + i) && c.worker == worker && c.descriptor < live.size()) live[c.descriptor] = 1;
    }
    for (std::uint64_t d = 0; d < live.size(); ++d) {
        // [L3]
        const std::uint64_t state = m.descriptor(worker, d).word.load(std::memory_order_acquire) & kStateMask;
        if (state == kTaken) live[d] = 1;
        if (state == kReleased) live[d] = 0;
    }
    return live;
}

struct Recovered {
    std::vector<std::uint64_t> published, reissued, failed;
};

// After the proven death of the worker's process. Writes nothing but exact CASes and hints, so it can be interrupted
// anywhere and run again.
//
// A PUBLISHING word is published if and only if a live descriptor names that exact word. Deaths: before the index CAS no
// live descriptor does (the descriptor was FREE before the word became PUBLISHING, and a FREE one counts only if the index
// names it); after it, the index or TAKEN does. Against the taker at work: it makes the word DONE before it makes the
// descriptor RELEASED, and the descriptors are read before the words here, so whoever reads RELEASED reads DONE too, or
// fails its CAS. An undelivered group is never RELEASED (Lease.release refuses), so no RELEASED one can still be PUBLISHING.
inline Recovered recover(const Mapping& m, std::uint64_t worker, std::uint64_t max_deaths, std::uint64_t reason,
                         bool count_death) {
    check_range("recover: worker", worker, 0, m.shape().workers - 1);
    check_range("recover: max_deaths", max_deaths, 0, kMaxDeaths - 1);
    check_range("recover: reason", reason, 0, kMaxReason);
    // [R1]
    m.hot().idle.fetch_and(~(1ULL << worker),
                           std::memory_order_seq_cst);  // pairs with idle_workers: the dead need no bell
    const std::vector<char> live = live_descriptors(m, worker);
    // Pairs: a delivered but unreleased group and a later one of the same entry may both be live.
    std::set<std::pair<std::uint64_t, std::uint64_t>> published;
    for (std::uint64_t d = 0; d < live.size(); ++d)
        if (live[d]) published.emplace(m.descriptor(worker, d).entry, m.descriptor(worker, d).table_word);
    Recovered result;
    for (std::uint64_t e = 0; e < m.shape().entries; ++e) {
        Word& word = m.table_word(e);
        // [R2]
        const std::uint64_t w = word.load(std::memory_order_acquire);  // pairs with hand_over
        Entry entry = Entry::unpack(w);
        if (entry.worker != worker || (entry.state != RUNNING && entry.state != PUBLISHING)) continue;
        const std::uint64_t ticket = m.record(e).ticket.load(std::memory_order_relaxed);
        if (entry.state == PUBLISHING && published.contains({e, w})) {
            result.published.push_back(ticket);
            continue;
        }
        entry.deaths += count_death ? 1 : 0;
        const bool over = entry.deaths > max_deaths;
        entry.state = over ? FAILED : READY;
        entry.reason = over ? reason : 0;
        if (!over) entry.worker = 0;
        // [R3]
        if (!hand_over(word, w, entry.pack())) continue;
        (over ? result.failed : result.reissued).push_back(ticket);
        if (over) note_ended(m, e);
    }
    shake(m);  // what is READY again, and what the dead one ended or gave back and did not say
    // [R4]
    help_tail(m);
    // [R5]; the keeper then rings the bells [R6]
    wake_taker(m);
    return result;
}

// ---- waiting, by the one taker

inline bool reached(const Mapping& m, std::uint64_t target) {
    // [S2] [S3]
    // FIFO has no holes: the last cell being filled means that all before it are. The tail may lag behind it by one.
    return filled(m, target - 1) || m.hot().tail.load(std::memory_order_seq_cst) >= target;  // seq_cst: see fire()
}

inline bool news_since(const Mapping& m, std::uint32_t seen) {
    return m.hot().wake_sequence.load(std::memory_order_seq_cst) != seen;  // seq_cst: see wake_taker()
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Spins a little before a sleep: a wake by futex costs about as much as is spun here. While groups come faster than that it
// goes on, since the last one will come as fast. Where it does not help (the publisher needs this very CPU, or comes much
// later) it is left out more and more often: after k misses in a row 2^k - 1 times.
class Spinner {
public:
    void spin(const Mapping& m, std::uint64_t target, std::uint32_t seen) {
        if (skip_ > 0) {
            --skip_;
            return;
        }
        std::uint64_t tail = 0;
        for (std::int64_t now = now_ns(), end = now + kSpinNs; now < end; now = now_ns()) {
            if (reached(m, target) || news_since(m, seen)) {
                misses_ = 0;
                return;
            }
            if (const std::uint64_t t = m.hot().tail.load(std::memory_order_relaxed); t != tail) {
                tail = t;
                end = now + kSpinNs;
            }
            for (int i = 0; i < 16; ++i) pause();
        }
        misses_ = std::min(misses_ + 1, kMostMisses);
        skip_ = (1 << misses_) - 1;
    }

private:
    static constexpr std::int64_t kSpinNs = 20000;
    static constexpr int kMostMisses = 6;

    int misses_ = 0, skip_ = 0;
};

inline void disarm(const Mapping& m) {
    // [S6]
    m.hot().wake_at.store(kNever, std::memory_order_seq_cst);
}

// Arm, then look. False: there is something to see already, nothing was armed.
inline bool arm(const Mapping& m, std::uint64_t target, std::uint32_t seen) {
    Word& wake_at = m.hot().wake_at;
    // [S1]
    wake_at.store(target, std::memory_order_seq_cst);  // arm, then look: pairs with fire() and wake_taker()
    // [S2] [S3] [S4]
    if (!reached(m, target) && !news_since(m, seen)) return true;
    disarm(m);
    return false;
}

// One bounded sleep. May return for any reason; the caller looks again.
inline void sleep_slice(const Mapping& m, std::uint64_t target, std::uint32_t seen, std::int64_t ns) {
    if (!arm(m, target, seen)) return;
    const timespec t{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    // [S5]
    ::syscall(SYS_futex, &m.hot().wake_sequence, FUTEX_WAIT, seen, &t, nullptr, 0);
    disarm(m);
}

// As a sleep, on the CPU: arms nothing, so no publisher makes a system call for it. Others get the CPU now and then, since
// the publisher may need this very one.
inline void spin_slice(const Mapping& m, std::uint64_t target, std::uint32_t seen, std::int64_t ns) {
    constexpr int kLooks = 256;
    const std::int64_t end = now_ns() + ns;
    do {
        for (int i = 0; i < kLooks; ++i) {
            if (reached(m, target) || news_since(m, seen)) return;
            pause();
        }
        ::sched_yield();
    } while (now_ns() < end);
}

}  // namespace mprollout
