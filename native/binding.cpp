// The Python face of the core; mprollout/_native.pyi documents it. Imports nothing: the keeper runs without NumPy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <signal.h>
#include <sys/prctl.h>

#include <cmath>
#include <unordered_map>

#include "claim.h"
#include "lease.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mprollout;

namespace {

// ---- handles

struct Segment {
    MappingPtr mapping;

    const MappingPtr& open() const {
        if (!mapping) throw std::invalid_argument("Segment: expected an open handle, got a closed one");
        return mapping;
    }
    const MappingPtr& writable() const {
        if (open()->read_only())
            throw std::invalid_argument("Segment: expected a writable one, got one that was attached read-only");
        return mapping;
    }
    void close() {
        if (mapping) mapping->close_fd();
        mapping.reset();
    }
};

std::uint64_t natural(const char* name, std::int64_t value) {
    if (value < 0) throw std::invalid_argument(text(name, ": expected a number >= 0, got ", value));
    return static_cast<std::uint64_t>(value);
}

Shape shape_of(std::int64_t workers, std::int64_t entries, std::int64_t cells, std::int64_t descriptors,
               std::int64_t arena_bytes, std::int64_t max_group_bytes, std::int64_t max_prompt_bytes,
               const nb::bytes& schema) {
    return {natural("workers", workers),
            natural("entries", entries),
            natural("cells", cells),
            natural("descriptors", descriptors),
            natural("arena_bytes", arena_bytes),
            natural("max_group_bytes", max_group_bytes),
            natural("max_prompt_bytes", max_prompt_bytes),
            schema.size()};
}

std::string_view view_of(const nb::bytes& b) { return {b.c_str(), b.size()}; }

class PyConsumer {
public:
    PyConsumer(const Segment& segment, int bell_fd) : mapping_(segment.writable()), consumer_(mapping_, bell_fd) {}
    ~PyConsumer() { disarm(); }

    nb::object take_one() {
        if (const auto taken = consumer_.take()) return hold(*taken);
        return nb::none();
    }

    // Exactly `count` or none.
    nb::list try_take(std::int64_t count) {
        consumer_.check_open();
        check_count("try_take", count);
        nb::list leases;
        if (consumer_.available() < static_cast<std::uint64_t>(count)) return leases;
        for (; count > 0; --count) {
            const auto taken = consumer_.take();
            if (!taken)
                throw SegmentError(text("index: expected ", count, " more filled cells below the tail, got none"));
            leases.append(hold(*taken));
        }
        return leases;
    }

    nb::list take(std::int64_t count, std::optional<double> timeout_s, bool spin) {
        const std::int64_t end = deadline("take", timeout_s.value_or(1e9));
        for (bool there = false;;) {
            const std::uint32_t seen = news();
            nb::list leases = try_take(count);
            const double left_s = static_cast<double>(end - now_ns()) * 1e-9;
            if (nb::len(leases) != 0 || left_s <= 0) return leases;
            if (there)
                throw SegmentError(
                    text("index: expected ", count, " groups, as its last cell says, got ", available()));
            there = wait_for("take", count, seen, left_s, spin);
        }
    }

    std::uint64_t available() const {
        consumer_.check_open();
        return consumer_.available();
    }
    std::vector<std::uint64_t> peek(std::int64_t count) const { return consumer_.peek(natural("peek", count)); }

    std::size_t held_count() const { return held_.size() - delivered_; }
    std::int64_t leased_count() const { return consumer_.taker()->leased; }

    std::vector<nb::object> held() const {
        std::vector<nb::object> leases;
        for (const nb::object& lease : held_)
            if (!as_lease(lease.ptr())->delivered) leases.push_back(lease);
        return leases;
    }

    // The undelivered lease of a ticket, or None. The index is made by the first who asks.
    nb::object find(std::int64_t ticket) {
        for (; indexed_ < held_.size(); ++indexed_) {
            const Lease* lease = as_lease(held_[indexed_].ptr());
            if (!lease->delivered) by_ticket_[lease->taken.ticket] = held_[indexed_].ptr();
        }
        const auto found = by_ticket_.find(static_cast<std::uint64_t>(ticket));
        return found == by_ticket_.end() ? nb::none() : nb::borrow(found->second);
    }

