// A taken group in Python, and the views of it.
//
// Invariant: a view keeps its exporter, the exporter keeps its lease, the lease keeps the mapping; memory goes back to its
// worker only when the lease was delivered, release() was called (or the lease died) and no exporter of it lives.
#pragma once

#include <nanobind/nanobind.h>

#include "consumer.h"

namespace mprollout {

namespace nb = nanobind;

class Lease {
public:
    Lease(std::shared_ptr<Taker> taker, const Taken& taken)
        : taker(std::move(taker)), taken(taken), delivered(mprollout::delivered(*this->taker->mapping, taken)) {}
    ~Lease() {
        if (delivered) give_back();  // an undelivered one stays TAKEN: the next taker gets it
    }
    Lease(const Lease&) = delete;

    std::int64_t release() {
        if (!taker->here()) return views;
        if (!delivered)
            throw std::runtime_error(text("release: expected a delivered lease, got ticket ", taken.ticket,
                                          " undelivered: its group would be lost"));
        released = true;
        if (views == 0) give_back();
        return views;
    }
    void view_made() {
        ++views;
        ++taker->mapping->views;
    }
    void view_died() {
        --views;
        --taker->mapping->views;
        if (views == 0 && released) give_back();
    }

    std::shared_ptr<Taker> taker;
    Taken taken;
    bool delivered, released = false, given_back = false;
    std::int64_t views = 0;

private:
    void give_back() {
        if (!given_back) mprollout::release(*taker, taken);
        given_back = true;
    }
};

// An object with the buffer protocol over a part of the mapping.
class Exporter {
public:
    Exporter(MappingPtr mapping, const void* data, std::uint64_t bytes, bool words)
        : mapping_(std::move(mapping)), data_(data), bytes_(bytes), words_(words) {}
    Exporter(nb::object lease, const Field& f)
        : mapping_(nb::cast<Lease&>(lease).taker->mapping), lease_(std::move(lease)), data_(f.data), bytes_(f.bytes) {
        nb::cast<Lease&>(lease_).view_made();
    }
    ~Exporter() {
        if (lease_) nb::cast<Lease&>(lease_).view_died();
    }
    Exporter(const Exporter&) = delete;

    // Statistics words are a writable array of int64, fields are read-only bytes.
    int fill(PyObject* self, Py_buffer* view, int flags) {
        shape_ = static_cast<Py_ssize_t>(words_ ? bytes_ / 8 : bytes_);
        if (PyBuffer_FillInfo(view, self, const_cast<void*>(data_), static_cast<Py_ssize_t>(bytes_), words_ ? 0 : 1,
                              flags) != 0)
            return -1;
        if (!words_) return 0;
        view->itemsize = 8;
        stride_ = 8;
        if (flags & PyBUF_FORMAT) view->format = const_cast<char*>("q");
        if (flags & PyBUF_ND) view->shape = &shape_;
        if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) view->strides = &stride_;
        return 0;
    }

private:
    MappingPtr mapping_;
    nb::object lease_;
    const void* data_;
    std::uint64_t bytes_;
    bool words_ = false;
    Py_ssize_t shape_ = 0, stride_ = 1;
};

inline int exporter_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    return nb::inst_ptr<Exporter>(self)->fill(self, view, flags);
}
inline PyType_Slot exporter_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(exporter_getbuffer)}, {0, nullptr}};

inline nb::object words_view(const MappingPtr& m, std::int64_t* words) {
    nb::object exporter = nb::cast(new Exporter(m, words, kStatWords * 8, true), nb::rv_policy::take_ownership);
    return nb::steal(PyMemoryView_FromObject(exporter.ptr()));
}

inline nb::object field_view(nb::object self, std::int64_t index, nb::str dtype) {
    // Cached, but not as initialized statics: the import lets go of the GIL, and another thread would wait for the guard with it.
    static PyObject *frombuffer = nullptr, *dtype_of = nullptr;
    if (dtype_of == nullptr) {
        const nb::module_ numpy = nb::module_::import_("numpy");
        frombuffer = nb::object(numpy.attr("frombuffer")).release().ptr();
        dtype_of = nb::object(numpy.attr("dtype")).release().ptr();
    }
    Lease& lease = nb::cast<Lease&>(self);
    if (lease.given_back)
        throw std::runtime_error(text("field: expected a lease that is not released, got ticket ", lease.taken.ticket));
    const Field f = field(lease.taken, index < 0 ? ~0ULL : static_cast<std::uint64_t>(index));
    nb::object type = nb::handle(dtype_of)(dtype);
    const auto item = nb::cast<std::uint64_t>(type.attr("itemsize"));
    if (item == 0 || f.bytes % item != 0)
        throw std::invalid_argument(text("field ", index, " of ticket ", lease.taken.ticket,
                                         ": expected a multiple of ", item, " bytes for dtype ", dtype.c_str(),
                                         ", got ", f.bytes));
    nb::object exporter = nb::cast(new Exporter(self, f), nb::rv_policy::take_ownership);
    return nb::handle(frombuffer)(exporter, type);
}

}  // namespace mprollout
