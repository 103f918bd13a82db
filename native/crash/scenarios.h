// What a child does between its two markers, and what the ring holds before it starts.
#pragma once

#include <sys/eventfd.h>

#include <functional>

#include "world.h"

namespace crash {

enum class Role { kWorker, kTaker, kKeeper };

// The state of the first entry once the ring was recovered, when the child died before the first and after the last step.
struct Ends {
    State before, after;
};

struct Scenario {
    const char* name;
    Role role;
    Ends ends;
    std::function<void(World&)> prepare;
    std::function<void(World&, std::uint64_t worker)> child;
    std::function<void(World&)> meanwhile = {};  // the parent's part, at one marker more before the two
    std::uint64_t position = 0;                  // of the ring's first free cell
};

constexpr std::int64_t kSoon = 1000000;  // ns; of a wait that is not to be ended by a wake

// A process that did this and is gone.
template <class Body>
void departed(const World& w, Body body) {
    CHECK(w.child(false, body)->ends_within(10000));
}

inline void published(World& w, unsigned count) {
    for (; count > 0; --count) {
        w.admit();
        CHECK(w.publish_one());
    }
}

// 0: not asked, 1: refused, 2: done.
inline void answer(bool done) { notes().answer = done ? 2 : 1; }

// Worker 0 is dead, and left tickets of every kind: running, half published, pending, and delivered but still leased, or a
// second one pending.
inline void leave_all_kinds(World& w, bool leased) {
    Producer dead(w.m, 0);
    w.admit(4);
    std::vector<std::optional<Claim>> c;
    for (int i = 0; i < 4; ++i) c.push_back(World::claim(dead));
    w.publish_now(dead, 0, *c[3]);
    if (leased) {
        w.drain(true);
        w.admit();  // the leased group's entry again, for whoever comes
    }
    w.publish_now(dead, 0, *c[2]);
    Entry half = Entry::unpack(c[1]->word);
    half.state = PUBLISHING;
    w.m->descriptor(0, c[1]->descriptor).word.store(kFree);
    CHECK(hand_over(w.m->table_word(c[1]->entry), c[1]->word, half.pack()));
}

inline std::vector<Scenario> scenarios() {
    std::vector<Scenario> all;
    const auto add = [&](Scenario s) { all.push_back(std::move(s)); };
    const auto publishing = [](World& w, std::uint64_t worker) {
        Producer p(w.m, worker);
        std::optional<Claim> c = World::claim(p);
        CHECK(c);
        marker();
        const bool done = World::publish(p, worker, *c);
        marker();
        answer(done);
    };

    const auto recovering = [](World& w, std::uint64_t) {
        marker();
        recover(*w.m, 0, kMaxDeathsAllowed, kReason, true);
        marker();
    };

    add({"claim",
         Role::kWorker,
         {READY, READY},
         [](World& w) { w.admit(2); },
         [](World& w, std::uint64_t worker) {
             Producer p(w.m, worker);
             marker();
             std::optional<Claim> c = World::claim(p);
             marker();
             if (c) answer(World::publish(p, worker, *c));
         }});
    // Its second, which goes by the window of admissions and moves its front.
    add({"claim in order",
         Role::kWorker,
         {READY, READY},
         [](World& w) { w.admit(3); },
         [](World& w, std::uint64_t worker) {
             Producer p(w.m, worker);
             std::optional<Claim> first = World::claim(p);
             marker();
             std::optional<Claim> c = World::claim(p);
             marker();
             if (first) World::publish(p, worker, *first);
             if (c) answer(World::publish(p, worker, *c));
         }});
    add({"publish", Role::kWorker, {READY, PUBLISHING}, [](World& w) { w.admit(); }, publishing});
    add({"publish at the index's wrap",
         Role::kWorker,
         {PUBLISHING, PUBLISHING},
         [](World& w) {
             published(w, 1);
             w.admit();
         },
         publishing,
         {},
         2 * kCells - 1});
    add({"publish at the tags' wrap",
         Role::kWorker,
         {PUBLISHING, PUBLISHING},
         [](World& w) {
             published(w, 1);
             w.admit();
         },
         publishing,
         {},
         kLastTag});
    add({"publish two",
         Role::kWorker,
         {READY, PUBLISHING},
         [](World& w) { w.admit(2); },
         [](World& w, std::uint64_t worker) {
             Producer p(w.m, worker);
             std::optional<Claim> c = World::claim(p), d = World::claim(p);
             CHECK(c && d);
             marker();
             const bool done = World::publish(p, worker, *c) & World::publish(p, worker, *d);
             marker();
             answer(done);
         }});
    // Claims and fills what an earlier group lay in, while the taker leases another of this worker.
    add({"publish into used memory",
         Role::kWorker,
         {READY, PUBLISHING},
         [](World& w) { w.admit(2); },
         [](World& w, std::uint64_t worker) {
             Producer p(w.m, worker);
             std::optional<Claim> c;
             for (int i = 0; i < 2; ++i) CHECK((c = World::claim(p)) && World::publish(p, worker, *c));
             marker();
             marker();
             c = World::claim(p);
             const bool done = c && World::publish(p, worker, *c);
             marker();
             if (c) answer(done);
         },
         [](World& w) {
             w.drain(true);
             w.admit();
         }});
    add({"retry",
         Role::kWorker,
         {READY, READY},
         [](World& w) { w.admit(); },
         [](World& w, std::uint64_t worker) {
             Producer p(w.m, worker);
             std::optional<Claim> old = World::claim(p);
             marker();
             std::optional<Claim> c = p.retry(*old);
             marker();
             CHECK(!World::publish(p, worker, *old));
             answer(c && World::publish(p, worker, *c));
         }});
    add({"end",
         Role::kWorker,
         {READY, FILTERED},
         [](World& w) {
             w.allow_filtered(0);
             w.admit();
         },
         [](World& w, std::uint64_t worker) {
             Producer p(w.m, worker);
             std::optional<Claim> c = World::claim(p);
             marker();
             const bool done = p.end(*c, FILTERED, kReason);
             marker();
             answer(done);
         }});
    add({"give back",
         Role::kWorker,
         {READY, READY},
         [](World& w) { w.admit(); },
         [](World& w, std::uint64_t worker) {
             Producer p(w.m, worker);
             std::optional<Claim> c = World::claim(p);
             marker();
             const bool done = p.give_back(*c);
             marker();
             answer(done);
         }});
    add({"sleep, wake, claim",
         Role::kWorker,
         {READY, READY},
         [](World& w) { w.admit(); },
         [](World& w, std::uint64_t worker) {
             Producer p(w.m, worker);
             marker();
             p.set_idle(true);
             std::optional<Claim> c = World::claim(p);
             p.set_idle(false);
             marker();
             if (c) answer(World::publish(p, worker, *c));
         }});
    for (const bool leased : {true, false}) {
        const auto leave = [leased](World& w) { leave_all_kinds(w, leased); };
        add({leased ? "start of a successor" : "start of a successor, pending",
             Role::kWorker,
             {READY, READY},
             [leave](World& w) {
                 leave(w);
                 w.recover_worker(0);
             },
             [](World& w, std::uint64_t worker) {
                 marker();
                 Producer p(w.m, worker);
                 std::vector<Claim> claims;  // all that it has room for, so that nothing it forgot stays whole
                 while (const std::optional<Claim> c = World::claim(p)) claims.push_back(*c);
                 marker();
                 for (Claim& c : claims) answer(World::publish(p, worker, c));
             }});
        add({leased ? "recover" : "recover, pending", Role::kKeeper, {READY, READY}, leave, recovering});
    }
    add({"recover a running ticket",
         Role::kKeeper,
         {READY, READY},
         [](World& w) {
             w.admit();
             Producer dead(w.m, 0);
             World::claim(dead);
         },
         recovering});

    add({"take",
         Role::kTaker,
         {PUBLISHING, PUBLISHING},
         [](World& w) { published(w, 2); },
         [](World& w, std::uint64_t) {
             Consumer c(w.m, -1);
             marker();
             c.take();
             c.take();
             marker();
         },
         {},
         2 * kCells - 1});
    add({"deliver",
         Role::kTaker,
         {PUBLISHING, DONE},
         [](World& w) { published(w, 2); },
         [](World& w, std::uint64_t) {
             Consumer c(w.m, -1);
             const auto t = c.take(), u = c.take();
             marker();
             deliver(*w.m, *t);
             deliver(*w.m, *u);
             marker();
         }});
    add({"release, with a bell",
         Role::kTaker,
         {DONE, DONE},
         [](World& w) {
             published(w, 2);
             w.helper().set_idle(true);
         },
         [](World& w, std::uint64_t) {
             Consumer c(w.m, ::eventfd(0, EFD_NONBLOCK));
             const auto t = c.take(), u = c.take();
             deliver(*w.m, *t);
             deliver(*w.m, *u);
             marker();
             World::release(*c.taker(), *u);
             World::release(*c.taker(), *t);
             marker();
         }});
    add({"take, deliver, release",
         Role::kTaker,
         {PUBLISHING, DONE},
         [](World& w) { published(w, 2); },
         [](World& w, std::uint64_t) {
             Consumer c(w.m, -1);
             marker();
             while (const auto t = c.take()) {
                 deliver(*w.m, *t);
                 World::release(*c.taker(), *t);
             }
             marker();
         }});
    // The leases outlive the handle; another process may take over meanwhile.
    add({"release after close",
         Role::kTaker,
         {DONE, DONE},
         [](World& w) { published(w, 2); },
         [](World& w, std::uint64_t) {
             Consumer c(w.m, -1);
             const auto t = c.take(), u = c.take();
             deliver(*w.m, *t);
             deliver(*w.m, *u);
             c.close();
             marker();
             World::release(*c.taker(), *t);
             World::release(*c.taker(), *u);
             marker();
         }});
    add({"close",
         Role::kTaker,
         {PUBLISHING, PUBLISHING},
         [](World& w) { published(w, 1); },
         [](World& w, std::uint64_t) {
             Consumer c(w.m, -1);
             c.take();
             marker();
             c.close();
             marker();
         }});
    add({"wait",
         Role::kTaker,
         {FREE, FREE},
         [](World&) {},
         [](World& w, std::uint64_t) {
             Consumer c(w.m, -1);
             marker();
             const std::uint32_t news = c.news();
             sleep_slice(*w.m, c.target(1), news, kSoon);
             marker();
         }});
    // From one that is dead and had released one, delivered another, taken a third and left a fourth.
    add({"take-over",
         Role::kTaker,
         {FREE, FREE},
         [](World& w) {
             published(w, 4);
             departed(w, [&] {
                 Consumer c(w.m, -1);
                 const auto t = c.take(), u = c.take();
                 c.take();
                 deliver(*w.m, *t);
                 deliver(*w.m, *u);
                 World::release(*c.taker(), *t);
             });
             w.sweep();
         },
         [](World& w, std::uint64_t) {
             marker();
             try {
                 Consumer c(w.m, -1);
                 marker();
             } catch (const TakerBusy&) {
                 marker();
             }
         }});
    return all;
}

}  // namespace crash
