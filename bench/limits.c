// What the machine allows: plain C for the work that every transport shares, and for the limits that none can beat.
//
// `touch` and `stamp` are how the consumer reads a group, the same for all transports. `copy`, `ping_pong` and the
// stream are the physical limits: a memcpy between two mappings, the way of one cache line between two processes, and a
// bounded single-producer stream of equal blocks with nothing but a memcpy, two counters and a checksum.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// The wrapping sum of all 64-bit words: reads every byte at the speed of the memory. Lengths are multiples of 8.
static uint64_t sum_words(const void* data, size_t bytes) {
    const uint64_t* words = data;
    uint64_t total = 0;
    for (size_t i = 0; i < bytes / 8; ++i) total += words[i];
    return total;
}

// Waits a little on the CPU, then lets others on it: producer and consumer may share one.
static void pause_or_yield(unsigned* turns) {
    if (++*turns % 256 == 0)
        sched_yield();
    else
        __builtin_ia32_pause();
}

// ---- how a consumer reads a group

static PyObject* touch(PyObject* self, PyObject* arrays) {
    PyObject* list = PySequence_Fast(arrays, "touch: expected a sequence of buffers");
    if (list == NULL) return NULL;
    uint64_t total = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); ++i) {
        Py_buffer view;
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(list, i), &view, PyBUF_SIMPLE) != 0) {
            Py_DECREF(list);
            return NULL;
        }
        total += sum_words(view.buf, (size_t)view.len);
        PyBuffer_Release(&view);
    }
    Py_DECREF(list);
    return PyLong_FromUnsignedLongLong(total);
}

static PyObject* stamp(PyObject* self, PyObject* arrays) {
    PyObject* list = PySequence_Fast(arrays, "stamp: expected a sequence of buffers");
    if (list == NULL) return NULL;
    Py_buffer view;
    uint64_t value = 0;
    int failed = PyObject_GetBuffer(PySequence_Fast_GET_ITEM(list, 0), &view, PyBUF_SIMPLE);
    if (!failed) {
        memcpy(&value, view.buf, sizeof value);
        PyBuffer_Release(&view);
    }
    Py_DECREF(list);
    return failed ? NULL : PyLong_FromUnsignedLongLong(value);
}

// ---- the limits

// copy(to, from, times) -> ns
static PyObject* copy(PyObject* self, PyObject* args) {
    Py_buffer to, from;
    long times;
    if (!PyArg_ParseTuple(args, "w*y*l", &to, &from, &times)) return NULL;
    int64_t start = now_ns();
    for (long i = 0; i < times; ++i) {
        memcpy(to.buf, from.buf, (size_t)from.len);
        atomic_signal_fence(memory_order_seq_cst);  // or the compiler keeps the last one only
    }
    int64_t took = now_ns() - start;
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return PyLong_FromLongLong(took);
}

// ping_pong(memory, me, turns, futex) -> ns. Side 0 moves the word from even to odd, side 1 back.
static PyObject* ping_pong(PyObject* self, PyObject* args) {
    Py_buffer memory;
    int me, use_futex;
    long turns;
    if (!PyArg_ParseTuple(args, "w*ilp", &memory, &me, &turns, &use_futex)) return NULL;
    _Atomic uint32_t* word = memory.buf;
    int64_t start = now_ns();
    Py_BEGIN_ALLOW_THREADS;
    for (long i = 0; i < turns; ++i) {
        unsigned waited = 0;
        uint32_t seen;
        while (((seen = atomic_load(word)) & 1) != (uint32_t)me) {
            if (use_futex)
                syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
            else
                pause_or_yield(&waited);
        }
        atomic_store(word, seen + 1);
        if (use_futex) syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
    Py_END_ALLOW_THREADS;
    int64_t took = now_ns() - start;
    PyBuffer_Release(&memory);
    return PyLong_FromLongLong(took);
}

// A bounded stream: counters on lines of their own, then the slots.
struct Stream {
    _Atomic uint64_t sent;
    char line0[120];
    _Atomic uint64_t received;
    char line1[4096 - 136];
    unsigned char slots[];
};

// stream_send(memory, slots, stride, body, count, pool): message i is the body with i % pool as its first word.
static PyObject* stream_send(PyObject* self, PyObject* args) {
    Py_buffer memory, body;
    unsigned long slots, stride, count, pool;
    if (!PyArg_ParseTuple(args, "w*kkw*kk", &memory, &slots, &stride, &body, &count, &pool)) return NULL;
    struct Stream* s = memory.buf;
    Py_BEGIN_ALLOW_THREADS;
    uint64_t at = atomic_load_explicit(&s->sent, memory_order_relaxed);
    for (uint64_t i = 0; i < count; ++i, ++at) {
        unsigned waited = 0;
        while (at - atomic_load_explicit(&s->received, memory_order_acquire) >= slots) pause_or_yield(&waited);
        *(uint64_t*)body.buf = i % pool;
        memcpy(s->slots + at % slots * stride, body.buf, (size_t)body.len);
        atomic_store_explicit(&s->sent, at + 1, memory_order_release);
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&memory);
    PyBuffer_Release(&body);
    Py_RETURN_NONE;
}

// stream_receive(memory, slots, stride, bytes, count) -> sum of the first `bytes` of each message
static PyObject* stream_receive(PyObject* self, PyObject* args) {
    Py_buffer memory;
    unsigned long slots, stride, bytes, count;
    if (!PyArg_ParseTuple(args, "w*kkkk", &memory, &slots, &stride, &bytes, &count)) return NULL;
    struct Stream* s = memory.buf;
    uint64_t total = 0;
    Py_BEGIN_ALLOW_THREADS;
    uint64_t at = atomic_load_explicit(&s->received, memory_order_relaxed);
    for (uint64_t i = 0; i < count; ++i, ++at) {
        unsigned waited = 0;
        while (atomic_load_explicit(&s->sent, memory_order_acquire) == at) pause_or_yield(&waited);
        total += sum_words(s->slots + at % slots * stride, bytes);
        atomic_store_explicit(&s->received, at + 1, memory_order_release);
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&memory);
    return PyLong_FromUnsignedLongLong(total);
}

static PyMethodDef methods[] = {
    {"touch", touch, METH_O, "touch(arrays) -> wrapping sum of all 64-bit words"},
    {"stamp", stamp, METH_O, "stamp(arrays) -> first 64-bit word of the first array"},
    {"copy", copy, METH_VARARGS, "copy(to, from, times) -> ns"},
    {"ping_pong", ping_pong, METH_VARARGS, "ping_pong(memory, me, turns, futex) -> ns"},
    {"stream_send", stream_send, METH_VARARGS, "stream_send(memory, slots, stride, body, count, pool)"},
    {"stream_receive", stream_receive, METH_VARARGS, "stream_receive(memory, slots, stride, bytes, count) -> sum"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "limits_c", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_limits_c(void) { return PyModule_Create(&module); }
