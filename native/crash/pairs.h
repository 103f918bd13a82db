// Two processes, each at each of its points: what one does from there, or leaves by its death, meets the other half-way.
#pragma once

#include "run.h"

namespace crash {

struct Pair {
    const char *first, *second;
    bool second_prepares = true;  // false: it finds what the first one's preparation left
    bool serial = false;          // the first one is dead before the second starts
};

inline const Pair kPairs[] = {
    {"publish", "publish"},
    {"publish at the tags' wrap", "publish at the tags' wrap"},
    {"publish into used memory", "publish"},
    {"claim", "claim"},
    {"claim in order", "claim in order"},
    {"claim in order", "give back"},
    {"publish", "take, deliver, release"},
    {"take, deliver, release", "publish"},
    {"publish", "take-over"},
    {"take-over", "publish"},
    {"recover, pending", "take, deliver, release", false},
    {"start of a successor, pending", "take, deliver, release", false},
    {"recover", "publish", false},
    {"release after close", "take-over", false},
    {"take, deliver, release", "take-over", false, true},
    {"take-over", "take-over", false, true},
    {"claim", "recover", false, true},
    {"publish into used memory", "recover", false, true},
};

enum class Mode { kBothDie, kSecondDies, kFirstDies, kBothStop };

// Both scenarios' rings in one. A taker's or keeper's preparation plays workers; a worker's leaves READY tickets, which
// those would claim, so it comes last.
inline void prepare(World& w, const Pair& pair, const Scenario& a, const Scenario& b) {
    const bool swap = pair.second_prepares && a.role == Role::kWorker && b.role != Role::kWorker;
    if (swap) b.prepare(w);
    a.prepare(w);
    if (!swap && pair.second_prepares) b.prepare(w);
}

// With the first at its point.
inline std::unique_ptr<Tracee> start_first(World& w, const Pair& pair, const Scenario& a, const Point& at) {
    auto first = start(w, a, 0);
    first->go(at);
    if (pair.serial)
        first->kill();
    else
        first->stop();
    return first;
}

inline Recording record_first(const Pair& pair, const Scenario& a, const Scenario& b) {
    World w(mapping(), a.position);
    prepare(w, pair, a, b);
    return start(w, a, 0)->record(true);
}

inline Recording record_second(const Pair& pair, const Scenario& a, const Scenario& b, const Point& at) {
    World w(mapping(), a.position);
    prepare(w, pair, a, b);
    const auto first = start_first(w, pair, a, at);
    return start(w, b, 1)->record(true);
}

inline void run_pair(const Pair& pair, const Scenario& a, const Scenario& b, Mode mode, const Point& at,
                     const Point& bt) {
    World w(mapping(), a.position);
    prepare(w, pair, a, b);
    const auto first = start_first(w, pair, a, at), second = start(w, b, 1);
    second->go(bt);
    const bool taker = a.role == Role::kTaker || b.role == Role::kTaker;
    switch (mode) {
        case Mode::kBothDie:
            second->kill();
            died(w, b, 1);
            if (!pair.serial) first->kill();
            died(w, a, 0);
            break;
        case Mode::kSecondDies:
            second->kill();
            died(w, b, 1);
            goes_on(w, *first, a, 0);
            break;
        case Mode::kFirstDies:
            second->stop();
            first->kill();
            died(w, a, 0);
            goes_on(w, *second, b, 1);
            break;
        case Mode::kBothStop:
            second->stop();
            if (!taker) w.lap();
            if (!pair.serial) goes_on(w, *first, a, 0);
            if (taker) w.fill_up();
            goes_on(w, *second, b, 1);
            if (pair.serial) died(w, a, 0);
            break;
    }
    w.finish();
}

inline void both(const Pair& pair, const Scenario& a, const Scenario& b, const Options& o, Counts& counts,
                 std::string& where) {
    std::vector<Mode> modes{Mode::kBothDie, Mode::kBothStop};
    if (!pair.serial) modes.push_back(Mode::kSecondDies);
    if (!pair.serial && o.all) modes.push_back(Mode::kFirstDies);
    for (const Point& at : record_first(pair, a, b).points) {
        // What the first one reads matters only where it goes on; the stops of one alone cover every read.
        if (!at.fresh && !at.end && !o.all) continue;
        where = text("the first at ", describe(at), ", recording the second");
        for (const Point& bt : record_second(pair, a, b, at).points)
            for (const Mode mode : modes) {
                where = text("the first at ", describe(at), ", the second at ", describe(bt), ", mode ",
                             static_cast<int>(mode));
                run_pair(pair, a, b, mode, at, bt);
                ++counts.pairs;
            }
        ++counts.points;
    }
    std::printf("%-62s %5llu points of the first, %6llu runs",
                text(a.name, pair.serial ? ", then " : " | ", b.name).c_str(),
                static_cast<unsigned long long>(counts.points), static_cast<unsigned long long>(counts.pairs));
}

}  // namespace crash
