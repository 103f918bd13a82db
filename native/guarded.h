// Functions that Python calls without nanobind in between, and their C++ exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include "segment.h"

namespace mprollout {

namespace nb = nanobind;

inline PyObject *segment_error = nullptr, *too_large_error = nullptr;  // the Python classes

// As nanobind translates them.
template <class F>
PyObject* guarded(F body) {
    try {
        return body();
    } catch (nb::python_error& e) {
        e.restore();
    } catch (const nb::builtin_exception& e) {
        PyErr_SetString(e.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_ValueError, e.what());
    } catch (const std::out_of_range& e) {
        PyErr_SetString(PyExc_IndexError, e.what());
    } catch (const std::invalid_argument& e) {
        PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const SegmentError& e) {
        PyErr_SetString(segment_error, e.what());
    } catch (const GroupTooLarge& e) {
        PyErr_SetString(too_large_error, e.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
}

}  // namespace mprollout
