"""The whole engine beside what its settings allow: refill, the trainer's CPU, the way from publish to `get`, the cost of `get`.

Everything real but the model (`SimulatedGenerator`). As in bench_ring.py the tests only record; report.py judges.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterable
from typing import Any

import pytest
from bench_ring import SMOKE, Foreign
from transport import cpu_ns

import mprollout as mp
from mprollout import _native
from mprollout.generator import VersionSpan
from mprollout.ring import RolledSample, encode_group
from mprollout.schema import Meta, schema_bytes

pytestmark = pytest.mark.timeout(300)
ORDERS = ("publish order", "ticket order")


async def at_once(sample: mp.RewardInput) -> float:
    """A reward that costs nothing: what is measured is the engine."""
    return 1.0


def config(generator: mp.SimulatedConfig, workers: int, places: int, live: int, **changes: Any) -> mp.EngineConfig:
    parts: dict[str, Any] = {
        "source": mp.SourceConfig(rows=[{"prompt": f"{i}", "answer": f"{i}"} for i in range(1000)]),
        "generator": generator,
        "sampling": mp.SamplingConfig(group_size=1, max_new_tokens=64, ignore_eos=True),
        "reward": mp.RewardConfig(at_once),
        "workers": mp.WorkerConfig(devices=["cpu"] * workers, max_running_samples=places),
        "gate": mp.GateConfig(max_live_groups=live),
    }
    return mp.EngineConfig(**(parts | changes))


def take_all(engine: mp.RolloutEngine, n: int, seconds: float) -> int:
    """Groups taken in so many seconds, n at a time."""
    deadline, taken = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        with engine.get(n, timeout=30) as batch:
            taken += len(batch)
    return taken


def others(engine: mp.RolloutEngine) -> Foreign:
    return Foreign([worker.pid for worker in engine.stats().workers])


def test_refill(benchmark: Any) -> None:
    """8 places, 50 ms a sample, groups of one: 160 groups a second if no place is ever empty."""
    generator = mp.SimulatedConfig(tokens_per_s=1280)
    row: dict[str, float] = {}
    with mp.RolloutEngine(config(generator, workers=1, places=8, live=64)) as engine:
        take_all(engine, 8, 0.5)

        def measure() -> None:
            foreign, start = others(engine), time.perf_counter()
            taken = take_all(engine, 8, 0.5 if SMOKE else 5.0)
            row["groups_per_s"] = taken / (time.perf_counter() - start)
            row["foreign"] = foreign.share()

        benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update(test="refill", ideal=160.0, **row)


def gate(order: str, live: int) -> mp.GateConfig:
    strict = (
        {"groups_per_update": 64, "max_lag": 100_000} if order == "ticket order" else {}
    )  # so far that it never binds
    return mp.GateConfig(max_live_groups=live, **strict)


@pytest.mark.parametrize("order", ORDERS)
def test_trainer_cpu(benchmark: Any, order: str) -> None:
    """8 workers x 512 running samples, groups of 8, about 200 groups a second: what the engine costs the trainer's process.

    The trainer takes 8 groups at a time and releases them; nothing else runs in its process.
    """
    workers, places, size = (2, 64, 8) if SMOKE else (8, 512, 8)
    live = workers * places // size + 64
    settings = config(
        mp.SimulatedConfig(tokens_per_s=100, mean_tokens=256, sigma=0.2),
        workers, places, live,
        sampling=mp.SamplingConfig(group_size=size, max_new_tokens=512),
        gate=gate(order, live),
    )  # fmt: skip
    row: dict[str, float] = {}
    with mp.RolloutEngine(settings) as engine:
        take_all(engine, 8, 1.0 if SMOKE else 5.0)  # the samples that began together have drifted apart

        def measure() -> None:
            foreign, cpu, start = others(engine), cpu_ns(os.getpid()), time.perf_counter()
            taken = take_all(engine, 8, 0.5 if SMOKE else 10.0)
            row["groups_per_s"] = taken / (time.perf_counter() - start)
            row["cpu_s_per_group"] = (cpu_ns(os.getpid()) - cpu) / 1e9 / taken
            row["running"] = sum(w.running_samples for w in engine.stats().workers)
            row["foreign"] = foreign.share()

        benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update(test="trainer_cpu", order=order, **row)


def _publish_now_and_then(segment: _native.Segment, groups: int) -> None:
    """A worker's last two steps and nothing else: a group each 2 ms, stamped and published."""
    producer = _native.Producer(segment, 0)
    sample = RolledSample(
        token_ids=[1] * 8,
        logprobs=[0.0] * 8,
        loss_mask=bytearray(8),
        finish_reason="stop",
        versions=[VersionSpan(0, 0, 8)],
    )
    meta = [0] * len(Meta._fields)
    fields = encode_group(meta, [1], [sample], [1.0])
    for _ in range(groups):
        time.sleep(0.002)
        if (claim := producer.claim()) is None:
            continue
        meta[Meta._fields.index("published_ns")] = time.monotonic_ns()
        producer.publish(claim, fields)


