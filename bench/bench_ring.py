"""The ring beside its rivals and beside what the machine allows, in one run. README.md defines every number; report.py
prints them.

Invariant: the two sides of a ratio are measured in turn, round by round, in the same processes and on the same CPUs,
and each round's payload is verified. The tests only record (in `extra_info`); whether a goal is met is the report's
business, so a miss is no failure.

BENCH_SMOKE=1: tiny counts and a part of the matrix, to see that everything still runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import limits
import psutil
import pytest
from calls import Desk
from rivals import RIVALS, Iceoryx2, InProcess, Queue, Ray, Ring, RingSpin, TorchQueue, missing
from transport import CPUS, Read, Shape, Transport, cpu_ns, running, settle, stamp, touch

import mprollout as mp

SMOKE = bool(os.environ.get("BENCH_SMOKE"))
ROUNDS = 1 if SMOKE else 9
ROUND_S = 0.004 if SMOKE else 0.1  # wall time of one round of one side
KIB = 1024
SIZES = [64 * KIB] if SMOKE else [4 * KIB, 64 * KIB, 512 * KIB, 4096 * KIB]
READS = {"all": touch, "header": stamp}
PINNED = [False] if SMOKE or len(CPUS) < 2 else [False, True]  # unpinned first: see README.md on spinning

pytestmark = pytest.mark.timeout(300)


def label(size: int) -> str:
    return f"{size // KIB}KiB"


def placed(pinned: bool) -> str:
    return "pinned" if pinned else "unpinned"


def unless_missing(kind: type[Transport]) -> pytest.MarkDecorator:
    why = missing(kind)
    return pytest.mark.skipif(why is not None, reason=str(why))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process and no shared memory outlives a test."""
    before = set(os.listdir("/dev/shm"))
    yield
    children = [p for p in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())]
    _, alive = psutil.wait_procs(children, timeout=3)
    assert not alive, f"left behind: {alive}"
    left, deadline = set(os.listdir("/dev/shm")) - before, time.monotonic() + 3
    while left := left & set(os.listdir("/dev/shm")):  # those of a run beside this one come and go
        assert time.monotonic() < deadline, f"left behind in /dev/shm: {sorted(left)}"
        time.sleep(0.05)


def busy_ns() -> int:
    """CPU time that this machine's CPUs spent on anything, theft by its host included, in steps of 10 ms."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + softirq + steal) * (10**9 // os.sysconf("SC_CLK_TCK"))


class Foreign:
    """Share of the machine's CPU time that went to others while it ran."""

    def __init__(self, pids: Sequence[int]) -> None:
        """`pids`: of the processes that are no others, beside this one."""
        self.pids = [os.getpid(), *pids]
        self.since = time.perf_counter_ns(), busy_ns(), self.own()

    def own(self) -> int:
        return sum(cpu_ns(pid) for pid in self.pids)

    def share(self) -> float:
        wall, busy, own = self.since
        elapsed = (time.perf_counter_ns() - wall) * (os.cpu_count() or 1)
        return (busy_ns() - busy - (self.own() - own)) / elapsed


def compare(
    benchmark: Any, pair: Sequence[Transport], measure: Callable[[Transport], dict[str, Any]], **about: Any
) -> None:
    """Our round, their round, and again. pytest-benchmark times theirs; the report reads `rounds`."""
    ours, theirs = pair
    rounds: list[dict[str, Any]] = []

    def first() -> None:
        rounds.append({"foreign": Foreign(ours.pids + theirs.pids), "ours": measure(ours)})

    def second() -> None:
        rounds[-1]["theirs"] = measure(theirs)
        rounds[-1]["foreign"] = rounds[-1]["foreign"].share()

    benchmark.pedantic(second, setup=first, rounds=ROUNDS)
    benchmark.extra_info.update(about, ours=ours.name, theirs=theirs.name, rounds=rounds)


def speed(pair: Sequence[Transport], read: Read) -> Callable[[Transport], dict[str, Any]]:
    """Warm both up; a measure of rounds as long as ROUND_S."""
    counts = {transport: settle(transport, read, ROUND_S) for transport in pair}
    return lambda transport: dataclasses.asdict(transport.round(counts[transport], read))


