"""`Transport`: one way to bring groups from producer processes to this one, and what a round of it costs.

    parent: Transport(shape) -> fork -> open()      child: sender(worker) -> send(group), as often as ordered
    parent: round(count, read) = order the producers, consume(count, read), read the clocks

A group is `payload(size)`: five arrays in the order of FIELDS, the same for all transports. Its first word is a stamp,
and every round is verified: the sum over what was read must be the sum over what was sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import multiprocessing
import os
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mprollout import _native

FIELDS = (("meta", "<i8"), ("rewards", "<f4"), ("token_ids", "<i4"), ("logprobs", "<f4"), ("loss_mask", "|u1"))
POOL = 4096  # groups that differ by their stamp; more than any transport has under way
CPUS = sorted(os.sched_getaffinity(0))
FORK = multiprocessing.get_context("fork")  # a child inherits descriptors, and no transport pays for an import

Group = Sequence[Any]  # arrays in the order of FIELDS
Read = Callable[[Any], int]  # what the consumer does with a group; returns what is summed up and verified


def compile_limits() -> Any:
    """limits.c as a module, built by gcc when the source is newer."""
    source = Path(__file__).with_name("limits.c")
    target = source.parents[1] / "build" / "bench" / f"limits_c{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        target.parent.mkdir(parents=True, exist_ok=True)
        command = ["gcc", "-O3", "-march=native", "-Wall", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
        subprocess.run([*command, str(source), "-o", str(target)], check=True)
    spec = importlib.util.spec_from_file_location("limits_c", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


limits_c = compile_limits()
touch: Read = limits_c.touch  # reads every byte
stamp: Read = limits_c.stamp  # reads the first word only


@dataclass(frozen=True)
class Shape:
    """What is carried, by how many producers, and where they run."""

    size: int  # bytes of a group
    producers: int = 1
    pinned: bool = False  # the consumer on the first CPU, producers on the others
    batch: int = 0  # groups that the consumer asks for at once, where the transport can; 0: a quarter of depth

    @property
    def depth(self) -> int:
        """Groups under way at most, where the transport has a bound: 4 MiB of them, 8 to 64."""
        return max(8, min(64, (4 << 20) // self.size))

    @property
    def step(self) -> int:
        return self.batch or self.depth // 4

    def producer_cpus(self, worker: int) -> set[int]:
        others = CPUS[1:] or CPUS
        return {others[worker % len(others)]} if self.pinned else set(CPUS)


def payload(size: int) -> list[np.ndarray]:
    """Stamp and three more words, eight rewards, then 9 bytes a token. All lengths are multiples of 8 bytes."""
    tokens = (size - 64) // 72 * 8
    ids, logprobs = np.arange(tokens, dtype="<i4"), np.linspace(-3, 0, tokens, dtype="<f4")
    return [np.zeros(4, "<i8"), np.arange(8, dtype="<f4"), ids, logprobs, np.ones(tokens, "|u1")]


def stamped(size: int) -> list[list[np.ndarray]]:
    """POOL groups that share all but the first array."""
    metas, rest = np.zeros((POOL, 4), "<i8"), payload(size)[1:]
    metas[:, 0] = np.arange(POOL)
    return [[meta, *rest] for meta in metas]


def expected(size: int, sent: Sequence[int], read: Read) -> int:
    """What a consumer's sum must be when each producer sent so many groups."""
    total = sum(n // POOL * (POOL * (POOL - 1) // 2) + (n % POOL) * (n % POOL - 1) // 2 for n in sent)
    return total + (sum(sent) * touch(payload(size)) if read is touch else 0)


def split(buffer: Any, layout: Sequence[tuple[str, int, int]]) -> list[np.ndarray]:
    """Arrays over one buffer that holds the fields at the offsets of `layout`. No copy."""
    return [np.frombuffer(buffer, dtype, count, offset) for dtype, count, offset in layout]


def layout(size: int) -> list[tuple[str, int, int]]:
    """(dtype, items, offset) of each field in a buffer that holds them back to back."""
    arrays = payload(size)
    offsets = itertools.accumulate((array.nbytes for array in arrays), initial=0)
    return [(dtype, len(array), at) for (_, dtype), array, at in zip(FIELDS, arrays, offsets, strict=False)]


def paced(groups: Iterator[Group], period_ns: int) -> Iterator[Group]:
    """One group a period, its stamp the time of its sending."""
    due = time.monotonic_ns()
    for group in groups:
        due += period_ns
        time.sleep(max(0, due - time.monotonic_ns()) / 1e9)
        group[0][0] = time.monotonic_ns()
        yield group


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, by its own clock."""
    return time.clock_gettime_ns(ctypes.c_int(~pid << 3 | 2).value)


@dataclass
class Round:
    """One round: wall seconds and CPU seconds a group, groups by producer."""

    count: int
    seconds: float
    trainer_cpu: float
    producer_cpu: float
    sent: list[int]


class Transport:
    """Base: producers are forked processes that wait on a pipe for orders and leave when told, or are killed.

    A subclass makes its channel in `__init__` (before the fork), its end of it in `sender` (in the producer) and in
    `open` (in the consumer, after the fork), and says how groups are consumed.
    """

    name: ClassVar[str]
    module: ClassVar[str | None] = None  # what must be installed

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.controls: list[Any] = []
        self.processes: list[Any] = []

    # -- what a subclass says

    def open(self) -> None:
        """The consumer's end."""

    def sender(self, worker: int) -> Callable[[Group], None]:
        """The producer's end: a function that sends one group."""
        raise NotImplementedError

    def all_sender(self, worker: int) -> Callable[[Iterator[Group]], int]:
        """The producer's end: a function that sends all groups of an order and says how many."""
        send = self.sender(worker)

        def send_all(groups: Iterator[Group]) -> int:
            sent = 0
            for group in groups:
                send(group)
                sent += 1
            return sent

        return send_all

    def consume(self, count: int, read: Read) -> int:
        """Receive exactly `count` groups, read each, give its memory back; the sum of what read() said."""
        raise NotImplementedError

    def share(self, count: int) -> int:
        """Groups that each producer is told to send."""
        return count // self.shape.producers

    def sent(self, count: int) -> list[int]:
        """What each producer says that it sent, once all have."""
        return [control.recv() for control in self.controls]

    def release(self) -> None:
        """Drop the consumer's end, after the producers have gone."""

    # -- a life

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def start(self) -> None:
        for worker in range(self.shape.producers):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=self._child, args=(worker, theirs, os.getpid()), daemon=True)
            process.start()
            self.controls.append(ours)
            self.processes.append(process)

    def _child(self, worker: int, control: Any, parent: int) -> None:
        _native.die_with_parent(parent)
        os.sched_setaffinity(0, self.shape.producer_cpus(worker))
        self.produce(worker, control)

    def produce(self, worker: int, control: Any) -> None:
        send, pool = self.all_sender(worker), stamped(self.shape.size)
        control.send(0)
        for count, period_ns in iter(control.recv, None):
            groups = itertools.islice(itertools.cycle(pool), count)
            control.send(send(paced(groups, period_ns) if period_ns else groups))

    def round(self, count: int, read: Read, period_ns: int = 0) -> Round:
        """Everything from the order to the last group read; asserts that what was read is what was sent."""
        cpu, trainer, start = self._producers_ns(), time.process_time_ns(), time.perf_counter_ns()
        for control in self.controls:
            control.send((self.share(count), period_ns))
        total = self.consume(count, read)
        wall, trainer = time.perf_counter_ns() - start, time.process_time_ns() - trainer
        cpu = self._producers_ns() - cpu
        sent = self.sent(count)
        assert sum(sent) == count, f"{self.name}: {count} groups consumed, {sent} sent"
        if read in (touch, stamp):
            assert total % 2**64 == expected(self.shape.size, sent, read) % 2**64, f"{self.name}: not what was sent"
        return Round(count, wall / 1e9 / count, trainer / 1e9 / count, cpu / 1e9 / count, sent)

    def _producers_ns(self) -> int:
        return sum(cpu_ns(pid) for pid in self.pids)

    def close(self) -> None:
        """Ask the producers to leave, kill by pid what did not, join all."""
        for control in self.controls:
            with contextlib.suppress(OSError):
                control.send(None)
        for process in self.processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for control in self.controls:
            control.close()
        self.controls, self.processes = [], []
        self.release()


@contextlib.contextmanager
def running(*kinds: tuple[type[Transport], Shape]) -> Iterator[list[Transport]]:
    """The transports, started and opened; the consumer pinned when they are. All gone at the end, whatever happens."""
    if any(shape.pinned for _, shape in kinds):
        os.sched_setaffinity(0, {CPUS[0]})
    transports: list[Transport] = []
    try:
        for kind, shape in kinds:
            transports.append(kind(shape))
            transports[-1].start()
        for transport in transports:
            transport.open()
            for control in transport.controls:
                control.recv()  # its sender stands
        yield transports
    finally:
        for transport in reversed(transports):
            transport.close()
        os.sched_setaffinity(0, set(CPUS))


def settle(transport: Transport, read: Read, seconds: float) -> int:
    """Warm it up; how many groups fill a round of so many seconds."""
    step = transport.shape.producers
    count = 16 * step
    while (took := transport.round(count, read).seconds * count) < seconds / 4:
        count *= 4
    return max(8, round(count * seconds / took / step)) * step
