// The taker: owns the head of the index, and every descriptor that it has TAKEN and not RELEASED.
//
// Invariant: one live process takes at a time (one word, {pid, start time}); TAKEN is stored before head moves and carries
// the taker's epoch, so a successor finds everything that its dead predecessor held, and an old handle can release nothing.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <deque>

#include "producer.h"

namespace mprollout {

// {start time:42, pid:22}: a process that lives cannot share it with one that has lived. 0: not found.
struct Process {
    std::uint64_t start = 0;
    bool alive = false;
};

inline Process look_up(std::uint64_t pid) {
    char path[32], line[1024];
    std::snprintf(path, sizeof path, "/proc/%llu/stat", static_cast<unsigned long long>(pid));
    const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return {};
    ssize_t n;
    do n = ::read(fd, line, sizeof line - 1);
    while (n < 0 && errno == EINTR);
    ::close(fd);
    if (n <= 0) return {};
    line[n] = 0;
    const char* after_name = std::strrchr(line, ')');  // the name may hold anything, a ')' too
    char state = 0;
    long threads = 0;
    unsigned long long start = 0;
    if (after_name == nullptr ||
        std::sscanf(after_name + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld %*s %llu",
                    &state, &threads, &start) != 3)
        return {};
    const bool zombie = (state == 'Z' || state == 'X') && threads <= 1;  // more: only the main thread has ended
    return {start, !zombie};
}

constexpr std::uint64_t kPidBits = 22;  // PID_MAX_LIMIT is 2^22

struct Taken {
    std::uint64_t worker, descriptor, position, ticket, entry, table_word, extent_bytes;
    const unsigned char* extent;
    std::uint32_t fields;
};

inline std::uint64_t pending(const Mapping& m) {
    // head first: the tail never lies behind an older head. acquire keeps the order.
    const std::uint64_t head = m.hot().head.load(std::memory_order_acquire),
                        tail = m.hot().tail.load(std::memory_order_acquire);
    return tail - head + (filled(m, tail) ? 1 : 0);  // a publisher may have died before it moved the tail
}

// What a Consumer and its leases share. The leases may outlive the Consumer.
struct Taker {
    MappingPtr mapping;
    std::uint64_t owner = 0, epoch = 0;
    std::uint64_t forks = forks_before;
    int bell = -1;
    std::int64_t leased = 0;  // delivered and not given back; Python's leases count it

    void close_bell() {
        if (bell >= 0) ::close(bell);
        bell = -1;
    }
    ~Taker() { close_bell(); }
    bool here() const { return forks_before == forks; }
};

inline bool delivered(const Mapping& m, const Taken& t) {
    return m.table_word(t.entry).load(std::memory_order_acquire) != t.table_word;  // pairs with deliver's hand_over
}

// PUBLISHING -> DONE. A failed CAS means that a dead taker had delivered it: nobody else leaves PUBLISHING of a live descriptor.
inline void deliver(const Mapping& m, const Taken& t) {
    Entry done = Entry::unpack(t.table_word);
    done.state = DONE;
    // [D1]
    if (hand_over(m.table_word(t.entry), t.table_word, done.pack())) note_ended(m, t.entry);
}

inline void release(const Taker& taker, const Taken& t) {
    if (!taker.here()) return;  // a forked child's copy gives nothing back
    std::uint64_t mine = taken_by(taker.epoch);
    // [D2]
    // seq_cst: releases this process's reads of the extent, and DONE, to the worker's and recovery's loads; then the idle
    // mask: pairs with set_idle. Fails when a later taker owns it now.
    if (!taker.mapping->descriptor(t.worker, t.descriptor)
             .word.compare_exchange_strong(mine, kReleased, std::memory_order_seq_cst))
        return;
    // [D3]
    if (taker.bell >= 0 && taker.mapping->hot().idle.load(std::memory_order_seq_cst) != 0) {
        const std::uint64_t one = 1;
        [[maybe_unused]] const ssize_t n = ::write(taker.bell, &one, sizeof one);  // EAGAIN: it rings already
    }
}

class Consumer {
public:
    Consumer(MappingPtr mapping, int bell_fd) : m_(std::move(mapping)), taker_(std::make_shared<Taker>()) {
        taker_->mapping = m_;
        if (bell_fd >= 0 && (taker_->bell = ::fcntl(bell_fd, F_DUPFD_CLOEXEC, 3)) < 0)
            throw std::invalid_argument(
                text("Consumer: expected an eventfd as bell_fd, got fd ", bell_fd, ": ", std::strerror(errno)));
        acquire();
        try {
            adopt();
        } catch (...) {
            close();
            throw;
        }
    }
    ~Consumer() { close(); }
    Consumer(const Consumer&) = delete;
    Consumer& operator=(const Consumer&) = delete;