def throughput_cases() -> list[Any]:
    cases = []
    for pinned, kind, size, read in itertools.product(PINNED, (*RIVALS, limits.CStream), SIZES, READS):
        if kind in (TorchQueue, Ray) and size not in (64 * KIB, 512 * KIB):
            continue  # milliseconds a group: two sizes tell it
        if kind is Ray and (SMOKE or pinned or read == "header"):
            continue  # a start takes ten seconds; its own processes are nowhere pinned
        name = f"{kind.__name__}-{label(size)}-{read}-{placed(pinned)}"
        cases.append(pytest.param(kind, size, read, pinned, id=name, marks=unless_missing(kind)))
    return cases


@pytest.mark.parametrize(("kind", "size", "read", "pinned"), throughput_cases())
def test_throughput(benchmark: Any, kind: type[Transport], size: int, read: str, pinned: bool) -> None:
    """One producer, one consumer."""
    shape = Shape(size, pinned=pinned)
    about = {"test": "throughput", "size": size, "read": read, "pinned": pinned}
    with running((Ring, shape), (kind, shape)) as pair:
        compare(benchmark, pair, speed(pair, READS[read]), **about)


@pytest.mark.parametrize("pinned", PINNED, ids=placed)
@pytest.mark.parametrize("producers", [2, 4])
@pytest.mark.parametrize("kind", [Ring, Queue])
def test_producers(benchmark: Any, kind: type[Transport], producers: int, pinned: bool) -> None:
    """Several producers against one of the same transport."""
    several, one = Shape(64 * KIB, producers, pinned=pinned), Shape(64 * KIB, pinned=pinned)
    about = {"test": "producers", "size": 64 * KIB, "pinned": pinned, "producers": producers}
    with running((kind, several), (kind, one)) as pair:
        compare(benchmark, pair, speed(pair, touch), **about)


def latency_cases() -> list[Any]:
    cases = []
    for pinned in PINNED:
        pairs = [(ours, InProcess, size) for size in (4 * KIB, 64 * KIB) for ours in (Ring, RingSpin)]
        # torch's queue and Ray do not carry 1,000 groups a second; iceoryx2's consumer spins, so ours does.
        others = [kind for kind in RIVALS if kind not in (InProcess, TorchQueue, Ray)]
        pairs += [(RingSpin if theirs is Iceoryx2 else Ring, theirs, 64 * KIB) for theirs in others]
        for ours, theirs, size in pairs:
            name = f"{ours.__name__}-{theirs.__name__}-{label(size)}-{placed(pinned)}"
            cases.append(pytest.param(ours, theirs, size, pinned, id=name, marks=unless_missing(theirs)))
    return cases


