// Claims: under producers, deaths and re-issues at once, each ticket arrives exactly once with its own payload, each
// worker's sequence in FIFO order, every wake-up comes, and at the end nothing is leaked. Threads over one mapping, so that
// ThreadSanitizer sees every order that the memory model allows to be seen.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "consumer.h"

using namespace mprollout;

#define CHECK(x) ((x) ? void() : (std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #x), std::abort()))

namespace {

constexpr std::uint64_t kWorkers = 3, kEntries = 12, kTickets = 20000, kArena = 1 << 16, kGroup = 4096;

Shape shape() { return {kWorkers, kEntries, 16, 10, kArena, kGroup, 64, 0}; }

std::atomic<bool> done{false};
std::atomic<std::uint64_t> deaths{0};

// One incarnation: works until it "dies" (true) at a random step, or all is done (false). Like a killed process it leaves
// whatever it was doing as it stands.
bool incarnation(const MappingPtr& m, std::uint64_t worker, std::mt19937_64& random) {
    Producer producer(m, worker);
    std::vector<std::uint64_t> data(kGroup / 8);
    while (!done.load(std::memory_order_relaxed)) {
        std::optional<Claim> claim = producer.claim();
        if (!claim) {
            std::this_thread::yield();
            continue;
        }
        CHECK(claim->prompt == std::to_string(claim->ticket));
        const unsigned step = random() % 64;
        if (step == 0) return true;  // RUNNING
        if (step == 1) {             // PUBLISHING, before the index
            Descriptor& d = m->descriptor(worker, claim->descriptor);
            d.word.store(kFree, std::memory_order_release);
            Entry next = Entry::unpack(claim->word);
            next.state = PUBLISHING;
            CHECK(hand_over(m->table_word(claim->entry), claim->word, next.pack()));
            return true;
        }
        if (step == 2) {
            std::optional<Claim> again = producer.retry(*claim);
            CHECK(again && !producer.publish(*claim, {}) && producer.current(*again));
            claim = again;
        }
        if (step == 3) {
            CHECK(producer.give_back(*claim));
            continue;
        }
        const std::uint64_t n = random() % 400;
        for (std::uint64_t i = 0; i < n; ++i) data[i] = claim->ticket * 1000003 + i;
        const Field fields[] = {{&claim->ticket, 8}, {data.data(), n * 8}, {nullptr, 0}};
        CHECK(producer.publish(*claim, fields));
        if (step == 4) return true;  // published
    }
    return false;
}

void work(const MappingPtr& m, std::uint64_t worker) {
    std::mt19937_64 random(worker + 1);
    while (incarnation(m, worker, random)) {
        ++deaths;
        const Recovered r = recover(*m, worker, 250, 7, random() % 2 == 0);
        CHECK(r.failed.empty() && r.reissued.size() <= 1);
        CHECK(recover(*m, worker, 250, 7, true).reissued.empty());  // idempotent
    }
}

void admit(const MappingPtr& m) {
    Admitter admitter(m);
    for (std::uint64_t ticket = 0; ticket < kTickets;) {
        for (const Ended& e : admitter.sweep()) CHECK(e.entry.state == DONE);
        snapshot(*m);
        if (admitter.admit(static_cast<std::int64_t>(ticket), std::to_string(ticket)))
            ++ticket;
        else
            std::this_thread::yield();
    }
}

void take(const MappingPtr& m) {
    auto consumer = std::make_unique<Consumer>(m, -1);
    std::vector<char> seen(kTickets, 0);
    std::vector<Taken> held;
    std::mt19937_64 random(99);
    std::uint64_t next_position = 0;
    Spinner spinner;
    for (std::uint64_t got = 0; got < kTickets;) {
        const std::uint32_t news = consumer->news();
        const std::uint64_t target = consumer->target(1 + (kTickets - got > 3 ? random() % 2 : 0));
        if (!reached(*m, target) && random() % 2) spinner.spin(*m, target, news);
        if (!reached(*m, target)) sleep_slice(*m, target, news, 50000000);
        while (auto t = consumer->take()) {
            CHECK(t->position == next_position);
            ++next_position;
            CHECK(!seen[t->ticket]);
            seen[t->ticket] = 1;
            ++got;
            held.push_back(*t);
            if (random() % 4 == 0) break;
        }
        std::shuffle(held.begin(), held.end(), random);
        while (held.size() > random() % 3) {
            const Taken t = held.back();
            held.pop_back();
            std::uint64_t ticket;
            std::memcpy(&ticket, field(t, 0).data, 8);
            CHECK(ticket == t.ticket);
            const Field f = field(t, 1);
            for (std::uint64_t i = 0; i < f.bytes / 8; ++i)
                CHECK(static_cast<const std::uint64_t*>(f.data)[i] == ticket * 1000003 + i);
            CHECK(field(t, 2).bytes == 0 && !delivered(*m, t));
            deliver(*m, t);
            CHECK(delivered(*m, t));
            release(*consumer->taker(), t);
        }
        if (random() % 500 == 0) {  // a new taker gets exactly what was held, in order
            std::sort(held.begin(), held.end(), [](auto& a, auto& b) { return a.position < b.position; });
            consumer->close();
            consumer = std::make_unique<Consumer>(m, -1);
            for (Taken& h : held) {
                const auto t = consumer->take();
                CHECK(t && t->position == h.position && t->ticket == h.ticket);
                h = *t;
            }
        }
    }
    for (const Taken& t : held) {
        deliver(*m, t);
        release(*consumer->taker(), t);
    }
    CHECK(!consumer->take());
    done = true;
}

}  // namespace

int main() {
    const MappingPtr m = Mapping::create(shape(), "");
    std::vector<std::thread> threads;
    for (std::uint64_t w = 0; w < kWorkers; ++w) threads.emplace_back(work, m, w);
    threads.emplace_back(admit, m);
    threads.emplace_back(take, m);
    for (std::thread& t : threads) t.join();
    Admitter(m).sweep();
    CHECK(snapshot(*m).empty());
    for (std::uint64_t w = 0; w < kWorkers; ++w) {
        CHECK(recover(*m, w, 0, 0, true).published.empty());
        CHECK(Producer(m, w).free_bytes() == m->arena_room());
    }
    CHECK(m->hot().tail.load() == kTickets && m->hot().head.load() == kTickets);
    std::printf("ring_test: %llu tickets, %llu deaths\n", static_cast<unsigned long long>(kTickets),
                static_cast<unsigned long long>(deaths.load()));
}
