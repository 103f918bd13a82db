// What every kind of run shares: a child at its first marker, the keeper's part after a death, the others' work meanwhile.
#pragma once

#include <dlfcn.h>

#include "scenarios.h"

namespace crash {

struct Options {
    bool all = false;
    std::string only;
};

struct Counts {
    std::uint64_t points = 0, kills = 0, stops = 0, stale = 0, pairs = 0;
};

inline const MappingPtr& mapping() {
    static const MappingPtr m = Mapping::create(shape(), "");
    return m;
}

// For addr2line -e, where it lies in this program.
inline std::string describe(const Point& p) {
    if (p.end) return "the end";
    if (p.at == 0) return text("the start + ", p.more, " instructions");
    Dl_info info{};
    std::string where = "?";
    if (::dladdr(reinterpret_cast<void*>(p.at), &info) != 0) {
        const char* slash = std::strrchr(info.dli_fname, '/');
        char offset[32];
        std::snprintf(offset, sizeof offset, "+0x%llx",
                      static_cast<unsigned long long>(p.at - reinterpret_cast<std::uint64_t>(info.dli_fbase)));
        where = text(slash != nullptr ? slash + 1 : info.dli_fname, offset);
    }
    return text(where, " for the ", p.hit, ". time", p.more == 0 ? "" : text(" + ", p.more, " instructions"));
}

// At its first marker.
inline std::unique_ptr<Tracee> start(World& w, const Scenario& s, std::uint64_t worker) {
    auto t = w.child(true, [&] { s.child(w, worker); });
    if (s.meanwhile) {
        t->run_to_marker();
        s.meanwhile(w);
    }
    t->run_to_marker();
    return t;
}

inline Recording record(const Scenario& s) {
    World w(mapping(), s.position);
    s.prepare(w);
    return start(w, s, 0)->record(true);
}

inline void died(World& w, const Scenario& s, std::uint64_t worker) {
    if (s.role == Role::kWorker) w.recover_worker(worker);
}

// One that was stopped goes on and ends by itself. Nobody took its ticket away, so what it was told is true.
inline void goes_on(World& w, Tracee& t, const Scenario& s, std::uint64_t worker) {
    notes().answer = 0;
    t.resume();
    CHECK(t.ends_within(10000));
    CHECK(notes().answer != 1);
    if (s.role == Role::kWorker) CHECK(w.recover_worker(worker, false) == 0 || notes().answer == 0);
}

// Others work while these are stopped. A stopped taker stays the taker: nobody else may take, and the ring fills.
inline void others_work(World& w, const Tracee* taker) {
    if (taker != nullptr) {
        const std::uint64_t pid = w.m->hot().taker.load() & ((1 << kPidBits) - 1);
        bool busy = false;
        try {
            w.taker();
        } catch (const TakerBusy&) {
            busy = true;
        }
        CHECK(busy == (pid == static_cast<std::uint64_t>(taker->pid())));
        if (busy) {
            w.fill_up();
            return;
        }
    }
    w.lap();
}

}  // namespace crash
