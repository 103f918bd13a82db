// Claims: the allocator agrees with a byte map under random use; every change of a header byte, every truncation and every
// file that is not a segment is refused; a corrupt body gives errors, never a crash.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "consumer.h"

using namespace mprollout;

#define CHECK(x) ((x) ? void() : (std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #x), std::abort()))

namespace {

void arena() {
    constexpr std::uint64_t kUnits = 200;
    std::mt19937_64 random(1);
    constexpr std::uint64_t kMost = 20;
    Arena arena(kUnits * kUnit, kMost * kUnit);
    std::vector<char> used(kUnits, 0);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> live;
    for (int i = 0; i < 100000; ++i) {
        if (random() % 2 || live.empty()) {
            const std::uint64_t bytes = 1 + random() % (kMost * kUnit), units = round_up(bytes, kUnit) / kUnit;
            std::uint64_t first = 0, run = 0;  // the lowest fit, by brute force
            for (; first + kMost <= kUnits; ++first) {
                for (run = 0; run < kMost && !used[first + run]; ++run) {
                }
                if (run == kMost) break;
            }
            const auto at = arena.allocate();
            CHECK(at.has_value() == (first + kMost <= kUnits));
            if (!at) continue;
            CHECK(*at == first * kUnit);
            arena.free(*at + units * kUnit, (kMost - units) * kUnit);
            std::fill_n(used.begin() + first, units, 1);
            live.emplace_back(*at, bytes);
        } else {
            std::swap(live[random() % live.size()], live.back());
            const auto [at, bytes] = live.back();
            live.pop_back();
            arena.free(at, bytes);
            std::fill_n(used.begin() + at / kUnit, round_up(bytes, kUnit) / kUnit, 0);
        }
        CHECK(arena.free_bytes() == kUnit * std::count(used.begin(), used.end(), 0));
        if (i % 1000 == 0) {
            Arena rebuilt(kUnits * kUnit, kMost * kUnit);
            for (const auto& [at, bytes] : live) CHECK(rebuilt.occupy(at, bytes));
            CHECK(rebuilt.free_bytes() == arena.free_bytes());
            for (const auto& [at, bytes] : live) CHECK(!rebuilt.occupy(at, bytes));
            CHECK(!rebuilt.occupy(kUnits * kUnit, 1) && !rebuilt.occupy(~0ULL - 63, 64) && !rebuilt.occupy(1, 64));
            CHECK(!rebuilt.occupy(0, ~0ULL) && !rebuilt.occupy(~0ULL, ~0ULL - 62));
        }
    }
}

std::vector<char> image(const Mapping& m) {
    std::vector<char> bytes(m.offsets().size);
    CHECK(::pread(m.fd(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    return bytes;
}

int memfd(const std::vector<char>& bytes, bool sealed = true) {
    const int fd = static_cast<int>(::syscall(SYS_memfd_create, "test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    if (sealed) CHECK(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

bool refused(const std::vector<char>& bytes, bool sealed = true) {
    const int fd = memfd(bytes, sealed);
    bool refused = false;
    try {
        Mapping::attach(fd);
    } catch (const SegmentError& e) {
        refused = std::strstr(e.what(), "expected") != nullptr;
    }
    ::close(fd);
    return refused;
}

void header() {
    const MappingPtr m = Mapping::create({2, 4, 4, 4, 4096, 1024, 64, 0}, "a schema");
    const std::vector<char> good = image(*m);
    CHECK(!refused(good));
    CHECK(refused(good, false));
    for (std::size_t i = 0; i < kHeaderBytes; ++i) {
        std::vector<char> bad = good;
        bad[i] ^= static_cast<char>(1 << i % 8);
        CHECK(refused(bad));
    }
    std::mt19937_64 random(2);
    for (int i = 0; i < 3000; ++i) {
        std::vector<char> bad = good;
        for (std::uint64_t k = 1 + random() % 4; k > 0; --k) {
            const std::uint64_t value = random() % 3 == 0 ? ~0ULL >> random() % 64 : random();
            std::memcpy(bad.data() + 8 * (random() % (offsetof(Header, reserved) / 8)), &value, 8);
        }
        CHECK(refused(bad) || bad == good);
    }
    for (std::size_t size :
         {std::size_t{0}, std::size_t{8}, std::size_t{4095}, std::size_t{4096}, good.size() - 1, good.size() + 1}) {
        std::vector<char> bad = good;
        bad.resize(size);
        CHECK(refused(bad));
    }
    std::vector<char> bad = good;
    bad[m->offsets().schema] ^= 1;
    CHECK(refused(bad));
    for (int fd : {-1, 0, 1 << 20}) {
        bool thrown = false;
        try {
            Mapping::attach(fd);
        } catch (const SegmentError&) {
            thrown = true;
        }
        CHECK(thrown);
    }
}

void publish_next(Producer& producer) {
    const Field f{"payload", 7};
    std::optional<Claim> claim = producer.claim();
    CHECK(claim && producer.publish(*claim, {&f, 1}));
}

void body() {
    std::mt19937_64 random(3);
    const MappingPtr m = Mapping::create({2, 4, 4, 4, 4096, 1024, 64, 0}, "");
    Admitter admitter(m);
    Producer producer(m, 1);
    for (int i = 0; i < 3; ++i) {
        CHECK(admitter.admit(i, "prompt"));
        publish_next(producer);
    }
    const std::vector<char> good = image(*m);
    int errors = 0;
    for (int i = 0; i < 4000; ++i) {
        std::vector<char> bad = good;
        const std::uint64_t from = m->offsets().table_words, to = m->offsets().schema;
        for (std::uint64_t k = 1 + random() % 4; k > 0; --k) {
            const std::uint64_t value = random() >> random() % 64, at = from + 8 * (random() % ((to - from) / 8));
            std::memcpy(bad.data() + at, &value, 8);
        }
        if (random() % 2)
            std::memset(bad.data() + m->offsets().arenas + m->offsets().arena_stride + 16, static_cast<int>(random()),
                        16);
        const int fd = memfd(bad);
        try {
            const MappingPtr n = Mapping::attach(fd);
            snapshot(*n);
            Consumer consumer(n, -1);
            while (auto t = consumer.take()) {
                for (std::uint64_t k = 0; k < std::min(t->fields, 3U); ++k) {
                    const Field f = field(*t, k);
                    const auto* data = static_cast<const unsigned char*>(f.data);
                    CHECK(f.bytes <= t->extent_bytes && data >= t->extent &&
                          data + f.bytes <= t->extent + t->extent_bytes);
                }
                deliver(*n, *t);
                release(*consumer.taker(), *t);
            }
            recover(*n, 1, 3, 0, true);
            Producer next(n, 1);
            if (std::optional<Claim> claim = next.claim()) next.give_back(*claim);
            Admitter(n).sweep();
        } catch (const SegmentError&) {
            ++errors;
        }
        ::close(fd);
    }
    CHECK(errors > 0);
}

// Somebody scribbles over what is in use: the words of a segment may then say anything, but move no access out of it,
// and keep nobody in a loop.
void scribbled_in_use() {
    ::setenv("MPROLLOUT_POISON", "1", 1);
    const auto raises = [](auto call) {
        try {
            call();
        } catch (const SegmentError& e) {
            return std::strstr(e.what(), "expected") != nullptr;
        }
        return false;
    };
    const auto fresh = [] { return Mapping::create({1, 4, 4, 4, 4096, 1024, 64, 0}, ""); };
    const Field f{"payload", 7};
    {  // an extent: the worker believes its own copy alone
        const MappingPtr m = fresh();
        Admitter admitter(m);
        Producer producer(m, 0);
        Consumer consumer(m, -1);
        for (std::int64_t ticket = 0; ticket < 20; ++ticket) {
            CHECK(admitter.admit(ticket, ""));
            publish_next(producer);
            const auto t = consumer.take();
            CHECK(t);
            deliver(*m, *t);
            release(*consumer.taker(), *t);
            admitter.sweep();
            m->descriptor(0, t->descriptor).extent_offset = 1ULL << 40;
            m->descriptor(0, t->descriptor).extent_bytes = ticket % 2 ? ~0ULL : 1 << 20;
        }
        CHECK(producer.free_bytes() == m->arena_room());
    }
    {  // a successor finds no such extent, and says so
        const MappingPtr m = fresh();
        Admitter admitter(m);
        Producer producer(m, 0);
        CHECK(admitter.admit(0, ""));
        publish_next(producer);
        for (std::uint64_t bytes : {~0ULL, ~0ULL - 62, 1ULL << 63, 4097ULL}) {
            m->descriptor(0, 0).extent_bytes = bytes;
            CHECK(raises([&] { Producer(m, 0); }));
            CHECK(raises([&] { Consumer(m, -1).take(); }));
        }
    }
    {  // a cell of no lap that could be
        const MappingPtr m = fresh();
        Admitter admitter(m);
        Producer producer(m, 0);
        CHECK(admitter.admit(0, ""));
        std::optional<Claim> claim = producer.claim();
        m->cell(0).store(Cell{77, 0, 0, 1}.pack());
        CHECK(raises([&] { producer.publish(*claim, {&f, 1}); }));
    }
    {  // a window of 2^40 admissions
        const MappingPtr m = fresh();
        Admitter admitter(m);
        Producer producer(m, 0);
        CHECK(admitter.admit(0, "") && producer.claim());  // its look at all is behind it
        m->hot().admitted.store(1ULL << 40);
        CHECK(raises([&] { producer.claim(); }));
        CHECK(admitter.admit(1, ""));  // by a shake, not by the window
        m->hot().front.store(Front::unpack(~0ULL).position);
        CHECK(admitter.admit(2, ""));
    }
    ::unsetenv("MPROLLOUT_POISON");
}

}  // namespace

int main() {
    arena();
    header();
    body();
    scribbled_in_use();
    std::puts("segment_test: passed");
}
