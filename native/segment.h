// The segment: one sealed memfd. This header is its layout, its making and its validation; README.md is the same as prose.
//
// Invariant: nobody trusts a byte of a segment before attach() proved its seals, its header and its size; from then on the
// shape comes from a private copy, so a later scribble over the header cannot move a pointer out of the mapping.
#pragma once

#include <fcntl.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace mprollout {

template <class... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

struct SegmentError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct GroupTooLarge : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct TakerBusy : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct OutOfMemory : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr std::uint64_t kMagic = 0x314c4f52504d0a1aULL;  // little endian on disk: 1a 0a "MPROL1"
constexpr std::uint32_t kVersion = 2;
constexpr std::uint32_t kEndianness = 0x01020304;
constexpr std::uint64_t kPage = 4096, kHeaderBytes = kPage, kUnit = 64, kStatWords = 64;
constexpr std::uint64_t kMaxWorkers = 64, kMaxEntries = 1 << 20, kMaxCells = 1 << 24, kMaxDescriptors = 1 << 14;
constexpr std::uint64_t kMaxSchema = 1 << 24;
constexpr std::uint64_t kNever = ~0ULL;  // wake_at: the taker is awake

// How many forks lie between this process and the one that loaded the core. What belongs to a process remembers it, so that
// a forked child's copy does nothing; getpid() would be a system call in every release.
inline std::uint64_t forks_before = 0;
inline const bool watching_forks = ::pthread_atfork(nullptr, nullptr, [] { ++forks_before; }) == 0;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

// What the creator chose.
struct Shape {
    std::uint64_t workers, entries, cells, descriptors, arena_bytes, max_group_bytes, max_prompt_bytes, schema_bytes;
};
static_assert(sizeof(Shape) == 64);

// Where it lies, in bytes from the start of the segment; a pure function of Shape.
struct Offsets {
    std::uint64_t hot, global_words, worker_words, controls, table_words, table_records, admissions, endings, index,
        descriptors, schema, prompts, prompt_stride, arenas, arena_stride, size;
};
static_assert(sizeof(Offsets) == 16 * 8);

struct Header {
    std::uint64_t magic;  // stored last
    std::uint32_t version, endianness;
    std::uint64_t checksum;  // FNV-1a of everything behind it in the header, then of the schema
    Shape shape;
    Offsets offsets;
    std::uint64_t features;  // reserved: NUMA, mlock, rank bits, spin; 0 in version 2
    std::uint8_t reserved[kHeaderBytes - 224];
};
static_assert(sizeof(Header) == kHeaderBytes && offsetof(Header, checksum) == 16 && offsetof(Header, shape) == 24 &&
              offsetof(Header, offsets) == 88 && offsetof(Header, features) == 216);

using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8 && std::atomic<std::uint32_t>::is_always_lock_free);

// Each on its own pair of cache lines: x86 prefetches lines in pairs, so 64 bytes apart would still bounce.
struct Hot {
    alignas(128) Word tail;     // publishers
    alignas(128) Word head;     // the taker
    alignas(128) Word wake_at;  // the taker arms it, publishers fire it; kNever while the taker is awake
    alignas(128) std::atomic<std::uint32_t> wake_sequence;  // the futex
    alignas(128) Word idle;                                 // bit w: worker w said that it sleeps
    alignas(128) Word taker;                                // pid and start time of the process that takes; 0: nobody
    alignas(128) Word taker_epoch;                          // counts the takers; stamps TAKEN words
    alignas(128) Word admitted;                             // the next position in `admissions`; the admitter
    alignas(128) Word front;                                // {shakes:16, position:48}: see Front in table.h
};
static_assert(sizeof(Hot) == 9 * 128 && offsetof(Hot, head) == 128 && offsetof(Hot, front) == 8 * 128);

