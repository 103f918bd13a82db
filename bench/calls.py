"""What each call of the ring costs, in one process: no other process, no waiting, nothing but the calls.

`Desk` holds all handles of a segment; `cycle` brings n small groups through it and says what each phase took.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from transport import FIELDS

from mprollout import _native

PHASES = ("admit", "claim", "publish", "take", "drop", "release", "sweep")  # take: deliver and views; drop: their death
DTYPES = [dtype for _, dtype in FIELDS]
ARRAYS = [np.arange(8, dtype=dtype) for dtype in DTYPES]  # 8 items each: the copy costs next to nothing


class Desk:
    """One segment and all who work on it. `capacity` is entries and cells; groups pass through the workers in turn."""

    def __init__(self, capacity: int, workers: int, n: int) -> None:
        room = _native.group_bytes([array.nbytes for array in ARRAYS])
        self.segment = _native.Segment.create(
            workers=workers,
            entries=capacity,
            cells=capacity,
            descriptors=min(4 * n, 1 << 14),
            arena_bytes=4 * n * room,
            max_group_bytes=room,
            max_prompt_bytes=64,
            schema=b"",
        )
        self.admitter, self.consumer = _native.Admitter(self.segment), _native.Consumer(self.segment)
        self.producers = [_native.Producer(self.segment, worker) for worker in range(workers)]
        self.ticket = 0

    def cycle(self, n: int) -> dict[str, float]:
        """Bring n groups from admission to sweep; seconds a group, by phase."""
        producers = [self.producers[i % len(self.producers)] for i in range(n)]
        tickets = range(self.ticket, self.ticket + n)
        self.ticket += n
        marks = [time.perf_counter()]

        for ticket in tickets:
            self.admitter.admit(ticket, b"")
        marks.append(time.perf_counter())
        claims: list[Any] = [producer.claim() for producer in producers]
        marks.append(time.perf_counter())
        for producer, claim in zip(producers, claims, strict=True):
            producer.publish(claim, ARRAYS)
        marks.append(time.perf_counter())
        leases = self.consumer.try_take(n)
        self.consumer.deliver(leases)
        views = _native.views(leases, DTYPES)
        marks.append(time.perf_counter())
        del views
        marks.append(time.perf_counter())
        _native.release(leases)
        marks.append(time.perf_counter())
        swept = self.admitter.sweep()
        marks.append(time.perf_counter())

        assert [lease.ticket for lease in leases] == list(tickets)
        assert len(swept) == n
        return {phase: (b - a) / n for phase, a, b in zip(PHASES, marks, marks[1:], strict=False)}

    def close(self) -> None:
        self.consumer.close()
        self.segment.close()