@pytest.mark.parametrize(("ours", "theirs", "size", "pinned"), latency_cases())
def test_latency(benchmark: Any, ours: type[Transport], theirs: type[Transport], size: int, pinned: bool) -> None:
    """One way, one group a millisecond: from before the producer's call until the consumer has arrays."""
    shape, count = Shape(size, pinned=pinned, batch=1), 20 if SMOKE else 150
    took: list[int] = []

    def read(arrays: Any) -> int:
        took.append(time.monotonic_ns() - stamp(arrays))
        return 0

    def measure(transport: Transport) -> dict[str, float]:
        took.clear()
        transport.round(count, read, period_ns=1_000_000)
        took.sort()
        return {"median": took[len(took) // 2] / 1e9, "p99": took[len(took) * 99 // 100] / 1e9}

    about = {"test": "latency", "size": size, "pinned": pinned}
    with running((ours, shape), (theirs, shape)) as pair:
        for transport in pair:
            transport.round(20, read, period_ns=1_000_000)
        compare(benchmark, pair, measure, **about)


# ---- the limits


@pytest.mark.parametrize("size", SIZES, ids=label)
def test_copy(benchmark: Any, size: int) -> None:
    """memcpy from one mapping to another."""
    times = max(4, (1 if SMOKE else 64) * 1024 * KIB // size)
    took: list[float] = []
    benchmark.pedantic(lambda: took.append(limits.copy_ns(size, times)), rounds=ROUNDS)
    benchmark.extra_info.update(test="copy", size=size, seconds=statistics.median(took) / 1e9)


@pytest.mark.parametrize("pinned", PINNED, ids=placed)
@pytest.mark.parametrize("futex", [False, True], ids=["spin", "futex"])
def test_ping_pong(benchmark: Any, futex: bool, pinned: bool) -> None:
    """One word from one process to the other and back."""
    took: list[float] = []
    turns = 200 if SMOKE else 4000
    benchmark.pedantic(lambda: took.append(limits.ping_pong_ns(turns, futex, pinned)), rounds=ROUNDS)
    benchmark.extra_info.update(test="ping_pong", futex=futex, pinned=pinned, seconds=statistics.median(took) / 1e9)


# ---- the calls alone


def cycles(benchmark: Any, capacity: int, workers: int, n: int) -> dict[str, float]:
    """The median of each phase over many cycles on one desk."""
    desk, rows = Desk(capacity, workers, n), []
    for _ in range(5):
        desk.cycle(n)
    benchmark.pedantic(lambda: rows.append(desk.cycle(n)), rounds=3 if SMOKE else 300)
    desk.close()
    return {phase: statistics.median(row[phase] for row in rows) for phase in rows[0]}


def test_calls(benchmark: Any) -> None:
    """64 groups at once."""
    benchmark.extra_info.update(test="calls", n=64, seconds=cycles(benchmark, 64, 1, 64))


@pytest.mark.parametrize("capacity", [16, 65536] if SMOKE else [16, 64, 256, 1024, 4096, 16384, 65536])
def test_capacity(benchmark: Any, capacity: int) -> None:
    """16 live groups in tables of growing size."""
    benchmark.extra_info.update(test="capacity", x=capacity, seconds=cycles(benchmark, capacity, 1, 16))


@pytest.mark.parametrize("workers", [1, 64] if SMOKE else [1, 2, 4, 8, 16, 32, 64])
def test_attached(benchmark: Any, workers: int) -> None:
    """64 live groups spread over a growing number of workers."""
    benchmark.extra_info.update(test="attached", x=workers, seconds=cycles(benchmark, 64, workers, 64))


# ---- idleness


@pytest.mark.parametrize("state", ["gate closed", "trainer waits"])
def test_idle(benchmark: Any, state: str) -> None:
    """A whole engine that has nothing to do: CPU of the trainer's process and of the worker's."""
    seconds = 0.5 if SMOKE else 10.0
    waits = state == "trainer waits"
    config = mp.EngineConfig(
        source=mp.SourceConfig(rows=[{"prompt": f"{i}", "answer": f"{i}"} for i in range(100)], epochs=1),
        generator=mp.SimulatedConfig(mean_tokens=12, prefill_s=1000 if waits else 0),
        sampling=mp.SamplingConfig(group_size=4, max_new_tokens=32),
        reward=mp.RewardConfig("exact"),
        workers=mp.WorkerConfig(devices=["cpu"], max_running_samples=16),
        gate=mp.GateConfig(max_live_groups=4),
    )
    result: dict[str, float] = {}
    with mp.RolloutEngine(config) as engine:
        deadline = time.monotonic() + 30
        while not (engine.stats().running_samples if waits else engine.stats().pending == 4):
            assert time.monotonic() < deadline, engine.stats()
            time.sleep(0.01)
        time.sleep(0.3)
        pids = {"trainer": os.getpid(), "worker": engine.stats().workers[0].pid}

        def idle() -> None:
            before = {who: cpu_ns(pid) for who, pid in pids.items()}
            start = time.perf_counter_ns()
            if waits:
                with pytest.raises(TimeoutError):
                    engine.get(1, timeout=seconds)
            else:
                time.sleep(seconds)
            wall = time.perf_counter_ns() - start
            result.update({who: (cpu_ns(pid) - before[who]) / wall for who, pid in pids.items()})

        benchmark.pedantic(idle, rounds=1)
    benchmark.extra_info.update(test="idle", state=state, share=result)
