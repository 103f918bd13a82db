// A private first-fit allocator, lowest address first: the hot part of an arena stays small and in cache.
//
// Invariant: nothing of it lies in shared memory. A dead owner's successor starts from an empty one and occupies what the
// descriptors (or table records) say is live, so a death inside allocate() or free() cannot corrupt anything.
//
// Every allocation has one size, the worst case, and is trimmed later: so the holes that fit are a set of their own, and no
// number of small ones between what is live makes the look for the next longer.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "segment.h"

namespace mprollout {

class Arena {
public:
    Arena(std::uint64_t bytes, std::uint64_t allocation)
        : allocation_(round_up(allocation, kUnit)), free_bytes_(round_up(bytes, kUnit)) {
        note(holes_.emplace(free_bytes_, 0).first, 0);
    }

    std::uint64_t free_bytes() const { return free_bytes_; }
    std::uint64_t allocation() const { return allocation_; }

    // The start of the lowest hole that holds one allocation.
    std::optional<std::uint64_t> allocate() {
        if (fitting_.empty()) return std::nullopt;
        const auto hole = holes_.find(*fitting_.begin());
        const std::uint64_t at = hole->second;
        cut(hole, at, allocation_);
        return at;
    }

    // For the rebuild. False: overlaps another live extent or leaves the arena, so the shared memory is corrupt.
    bool occupy(std::uint64_t at, std::uint64_t bytes) {
        if (bytes > free_bytes_) return false;
        bytes = round_up(bytes, kUnit);
        if (bytes == 0) return true;
        const auto hole = holes_.upper_bound(at);
        if (at % kUnit != 0 || hole == holes_.end() || hole->second > at || bytes > hole->first - at) return false;
        cut(hole, at, bytes);
        return true;
    }

    void free(std::uint64_t at, std::uint64_t bytes) {
        bytes = round_up(bytes, kUnit);
        if (bytes == 0) return;
        free_bytes_ += bytes;
        auto next = holes_.lower_bound(at);
        const auto previous = next != holes_.end() && next->first == at ? next++ : holes_.end();
        if (next != holes_.end() && next->second == at + bytes) {
            const std::uint64_t had = next->first - next->second;
            next->second = previous == holes_.end() ? at : previous->second;
            if (previous != holes_.end()) forget(previous);
            note(next, had);
        } else if (previous != holes_.end()) {
            move(previous, at + bytes);
        } else {
            note(holes_.emplace_hint(next, at + bytes, at), 0);
        }
    }

private:
    using Hole = std::map<std::uint64_t, std::uint64_t>::iterator;

    bool fits(std::uint64_t bytes) const { return bytes >= allocation_; }

    // After it grew from so many bytes.
    void note(Hole hole, std::uint64_t had) {
        if (!fits(had) && fits(hole->first - hole->second)) fitting_.insert(hole->first);
    }
    void forget(Hole hole) {
        if (fits(hole->first - hole->second)) fitting_.erase(hole->first);
        holes_.erase(hole);
    }
    // A later end, the same place among the others; without a new node.
    void move(Hole hole, std::uint64_t end) {
        const std::uint64_t had = hole->first - hole->second;
        const auto behind = std::next(hole);
        auto fit = fits(had) ? fitting_.extract(hole->first) : std::set<std::uint64_t>::node_type();
        auto node = holes_.extract(hole);
        node.key() = end;
        hole = holes_.insert(behind, std::move(node));
        if (!fit) return note(hole, had);
        fit.value() = end;
        fitting_.insert(std::move(fit));
    }
    void cut(Hole hole, std::uint64_t at, std::uint64_t bytes) {
        const std::uint64_t start = hole->second, end = hole->first;
        free_bytes_ -= bytes;
        if (start < at) note(holes_.emplace_hint(hole, at, start), 0);
        if (at + bytes == end) return forget(hole);
        if (fits(end - start) && !fits(end - at - bytes)) fitting_.erase(end);
        hole->second = at + bytes;
    }

    std::uint64_t allocation_, free_bytes_;
    // end -> start; never adjacent. By its end, since what is claimed goes from a hole's start, and most that is trimmed
    // comes back there: neither moves it among the others.
    std::map<std::uint64_t, std::uint64_t> holes_;
    std::set<std::uint64_t> fitting_;  // ends of those that hold an allocation
};

}  // namespace mprollout