// What survives a worker's process: written by its Producer alone.
struct alignas(64) Control {
    Word incarnation;  // how many Producers there were; an older one is superseded
    Word sequence;     // of the index words; raised before the word is used, so that no death repeats one
};
static_assert(sizeof(Control) == 64);

// Bits of entries that ended since the last sweep, and above them one bit for each word of such bits that is not 0.
struct EndedBits {
    std::uint64_t words, summary;  // how many

    constexpr explicit EndedBits(std::uint64_t entries) : words((entries + 63) / 64), summary((words + 63) / 64) {}
};

// The ticket behind a table word; valid for one generation of that word.
struct Record {
    Word ticket, prompt_bytes;
};
static_assert(sizeof(Record) == 16);

// One group in a worker's arena. All but `word` and `position` are written by the worker while `word` is FREE and not in
// the index, and may be read by others only when `word` is not FREE or an index cell names the descriptor.
struct alignas(64) Descriptor {
    Word word;      // FREE, TAKEN | epoch, RELEASED (see ring.h)
    Word position;  // index position; stored by the taker before TAKEN
    std::uint64_t ticket;
    std::uint64_t table_word;  // the PUBLISHING word of this very attempt: carries the entry's generation
    std::uint64_t extent_offset, extent_bytes;
    std::uint32_t entry, fields;
    std::uint16_t readers;   // reserved: bit r, data-parallel reader r still reads
    std::uint16_t recycles;  // reserved
    std::uint32_t reserved;
};
static_assert(sizeof(Descriptor) == 64);

// One read of a plain word of another process: what was checked is what is used.
template <class T>
T read_once(T& shared) {
    return std::atomic_ref<T>(shared).load(std::memory_order_relaxed);
}

inline void check_range(const char* name, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
    if (value < low || value > high)
        throw std::invalid_argument(text(name, ": expected ", low, "..", high, ", got ", value));
}

// Throws std::invalid_argument; no arithmetic overflows because every factor was bounded first.
inline Offsets plan(const Shape& s) {
    constexpr std::uint64_t kMaxArena = 1ULL << 44;
    check_range("workers", s.workers, 1, kMaxWorkers);
    check_range("entries", s.entries, 1, kMaxEntries);
    check_range("cells", s.cells, s.entries, kMaxCells);  // cells >= entries: the index can never be full
    if (!std::has_single_bit(s.cells))
        throw std::invalid_argument(text("cells: expected a power of two, got ", s.cells));
    check_range("descriptors", s.descriptors, 1, kMaxDescriptors);
    check_range("arena_bytes", s.arena_bytes, 2 * kUnit, kMaxArena);
    check_range("max_group_bytes", s.max_group_bytes, kUnit, kMaxArena);
    if (2 * round_up(s.max_group_bytes, kUnit) > round_up(s.arena_bytes, kUnit))
        throw std::invalid_argument(text("max_group_bytes: expected at most half of arena_bytes ", s.arena_bytes,
                                         " (both rounded up to ", kUnit, "), got ", s.max_group_bytes));
    check_range("max_prompt_bytes", s.max_prompt_bytes, 1, 1ULL << 30);
    check_range("schema bytes", s.schema_bytes, 0, kMaxSchema);
    std::uint64_t at = kHeaderBytes;
    auto place = [&at](std::uint64_t bytes, std::uint64_t align) {
        std::uint64_t here = round_up(at, align);
        at = here + bytes;
        return here;
    };
    Offsets o{};
    o.hot = place(sizeof(Hot), 128);
    o.global_words = place(kStatWords * 8, 128);
    o.worker_words = place(s.workers * kStatWords * 8, 128);
    o.controls = place(s.workers * sizeof(Control), 128);
    o.table_words = place(s.entries * 8, 128);
    o.table_records = place(s.entries * sizeof(Record), 128);
    o.admissions = place(s.cells * 8, 128);
    o.endings = place((EndedBits(s.entries).words + EndedBits(s.entries).summary) * 8, 128);
    o.index = place(s.cells * 8, 128);
    o.descriptors = place(s.workers * s.descriptors * sizeof(Descriptor), 128);
    o.schema = place(s.schema_bytes, 128);
    o.prompt_stride = round_up(s.max_prompt_bytes, kUnit);
    o.prompts = place(s.entries * o.prompt_stride, kPage);
    o.arena_stride = round_up(s.arena_bytes, kPage);
    o.arenas = place(s.workers * o.arena_stride, kPage);
    o.size = round_up(at, kPage);
    return o;
}

