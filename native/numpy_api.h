// NumPy's C API, got on the first use: `import mprollout` and the keeper go without NumPy.
#pragma once

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>

namespace mprollout {

namespace nb = nanobind;

inline bool numpy_ready() { return PyArray_API != nullptr; }

inline void need_numpy() {
    if (!numpy_ready() && _import_array() < 0) throw nb::python_error();
}

// Whether an object is an array, without an import of NumPy for its sake: where nobody imported it there is none.
inline bool is_array(PyObject* object) {
    if (!numpy_ready()) {
        if (PyDict_GetItemString(PyImport_GetModuleDict(), "numpy") == nullptr) return false;
        need_numpy();
    }
    return PyArray_Check(object);
}

// The type of a dtype string, borrowed for ever: a program uses few.
inline PyArray_Descr* descr_of(PyObject* dtype) {
    static PyObject* known = PyDict_New();
    if (PyObject* found = PyDict_GetItemWithError(known, dtype)) return reinterpret_cast<PyArray_Descr*>(found);
    if (PyErr_Occurred()) throw nb::python_error();
    need_numpy();
    PyArray_Descr* descr = nullptr;
    if (PyArray_DescrConverter(dtype, &descr) != NPY_SUCCEED) throw nb::python_error();
    const nb::object owned = nb::steal(reinterpret_cast<PyObject*>(descr));
    if (PyDataType_REFCHK(descr) || PyDataType_ELSIZE(descr) == 0)
        throw nb::value_error("dtype: expected one of fixed size without Python objects");
    if (PyDict_SetItem(known, dtype, owned.ptr()) != 0) throw nb::python_error();
    return descr;  // `known` holds it
}

}  // namespace mprollout
