"""What each call of the ring costs, in one process: no other process, no waiting, nothing but the calls.

`Desk` holds all handles of a segment; `cycle` brings n small groups through it and says what each phase took. The numbers are of the
calls as `rivals.Ring` makes them: admit, claim, publish, take (deliver and five views included), release, sweep.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from transport import FIELDS

from mprollout import _native

PHASES = ("admit", "claim", "publish", "take", "release", "sweep")
ARRAYS = [np.arange(8, dtype=dtype) for _, dtype in FIELDS]  # 8 items each: the copy costs next to nothing


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
        clock, marks = time.perf_counter, [time.perf_counter()]
        fields = [(i, dtype) for i, (_, dtype) in enumerate(FIELDS)]
        producers = [self.producers[i % len(self.producers)] for i in range(n)]
        for ticket in range(self.ticket, self.ticket + n):
            self.admitter.admit(ticket, b"")
        marks.append(clock())
        claims: list[Any] = [producer.claim() for producer in producers]
        marks.append(clock())
        for producer, claim in zip(producers, claims, strict=True):
            producer.publish(claim, ARRAYS)
        marks.append(clock())
        leases: list[Any] = [self.consumer.take() for _ in range(n)]
        self.consumer.deliver(leases)
        views = [[lease.field(i, dtype) for i, dtype in fields] for lease in leases]
        marks.append(clock())
        assert [lease.ticket for lease in leases] == list(range(self.ticket, self.ticket + n))
        del views
        middle = clock()
        for lease in leases:
            lease.release()
        marks.append(clock())
        swept = self.admitter.sweep()
        marks.append(clock())
        assert len(swept) == n
        self.ticket += n
        starts = [*marks[:4], middle, marks[5 - 1]]
        return {phase: (end - start) / n for phase, start, end in zip(PHASES, starts, marks[1:], strict=True)}

    def close(self) -> None:
        self.consumer.close()
        self.segment.close()
