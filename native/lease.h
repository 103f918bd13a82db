// A taken group in Python, and the views of it: two types of CPython itself, since a batch makes hundreds of them.
//
// Invariant: an array keeps its lease's Views, which keep the lease, which keeps the mapping; memory goes back to its worker
// only when the lease was delivered, release() was called (or the lease died) and its Views are dead: with the last array.
#pragma once

#include "consumer.h"
#include "guarded.h"
#include "numpy_api.h"

namespace mprollout {

struct Lease;

// The base object of all arrays over one lease's memory; each array is one reference.
struct Views {
    PyObject_HEAD Lease* lease;  // owned
};

struct Lease {
    PyObject_HEAD std::shared_ptr<Taker> taker;
    Taken taken;
    Views* views;  // borrowed; nullptr while there are none
    bool delivered, released, given_back;

    std::int64_t alive() const { return views == nullptr ? 0 : Py_REFCNT(views); }
    void give_back() {
        if (given_back) return;
        given_back = true;
        --taker->leased;
        mprollout::release(*taker, taken);
    }
    std::int64_t release() {
        if (!taker->here()) return alive();
        if (!delivered)
            throw std::runtime_error(text("release: expected a delivered lease, got ticket ", taken.ticket,
                                          " undelivered: its group would be lost"));
        released = true;
        if (views == nullptr) give_back();
        return alive();
    }
};

inline PyTypeObject *lease_type = nullptr, *views_type = nullptr;

inline Lease* as_lease(PyObject* object) {
    return Py_TYPE(object) == lease_type ? reinterpret_cast<Lease*>(object) : nullptr;
}

inline nb::object new_lease(const std::shared_ptr<Taker>& taker, const Taken& taken) {
    Lease* lease = PyObject_New(Lease, lease_type);
    if (lease == nullptr) throw nb::python_error();
    new (&lease->taker) std::shared_ptr<Taker>(taker);
    new (&lease->taken) Taken(taken);
    lease->views = nullptr;
    lease->delivered = delivered(*taker->mapping, taken);
    taker->leased += lease->delivered;
    lease->released = lease->given_back = false;
    return nb::steal(reinterpret_cast<PyObject*>(lease));
}

inline void lease_dealloc(PyObject* self) {
    auto* lease = reinterpret_cast<Lease*>(self);
    if (lease->delivered) lease->give_back();  // an undelivered one stays TAKEN: the next taker gets it
    lease->taker.~shared_ptr();
    PyTypeObject* type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

inline void views_dealloc(PyObject* self) {
    Lease* lease = reinterpret_cast<Views*>(self)->lease;
    lease->views = nullptr;
    --lease->taker->mapping->viewed;
    if (lease->released) lease->give_back();
    PyTypeObject* type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
    Py_DECREF(lease);
}

// A reference to the lease's Views: for one array, or for as long as some are made.
inline nb::object views_of(Lease* lease) {
    if (lease->given_back)
        throw std::runtime_error(
            text("field: expected a lease that is not released, got ticket ", lease->taken.ticket));
    if (lease->views != nullptr) return nb::borrow(reinterpret_cast<PyObject*>(lease->views));
    Views* views = PyObject_New(Views, views_type);
    if (views == nullptr) throw nb::python_error();
    Py_INCREF(lease);
    views->lease = lease;
    lease->views = views;
    ++lease->taker->mapping->viewed;
    return nb::steal(reinterpret_cast<PyObject*>(views));
}

// What PyArray_NewFromDescr and PyArray_SetBaseObject do for one dimension of aligned memory that is not writable, without
// their looks at all other cases, which take twice the time of this. tp_alloc zeroes what is not set here. Steals nothing.
inline PyObject* plain_view(const void* data, npy_intp length, npy_intp item, PyArray_Descr* descr, PyObject* base) {
    npy_intp* sizes = PyDimMem_NEW(2);
    if (sizes == nullptr) throw std::bad_alloc();
    PyObject* array = PyArray_Type.tp_alloc(&PyArray_Type, 0);
    if (array == nullptr) {
        PyDimMem_FREE(sizes);
        throw nb::python_error();
    }
    auto* fields = reinterpret_cast<PyArrayObject_fields*>(array);
    sizes[0] = length;
    sizes[1] = item;
    fields->nd = 1;
    fields->dimensions = sizes;
    fields->strides = sizes + 1;
    fields->data = static_cast<char*>(const_cast<void*>(data));
    fields->flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS | NPY_ARRAY_ALIGNED;
    Py_INCREF(descr);
    fields->descr = descr;
    Py_INCREF(base);
    fields->base = base;
    return array;
}

inline PyObject* new_view(const Lease* lease, const nb::object& base, std::uint64_t index, PyArray_Descr* descr) {
    const Field f = field(lease->taken, index);
    const auto item = static_cast<std::uint64_t>(PyDataType_ELSIZE(descr));
    // Nearly all are powers of two, for which a division would be a good part of the whole.
    auto length = static_cast<npy_intp>((item & (item - 1)) == 0 ? f.bytes >> std::countr_zero(item) : f.bytes / item);
    if (static_cast<std::uint64_t>(length) * item != f.bytes)
        throw std::invalid_argument(text("field ", index, " of ticket ", lease->taken.ticket,
                                         ": expected a multiple of ", item, " bytes for its dtype, got ", f.bytes));
    const auto alignment = static_cast<std::uintptr_t>(PyDataType_ALIGNMENT(descr));
    if (!PyDataType_HASSUBARRAY(descr) && reinterpret_cast<std::uintptr_t>(f.data) % alignment == 0)
        return plain_view(f.data, length, static_cast<npy_intp>(item), descr, base.ptr());
    Py_INCREF(descr);  // stolen by the next call, which derives contiguity and alignment itself; not writable
    PyObject* array =
        PyArray_NewFromDescr(&PyArray_Type, descr, 1, &length, nullptr, const_cast<void*>(f.data), 0, nullptr);
    if (array == nullptr) throw nb::python_error();
    // What PyArray_SetBaseObject does for a base that is no array.
    reinterpret_cast<PyArrayObject_fields*>(array)->base = nb::object(base).release().ptr();
    return array;
}

inline PyObject* lease_field(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    return guarded([&] {
        if (count != 2 || !PyUnicode_Check(args[1])) throw nb::type_error("field: expected (index: int, dtype: str)");
        const Py_ssize_t index = PyNumber_AsSsize_t(args[0], PyExc_IndexError);
        if (index == -1 && PyErr_Occurred()) throw nb::python_error();
        PyArray_Descr* descr = descr_of(args[1]);
        auto* lease = reinterpret_cast<Lease*>(self);
        return new_view(lease, views_of(lease), index < 0 ? ~0ULL : static_cast<std::uint64_t>(index), descr);
    });
}

inline PyObject* lease_release(PyObject* self, PyObject*) {
    return guarded([&] { return PyLong_FromLongLong(reinterpret_cast<Lease*>(self)->release()); });
}

template <class F>
PyObject* lease_get(PyObject* self, F get) {
    return PyLong_FromUnsignedLongLong(get(*reinterpret_cast<Lease*>(self)));
}

inline void make_lease_types(nb::module_& m) {
    static PyMethodDef methods[] = {{"field", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(lease_field)),
                                     METH_FASTCALL, "field($self, index, dtype, /)\n--\n\n"},
                                    {"release", lease_release, METH_NOARGS, "release($self, /)\n--\n\n"},
                                    {}};
#define NUMBER(name, value)                                                                                            \
    {                                                                                                                  \
        name, [](PyObject* s, void*) { return lease_get(s, [](const Lease& l) { return value; }); }, nullptr, nullptr, \
            nullptr                                                                                                    \
    }
    static PyGetSetDef properties[] = {
        NUMBER("ticket", l.taken.ticket),
        NUMBER("worker", l.taken.worker),
        NUMBER("attempt", Entry::unpack(l.taken.table_word).attempt),
        NUMBER("nbytes", l.taken.extent_bytes),
        NUMBER("fields", l.taken.fields),
        {"delivered", [](PyObject* s, void*) { return PyBool_FromLong(reinterpret_cast<Lease*>(s)->delivered); },
         nullptr, nullptr, nullptr},
        {}};
#undef NUMBER
    static PyType_Slot lease_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(lease_dealloc)},
                                        {Py_tp_methods, methods},
                                        {Py_tp_getset, properties},
                                        {}};
    static PyType_Slot views_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(views_dealloc)}, {}};
    constexpr unsigned kFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE;
    static PyType_Spec lease_spec{"mprollout._native.Lease", sizeof(Lease), 0, kFlags, lease_slots};
    static PyType_Spec views_spec{"mprollout._native._Views", sizeof(Views), 0, kFlags, views_slots};
    for (const auto& [type, spec] : {std::pair{&lease_type, &lease_spec}, {&views_type, &views_spec}}) {
        *type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(spec));
        if (*type == nullptr) throw nb::python_error();
    }
    m.attr("Lease") = nb::handle(reinterpret_cast<PyObject*>(lease_type));
}

