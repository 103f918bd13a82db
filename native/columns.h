// What Python gives for a field of a group, written into the extent in one pass: a NumPy array, any other C-contiguous
// buffer, or (dtype, parts): lists of numbers, and buffers, one after another, as an inference engine returns them.
//
// Invariant: no Python code runs while a group is written, so nothing that it was measured by can change. A number that only
// Python code could turn into one (a NumPy scalar) is `Foreign`: nothing is published, all lists are made plain, then again.
#pragma once

#include <limits>

#include "numpy_api.h"
#include "producer.h"

namespace mprollout {

struct Foreign {};

// For errors.
struct Where {
    std::size_t column;
    std::ptrdiff_t part = -1;

    std::string operator()() const {
        return text("publish: arrays[", column, "]", part < 0 ? "" : text(", part ", part));
    }
};

// Of an array that can be copied as it lies.
inline std::optional<Field> memory_of(PyArrayObject* array) {
    if (!PyArray_IS_C_CONTIGUOUS(array) || PyDataType_REFCHK(PyArray_DESCR(array))) return std::nullopt;
    const npy_intp items = PyArray_NDIM(array) == 1 ? PyArray_DIM(array, 0) : PyArray_SIZE(array);
    return Field{PyArray_DATA(array), static_cast<std::uint64_t>(items * PyArray_ITEMSIZE(array))};
}

// Memory of a Python object, held.
struct Raw {
    const void* data = nullptr;
    std::uint64_t bytes = 0;

    Raw() = default;
    Raw(nb::handle given, const Where& where) {
        if (is_array(given.ptr())) {
            const auto memory = memory_of(reinterpret_cast<PyArrayObject*>(given.ptr()));
            if (!memory)
                throw std::invalid_argument(where() + ": expected a C-contiguous buffer without Python objects");
            data = memory->data;
            bytes = memory->bytes;
            array_ = nb::borrow(given);
            return;
        }
        view_.reset(new Py_buffer{});
        if (PyObject_GetBuffer(given.ptr(), view_.get(), PyBUF_C_CONTIGUOUS) != 0) {
            nb::python_error cause;
            PyObject* const type = cause.matches(PyExc_TypeError) ? PyExc_TypeError : PyExc_ValueError;
            if (type == PyExc_ValueError && !cause.matches(PyExc_ValueError) && !cause.matches(PyExc_BufferError))
                throw cause;
            nb::raise_from(cause, type, "%s: expected a C-contiguous buffer, got %s", where().c_str(),
                           Py_TYPE(given.ptr())->tp_name);
        }
        data = view_->buf;
        bytes = static_cast<std::uint64_t>(view_->len);
    }

private:
    struct Release {
        void operator()(Py_buffer* view) const {
            PyBuffer_Release(view);  // does nothing to one that was never filled
            delete view;
        }
    };
    nb::object array_;
    std::unique_ptr<Py_buffer, Release> view_;
};

// Integers are kept exactly or refused; of [logprob, id, text] a real column keeps the first.
inline long long whole(PyObject* item) {
    if (!PyLong_Check(item)) throw Foreign{};
    auto* number = reinterpret_cast<PyLongObject*>(item);
#if PY_VERSION_HEX >= 0x030c0000
    if (PyUnstable_Long_IsCompact(number)) return PyUnstable_Long_CompactValue(number);
#else
    if (const Py_ssize_t size = Py_SIZE(number); size >= -1 && size <= 1)
        return size * static_cast<long long>(number->ob_digit[0]);  // a 0 has a digit, too, and counts it 0 times
#endif
    const long long value = PyLong_AsLongLong(item);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
}
inline double real(PyObject* item) {
    if ((PyList_CheckExact(item) || PyTuple_CheckExact(item)) && PySequence_Fast_GET_SIZE(item) > 0)
        item = PySequence_Fast_GET_ITEM(item, 0);
    if (PyFloat_Check(item)) return PyFloat_AS_DOUBLE(item);
    if (!PyLong_Check(item)) throw Foreign{};
    const double value = PyLong_AsDouble(item);
    if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
    return value;
}

template <class T>
void write_list(PyObject* list, unsigned char* to, const Where& where) {
    auto* out = reinterpret_cast<T*>(to);
    PyObject* const* items = PySequence_Fast_ITEMS(list);
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    for (Py_ssize_t k = 0; k < count; ++k) {
        if constexpr (std::is_floating_point_v<T>) {
            out[k] = static_cast<T>(real(items[k]));
        } else {
            const long long value = whole(items[k]);
            if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max())
                throw std::invalid_argument(
                    text(where(), ": expected a number that fits ", sizeof(T), " bytes, got ", value, " at ", k));
            out[k] = static_cast<T>(value);
        }
    }
}