inline std::uint64_t fnv1a(const void* data, std::size_t bytes, std::uint64_t hash = 0xcbf29ce484222325ULL) {
    auto* p = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3ULL;
    return hash;
}

inline std::uint64_t header_checksum(const Header& h, std::string_view schema) {
    constexpr std::size_t from = offsetof(Header, shape);
    return fnv1a(schema.data(), schema.size(), fnv1a(reinterpret_cast<const char*>(&h) + from, sizeof(Header) - from));
}

// One mapping of the segment in this process; dies with the last handle, lease or view that uses it.
class Mapping {
public:
    static std::shared_ptr<Mapping> create(Shape shape, std::string_view schema) {
        shape.schema_bytes = schema.size();
        const Offsets offsets = plan(shape);
        auto failed = [&](const char* step, int error) -> OutOfMemory {
            return OutOfMemory(text("segment: expected ", offsets.size, " bytes of memory, got ", std::strerror(error),
                                    " from ", step));
        };
        const int fd = static_cast<int>(::syscall(SYS_memfd_create, "mprollout", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        if (fd < 0) throw failed("memfd_create", errno);
        std::shared_ptr<Mapping> m(new Mapping(fd, shape, offsets, std::string(schema)));
        if (retry([&] { return ::fchmod(fd, 0600); }) != 0) throw failed("fchmod", errno);
        if (retry([&] { return ::ftruncate(fd, static_cast<off_t>(offsets.size)); }) != 0)
            throw failed("ftruncate", errno);
        if (!m->map()) throw failed("mmap", errno);
        if (int error = m->populate()) throw failed("populating it", error);
        auto* header = new (m->base_) Header{};
        header->version = kVersion;
        header->endianness = kEndianness;
        header->shape = shape;
        header->offsets = offsets;
        std::memcpy(m->base_ + offsets.schema, schema.data(), schema.size());
        header->checksum = header_checksum(*header, schema);
        m->hot().wake_at.store(kNever, std::memory_order_relaxed);
        if (retry([&] { return ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL); }) != 0)
            throw failed("F_ADD_SEALS", errno);
        // release: whoever sees the magic (attach) sees the rest of the header and the seals.
        std::atomic_ref<std::uint64_t>(header->magic).store(kMagic, std::memory_order_release);
        return m;
    }

    // Read only: for monitors. Works with a descriptor that was opened for reading, too.
    static std::shared_ptr<Mapping> attach(int foreign_fd, bool read_only = false) {
        const int fd = ::fcntl(foreign_fd, F_DUPFD_CLOEXEC, 3);
        if (fd < 0)
            throw SegmentError(
                text("segment: expected an open memfd, got fd ", foreign_fd, ": ", std::strerror(errno)));
        std::shared_ptr<Mapping> m(new Mapping(fd, Shape{}, Offsets{}, std::string()));
        m->read_only_ = read_only;
        struct stat st{};
        if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
            throw SegmentError(text("segment: expected a memfd, got another kind of file as fd ", foreign_fd));
        // Without the seals whoever holds the file could truncate it under us: SIGBUS instead of an error.
        const int seals = ::fcntl(fd, F_GET_SEALS);
        if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
            throw SegmentError(text("segment: expected seals shrink and grow (", F_SEAL_SHRINK | F_SEAL_GROW, "), got ",
                                    seals, " on fd ", foreign_fd));
        Header h{};
        m->read_exactly(&h, sizeof h, 0, "header");
        expect("magic", 0, kMagic, h.magic);
        expect("version", offsetof(Header, version), kVersion, h.version);
        expect("endianness", offsetof(Header, endianness), kEndianness, h.endianness);
        try {
            m->offsets_ = plan(h.shape);
        } catch (const std::invalid_argument& e) {
            throw SegmentError(text("segment: shape at offset ", offsetof(Header, shape), ": ", e.what()));
        }
        const auto* want = reinterpret_cast<const std::uint64_t*>(&m->offsets_);
        const auto* got = reinterpret_cast<const std::uint64_t*>(&h.offsets);
        for (std::size_t i = 0; i < sizeof(Offsets) / 8; ++i)
            expect("offset table", offsetof(Header, offsets) + 8 * i, want[i], got[i]);
        expect("file size", offsetof(Header, offsets) + offsetof(Offsets, size), m->offsets_.size,
               static_cast<std::uint64_t>(st.st_size));
        m->shape_ = h.shape;
        m->schema_.resize(h.shape.schema_bytes);
        m->read_exactly(m->schema_.data(), m->schema_.size(), m->offsets_.schema, "schema");
        expect("checksum", offsetof(Header, checksum), header_checksum(h, m->schema_), h.checksum);
        if (!m->map())
            throw SegmentError(
                text("segment: expected to map ", m->offsets_.size, " bytes, got ", std::strerror(errno)));
        // acquire: pairs with the creator's release store of the magic.
        expect(
            "magic", 0, kMagic,
            std::atomic_ref<std::uint64_t>(reinterpret_cast<Header*>(m->base_)->magic).load(std::memory_order_acquire));
        return m;
    }

    ~Mapping() {
        set_taker_bell(-1);
        if (base_ != nullptr) ::munmap(base_, offsets_.size);
        close_fd();
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    void close_fd() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }

    // The taker's eventfd, as this process has it: whoever wakes the taker writes it, too. A duplicate; -1: none.
    void set_taker_bell(int foreign_fd) {
        const int fd = foreign_fd < 0 ? -1 : ::fcntl(foreign_fd, F_DUPFD_CLOEXEC, 3);
        if (foreign_fd >= 0 && fd < 0)
            throw std::invalid_argument(
                text("taker_bell: expected an eventfd, got fd ", foreign_fd, ": ", std::strerror(errno)));
        if (taker_bell_ >= 0) ::close(taker_bell_);
        taker_bell_ = fd;
    }
    int taker_bell() const { return taker_bell_; }

    int fd() const { return fd_; }
    bool read_only() const { return read_only_; }
    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(base_); }
    const Shape& shape() const { return shape_; }
    const Offsets& offsets() const { return offsets_; }
    const std::string& schema() const { return schema_; }

