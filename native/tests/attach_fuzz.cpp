// Claims: whatever stands in a file, attach() either refuses it with an error that says what was expected, or all
// that a monitor, an admitter, a worker, a taker and the keeper then do ends, by itself or with such an error, and
// never leaves the mapping. Three kinds of input: a good image with scribbles anywhere, one whose header was forged
// to hold together (another shape, offsets and checksum made anew), and a scribble under handles that are open
// already.
//
//   attach_fuzz [INPUTS [FIRST]]
//
// Each input is its own seed; one that fails is named, and `attach_fuzz 1 FIRST` plays it again. The inputs run in a
// child, so that a crash, and a call that does not come back, have somebody to name them.
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>

#include "consumer.h"

using namespace mprollout;

#define CHECK(x) ((x) ? void() : (std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #x), std::abort()))

namespace {

using Random = std::mt19937_64;
using Image = std::vector<unsigned char>;

// What an input came to.
enum Outcome { REFUSED, ERROR, ENDED, kOutcomes };

struct Progress {
    std::atomic<std::uint64_t> input, outcomes[kOutcomes], sum;
};

constexpr Shape kShape{2, 4, 4, 4, 4096, 1024, 64, 8};

std::vector<Image> good_images() {
    std::vector<Image> images;
    const MappingPtr m = Mapping::create(kShape, "a schema");
    const auto keep = [&] {
        images.emplace_back(m->offsets().size);
        CHECK(::pread(m->fd(), images.back().data(), images.back().size(), 0) ==
              static_cast<ssize_t>(m->offsets().size));
    };
    keep();  // never used
    Admitter admitter(m);
    Consumer consumer(m, -1);
    Producer first(m, 0), second(m, 1);
    std::uint64_t ticket = 0;
    const auto publish = [&](Producer& p) {
        CHECK(admitter.admit(static_cast<std::int64_t>(ticket), "prompt"));
        const Field fields[] = {{&ticket, 8}, {nullptr, 0}, {"payload", 7}};
        std::optional<Claim> claim = p.claim();
        CHECK(claim && p.publish(*claim, fields));
        ++ticket;
    };
    for (int i = 0; i < 7; ++i) {  // laps, and memory that was used before
        publish(i % 2 ? first : second);
        const auto t = consumer.take();
        deliver(*m, *t);
        release(*consumer.taker(), *t);
        admitter.sweep();
    }
    publish(first);
    publish(second);
    CHECK(consumer.take());
    CHECK(admitter.admit(100, "running") && admitter.admit(101, "ready"));
    std::optional<Claim> running = second.claim();
    CHECK(running);
    keep();  // one taken, one pending, one running, one ready
    m->hot().taker.store(0);
    keep();  // the same, and the taker is gone
    return images;
}

std::uint64_t odd_number(Random& random) {
    switch (random() % 5) {
        case 0:
            return random();
        case 1:
            return random() % 9;
        case 2:
            return ~0ULL - random() % 9;
        case 3:
            return 1ULL << random() % 64;
        default:
            return random() >> random() % 64;
    }
}

// From the header to the tables mostly: the arenas are the largest part and the least likely to matter.
void scribble(unsigned char* bytes, const Offsets& o, Random& random) {
    const std::array<std::uint64_t, 7> ends{kHeaderBytes,  o.global_words, o.table_words, o.index,
                                            o.descriptors, o.schema,       o.size};
    for (std::uint64_t k = 1 + random() % 6; k > 0; --k) {
        const std::uint64_t part = random() % ends.size(), from = part == 0 ? 0 : ends[part - 1];
        // 64-bit words, as their readers: so that a scribble under open handles is no data race
        const std::uint64_t at = from + 8 * (random() % ((ends[part] - from) / 8));
        std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(bytes + at));
        const std::uint64_t was = word.load(std::memory_order_relaxed);
        word.store(random() % 2 ? odd_number(random) : was ^ 1ULL << random() % 64, std::memory_order_relaxed);
    }
    if (random() % 4 == 0) {  // a payload's table of fields
        const std::uint64_t arena = o.arenas + random() % 2 * o.arena_stride, at = arena + 8 * (random() % 16);
        if (at + 8 <= o.size) std::memcpy(bytes + at, std::array{odd_number(random)}.data(), 8);
    }
}