def test_publish_to_take(benchmark: Any) -> None:
    """What of `publish_to_get` is the machine's: the same between two processes with the ring's bare handles."""
    took: list[float] = []
    segment = _native.Segment.create(
        workers=1, entries=64, cells=64, descriptors=128, arena_bytes=1 << 20, max_group_bytes=8192, max_prompt_bytes=64, schema=schema_bytes()
    )  # fmt: skip
    admitter, stamp = _native.Admitter(segment), Meta._fields.index("published_ns")
    tickets = itertools.count()
    for _ in range(32):
        admitter.admit(next(tickets), b"")
    producer = os.fork()
    if producer == 0:
        _publish_now_and_then(segment, 400 if SMOKE else 4000)
        os._exit(0)
    consumer = _native.Consumer(segment)

    def measure() -> None:
        while leases := consumer.take(8, 1.0):
            now = time.monotonic_ns()
            consumer.deliver(leases)
            took.append((now - leases[-1].field(0, "<i8")[stamp]) / 1e9)
            _native.release(leases)
            admitter.sweep()
            for _ in leases:
                admitter.admit(next(tickets), b"")

    try:
        benchmark.pedantic(measure, rounds=1)
    finally:
        os.waitpid(producer, 0)
        consumer.close()
        segment.close()
    took.sort()
    benchmark.extra_info.update(test="publish_to_take", median=took[len(took) // 2], p99=took[len(took) * 99 // 100])


def test_publish_to_get(benchmark: Any) -> None:
    """From the last publish that a waiting `get(8)` needs until it returns a batch.

    Eight workers' samples of equal length would end at once; here one worker ends a sample about each 2 ms, so the taker sleeps before the last.
    """
    took: list[float] = []
    settings = config(
        mp.SimulatedConfig(tokens_per_s=4000, lengths=[8]),
        1,
        1,
        64,
        sampling=mp.SamplingConfig(group_size=1, max_new_tokens=8),
    )
    with mp.RolloutEngine(settings) as engine:
        take_all(engine, 8, 0.3)

        def measure() -> None:
            deadline = time.monotonic() + (0.5 if SMOKE else 8.0)
            while time.monotonic() < deadline:
                with engine.get(8, timeout=10) as batch:
                    now = time.monotonic_ns()
                    took.append((now - max(group.meta.published_ns for group in batch)) / 1e9)

        benchmark.pedantic(measure, rounds=1)
    took.sort()
    benchmark.extra_info.update(test="publish_to_get", median=took[len(took) // 2], p99=took[len(took) * 99 // 100])


@pytest.mark.parametrize("order", ORDERS)
def test_get_is_flat(benchmark: Any, order: str) -> None:
    """`get(8)` and its release with 4,096 groups pending down to none, after 0 to 40,000 tickets; the generator is as fast as it can be.

    Fastest of many calls in each bin: others of this machine's few CPUs are at work for the engine meanwhile.
    """
    depth, rows = (64, 256) if SMOKE else (4096, 40_960)
    settings = config(
        mp.SimulatedConfig(), 1, 64, depth,
        source=mp.SourceConfig(rows=[{"prompt": f"{i}", "answer": f"{i}"} for i in range(rows)], epochs=1),
        sampling=mp.SamplingConfig(group_size=1, max_new_tokens=4),
        gate=gate(order, depth),
    )  # fmt: skip
    costs: list[tuple[int, int, float]] = []  # tickets seen, pending, seconds
    with mp.RolloutEngine(settings) as engine:

        def fill() -> None:
            deadline = time.monotonic() + 120
            while (stats := engine.stats()).pending + stats.held < min(depth, rows - stats.taken):
                assert time.monotonic() < deadline, stats
                time.sleep(0.05)

        def measure() -> None:
            taken = 0
            while taken < rows:
                fill()
                for left in range(min(depth, rows - taken), 0, -8):
                    start = time.perf_counter()
                    with engine.get(8, timeout=30):
                        pass
                    costs.append((taken, left, time.perf_counter() - start))
                    taken += 8

        benchmark.pedantic(measure, rounds=1)
    # With the source's end nothing refills, so the last pass goes from full to empty; in the others the workers refill beside it.
    last = [(left, cost) for seen, left, cost in costs if seen >= rows - depth]
    full, empty = (
        median_of(cost for left, cost in last if left > depth // 2),
        median_of(cost for left, cost in last if left <= depth // 4),
    )
    early, late = (
        median_of(cost for seen, _, cost in costs if seen < depth),
        median_of(cost for seen, _, cost in costs if rows - 2 * depth <= seen < rows - depth),
    )
    benchmark.extra_info.update(test="get", order=order, full=full, empty=empty, early=early, late=late)


def median_of(values: Iterable[float]) -> float:
    return statistics.median(values)