    // All or nothing: every check stands before the first hand-over, and nothing in between can raise.
    void deliver(nb::handle list) {
        consumer_.check_open();
        const std::vector<Lease*> leases = leases_of("deliver", list);
        for (std::size_t i = 0; i < leases.size(); ++i)
            if (leases[i]->taker != consumer_.taker())
                throw std::invalid_argument(text("deliver: leases[", i,
                                                 "]: expected a lease of this Consumer, got ticket ",
                                                 leases[i]->taken.ticket, " of another"));
        for (Lease* lease : leases) {
            if (lease->delivered) continue;
            mprollout::deliver(*mapping_, lease->taken);
            lease->delivered = true;
            ++consumer_.taker()->leased;
            by_ticket_.erase(lease->taken.ticket);
            ++delivered_;
        }
        // So that each costs the same, however many others are held: only when half of them can go.
        if (2 * delivered_ < held_.size()) return;
        std::vector<nb::object> kept;
        kept.reserve(held_.size() - delivered_);
        for (nb::object& lease : held_)
            if (!as_lease(lease.ptr())->delivered) kept.push_back(std::move(lease));
        held_.swap(kept);
        indexed_ = delivered_ = 0;
    }

    bool wait(std::int64_t count, std::uint32_t seen, double timeout_s) {
        return wait_for("wait", count, seen, timeout_s, false);
    }

    // For a sleep by eventfd: the first half of a wait. disarm() is the other.
    bool arm(std::int64_t count, std::uint32_t seen) {
        const std::uint64_t target = target_of("arm", count);
        if (mapping_->taker_bell() < 0)
            throw std::runtime_error("arm: expected the segment's taker_bell to be set, got none");
        if (waiting_) throw std::runtime_error("arm: expected one waiter, got a second one in this process");
        std::uint64_t stale;
        // Before arming: what rings from here on may be meant for this sleep.
        [[maybe_unused]] const ssize_t n = ::read(mapping_->taker_bell(), &stale, sizeof stale);
        if (enough(target)) return false;
        return waiting_ = armed_ = mprollout::arm(*mapping_, target, seen);
    }
    void disarm() {
        if (!armed_ || !consumer_.taker()->here()) return;
        waiting_ = armed_ = false;
        mprollout::disarm(*mapping_);
    }

    std::uint32_t news() const { return consumer_.news(); }

    void close() {
        disarm();
        consumer_.close();
        if (!consumer_.taker()->here()) return;
        std::vector<nb::object> held;
        held.swap(held_);  // what dies with them may call back
        by_ticket_.clear();
        indexed_ = delivered_ = 0;
    }

private:
    bool wait_for(const char* call, std::int64_t count, std::uint32_t seen, double timeout_s, bool spin) {
        const std::uint64_t target = target_of(call, count);
        const std::int64_t end = deadline(call, timeout_s);
        if (waiting_) throw std::runtime_error("Consumer: expected one waiter, got a second one in this process");
        if (enough(target)) return true;
        const MappingPtr m = mapping_;
        struct Flag {
            bool& flag;
            explicit Flag(bool& f) : flag(f) { flag = true; }
            ~Flag() { flag = false; }
        } flag(waiting_);
        bool spun = false;
        for (;;) {
            if (reached(*m, target)) return true;
            const std::int64_t left = end - now_ns();
            if (news_since(*m, seen) || left <= 0) return false;
            {
                nb::gil_scoped_release unlocked;
                const std::int64_t slice = std::min<std::int64_t>(left, kSafetyLookNs);
                if (!spin && !spun) spinner_.spin(*m, target, seen);
                spun = true;
                if (spin)
                    spin_slice(*m, target, seen, slice);
                else if (!reached(*m, target))
                    sleep_slice(*m, target, seen, slice);
            }
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
    }

    nb::object hold(const Taken& taken) {
        nb::object lease = new_lease(consumer_.taker(), taken);
        if (!as_lease(lease.ptr())->delivered) held_.push_back(lease);
        return lease;
    }
    void check_count(const char* call, std::int64_t count) const {
        if (count < 1 || static_cast<std::uint64_t>(count) >
                             mapping_->shape().cells + mapping_->shape().descriptors * mapping_->shape().workers)
            throw std::invalid_argument(
                text(call, ": expected a count of 1.. as many as the ring can hold, got ", count));
    }
    static std::int64_t deadline(const char* call, double timeout_s) {
        if (std::isnan(timeout_s)) throw std::invalid_argument(text(call, ": expected timeout_s as a number, got nan"));
        return now_ns() + static_cast<std::int64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9);
    }
    std::uint64_t target_of(const char* call, std::int64_t count) const {
        consumer_.check_open();
        check_count(call, count);
        return consumer_.target(static_cast<std::uint64_t>(count));
    }
    // Adopted ones suffice.
    bool enough(std::uint64_t target) const { return target == mapping_->hot().head.load(std::memory_order_relaxed); }

