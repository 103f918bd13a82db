// One sleeps, another brings what it sleeps for: the sleeper at each point, the waker at each point, the waker's death.
#pragma once

#include "run.h"

namespace crash {

struct Wake {
    const char* waker;
    std::uint64_t groups;  // that the sleeper waits for
    State ending = FREE;   // or for this state of the first entry
};

inline const Wake kWakes[] = {{"publish", 1},
                              {"publish two", 1},
                              {"publish two", 2},
                              {"end", 1, FILTERED},
                              {"recover a running ticket", 1, READY}};

constexpr std::int64_t kForever = 60'000'000'000;  // ns: no safety look hides a lost wake
constexpr int kPrompt = 5000;                      // ms: far from kForever, and patient with a busy machine

// A taker that sleeps until what it waits for is there; `once`: until any wake.
inline std::unique_ptr<Tracee> start_sleeper(World& w, const Wake& wake, std::int64_t slice, bool once) {
    auto t = w.child(true, [&w, &wake, slice, once] {
        Consumer c(w.m, -1);
        const std::uint64_t target = c.target(wake.groups);
        marker();
        for (;;) {
            const std::uint32_t news = c.news();
            if (reached(*w.m, target) || (wake.ending != FREE && state_of(w.m->table_word(0).load()) == wake.ending))
                break;
            sleep_slice(*w.m, target, news, slice);
            if (once) break;
        }
        marker();
    });
    t->run_to_marker();
    return t;
}

// It sleeps already; the waker dies at this point, and is recovered. One that is through must have woken it by itself.
inline void die_owing_a_wake(const Wake& wake, const Scenario& waker, const Point& p) {
    World w(mapping(), waker.position);
    waker.prepare(w);
    const auto sleeper = start_sleeper(w, wake, kForever, true);
    sleeper->release();
    sleeper->until_asleep();
    const auto t = start(w, waker, 0);
    t->go(p);
    if (p.end) CHECK(sleeper->ends_within(kPrompt));
    t->kill();
    w.recover_worker(0);
    CHECK(p.end || sleeper->ends_within(kPrompt));
    w.finish();
}

// Nobody dies: one has come so far with going to sleep, the other with waking it, then the first goes on, then the second.
inline void meet(const Wake& wake, const Scenario& waker, const Point& sleeper_at, const Point& waker_at) {
    World w(mapping(), waker.position);
    waker.prepare(w);
    const auto sleeper = start_sleeper(w, wake, kForever, false);
    sleeper->go(sleeper_at);
    sleeper->stop();
    const auto t = start(w, waker, 0);
    t->go(waker_at);
    sleeper->resume();
    sleeper->until_asleep();
    t->release();
    CHECK(t->ends_within(kPrompt));
    CHECK(sleeper->ends_within(kPrompt));
    died(w, waker, 0);
    w.finish();
}

// Two publish for one that sleeps. Whatever the second did for the first until it stopped, the first wakes the sleeper; but
// if the second has published itself and disarmed wake_at, the wake is its own to make.
inline void helped(const Scenario& publish, Counts& counts, std::string& where) {
    const auto run = [&](const Point& at, const Point* second_at) {
        World w(mapping(), publish.position);
        w.admit(2);
        const auto sleeper = start_sleeper(w, {publish.name, 1}, kForever, false);
        sleeper->release();
        sleeper->until_asleep();
        const auto first = start(w, publish, 0);
        first->go(at);
        first->stop();
        const auto second = start(w, publish, 1);
        if (second_at == nullptr) return second->record(false).points;
        second->go(*second_at);
        second->stop();
        const bool owed = w.m->hot().wake_at.load() == kNever;
        first->resume();
        CHECK(first->ends_within(kPrompt));
        CHECK(owed || sleeper->ends_within(kPrompt));
        second->resume();
        CHECK(second->ends_within(kPrompt));
        CHECK(!owed || sleeper->ends_within(kPrompt));
        died(w, publish, 0);
        died(w, publish, 1);
        w.finish();
        return std::vector<Point>{};
    };
    for (const Point& at : record(publish).points) {
        if (!at.fresh) continue;
        for (const Point& second_at : run(at, nullptr)) {
            where = text("the first at ", describe(at), ", the second stopped at ", describe(second_at));
            run(at, &second_at);
            ++counts.pairs;
        }
    }
    std::printf("%-62s %5llu meetings", "wait for 1 | publish | publish",
                static_cast<unsigned long long>(counts.pairs));
}

inline void waking(const Wake& wake, const Scenario& waker, Counts& counts, std::string& where) {
    Recording sleeping, working;
    {
        World w(mapping(), waker.position);
        waker.prepare(w);
        sleeping = start_sleeper(w, wake, kSoon, true)->record(true);
        while (!sleeping.points.back().system_call) sleeping.points.pop_back();  // behind the sleep it looks again
    }
    for (const Point& at : sleeping.points) {
        {
            World w(mapping(), waker.position);
            waker.prepare(w);
            const auto sleeper = start_sleeper(w, wake, kForever, false);
            sleeper->go(at);
            working = start(w, waker, 0)->record(true);
        }
        for (const Point& waker_at : working.points) {
            where = text("the sleeper at ", describe(at), ", the waker at ", describe(waker_at));
            meet(wake, waker, at, waker_at);
            ++counts.pairs;
        }
    }
    {
        World w(mapping(), waker.position);
        waker.prepare(w);
        const auto sleeper = start_sleeper(w, wake, kForever, false);
        sleeper->release();
        sleeper->until_asleep();
        working = start(w, waker, 0)->record(false);
    }
    for (const Point& p : working.points) {
        where = text("the sleeper asleep, the waker killed at ", describe(p));
        die_owing_a_wake(wake, waker, p);
        ++counts.kills;
    }
    std::printf("%-62s %5llu meetings, %5llu kills", text("wait for ", wake.groups, " | ", waker.name).c_str(),
                static_cast<unsigned long long>(counts.pairs), static_cast<unsigned long long>(counts.kills));
}

}  // namespace crash