    Hot& hot() const { return *at<Hot>(offsets_.hot); }
    std::int64_t* global_words() const { return at<std::int64_t>(offsets_.global_words); }
    std::int64_t* worker_words(std::uint64_t w) const {
        return at<std::int64_t>(offsets_.worker_words) + w * kStatWords;
    }
    Control& control(std::uint64_t w) const { return at<Control>(offsets_.controls)[w]; }
    Word& table_word(std::uint64_t e) const { return at<Word>(offsets_.table_words)[e]; }
    Record& record(std::uint64_t e) const { return at<Record>(offsets_.table_records)[e]; }
    Word& admission(std::uint64_t position) const {
        return at<Word>(offsets_.admissions)[position & (shape_.cells - 1)];
    }
    Word& ended_word(std::uint64_t i) const { return at<Word>(offsets_.endings)[i]; }
    Word& ended_summary(std::uint64_t i) const { return ended_word(EndedBits(shape_.entries).words + i); }
    Word& cell(std::uint64_t position) const { return at<Word>(offsets_.index)[position & (shape_.cells - 1)]; }
    Descriptor& descriptor(std::uint64_t w, std::uint64_t d) const {
        return at<Descriptor>(offsets_.descriptors)[w * shape_.descriptors + d];
    }
    unsigned char* prompt(std::uint64_t e) const {
        return at<unsigned char>(offsets_.prompts + e * offsets_.prompt_stride);
    }
    unsigned char* arena(std::uint64_t w) const {
        return at<unsigned char>(offsets_.arenas + w * offsets_.arena_stride);
    }
    std::uint64_t arena_room() const { return round_up(shape_.arena_bytes, kUnit); }