// A header that holds together, whatever else stands in the file.
void seal_header(Image& image, const Shape& shape) {
    Header h{};
    h.magic = kMagic;
    h.version = kVersion;
    h.endianness = kEndianness;
    h.shape = shape;
    h.offsets = plan(shape);
    h.checksum = header_checksum(
        h, std::string_view(reinterpret_cast<const char*>(image.data()) + h.offsets.schema, shape.schema_bytes));
    std::memcpy(image.data(), &h, sizeof h);
}

Image forged(const std::vector<Image>& good, Random& random) {
    Shape s{1 + random() % 4,  1 + random() % 9, 0, 1 + random() % 9, 128 + random() % 9000, 64,
            1 + random() % 99, random() % 99};
    s.cells = std::bit_ceil(s.entries) << random() % 3;
    s.max_group_bytes = 64 + random() % (round_up(s.arena_bytes, kUnit) / 2 - 63);
    if (2 * round_up(s.max_group_bytes, kUnit) > round_up(s.arena_bytes, kUnit)) s.max_group_bytes = 64;
    Image image(plan(s).size);
    if (random() % 2) {
        const Image& other = good[random() % good.size()];  // read as another shape
        std::memcpy(image.data(), other.data(), std::min(image.size(), other.size()));
    }
    const Offsets o = plan(s);
    for (std::uint64_t k = random() % 40; k > 0; --k) {
        const std::uint64_t value = odd_number(random),
                            at = kHeaderBytes + 8 * (random() % ((o.size - kHeaderBytes) / 8));
        std::memcpy(image.data() + at, &value, 8);
    }
    seal_header(image, s);
    return image;
}

