// The Python face of the core; mprollout/_native.pyi documents it. Imports nothing: the keeper runs without NumPy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <signal.h>
#include <sys/prctl.h>

#include <cmath>

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

std::uint64_t pending(const Mapping& m) {
    // head first: the tail never lies behind an older head. acquire keeps the order.
    const std::uint64_t head = m.hot().head.load(std::memory_order_acquire),
                        tail = m.hot().tail.load(std::memory_order_acquire);
    return tail - head + (filled(m, tail) ? 1 : 0);  // a publisher may have died before it moved the tail
}

struct PyClaim {
    ClaimPtr claim;
    std::shared_ptr<Producer> producer;
};

nb::object claim_or_none(ClaimPtr claim, const std::shared_ptr<Producer>& producer) {
    if (!claim) return nb::none();
    return nb::cast(PyClaim{std::move(claim), producer});
}

// The buffers of a publish, held until it returns.
class Buffers {
public:
    explicit Buffers(nb::sequence arrays) {
        try {
            for (nb::handle array : arrays) add(array);
        } catch (...) {
            drop();  // no destructor runs after a constructor that throws
            throw;
        }
    }
    ~Buffers() { drop(); }
    Buffers(const Buffers&) = delete;
    std::span<const Field> fields() const { return fields_; }

private:
    void add(nb::handle array) {
        Py_buffer view;
        if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) {
            nb::python_error cause;
            PyObject* const type = cause.matches(PyExc_TypeError) ? PyExc_TypeError : PyExc_ValueError;
            if (type == PyExc_ValueError && !cause.matches(PyExc_ValueError) && !cause.matches(PyExc_BufferError))
                throw cause;
            const std::string name = nb::cast<std::string>(array.type().attr("__name__"));
            nb::raise_from(cause, type, "publish: arrays[%zu]: expected a C-contiguous buffer, got %s", views_.size(),
                           name.c_str());
        }
        views_.push_back(view);
        fields_.push_back({view.buf, static_cast<std::uint64_t>(view.len)});
    }
    void drop() {
        for (Py_buffer& view : views_) PyBuffer_Release(&view);
        views_.clear();
    }
    std::vector<Py_buffer> views_;
    std::vector<Field> fields_;
};

class PyConsumer {
public:
    PyConsumer(const Segment& segment, int bell_fd) : mapping_(segment.open()), consumer_(mapping_, bell_fd) {}

    nb::object take() {
        const auto taken = consumer_.take();
        if (!taken) return nb::none();
        nb::object lease = nb::cast(new Lease(consumer_.taker(), *taken), nb::rv_policy::take_ownership);
        if (!nb::cast<Lease&>(lease).delivered) held_[taken->position] = lease;
        return lease;
    }

    std::vector<nb::object> held() const {
        std::vector<nb::object> leases;
        for (const auto& [position, lease] : held_) leases.push_back(lease);
        return leases;
    }

    // All or nothing: every check stands before the first hand-over, and nothing in between can raise.
    void deliver(const std::vector<nb::object>& leases) {
        consumer_.check_open();
        for (std::size_t i = 0; i < leases.size(); ++i) {
            if (!nb::isinstance<Lease>(leases[i]))
                throw nb::type_error(text("deliver: leases[", i, "]: expected a Lease").c_str());
            if (nb::cast<Lease&>(leases[i]).taker != consumer_.taker())
                throw std::invalid_argument(text("deliver: leases[", i,
                                                 "]: expected a lease of this Consumer, got ticket ",
                                                 nb::cast<Lease&>(leases[i]).taken.ticket, " of another"));
        }
        for (const nb::object& object : leases) {
            Lease& lease = nb::cast<Lease&>(object);
            if (!lease.delivered) mprollout::deliver(*mapping_, lease.taken);
            lease.delivered = true;
        }
        for (const nb::object& object : leases) held_.erase(nb::cast<Lease&>(object).taken.position);
    }

    bool wait(std::int64_t count, std::uint32_t seen, double timeout_s) {
        consumer_.check_open();
        if (count < 1 || static_cast<std::uint64_t>(count) >
                             mapping_->shape().cells + mapping_->shape().descriptors * mapping_->shape().workers)
            throw std::invalid_argument(
                text("wait: expected a count of 1.. as many as the ring can hold, got ", count));
        if (std::isnan(timeout_s)) throw std::invalid_argument("wait: expected timeout_s as a number, got nan");
        if (waiting_) throw std::runtime_error("wait: expected one waiter, got a second one in this process");
        const std::uint64_t target = consumer_.target(static_cast<std::uint64_t>(count));
        if (target == mapping_->hot().head.load(std::memory_order_relaxed)) return true;  // the backlog suffices
        const MappingPtr m = mapping_;
        const std::int64_t end = now_ns() + static_cast<std::int64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9);
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
                if (!spun) spin(*m, target, seen);
                spun = true;
                if (!reached(*m, target)) sleep_slice(*m, target, seen, std::min<std::int64_t>(left, kSliceNs));
            }
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
    }

    std::uint32_t news() const { return consumer_.news(); }

    void close() {
        consumer_.close();
        if (consumer_.taker()->here()) held_.clear();
    }