// What lists can be written as.
struct ListType {
    const char* name;
    std::uint64_t item_bytes;
    bool real;
    void (*write)(PyObject*, unsigned char*, const Where&);
};
inline constexpr ListType kListTypes[] = {{"<i4", 4, false, write_list<std::int32_t>},
                                          {"<f4", 4, true, write_list<float>},
                                          {"|u1", 1, false, write_list<std::uint8_t>},
                                          {"<i8", 8, false, write_list<std::int64_t>},
                                          {"<f8", 8, true, write_list<double>}};

class Column {
public:
    Column(nb::handle given, std::size_t index) : where_{index} {
        if (!PyTuple_Check(given.ptr())) {
            raw_ = Raw(given, where_);
            bytes = raw_.bytes;
            return;
        }
        if (nb::len(given) != 2 || !nb::isinstance<nb::str>(given[0]))
            throw nb::type_error((where_() + ": expected (dtype, parts)").c_str());
        const auto name = nb::borrow<nb::str>(given[0]);
        const std::string_view dtype = name.c_str();
        for (const ListType& type : kListTypes)
            if (dtype == type.name) type_ = &type;
        if (type_ == nullptr)
            throw std::invalid_argument(
                text(where_(), ": expected |u1, <i4, <i8, <f4 or <f8 as dtype of lists, got ", dtype));
        for (nb::handle part : nb::object(given[1])) {
            if (PyList_Check(part.ptr()) || PyTuple_Check(part.ptr()))
                parts_.push_back({nb::borrow(part), Raw()});
            else
                parts_.push_back({nb::object(), checked(part)});
        }
    }

    std::uint64_t bytes = 0;

    // Again after other Python code ran: a list may have another length now.
    void measure() {
        if (type_ == nullptr) return;
        bytes = 0;
        for (const Part& part : parts_)
            bytes += part.list.is_valid()
                         ? static_cast<std::uint64_t>(PySequence_Fast_GET_SIZE(part.list.ptr())) * type_->item_bytes
                         : part.raw.bytes;
    }

    void write(unsigned char* to) const {
        if (type_ == nullptr) {
            if (bytes != 0) std::memcpy(to, raw_.data, bytes);
            return;
        }
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            if (const Part& part = parts_[i]; part.list.is_valid()) {
                type_->write(part.list.ptr(), to, at(i));
                to += static_cast<std::uint64_t>(PySequence_Fast_GET_SIZE(part.list.ptr())) * type_->item_bytes;
            } else if (part.raw.bytes != 0) {
                std::memcpy(to, part.raw.data, part.raw.bytes);
                to += part.raw.bytes;
            }
        }
    }

    // All numbers of all lists as plain ints or floats. Runs Python code.
    void make_plain() {
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            if (!parts_[i].list.is_valid()) continue;
            nb::list plain;
            for (nb::handle each : nb::borrow(parts_[i].list)) {
                nb::object item = nb::borrow(each);
                if (type_->real && (PyList_Check(item.ptr()) || PyTuple_Check(item.ptr())) && nb::len(item) > 0)
                    item = item[0];
                const bool number = PyIndex_Check(item.ptr()) || (type_->real && PyNumber_Check(item.ptr()));
                if (!number)
                    throw nb::type_error(
                        text(at(i)(), ": expected a number, got ", Py_TYPE(item.ptr())->tp_name, " at ", nb::len(plain))
                            .c_str());
                const nb::object exact =
                    nb::steal(type_->real ? PyNumber_Float(item.ptr()) : PyNumber_Index(item.ptr()));
                if (!exact.is_valid()) throw nb::python_error();
                plain.append(exact);
            }
            parts_[i].list = plain;
        }
    }