// Files by size, used again: sealed against growth, open for writing.
int file_of(const Image& image) {
    static std::map<std::size_t, int> files;
    auto [at, fresh] = files.try_emplace(image.size(), -1);
    if (fresh) {
        at->second = static_cast<int>(::syscall(SYS_memfd_create, "fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        CHECK(at->second >= 0 && ::ftruncate(at->second, static_cast<off_t>(image.size())) == 0);
        CHECK(::fcntl(at->second, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    }
    CHECK(::pwrite(at->second, image.data(), image.size(), 0) == static_cast<ssize_t>(image.size()));
    return at->second;
}

std::uint64_t sum;  // so that no read is left out

void read_all(const Taken& t) {
    for (std::uint64_t k = 0; k < std::min<std::uint64_t>(t.fields, 5); ++k) {
        const Field f = field(t, k);
        const auto* data = static_cast<const unsigned char*>(f.data);
        CHECK(f.bytes <= t.extent_bytes && data >= t.extent && data + f.bytes <= t.extent + t.extent_bytes);
        for (std::uint64_t i = 0; i < f.bytes; ++i) sum += data[i];
    }
}

// Every call may raise; what it raises must say something, and the next one is made all the same.
class Player {
public:
    Player(const MappingPtr& m, Random& random) : m_(m), random_(random) {}

    bool play() {
        for (int i = 0; i < 12; ++i) {
            try {
                step(random_() % 13);
            } catch (const std::exception& e) {
                CHECK(std::strlen(e.what()) > 20);
                failed_ = true;
            }
            if (random_() % 16 == 0) scribble(reinterpret_cast<unsigned char*>(m_->address()), m_->offsets(), random_);
        }
        return !failed_;
    }

private:
    void step(std::uint64_t which) {
        const std::uint64_t worker = random_() % m_->shape().workers;
        switch (which) {
            case 0:
                snapshot(*m_);
                sum += pending(*m_);
                break;
            case 1:
            case 2: {
                Consumer& taker = this->taker();
                sum += taker.available() + taker.peek(1 + random_() % 9).size();
                for (int i = 0; i < 3; ++i) {
                    const auto t = taker.take();
                    if (!t) break;
                    taken_.push_back(*t);
                    read_all(*t);
                }
                break;
            }
            case 3:
            case 4:
                if (taken_.empty()) break;
                read_all(taken_.back());
                sum += delivered(*m_, taken_.back());
                deliver(*m_, taken_.back());
                release(*taker().taker(), taken_.back());
                taken_.pop_back();
                break;
            case 5:
                recover(*m_, worker, random_() % 4, 7, random_() % 2);
                producers_.erase(worker);
                break;
            case 6:
            case 7:
            case 8: {
                Producer& p = producer(worker);
                std::optional<Claim> claim = p.claim();
                sum += p.free_bytes() + p.starved_for_room();
                if (!claim) break;
                sum += claim->prompt.size();
                if (random_() % 4 == 0)
                    p.give_back(*claim);
                else if (random_() % 4 == 0)
                    p.end(*claim, FAILED, 3);
                else if (std::optional<Claim> again = p.retry(*claim)) {
                    const std::string payload(random_() % 3000, 'x');  // some too large
                    const Field fields[] = {{payload.data(), payload.size()}, {nullptr, 0}};
                    p.publish(*again, fields);
                }
                break;
            }
            case 9:
                admitter().admit(static_cast<std::int64_t>(1000 + random_() % 1000), "p");
                break;
            case 10:
                sum += admitter().sweep().size();
                break;
            case 11: {
                Consumer& taker = this->taker();
                const std::uint64_t target = taker.target(1 + random_() % 3);
                sleep_slice(*m_, target, taker.news(), 1);
                sum += reached(*m_, target);
                break;
            }
            default:
                producer(worker).set_idle(random_() % 2);
                taken_.clear();
                taker_.reset();
        }
    }

    Consumer& taker() {
        if (!taker_) taker_ = std::make_unique<Consumer>(m_, -1);
        return *taker_;
    }
    Admitter& admitter() {
        if (!admitter_) admitter_ = std::make_unique<Admitter>(m_);
        return *admitter_;
    }
    Producer& producer(std::uint64_t worker) {
        auto& p = producers_[worker];
        if (!p || random_() % 16 == 0) p = std::make_unique<Producer>(m_, worker);
        return *p;
    }

    MappingPtr m_;
    Random& random_;
    std::unique_ptr<Consumer> taker_;
    std::unique_ptr<Admitter> admitter_;
    std::map<std::uint64_t, std::unique_ptr<Producer>> producers_;
    std::vector<Taken> taken_;
    bool failed_ = false;
};

Outcome play(const std::vector<Image>& good, std::uint64_t input) {
    Random random(input);
    Image image;
    if (random() % 3 == 0) {
        image = forged(good, random);
    } else {
        image = good[random() % good.size()];
        const Offsets o = plan(kShape);
        scribble(image.data(), o, random);
        if (random() % 3 != 0) {
            seal_header(image, kShape);  // so that the rest of it is looked at
        } else {
            const std::uint64_t value = odd_number(random), at = random() % (offsetof(Header, reserved) + 8);
            std::memcpy(image.data() + at, &value, 1 + random() % 8);
        }
    }
    MappingPtr m;
    try {
        m = Mapping::attach(file_of(image), random() % 8 == 0);
    } catch (const SegmentError& e) {
        CHECK(std::strstr(e.what(), "expected") != nullptr);
        return REFUSED;
    }
    if (m->read_only()) {  // a monitor
        sum += snapshot(*m).size() + pending(*m) + static_cast<std::uint64_t>(m->worker_words(0)[0]);
        return ENDED;
    }
    return Player(m, random).play() ? ENDED : ERROR;
}

[[noreturn]] void run(Progress& progress, std::uint64_t first, std::uint64_t inputs) {
    ::setenv("MPROLLOUT_POISON", "1", 1);  // writes to whatever extent comes back
    const std::vector<Image> good = good_images();
    for (std::uint64_t i = 0; i < inputs; ++i) {
        if (i % 64 == 0) ::alarm(60);  // an input takes less than a millisecond
        progress.input = first + i;
        ++progress.outcomes[play(good, first + i)];
    }
    progress.sum = sum;
    ::_exit(0);
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t inputs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 4000,
                        first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    auto& progress = *static_cast<Progress*>(
        ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const pid_t pid = ::fork();
    if (pid == 0) run(progress, first, inputs);
    int status = 0;
    CHECK(pid > 0 && ::waitpid(pid, &status, 0) == pid);
    if (status != 0) {
        std::printf("attach_fuzz: FAILED at input %llu: %s %d\n", static_cast<unsigned long long>(progress.input),
                    WIFSIGNALED(status) ? "signal" : "exit", WIFSIGNALED(status) ? WTERMSIG(status) : status >> 8);
        return 1;
    }
    std::printf("attach_fuzz: %llu inputs: %llu refused, %llu with errors later, %llu without\n",
                static_cast<unsigned long long>(inputs), static_cast<unsigned long long>(progress.outcomes[REFUSED]),
                static_cast<unsigned long long>(progress.outcomes[ERROR]),
                static_cast<unsigned long long>(progress.outcomes[ENDED]));
}
