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
        holes_.emplace(0, free_bytes_);
        note(holes_.begin());
    }

    std::uint64_t free_bytes() const { return free_bytes_; }
    std::uint64_t allocation() const { return allocation_; }

    // The start of the lowest hole that holds one allocation.
    std::optional<std::uint64_t> allocate() {
        if (fitting_.empty()) return std::nullopt;
        const std::uint64_t at = *fitting_.begin();
        cut(holes_.find(at), at, allocation_);
        return at;
    }

    // For the rebuild. False: overlaps another live extent or leaves the arena, so the shared memory is corrupt.
    bool occupy(std::uint64_t at, std::uint64_t bytes) {
        if (bytes > free_bytes_) return false;
        bytes = round_up(bytes, kUnit);
        if (bytes == 0) return true;
        auto hole = holes_.upper_bound(at);
        if (at % kUnit != 0 || hole == holes_.begin()) return false;
        --hole;
        if (bytes > hole->second || at - hole->first > hole->second - bytes) return false;
        cut(hole, at, bytes);
        return true;
    }

    void free(std::uint64_t at, std::uint64_t bytes) {
        bytes = round_up(bytes, kUnit);
        if (bytes == 0) return;
        free_bytes_ += bytes;
        const auto next = holes_.lower_bound(at);
        const auto previous = next == holes_.begin() ? holes_.end() : std::prev(next);
        const bool joins_next = next != holes_.end() && at + bytes == next->first;
        if (previous != holes_.end() && previous->first + previous->second == at) {
            previous->second += bytes + (joins_next ? next->second : 0);
            if (joins_next) forget(next);
            note(previous);
        } else if (joins_next) {
            bytes += next->second;
            move(next, at, bytes);
        } else {
            note(holes_.emplace_hint(next, at, bytes));
        }
    }

private:
    using Hole = std::map<std::uint64_t, std::uint64_t>::iterator;

    void note(Hole hole) {
        if (hole->second >= allocation_) fitting_.insert(hole->first);
    }
    Hole forget(Hole hole) {
        fitting_.erase(hole->first);
        return holes_.erase(hole);
    }
    // The same place among the others, another start; without a new node.
    void move(Hole hole, std::uint64_t start, std::uint64_t bytes) {
        const auto behind = std::next(hole);
        auto fit = fitting_.extract(hole->first);
        auto node = holes_.extract(hole);
        node.key() = start;
        node.mapped() = bytes;
        holes_.insert(behind, std::move(node));
        if (bytes < allocation_) return;
        if (fit) {
            fit.value() = start;
            fitting_.insert(std::move(fit));
        } else {
            fitting_.insert(start);
        }
    }
    void cut(Hole hole, std::uint64_t at, std::uint64_t bytes) {
        const std::uint64_t start = hole->first, end = start + hole->second, cut_end = at + bytes;
        free_bytes_ -= bytes;
        if (start == at && cut_end == end) {
            forget(hole);
        } else if (start == at) {
            move(hole, cut_end, end - cut_end);
        } else {
            hole->second = at - start;
            if (hole->second < allocation_) fitting_.erase(start);
            if (cut_end < end) note(holes_.emplace_hint(std::next(hole), cut_end, end - cut_end));
        }
    }

    std::uint64_t allocation_, free_bytes_;
    std::map<std::uint64_t, std::uint64_t> holes_;  // start -> bytes; never adjacent
    std::set<std::uint64_t> fitting_;               // starts of those that hold an allocation
};

}  // namespace mprollout
