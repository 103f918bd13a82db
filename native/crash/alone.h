// One process at each of its points: killed, stopped while others work, or stopped and taken for dead.
#pragma once

#include "run.h"

namespace crash {

// With --all every instruction is a point: so many behind the point before it.
inline std::vector<Point> choose(const Recording& r, bool all) {
    if (!all) return r.points;
    std::vector<Point> points;
    for (std::size_t i = 0; i < r.points.size(); ++i) {
        points.push_back(r.points[i]);
        for (unsigned more = 1; more < r.gaps[i]; ++more) {
            points.push_back(r.points[i]);
            points.back().more = more;
        }
    }
    return points;
}

inline void kill_at(const Scenario& s, const Point& p, bool first) {
    World w(mapping(), s.position);
    s.prepare(w);
    const auto t = start(w, s, 0);
    t->go(p);
    t->kill();
    died(w, s, 0);
    if (s.role == Role::kKeeper) w.recover_worker(0);
    const State state = state_of(w.m->table_word(0).load());
    if (first) CHECK(state == s.ends.before);
    if (p.end) CHECK(state == s.ends.after);
    w.finish();
}

inline void stop_at(const Scenario& s, const Point& p) {
    World w(mapping(), s.position);
    s.prepare(w);
    const auto t = start(w, s, 0);
    t->go(p);
    t->stop();
    others_work(w, s.role == Role::kTaker ? t.get() : nullptr);
    goes_on(w, *t, s, 0);
    w.finish();
}

// The tickets of a stopped worker go to others as if it had died. False: not at this point, where only a proven death may.
inline bool stale_at(const Scenario& s, const Point& p) {
    World w(mapping(), s.position);
    s.prepare(w);
    const auto t = start(w, s, 0);
    t->go(p);
    t->stop();
    if (w.half_published(0)) return false;
    w.recover_worker(0);
    others_work(w, nullptr);
    t->resume();
    CHECK(t->ends_within(10000));
    died(w, s, 0);
    w.finish();
    return true;
}

inline void single(const Scenario& s, const Options& o, Counts& counts, std::string& where) {
    record(s);  // the first fork of a heap takes other private ways than those behind it
    const Recording r = record(s);
    const std::vector<Point> points = choose(r, o.all);
    counts.points = points.size();
    for (std::size_t i = 0; i < points.size(); ++i) {
        const std::string point = text("at point ", i, " of ", points.size(), ", ", describe(points[i]));
        where = "killed " + point;
        kill_at(s, points[i], i == 0);
        ++counts.kills;
        where = "stopped " + point;
        stop_at(s, points[i]);
        ++counts.stops;
        where = "stopped and taken for dead " + point;
        if (s.role == Role::kWorker) counts.stale += stale_at(s, points[i]);
    }
    std::printf("%-32s %6llu instructions %5llu points: %5llu kills, %5llu stops, %5llu stale", s.name,
                static_cast<unsigned long long>(r.instructions), static_cast<unsigned long long>(counts.points),
                static_cast<unsigned long long>(counts.kills), static_cast<unsigned long long>(counts.stops),
                static_cast<unsigned long long>(counts.stale));
}

}  // namespace crash
