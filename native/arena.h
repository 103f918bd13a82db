// A private first-fit allocator, lowest address first: the hot part of an arena stays small and in cache.
//
// Invariant: nothing of it lies in shared memory. A dead owner's successor starts from an empty one and occupies what the
// descriptors (or table records) say is live, so a death inside allocate() or free() cannot corrupt anything.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

#include "segment.h"

namespace mprollout {

class Arena {
public:
    explicit Arena(std::uint64_t bytes) : free_bytes_(bytes) { holes_.emplace(0, bytes); }

    std::uint64_t free_bytes() const { return free_bytes_; }

    // The lowest hole that fits; sizes round up to kUnit.
    std::optional<std::uint64_t> allocate(std::uint64_t bytes) {
        bytes = round_up(bytes, kUnit);
        for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
            if (hole->second < bytes) continue;
            const std::uint64_t at = hole->first;
            cut(hole, at, bytes);
            return at;
        }
        return std::nullopt;
    }

    // For the rebuild. False: overlaps another live extent or leaves the arena, so the shared memory is corrupt.
    bool occupy(std::uint64_t at, std::uint64_t bytes) {
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
        auto next = holes_.lower_bound(at);
        if (next != holes_.end() && at + bytes == next->first) {
            bytes += next->second;
            next = holes_.erase(next);
        }
        if (next != holes_.begin()) {
            auto previous = std::prev(next);
            if (previous->first + previous->second == at) {
                previous->second += bytes;
                return;
            }
        }
        holes_.emplace_hint(next, at, bytes);
    }

private:
    void cut(std::map<std::uint64_t, std::uint64_t>::iterator hole, std::uint64_t at, std::uint64_t bytes) {
        const std::uint64_t start = hole->first, end = start + hole->second;
        holes_.erase(hole);
        if (start < at) holes_.emplace(start, at - start);
        if (at + bytes < end) holes_.emplace(at + bytes, end - at - bytes);
        free_bytes_ -= bytes;
    }

    std::map<std::uint64_t, std::uint64_t> holes_;  // start -> bytes; never adjacent
    std::uint64_t free_bytes_;
};

}  // namespace mprollout
