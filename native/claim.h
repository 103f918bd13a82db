// A claimed ticket in Python, and the two calls that every group costs its worker. A copy of a group drives all else from the
// caches, so what counts here is how few lines of code and data lie on the way: the claim is a type of CPython itself, as
// the leases are, and both calls are plain methods.
//
// Invariant: a claim keeps its Producer, and the prompt as bytes of its own.
#pragma once

#include <structmember.h>

#include "columns.h"
#include "guarded.h"

namespace mprollout {

struct PyClaim {
    PyObject_HEAD Claim claim;
    PyObject *producer, *prompt;  // owned
};
static_assert(std::is_trivially_copyable_v<Claim>);  // PyObject_New makes none

inline PyTypeObject* claim_type = nullptr;

inline Claim& claim_of(nb::handle object) {
    if (Py_TYPE(object.ptr()) != claim_type)
        throw nb::type_error(text("expected a Claim, got ", Py_TYPE(object.ptr())->tp_name).c_str());
    return reinterpret_cast<PyClaim*>(object.ptr())->claim;
}

inline nb::object new_claim(const Claim& claim, nb::handle producer, nb::object prompt) {
    auto* self = PyObject_New(PyClaim, claim_type);
    if (self == nullptr) throw nb::python_error();
    self->claim = claim;
    self->claim.prompt = {};  // it lies where the next ticket's will
    self->producer = producer.inc_ref().ptr();
    self->prompt = prompt.release().ptr();
    return nb::steal(reinterpret_cast<PyObject*>(self));
}

inline void claim_dealloc(PyObject* object) {
    auto* self = reinterpret_cast<PyClaim*>(object);
    PyTypeObject* type = Py_TYPE(object);
    Py_DECREF(self->producer);
    Py_DECREF(self->prompt);
    PyObject_Free(object);
    Py_DECREF(type);
}

inline void make_claim_type(nb::module_& m) {
    static PyMemberDef members[] = {{"prompt", T_OBJECT_EX, offsetof(PyClaim, prompt), READONLY, nullptr}, {}};
#define FROM(name, make)                                                                                         \
    {                                                                                                            \
        name, [](PyObject* s, void*) { return make(*reinterpret_cast<PyClaim*>(s)); }, nullptr, nullptr, nullptr \
    }
    static PyGetSetDef properties[] = {
        FROM("ticket", [](const PyClaim& c) { return PyLong_FromUnsignedLongLong(c.claim.ticket); }),
        FROM("attempt",
             [](const PyClaim& c) { return PyLong_FromUnsignedLongLong(Entry::unpack(c.claim.word).attempt); }),
        FROM("deaths",
             [](const PyClaim& c) { return PyLong_FromUnsignedLongLong(Entry::unpack(c.claim.word).deaths); }),
        FROM("current",
             [](const PyClaim& c) { return PyBool_FromLong(nb::inst_ptr<Producer>(c.producer)->current(c.claim)); }),
        {}};
#undef FROM
    static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(claim_dealloc)},
                                  {Py_tp_members, members},
                                  {Py_tp_getset, properties},
                                  {}};
    static PyType_Spec spec{"mprollout._native.Claim", sizeof(PyClaim), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, slots};
    claim_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    if (claim_type == nullptr) throw nb::python_error();
    m.attr("Claim") = nb::handle(reinterpret_cast<PyObject*>(claim_type));
}

// ---- Producer.claim and publish

inline Producer& producer_of(PyObject* self) {
    if (!nb::inst_ready(self)) throw nb::type_error("Producer: expected one that was initialised");
    return *nb::inst_ptr<Producer>(self);
}

template <class F>
nb::object hand_out(nb::handle self, Producer& producer, std::optional<Claim> claim, F prompt) {
    if (!claim) return nb::none();
    try {
        return new_claim(*claim, self, prompt(*claim));
    } catch (...) {  // no memory
        producer.give_back(*claim);
        throw;
    }
}

inline PyObject* producer_claim(PyObject* self, PyObject*) {
    return guarded([&] {
        Producer& producer = producer_of(self);
        const auto prompt = [](const Claim& claim) { return nb::bytes(claim.prompt.data(), claim.prompt.size()); };
        return hand_out(self, producer, producer.claim(), prompt).release().ptr();
    });
}

inline PyObject* producer_publish(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    return guarded([&] {
        if (count != 2) throw nb::type_error("publish: expected (claim, arrays)");
        return PyBool_FromLong(publish(producer_of(self), claim_of(args[0]), args[1]));
    });
}

inline void make_producer_methods(nb::handle type) {
    static PyMethodDef methods[] = {
        {"claim", producer_claim, METH_NOARGS, "claim($self, /)\n--\n\n"},
        {"publish", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(producer_publish)), METH_FASTCALL,
         "publish($self, claim, arrays, /)\n--\n\n"}};
    for (PyMethodDef& method : methods) {
        const nb::object descriptor =
            nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
        if (!descriptor.is_valid()) throw nb::python_error();
        nb::setattr(type, method.ml_name, descriptor);
    }
}

}  // namespace mprollout