    // Groups with live views in this process: while there are any, their leases must not change hands. Under the GIL.
    std::int64_t viewed = 0;

private:
    Mapping(int fd, const Shape& shape, const Offsets& offsets, std::string schema)
        : fd_(fd), shape_(shape), offsets_(offsets), schema_(std::move(schema)) {}

    template <class T>
    T* at(std::uint64_t offset) const {
        return reinterpret_cast<T*>(base_ + offset);
    }

    template <class F>
    static int retry(F call) {
        int rc;
        do rc = call();
        while (rc != 0 && errno == EINTR);
        return rc;
    }

    static void expect(const char* what, std::uint64_t offset, std::uint64_t want, std::uint64_t got) {
        if (want != got)
            throw SegmentError(text("segment: expected ", what, " ", want, " at offset ", offset, ", got ", got));
    }

    void read_exactly(void* to, std::size_t bytes, std::uint64_t offset, const char* what) const {
        for (std::size_t done = 0; done < bytes;) {
            const ssize_t n =
                ::pread(fd_, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0)
                throw SegmentError(
                    text("segment: expected ", bytes, " bytes of ", what, " at offset ", offset, ", got ", done));
            done += static_cast<std::size_t>(n);
        }
    }

    bool map() {
        const int protection = read_only_ ? PROT_READ : PROT_READ | PROT_WRITE;
        void* p = ::mmap(nullptr, offsets_.size, protection, MAP_SHARED, fd_, 0);
        if (p == MAP_FAILED) return false;
        base_ = static_cast<unsigned char*>(p);
        ::madvise(p, offsets_.size, MADV_HUGEPAGE);  // an attempt: the system may forbid huge pages in shared memory
        return true;
    }

    // Every page now, so that a lack of memory is an error here and not a SIGBUS later. Small chunks: a storm of signals
    // interrupts each call, and only what a chunk did is kept. posix_fallocate first would defeat huge pages.
    int populate() const {
        constexpr std::uint64_t kChunk = 16 << 20, kFallbackChunk = 1 << 20;
        for (std::uint64_t at = 0; at < offsets_.size;) {
            const std::uint64_t n = std::min(kChunk, offsets_.size - at);
            if (::madvise(base_ + at, n, MADV_POPULATE_WRITE) == 0)
                at += n;
            else if (errno == EINVAL)
                break;  // before Linux 5.14
            else if (errno == EFAULT)
                return ENOMEM;  // a page that could not be had
            else if (errno != EINTR && errno != EAGAIN)
                return errno;
            if (at == offsets_.size) return 0;
        }
        for (std::uint64_t at = 0; at < offsets_.size;) {
            const std::uint64_t n = std::min(kFallbackChunk, offsets_.size - at);
            const int error = ::posix_fallocate(fd_, static_cast<off_t>(at), static_cast<off_t>(n));
            if (error == 0)
                at += n;
            else if (error != EINTR)
                return error;
        }
        return 0;
    }

    int fd_;
    Shape shape_;
    Offsets offsets_;
    std::string schema_;
    unsigned char* base_ = nullptr;
    bool read_only_ = false;
    int taker_bell_ = -1;
};

using MappingPtr = std::shared_ptr<Mapping>;

}  // namespace mprollout
