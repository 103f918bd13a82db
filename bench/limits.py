"""The physical limits, measured by limits.c over memory that the ring's own code made: what no transport can beat.

`CStream` has the shape of a transport, so that it runs against the ring round by round; the others are single numbers.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

from transport import CPUS, FORK, POOL, Group, Read, Shape, Transport, limits_c, payload, touch

from mprollout import _native

PAGE = 4096
ARENAS = 88 + 8 * 11  # where the header says where the arenas start: the twelfth offset (native/README.md)


def shared(nbytes: int) -> tuple[_native.Segment, int]:
    """A segment with room for `nbytes` in one arena, and where that arena starts: the ring's own kind of pages."""
    segment = _native.Segment.create(
        workers=1,
        entries=1,
        cells=2,
        descriptors=2,
        arena_bytes=-(-nbytes // PAGE) * PAGE + PAGE,
        max_group_bytes=PAGE,
        max_prompt_bytes=64,
        schema=b"",
    )
    (arena,) = struct.unpack("<Q", os.pread(segment.fd, 8, ARENAS))
    return segment, arena


def arena_of(segment: _native.Segment, arena: int) -> memoryview:
    """A mapping of it, from the arena on, with the advice that the ring gives."""
    mapping = mmap.mmap(segment.fd, segment.size_bytes)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)[arena:]


class CStream(Transport):
    """A memcpy and a checksum in C, a few slots, two counters: no Python, no tickets, no deaths."""

    name = "C stream"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.body = bytearray(b"".join(payload(shape.size)))
        self.stride = -(-len(self.body) // 64) * 64
        self.slots = max(2, min(64, (4 << 20) // shape.size))  # measured: more of them leave the cache, fewer wait
        self.segment, self.arena = shared(PAGE + self.slots * self.stride)

    def all_sender(self, worker: int) -> Callable[[Iterator[Group]], int]:
        memory = arena_of(self.segment, self.arena)

        def send(groups: Iterator[Group]) -> int:
            count = sum(1 for _ in groups)
            limits_c.stream_send(memory, self.slots, self.stride, self.body, count, POOL)
            return count

        return send

    def open(self) -> None:
        self.memory: Any = arena_of(self.segment, self.arena)

    def consume(self, count: int, read: Read) -> int:
        nbytes = len(self.body) if read is touch else 8
        return limits_c.stream_receive(self.memory, self.slots, self.stride, nbytes, count)

    def release(self) -> None:
        self.memory = None
        self.segment.close()


def copy_ns(size: int, times: int) -> float:
    """Mean of `times` memcpy of `size` bytes from one mapping of shared memory to another."""
    (source, at), (target, to) = shared(size), shared(size)
    return limits_c.copy(arena_of(target, to)[:size], arena_of(source, at)[:size], times) / times


def ping_pong_ns(turns: int, futex: bool, pinned: bool) -> float:
    """Half a round trip of one word between two processes: by spinning, or by futex."""
    segment, arena = shared(PAGE)
    memory, shape = arena_of(segment, arena), Shape(PAGE, pinned=pinned)

    def other(parent: int) -> None:
        _native.die_with_parent(parent)
        os.sched_setaffinity(0, shape.producer_cpus(0))
        limits_c.ping_pong(memory, 1, turns, futex)

    process = FORK.Process(target=other, args=(os.getpid(),), daemon=True)
    process.start()
    try:
        if pinned:
            os.sched_setaffinity(0, {CPUS[0]})
        return limits_c.ping_pong(memory, 0, turns, futex) / turns / 2
    finally:
        os.sched_setaffinity(0, set(CPUS))
        process.join(3)
        process.kill()
        process.join()
        process.close()