    std::optional<Taken> take() {
        check_open();
        if (!backlog_.empty()) {
            // [T1]
            const Taken t = backlog_.front();
            backlog_.pop_front();
            return t;
        }
        Hot& hot = m_->hot();
        const std::uint64_t h = hot.head.load(std::memory_order_relaxed);  // this handle alone moves it
        // [T2]
        if (!filled(*m_, h)) return std::nullopt;
        // [T3]
        // A CAS that could only fail is left out: the tail never comes back to h, so one that was seen beyond it suffices.
        if (tail_seen_ <= h) tail_seen_ = hot.tail.load(std::memory_order_seq_cst);  // as the CAS
        if (tail_seen_ <= h) advance_tail(*m_, h);
        const Cell c = Cell::unpack(m_->cell(h).load(std::memory_order_acquire));  // pairs with enqueue's CAS
        check_cell(c, h);
        Descriptor& d = m_->descriptor(c.worker, c.descriptor);
        const Taken t = describe(c.worker, c.descriptor, h);
        // [T4]
        d.position.store(h, std::memory_order_relaxed);  // before TAKEN, which releases it
        // [T5]
        // release: recovery and a next taker that see TAKEN see the position. TAKEN before head, else a death of this
        // process in between would lose the group, and a recovery that sees the new head would free it.
        d.word.store(taken_by(taker_->epoch), std::memory_order_release);
        // [T6]
        hot.head.store(h + 1, std::memory_order_release);  // pairs with enqueue's and live_descriptors' loads of head
        return t;
    }

    // What take() would give now.
    std::uint64_t available() const { return backlog_.size() + pending(*m_); }

    // The tickets of the first of them, in the order of take(). The descriptors of filled cells do not change before they are
    // TAKEN, which only this handle does.
    std::vector<std::uint64_t> peek(std::uint64_t count) const {
        check_open();
        std::vector<std::uint64_t> tickets;
        for (const Taken& t : backlog_) {
            if (tickets.size() == count) return tickets;
            tickets.push_back(t.ticket);
        }
        for (std::uint64_t h = m_->hot().head.load(std::memory_order_relaxed); tickets.size() < count && filled(*m_, h);
             ++h) {
            const Cell c = Cell::unpack(m_->cell(h).load(std::memory_order_acquire));  // pairs with enqueue's CAS
            check_cell(c, h);
            tickets.push_back(m_->descriptor(c.worker, c.descriptor).ticket);
        }
        return tickets;
    }

    // In groups, the backlog of a dead taker included.
    std::uint64_t target(std::uint64_t count) const {
        const std::uint64_t head = m_->hot().head.load(std::memory_order_relaxed);
        // [W2]
        return count <= backlog_.size() ? head : head + count - backlog_.size();
    }

    // [W1]
    std::uint32_t news() const { return m_->hot().wake_sequence.load(std::memory_order_seq_cst); }  // see wake_taker()

    // The descriptors stay TAKEN: what was not released comes back to the next taker.
    void close() {
        if (closed_ || !taker_->here()) return;
        closed_ = true;
        taker_->close_bell();
        std::uint64_t mine = taker_->owner;
        m_->hot().taker.compare_exchange_strong(mine, 0, std::memory_order_acq_rel);  // pairs with acquire()
    }

    void check_open() const {
        if (!taker_->here())
            throw std::runtime_error(
                text("Consumer: expected the process that made it, got its forked child ", ::getpid()));
        if (closed_) throw std::runtime_error("Consumer: expected an open handle, got a closed one");
    }

    const std::shared_ptr<Taker>& taker() const { return taker_; }

private:
    void acquire() {
        const std::uint64_t pid = static_cast<std::uint64_t>(::getpid());
        const std::uint64_t mine = look_up(pid).start << kPidBits | pid;
        Word& owner = m_->hot().taker;
        // acq_rel: pairs with the previous owner's close(), or with nothing if it died: its stores are in memory then.
        std::uint64_t was = owner.load(std::memory_order_acquire);
        // [A1]
        do {
            const std::uint64_t other = was & ((1 << kPidBits) - 1);
            const Process p = was == 0 ? Process{} : look_up(other);
            if (p.alive && p.start == was >> kPidBits) {
                closed_ = true;
                throw TakerBusy(text("Consumer: expected no live taker, got process ", other,
                                     other == pid ? " (this one: close() the other Consumer first)" : ""));
            }
            if (const std::int64_t views = m_->viewed; views != 0) {
                closed_ = true;
                throw TakerBusy(
                    text("Consumer: expected no views of an earlier Consumer's groups in this process, got ", views,
                         " groups with views"));
            }
        } while (!owner.compare_exchange_weak(was, mine, std::memory_order_acq_rel, std::memory_order_acquire));
        taker_->owner = mine;
        taker_->epoch = m_->hot().taker_epoch.fetch_add(1, std::memory_order_relaxed) + 1;
    }