private:
    static constexpr std::int64_t kSliceNs = 50'000'000;  // the bounded safety look
    MappingPtr mapping_;
    Consumer consumer_;
    std::map<std::uint64_t, nb::object> held_;  // by position: FIFO
    bool waiting_ = false;
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
    nb::exception<SegmentError>(m, "SegmentError", PyExc_ValueError);
    nb::exception<GroupTooLarge>(m, "GroupTooLarge", PyExc_ValueError);
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
            return payload_bytes(fields);
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
            "attach", [](int fd) { return Segment{Mapping::attach(fd)}; }, "fd"_a)
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
        .def("wake_taker", [](const Segment& s) { wake_taker(*s.open()); })
        .def("idle_workers",
             [](const Segment& s) {
                 return s.open()->hot().idle.load(std::memory_order_seq_cst);
             })  // pairs with set_idle
        .def("close", &Segment::close);

    nb::class_<PyClaim>(m, "Claim", nb::is_final())
        .def_prop_ro("ticket", [](const PyClaim& c) { return c.claim->ticket; })
        .def_prop_ro("attempt", [](const PyClaim& c) { return Entry::unpack(c.claim->word).attempt; })
        .def_prop_ro("deaths", [](const PyClaim& c) { return Entry::unpack(c.claim->word).deaths; })
        .def_prop_ro("prompt",
                     [](const PyClaim& c) { return nb::bytes(c.claim->prompt.data(), c.claim->prompt.size()); })
        .def_prop_ro("current", [](const PyClaim& c) { return c.producer->current(*c.claim); });

    using ProducerPtr = std::shared_ptr<Producer>;
    struct PyProducer {
        ProducerPtr producer;
    };
    nb::class_<PyProducer>(m, "Producer", nb::is_final())
        .def(
            "__init__",
            [](PyProducer* self, const Segment& segment, std::int64_t worker) {
                new (self) PyProducer{std::make_shared<Producer>(segment.open(), natural("Producer: worker", worker))};
            },
            "segment"_a, "worker"_a)
        .def("claim", [](const PyProducer& p) { return claim_or_none(p.producer->claim(), p.producer); })
        .def_prop_ro("starved_for_room", [](const PyProducer& p) { return p.producer->starved_for_room(); })
        .def(
            "publish",
            [](const PyProducer& p, const PyClaim& c, nb::sequence arrays) {
                const Buffers buffers(arrays);
                return p.producer->publish(*c.claim, buffers.fields());
            },
            "claim"_a, "arrays"_a)
        .def(
            "retry",
            [](const PyProducer& p, const PyClaim& c) {
                return claim_or_none(p.producer->retry(*c.claim), p.producer);
            },
            "claim"_a)
        .def(
            "give_back", [](const PyProducer& p, const PyClaim& c) { return p.producer->give_back(*c.claim); },
            "claim"_a)
        .def(
            "end",
            [](const PyProducer& p, const PyClaim& c, std::int64_t state, std::int64_t reason) {
                return p.producer->end(*c.claim, natural("end: state", state), natural("end: reason", reason));
            },
            "claim"_a, "state"_a, "reason"_a)
        .def(
            "set_idle", [](const PyProducer& p, bool idle) { p.producer->set_idle(idle); }, "idle"_a)
        .def_prop_ro("claims", [](const PyProducer& p) { return p.producer->claims(); })
        .def_prop_ro("incarnation", [](const PyProducer& p) { return p.producer->incarnation(); })
        .def_prop_ro("free_bytes", [](const PyProducer& p) { return p.producer->free_bytes(); });

    nb::class_<Lease>(m, "Lease", nb::is_final())
        .def_prop_ro("ticket", [](const Lease& l) { return l.taken.ticket; })
        .def_prop_ro("worker", [](const Lease& l) { return l.taken.worker; })
        .def_prop_ro("attempt", [](const Lease& l) { return Entry::unpack(l.taken.table_word).attempt; })
        .def_prop_ro("nbytes", [](const Lease& l) { return l.taken.extent_bytes; })
        .def_prop_ro("fields", [](const Lease& l) { return l.taken.fields; })
        .def_prop_ro("delivered", [](const Lease& l) { return l.delivered; })
        .def("field", &field_view, "index"_a, "dtype"_a)
        .def("release", &Lease::release);

    nb::class_<PyConsumer>(m, "Consumer", nb::is_final())
        .def(nb::init<const Segment&, int>(), "segment"_a, "bell_fd"_a = -1)
        .def("take", &PyConsumer::take)
        .def("held", &PyConsumer::held)
        .def("deliver", &PyConsumer::deliver, "leases"_a)
        .def("news", &PyConsumer::news)
        .def("wait", &PyConsumer::wait, "count"_a, "seen"_a, "timeout_s"_a)
        .def("close", &PyConsumer::close);

    nb::class_<Admitter>(m, "Admitter", nb::is_final())
        .def(
            "__init__", [](Admitter* self, const Segment& segment) { new (self) Admitter(segment.open()); },
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
            return recover(*s.open(), natural("recover: worker", worker), natural("recover: max_deaths", max_deaths),
                           natural("recover: reason", reason), count_death);
        },
        "segment"_a, "worker"_a, "max_deaths"_a, "reason"_a, "count_death"_a = true);

    const nb::object segment = m.attr("Segment");
#define SHAPE "*, workers, entries, cells, descriptors, arena_bytes, max_group_bytes, max_prompt_bytes, schema"
    as_builtin(segment, "create", "create(" SHAPE ")\n--\n\n");
    as_builtin(segment, "size_of", "size_of(" SHAPE ")\n--\n\n");
#undef SHAPE
    as_builtin(segment, "attach", "attach(fd)\n--\n\n");
    as_builtin(m, "die_with_parent", "die_with_parent(expected_parent_pid)\n--\n\n");
    as_builtin(m, "become_subreaper", "become_subreaper()\n--\n\n");
    as_builtin(m, "group_bytes", "group_bytes(lengths)\n--\n\n");
    as_builtin(m, "recover", "recover(segment, worker, max_deaths, reason, count_death=True)\n--\n\n");
}