private:
    struct Part {
        nb::object list;  // or
        Raw raw;
    };

    Where at(std::size_t part) const { return {where_.column, static_cast<std::ptrdiff_t>(part)}; }

    Raw checked(nb::handle part) const {
        const Where where = at(parts_.size());
        Raw raw(part, where);
        const bool same =
            !is_array(part.ptr()) || PyArray_EquivTypes(PyArray_DESCR(reinterpret_cast<PyArrayObject*>(part.ptr())),
                                                        descr_of(nb::str(type_->name).ptr()));
        if (!same || raw.bytes % type_->item_bytes != 0)
            throw std::invalid_argument(text(where(), ": expected a buffer of ", type_->name, " items"));
        return raw;
    }

    Where where_;
    const ListType* type_ = nullptr;
    Raw raw_;
    std::vector<Part> parts_;
};

class Columns {
public:
    explicit Columns(nb::handle arrays) {
        const nb::object all = nb::steal(PySequence_Tuple(arrays.ptr()));
        if (!all.is_valid()) throw nb::python_error();
        const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(all.ptr()));
        columns_.reserve(count);
        for (std::size_t i = 0; i < count; ++i)
            columns_.emplace_back(PyTuple_GET_ITEM(all.ptr(), static_cast<Py_ssize_t>(i)), i);
    }

    bool publish(Producer& producer, Claim& claim) {
        for (bool plain = false;; plain = true) {
            for (Column& c : columns_) c.measure();
            try {
                return producer.publish_from<Column>(claim, columns_);
            } catch (const Foreign&) {
                if (plain) throw;  // cannot be: make_plain left nothing foreign
                for (Column& c : columns_) c.make_plain();
            }
        }
    }

private:
    std::vector<Column> columns_;
};

// Nearly all groups of a fast worker are a few arrays in a list: nothing needs to be held or kept then, since no Python code
// runs until they are written.
inline bool publish(Producer& producer, Claim& claim, nb::handle arrays) {
    constexpr Py_ssize_t kFew = 32;
    const bool plain = PyList_CheckExact(arrays.ptr()) || PyTuple_CheckExact(arrays.ptr());
    const Py_ssize_t count = plain ? PySequence_Fast_GET_SIZE(arrays.ptr()) : 0;
    if (!plain || count > kFew || !numpy_ready()) return Columns(arrays).publish(producer, claim);
    Field fields[kFew];
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* given = PySequence_Fast_GET_ITEM(arrays.ptr(), i);
        const auto memory = PyArray_Check(given) ? memory_of(reinterpret_cast<PyArrayObject*>(given)) : std::nullopt;
        if (!memory) return Columns(arrays).publish(producer, claim);
        fields[i] = *memory;
    }
    return producer.publish(claim, {fields, static_cast<std::size_t>(count)});
}

// The first item of each row: the logprobs of SGLang's [logprob, id, text], without a pass in Python.
inline nb::list first_of_each(nb::handle rows) {
    const nb::object fast = nb::steal(PySequence_Fast(rows.ptr(), "first_of_each: expected a sequence of sequences"));
    if (!fast.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
    nb::list firsts = nb::steal<nb::list>(PyList_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* row = PySequence_Fast_GET_ITEM(fast.ptr(), i);
        if ((!PyList_CheckExact(row) && !PyTuple_CheckExact(row)) || PySequence_Fast_GET_SIZE(row) == 0)
            throw nb::type_error(text("first_of_each: expected lists and tuples that are not empty, got ",
                                      Py_TYPE(row)->tp_name, " at ", i)
                                     .c_str());
        PyObject* item = PySequence_Fast_GET_ITEM(row, 0);
        Py_INCREF(item);
        PyList_SET_ITEM(firsts.ptr(), i, item);
    }
    return firsts;
}

}  // namespace mprollout