    // What a previous taker had TAKEN and not RELEASED, by position. It may have died between TAKEN and head.
    void adopt() {
        shake(*m_);  // the dead one may have made a ticket DONE and not said so
        // [A2]
        m_->hot().wake_at.store(kNever, std::memory_order_seq_cst);  // the dead one may have been asleep
        const std::uint64_t h = m_->hot().head.load(std::memory_order_relaxed);
        // [A3]
        if (filled(*m_, h)) {
            const Cell c = Cell::unpack(m_->cell(h).load(std::memory_order_acquire));  // pairs with enqueue's CAS
            check_cell(c, h);
            const Descriptor& d = m_->descriptor(c.worker, c.descriptor);
            // [A4]
            // A position is never repeated, so TAKEN at this one is this cell's group.
            if ((d.word.load(std::memory_order_acquire) & kStateMask) == kTaken &&
                d.position.load(std::memory_order_relaxed) == h) {
                // [A5]
                advance_tail(*m_, h);
                // [A6]
                m_->hot().head.store(h + 1, std::memory_order_release);  // as in take()
            }
        }
        for (std::uint64_t w = 0; w < m_->shape().workers; ++w)
            for (std::uint64_t i = 0; i < m_->shape().descriptors; ++i) {
                Descriptor& d = m_->descriptor(w, i);
                // [A7]
                std::uint64_t was = d.word.load(std::memory_order_acquire);  // pairs with take()
                if ((was & kStateMask) != kTaken) continue;
                // [A8] from here no older handle releases it; a CAS, since one that was closed and lives may just do so
                if (!d.word.compare_exchange_strong(was, taken_by(taker_->epoch), std::memory_order_acq_rel)) continue;
                backlog_.push_back(describe(w, i, d.position.load(std::memory_order_relaxed)));
            }
        std::sort(backlog_.begin(), backlog_.end(),
                  [](const Taken& a, const Taken& b) { return a.position < b.position; });
    }

    void check_cell(const Cell& c, std::uint64_t position) const {
        if (c.worker >= m_->shape().workers || c.descriptor >= m_->shape().descriptors)
            throw SegmentError(text("index: expected a worker below ", m_->shape().workers, " and a descriptor below ",
                                    m_->shape().descriptors, " at position ", position, ", got ", c.worker, " and ",
                                    c.descriptor));
    }

    Taken describe(std::uint64_t w, std::uint64_t i, std::uint64_t position) const {
        Descriptor& d = m_->descriptor(w, i);
        const std::uint64_t room = m_->arena_room(), offset = read_once(d.extent_offset),
                            bytes = read_once(d.extent_bytes), entry = read_once(d.entry);
        const std::uint32_t fields = read_once(d.fields);
        if (bytes > room || offset > room - bytes || entry >= m_->shape().entries ||
            bytes < sizeof(PayloadHeader) + std::uint64_t{fields} * sizeof(FieldPlace))
            throw SegmentError(text("descriptor ", i, " of worker ", w, ": expected an extent in ", room,
                                    " bytes with ", fields, " fields, got offset ", offset, " and ", bytes,
                                    " bytes of entry ", entry));
        return {w, i, position, d.ticket, entry, d.table_word, bytes, m_->arena(w) + offset, fields};
    }

    MappingPtr m_;
    std::shared_ptr<Taker> taker_;
    std::deque<Taken> backlog_;
    std::uint64_t tail_seen_ = 0;
    bool closed_ = false;
};

// A field of a taken group; bounds are checked because another process wrote them.
inline Field field(const Taken& t, std::uint64_t index) {
    if (index >= t.fields)
        throw std::out_of_range(
            text("field: expected an index below ", t.fields, ", got ", index, " for ticket ", t.ticket));
    FieldPlace place;
    std::memcpy(&place, t.extent + sizeof(PayloadHeader) + index * sizeof place, sizeof place);
    if (place.bytes > t.extent_bytes || place.offset > t.extent_bytes - place.bytes)
        throw SegmentError(text("field ", index, " of ticket ", t.ticket, ": expected it within ", t.extent_bytes,
                                " bytes, got offset ", place.offset, " and ", place.bytes, " bytes"));
    return {t.extent + place.offset, place.bytes};
}

}  // namespace mprollout