// ---- many at once

// All leases of a list, checked.
inline std::vector<Lease*> leases_of(const char* call, nb::handle list) {
    const nb::object fast = nb::steal(PySequence_Fast(list.ptr(), "expected a sequence of leases"));
    if (!fast.is_valid()) throw nb::python_error();
    std::vector<Lease*> leases(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
    for (std::size_t i = 0; i < leases.size(); ++i) {
        leases[i] = as_lease(PySequence_Fast_GET_ITEM(fast.ptr(), static_cast<Py_ssize_t>(i)));
        if (leases[i] == nullptr) throw nb::type_error(text(call, ": leases[", i, "]: expected a Lease").c_str());
    }
    return leases;
}

// For each lease the arrays of its first fields, one for each dtype.
inline nb::list views(nb::list leases, nb::handle dtypes) {
    std::vector<PyArray_Descr*> descrs;
    for (nb::handle dtype : dtypes) descrs.push_back(descr_of(dtype.ptr()));
    const std::vector<Lease*> all = leases_of("views", leases);
    nb::list rows = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(all.size())));
    for (std::size_t i = 0; i < all.size(); ++i) {
        const nb::object base = views_of(all[i]);
        PyObject* row = PyTuple_New(static_cast<Py_ssize_t>(descrs.size()));
        if (row == nullptr) throw nb::python_error();
        PyList_SET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(i), row);  // so that it is freed, whatever follows
        for (std::size_t k = 0; k < descrs.size(); ++k)
            PyTuple_SET_ITEM(row, static_cast<Py_ssize_t>(k), new_view(all[i], base, k, descrs[k]));
    }
    return rows;
}