    MappingPtr mapping_;
    Consumer consumer_;
    std::vector<nb::object> held_;                            // leases in FIFO order; some may be delivered
    std::unordered_map<std::uint64_t, PyObject*> by_ticket_;  // of those below indexed_
    std::size_t indexed_ = 0, delivered_ = 0;
    Spinner spinner_;
    bool waiting_ = false, armed_ = false;
};

void die_with_parent(std::int64_t expected_parent_pid) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != expected_parent_pid) ::_exit(1);  // it died before the line above: no signal will come
}

void become_subreaper() {
    if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0)
        throw std::runtime_error(text("become_subreaper: expected prctl to succeed, got ", std::strerror(errno)));
}

// nanobind's function objects are not what `inspect` (and so stubtest, help, IDEs) takes for functions: wrap them in builtins.
PyObject* forward(PyObject* self, PyObject* args, PyObject* kwargs) { return PyObject_Call(self, args, kwargs); }

void as_builtin(nb::handle scope, const char* name, const char* doc) {
    nb::object function = scope.attr(name);
    auto* def = new PyMethodDef{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(forward)),
                                METH_VARARGS | METH_KEYWORDS, doc};  // lives as long as the process
    nb::object builtin = nb::steal(PyCFunction_NewEx(def, function.ptr(), nullptr));
    if (PyType_Check(scope.ptr())) builtin = nb::steal(PyStaticMethod_New(builtin.ptr()));
    nb::setattr(scope, name, builtin);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // leases and views may outlive the interpreter's tidy end
    segment_error = nb::exception<SegmentError>(m, "SegmentError", PyExc_ValueError).ptr();
    too_large_error = nb::exception<GroupTooLarge>(m, "GroupTooLarge", PyExc_ValueError).ptr();
    nb::exception<TakerBusy>(m, "TakerBusy", PyExc_RuntimeError);
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const OutOfMemory& e) {
            PyErr_SetString(PyExc_MemoryError, e.what());
        }
    });

    m.attr("FREE") = static_cast<int>(FREE);
    m.attr("READY") = static_cast<int>(READY);
    m.attr("RUNNING") = static_cast<int>(RUNNING);
    m.attr("PUBLISHING") = static_cast<int>(PUBLISHING);
    m.attr("DONE") = static_cast<int>(DONE);
    m.attr("FILTERED") = static_cast<int>(FILTERED);
    m.attr("FAILED") = static_cast<int>(FAILED);

    m.def("die_with_parent", &die_with_parent, "expected_parent_pid"_a);
    m.def("become_subreaper", &become_subreaper);
    m.def(
        "group_bytes",
        [](const std::vector<std::int64_t>& lengths) {
            std::vector<Field> fields;
            for (const std::int64_t n : lengths) fields.push_back({nullptr, natural("group_bytes", n)});
            return payload_bytes<Field>(fields);
        },
        "lengths"_a);

    nb::class_<Exporter>(m, "_Exporter", nb::type_slots(exporter_slots));

    nb::class_<Segment>(m, "Segment", nb::is_final())
        .def_static(
            "create",
            [](std::int64_t workers, std::int64_t entries, std::int64_t cells, std::int64_t descriptors,
               std::int64_t arena_bytes, std::int64_t max_group_bytes, std::int64_t max_prompt_bytes,
               nb::bytes schema) {
                const Shape shape = shape_of(workers, entries, cells, descriptors, arena_bytes, max_group_bytes,
                                             max_prompt_bytes, schema);
                nb::gil_scoped_release unlocked;  // populating many gigabytes takes seconds
                return Segment{Mapping::create(shape, view_of(schema))};
            },
            nb::kw_only(), "workers"_a, "entries"_a, "cells"_a, "descriptors"_a, "arena_bytes"_a, "max_group_bytes"_a,
            "max_prompt_bytes"_a, "schema"_a)
        .def_static(
            "attach", [](int fd, bool read_only) { return Segment{Mapping::attach(fd, read_only)}; }, "fd"_a,
            "read_only"_a = false)
        .def_static(
            "size_of",
            [](std::int64_t workers, std::int64_t entries, std::int64_t cells, std::int64_t descriptors,
               std::int64_t arena_bytes, std::int64_t max_group_bytes, std::int64_t max_prompt_bytes,
               nb::bytes schema) {
                return plan(shape_of(workers, entries, cells, descriptors, arena_bytes, max_group_bytes,
                                     max_prompt_bytes, schema))
                    .size;
            },
            nb::kw_only(), "workers"_a, "entries"_a, "cells"_a, "descriptors"_a, "arena_bytes"_a, "max_group_bytes"_a,
            "max_prompt_bytes"_a, "schema"_a)
        .def_prop_ro("fd", [](const Segment& s) { return s.open()->fd(); })
        .def_prop_ro("address", [](const Segment& s) { return s.open()->address(); })
        .def_prop_ro("read_only", [](const Segment& s) { return s.open()->read_only(); })
        .def_prop_rw(
            "taker_bell", [](const Segment& s) { return s.open()->taker_bell(); },
            [](const Segment& s, int fd) { s.writable()->set_taker_bell(fd); })
        .def_prop_ro("size_bytes", [](const Segment& s) { return s.open()->offsets().size; })
        .def_prop_ro("workers", [](const Segment& s) { return s.open()->shape().workers; })
        .def_prop_ro("entries", [](const Segment& s) { return s.open()->shape().entries; })
        .def_prop_ro("cells", [](const Segment& s) { return s.open()->shape().cells; })
        .def_prop_ro("descriptors", [](const Segment& s) { return s.open()->shape().descriptors; })
        .def_prop_ro("arena_bytes", [](const Segment& s) { return s.open()->shape().arena_bytes; })
        .def_prop_ro("max_group_bytes", [](const Segment& s) { return s.open()->shape().max_group_bytes; })
        .def_prop_ro("max_prompt_bytes", [](const Segment& s) { return s.open()->shape().max_prompt_bytes; })
        .def_prop_ro("schema",
                     [](const Segment& s) { return nb::bytes(s.open()->schema().data(), s.open()->schema().size()); })
        .def_prop_ro("global_words", [](const Segment& s) { return words_view(s.open(), s.open()->global_words()); })
        .def(
            "worker_words",
            [](const Segment& s, std::int64_t worker) {
                check_range("worker_words: worker", natural("worker_words: worker", worker), 0,
                            s.open()->shape().workers - 1);
                return words_view(s.open(), s.open()->worker_words(static_cast<std::uint64_t>(worker)));
            },
            "worker"_a)
        .def("table",
             [](const Segment& s) {
                 nb::list rows;
                 for (const Row& r : snapshot(*s.open()))
                     rows.append(nb::make_tuple(r.ticket, r.entry.state, r.entry.attempt, r.entry.deaths,
                                                r.entry.worker, r.entry.reason, r.entry.generation));
                 return rows;
             })
        .def("pending", [](const Segment& s) { return pending(*s.open()); })
        .def("wake_taker", [](const Segment& s) { wake_taker(*s.writable()); })
        .def("idle_workers",
             [](const Segment& s) {
                 return s.open()->hot().idle.load(std::memory_order_seq_cst);
             })  // pairs with set_idle
        .def("close", &Segment::close);

    make_claim_type(m);
    nb::class_<Producer> producer(m, "Producer", nb::is_final());
    make_producer_methods(producer);
    producer
        .def(
            "__init__",
            [](Producer* self, const Segment& segment, std::int64_t worker) {
                new (self) Producer(segment.writable(), natural("Producer: worker", worker));
            },
            "segment"_a, "worker"_a)
        .def_prop_ro("starved_for_room", &Producer::starved_for_room)
        .def(
            "retry",
            [](nb::handle_t<Producer> self, nb::handle claim) {
                Producer& producer = producer_of(self.ptr());
                return hand_out(self, producer, producer.retry(claim_of(claim)), [claim](const Claim&) {
                    return nb::borrow(reinterpret_cast<PyClaim*>(claim.ptr())->prompt);
                });
            },
            "claim"_a)
        .def(
            "give_back", [](Producer& p, nb::handle claim) { return p.give_back(claim_of(claim)); }, "claim"_a)
        .def(
            "end",
            [](Producer& p, nb::handle claim, std::int64_t state, std::int64_t reason) {
                return p.end(claim_of(claim), natural("end: state", state), natural("end: reason", reason));
            },
            "claim"_a, "state"_a, "reason"_a)
        .def("set_idle", &Producer::set_idle, "idle"_a)
        .def_prop_ro("claims", &Producer::claims)
        .def_prop_ro("incarnation", &Producer::incarnation)
        .def_prop_ro("free_bytes", &Producer::free_bytes);

    make_lease_types(m);
    m.def("views", &views, "leases"_a, "dtypes"_a);
    m.def("copies", &copies, "leases"_a, "fields"_a);
    m.def("release", &release_all, "leases"_a);
    m.def("first_of_each", &first_of_each, "rows"_a);

    nb::class_<PyConsumer>(m, "Consumer", nb::is_final())
        .def(nb::init<const Segment&, int>(), "segment"_a, "bell_fd"_a = -1)
        .def("take", &PyConsumer::take_one)
        .def("take", &PyConsumer::take, "count"_a, "timeout_s"_a.none(), "spin"_a = false)
        .def("try_take", &PyConsumer::try_take, "count"_a)
        .def("available", &PyConsumer::available)
        .def("peek", &PyConsumer::peek, "count"_a)
        .def("held", &PyConsumer::held)
        .def_prop_ro("held_count", &PyConsumer::held_count)
        .def_prop_ro("leased_count", &PyConsumer::leased_count)
        .def("find", &PyConsumer::find, "ticket"_a)
        .def("deliver", &PyConsumer::deliver, "leases"_a)
        .def("news", &PyConsumer::news)
        .def("wait", &PyConsumer::wait, "count"_a, "seen"_a, "timeout_s"_a)
        .def("arm", &PyConsumer::arm, "count"_a, "seen"_a)
        .def("disarm", &PyConsumer::disarm)
        .def("close", &PyConsumer::close);

    nb::class_<Admitter>(m, "Admitter", nb::is_final())
        .def(
            "__init__", [](Admitter* self, const Segment& segment) { new (self) Admitter(segment.writable()); },
            "segment"_a)
        .def(
            "admit",
            [](Admitter& a, std::int64_t ticket, nb::bytes prompt) { return a.admit(ticket, view_of(prompt)); },
            "ticket"_a, "prompt"_a)
        .def("sweep", [](Admitter& a) {
            nb::list ended;
            for (const Ended& e : a.sweep())
                ended.append(nb::make_tuple(e.ticket, e.entry.state, e.entry.reason, e.entry.attempt, e.entry.deaths));
            return ended;
        });

    nb::class_<Recovered>(m, "Recovered", nb::is_final())
        .def_prop_ro("published", [](const Recovered& r) { return r.published; })
        .def_prop_ro("reissued", [](const Recovered& r) { return r.reissued; })
        .def_prop_ro("failed", [](const Recovered& r) { return r.failed; });
    m.def(
        "recover",
        [](const Segment& s, std::int64_t worker, std::int64_t max_deaths, std::int64_t reason, bool count_death) {
            return recover(*s.writable(), natural("recover: worker", worker),
                           natural("recover: max_deaths", max_deaths), natural("recover: reason", reason), count_death);
        },
        "segment"_a, "worker"_a, "max_deaths"_a, "reason"_a, "count_death"_a = true);

    const nb::object segment = m.attr("Segment");
#define SHAPE "*, workers, entries, cells, descriptors, arena_bytes, max_group_bytes, max_prompt_bytes, schema"
    as_builtin(segment, "create", "create(" SHAPE ")\n--\n\n");
    as_builtin(segment, "size_of", "size_of(" SHAPE ")\n--\n\n");
#undef SHAPE
    as_builtin(segment, "attach", "attach(fd, read_only=False)\n--\n\n");
    as_builtin(m, "die_with_parent", "die_with_parent(expected_parent_pid)\n--\n\n");
    as_builtin(m, "become_subreaper", "become_subreaper()\n--\n\n");
    as_builtin(m, "views", "views(leases, dtypes)\n--\n\n");
    as_builtin(m, "copies", "copies(leases, fields)\n--\n\n");
    as_builtin(m, "release", "release(leases)\n--\n\n");
    as_builtin(m, "first_of_each", "first_of_each(rows)\n--\n\n");
    as_builtin(m, "group_bytes", "group_bytes(lengths)\n--\n\n");
    as_builtin(m, "recover", "recover(segment, worker, max_deaths, reason, count_death=True)\n--\n\n");
}
