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

#include <optional>
#include <queue>
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

struct Ready {
    std::uint64_t entry, word, ticket, prompt_bytes;
};

// The READY entry with the lowest ticket. Its record is proven only by the CAS that follows: a record is written once a
// generation, before READY, so if the CAS finds the same word, the record read in between was that generation's.
inline std::optional<Ready> lowest_ready(const Mapping& m) {
    std::optional<Ready> best;
    for (std::uint64_t e = 0; e < m.shape().entries; ++e) {
        // seq_cst: pairs with admit's seq_cst store and idle_workers' load (set_idle, then this look: one of both sees the other).
        const std::uint64_t word = m.table_word(e).load(std::memory_order_seq_cst);
        if (state_of(word) != READY) continue;
        const Record& r = m.record(e);
        const std::uint64_t ticket = r.ticket.load(std::memory_order_relaxed);
        if (!best || ticket < best->ticket)
            best = Ready{e, word, ticket, r.prompt_bytes.load(std::memory_order_relaxed)};
    }
    return best;
}

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
        for (std::uint64_t e = 0; e < m_->shape().entries; ++e) {
            // acquire: pairs with a previous admitter's store of READY, so that its record is seen.
            if (state_of(m_->table_word(e).load(std::memory_order_acquire)) == FREE)
                free_.push(e);
            else
                live_.insert(m_->record(e).ticket.load(std::memory_order_relaxed));
        }
    }

    bool admit(std::int64_t ticket, std::string_view prompt) {
        if (ticket < 0) throw std::invalid_argument(text("admit: expected a ticket >= 0, got ", ticket));
        const std::uint64_t t = static_cast<std::uint64_t>(ticket);
        if (prompt.size() > m_->shape().max_prompt_bytes)
            throw GroupTooLarge(text("admit: expected a prompt of at most max_prompt_bytes ",
                                     m_->shape().max_prompt_bytes, " bytes, got ", prompt.size(), " for ticket ",
                                     ticket));
        if (live_.contains(t))
            throw std::invalid_argument(
                text("admit: expected a ticket that is not live, got ", ticket, ", which stands in the table"));
        if (free_.empty()) return false;
        const std::uint64_t e = free_.top();
        Word& word = m_->table_word(e);
        Record& record = m_->record(e);
        Entry next{READY, 0, 0, 0, 0, Entry::unpack(word.load(std::memory_order_relaxed)).generation + 1};
        // release: orders these after the FREE that this handle (or its predecessor) stored; see snapshot's second look.
        record.ticket.store(t, std::memory_order_release);
        record.prompt_bytes.store(prompt.size(), std::memory_order_relaxed);
        std::memcpy(m_->prompt(e), prompt.data(), prompt.size());
        // seq_cst: releases record and prompt to the claimer, and pairs with set_idle (see lowest_ready).
        word.store(next.pack(), std::memory_order_seq_cst);
        free_.pop();
        live_.insert(t);
        return true;
    }

    std::vector<Ended> sweep() {
        std::vector<Ended> ended;
        for (std::uint64_t e = 0; e < m_->shape().entries; ++e) {
            Word& word = m_->table_word(e);
            // acquire: pairs with the hand_over that ended it.
            const std::uint64_t w = word.load(std::memory_order_acquire);
            const State state = state_of(w);
            if (state != DONE && state != FILTERED && state != FAILED) continue;
            const std::uint64_t ticket = m_->record(e).ticket.load(std::memory_order_relaxed);
            ended.push_back({ticket, Entry::unpack(w)});
            // The generation stays until the next READY raises it. release: a snapshot that reads this FREE, or what follows, discards the old ticket.
            word.store(Entry{FREE, 0, 0, 0, 0, Entry::unpack(w).generation}.pack(), std::memory_order_release);
            free_.push(e);
            live_.erase(ticket);
        }
        return ended;
    }

private:
    MappingPtr m_;
    // Lowest entry first: the words that workers scan stay few and in cache.
    std::priority_queue<std::uint64_t, std::vector<std::uint64_t>, std::greater<>> free_;
    std::unordered_set<std::uint64_t> live_;
};

}  // namespace mprollout
