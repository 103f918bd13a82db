// Claims: a process may die, or be stopped for a whole lap of the ring, at any instruction of any operation; afterwards
// nothing published is lost or doubled, every ticket ends exactly once, FIFO order stands, leases are untouched, no taker
// sleeps beside what it waits for, and the whole capacity is back.
//
//   crash_points [--all] [--only PART-OF-A-NAME]
//
// Default: one kill and one stop before each access to shared memory and each system call, and pairs of processes at those
// steps of the first that changed memory and all of the second; the maker of a segment at each step of that. --all: at
// every instruction, and all steps of both.
#if defined(__x86_64__) && defined(__linux__)

#include <chrono>

#include "alone.h"
#include "creation.h"
#include "pairs.h"
#include "wakes.h"

namespace crash {
namespace {

std::uint64_t runs = 0;

template <class Body>
bool guarded(const std::string& name, const Options& o, Body body) {
    if (name.find(o.only) == std::string::npos) return true;
    const auto before = std::chrono::steady_clock::now();
    std::string where = "recording";
    ::alarm(o.all ? 3600 : 100);  // a child that should run and sleeps would be waited for without end
    try {
        Counts counts;
        body(counts, where);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
        std::printf("  %6.2f s\n", took.count());
        std::fflush(stdout);
        runs += counts.kills + counts.stops + counts.stale + counts.pairs;
        return true;
    } catch (const std::exception& e) {
        std::printf("%s: FAILED, %s:\n    %s\n", name.c_str(), where.c_str(), e.what());
        std::fflush(stdout);
        return false;
    }
}

int run(const Options& o) {
    const std::vector<Scenario> all = scenarios();
    const auto named = [&](const std::string& name) -> const Scenario& {
        for (const Scenario& s : all)
            if (name == s.name) return s;
        throw std::logic_error("no scenario " + name);
    };
    bool good = guarded("making a segment", o, [](Counts& c, std::string& where) { creation(c, where); });
    for (const Scenario& s : all)
        good &= guarded(s.name, o, [&](Counts& c, std::string& where) { single(s, o, c, where); });
    for (const Pair& p : kPairs) {
        const std::string name = text(p.first, " | ", p.second);
        good &= guarded(name, o,
                        [&](Counts& c, std::string& where) { both(p, named(p.first), named(p.second), o, c, where); });
    }
    for (const Wake& k : kWakes)
        good &= guarded(text("wait | ", k.waker), o,
                        [&](Counts& c, std::string& where) { waking(k, named(k.waker), c, where); });
    good &= guarded("wait | publish | publish", o,
                    [&](Counts& c, std::string& where) { helped(named("publish"), c, where); });
    std::printf("crash_points: %llu runs%s\n", static_cast<unsigned long long>(runs), good ? " passed" : "; FAILED");
    return good ? 0 : 1;
}

}  // namespace
}  // namespace crash

int main(int argc, char** argv) {
    crash::Options o;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--all") {
            o.all = true;
        } else if (argument == "--only" && i + 1 < argc) {
            o.only = argv[++i];
        } else {
            std::fprintf(stderr, "usage: crash_points [--all] [--only PART-OF-A-NAME], got %s\n", argv[i]);
            return 2;
        }
    }
    if (!crash::may_trace()) {
        std::puts("crash_points: skipped, this system forbids ptrace");
        return 0;
    }
    return crash::run(o);
}

#else

#include <cstdio>

int main() { std::puts("crash_points: skipped, it single-steps x86-64 code under Linux"); }

#endif
