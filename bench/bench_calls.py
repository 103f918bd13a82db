"""What the ring's own calls cost in one process: a group of five small arrays, in batches of 64, over tables of all sizes.

Each round admits, claims, publishes, takes, makes five views a group, delivers, releases and sweeps a batch; `extra_info` has the
median of each part in nanoseconds a group, and the payload is verified once. Nobody sleeps here, so nothing is a system call.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from mprollout import _native

BATCH, ROUNDS = 64, 300
ARRAYS = [
    np.arange(16, dtype="<i4"),
    np.arange(16, dtype="<f4"),
    np.ones(16, "|u1"),
    np.arange(4, dtype="<i8"),
    np.arange(8, dtype="<f4"),
]
DTYPES = ("<i4", "<f4", "|u1", "<i8", "<f4")


@pytest.mark.parametrize("workers", [1, 64])
@pytest.mark.parametrize("entries", [64, 1024, 65536])
def test_calls(benchmark: Any, entries: int, workers: int) -> None:
    benchmark.group = "all calls of a batch of 64 groups"
    segment = _native.Segment.create(
        workers=workers,
        entries=entries,
        cells=entries,
        descriptors=256,
        arena_bytes=256 * 1024,
        max_group_bytes=1024,
        max_prompt_bytes=64,
        schema=b"",
    )
    admitter, consumer = _native.Admitter(segment), _native.Consumer(segment)
    producers = [_native.Producer(segment, worker) for worker in range(workers)]
    parts: dict[str, list[int]] = {}
    ticket, clock = 0, time.perf_counter_ns

    def run() -> None:
        nonlocal ticket
        times = [clock()]
        for _ in range(BATCH):
            admitter.admit(ticket, b"prompt")
            ticket += 1
        times.append(clock())
        claims = [(p := producers[i % workers], p.claim()) for i in range(BATCH)]
        times.append(clock())
        for producer, claim in claims:
            producer.publish(claim, ARRAYS)  # type: ignore[arg-type]
        times.append(clock())
        leases = consumer.try_take(BATCH)
        times.append(clock())
        views = _native.views(leases, DTYPES)
        times.append(clock())
        consumer.deliver(leases)
        times.append(clock())
        assert len(views) == BATCH
        del views
        times.append(clock())
        assert _native.release(leases) == 0
        times.append(clock())
        assert len(admitter.sweep()) == BATCH
        times.append(clock())
        names = ("admit", "claim", "publish", "take", "five views", "deliver", "views die", "release", "sweep")
        for name, begin, end in zip(names, times, times[1:], strict=False):
            parts.setdefault(name, []).append(end - begin)

    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=10)
    benchmark.extra_info.update({name: round(float(np.median(ns)) / BATCH, 1) for name, ns in parts.items()})
    assert admitter.admit(ticket, b"")
    claim = producers[0].claim()
    assert claim is not None
    assert producers[0].publish(claim, ARRAYS)
    [lease] = consumer.try_take(1)
    assert all(
        np.array_equal(view, array) for view, array in zip(_native.views([lease], DTYPES)[0], ARRAYS, strict=True)
    )
    consumer.close()