// For each lease the bytes of some of its fields: what is needed of a group that may be released meanwhile.
inline nb::list copies(nb::list leases, const std::vector<std::uint64_t>& fields) {
    const std::vector<Lease*> all = leases_of("copies", leases);
    nb::list rows = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(all.size())));
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i]->given_back)
            throw std::runtime_error(
                text("copies: expected leases that are not released, got ticket ", all[i]->taken.ticket));
        PyObject* row = PyTuple_New(static_cast<Py_ssize_t>(fields.size()));
        if (row == nullptr) throw nb::python_error();
        PyList_SET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(i), row);  // so that it is freed, whatever follows
        for (std::size_t k = 0; k < fields.size(); ++k) {
            const Field f = field(all[i]->taken, fields[k]);
            PyObject* bytes = PyBytes_FromStringAndSize(static_cast<const char*>(static_cast<const void*>(f.data)),
                                                        static_cast<Py_ssize_t>(f.bytes));
            if (bytes == nullptr) throw nb::python_error();
            PyTuple_SET_ITEM(row, static_cast<Py_ssize_t>(k), bytes);
        }
    }
    return rows;
}

// Nothing is released if one is not delivered. Returns the views that are alive, of all.
inline std::int64_t release_all(nb::list leases) {
    const std::vector<Lease*> all = leases_of("release", leases);
    for (const Lease* lease : all)
        if (!lease->delivered)
            throw std::runtime_error(text("release: expected delivered leases, got ticket ", lease->taken.ticket,
                                          " undelivered: its group would be lost"));
    std::int64_t alive = 0;
    for (Lease* lease : all) alive += lease->release();
    return alive;
}

// ---- statistics words

// An object with the buffer protocol over 64 int64 of the mapping.
class Exporter {
public:
    Exporter(MappingPtr mapping, std::int64_t* words) : mapping_(std::move(mapping)), words_(words) {}

    int fill(PyObject* self, Py_buffer* view, int flags) {
        if (PyBuffer_FillInfo(view, self, words_, sizeof(std::int64_t) * kStatWords, mapping_->read_only(), flags) != 0)
            return -1;
        view->itemsize = sizeof(std::int64_t);
        if (flags & PyBUF_FORMAT) view->format = const_cast<char*>("q");
        if (flags & PyBUF_ND) view->shape = &shape_;
        if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) view->strides = &stride_;
        return 0;
    }

private:
    MappingPtr mapping_;
    std::int64_t* words_;
    Py_ssize_t shape_ = kStatWords, stride_ = sizeof(std::int64_t);
};

inline int exporter_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    return nb::inst_ptr<Exporter>(self)->fill(self, view, flags);
}
inline PyType_Slot exporter_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(exporter_getbuffer)}, {0, nullptr}};

inline nb::object words_view(const MappingPtr& m, std::int64_t* words) {
    nb::object exporter = nb::cast(new Exporter(m, words), nb::rv_policy::take_ownership);
    return nb::steal(PyMemoryView_FromObject(exporter.ptr()));
}

}  // namespace mprollout
