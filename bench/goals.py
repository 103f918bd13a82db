"""The goals, each with how its number is read from a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from results import BOTH, C_STREAM, ICEORYX2, IN_PROCESS, KIB, QUEUE, RING, Results, Value, number, size_name


@dataclass(frozen=True)
class Goal:
    """`value(results, pinned)` must be at least, or at most, `bound`. Without `placed` it has no pinned form."""

    text: str
    sense: str  # ">=" or "<="
    bound: float
    value: Callable[[Results, bool], Value]
    scale: float = 1
    unit: str = "x"
    placed: bool = True

    def verdict(self, results: Results, pinned: bool) -> str:
        value = self.value(results, pinned)
        if value is None:
            return "no clean number"
        met = value >= self.bound if self.sense == ">=" else value <= self.bound
        return f"{number(value * self.scale)}{self.unit} {'met' if met else 'MISSED'}"


def faster(theirs: str, kib: int, bound: float, read: str = "all") -> Goal:
    what = "every byte touched" if read == "all" else "header only"
    return Goal(
        f"vs {theirs}, {size_name(kib * KIB)}, {what}",
        ">=",
        bound,
        lambda results, pinned: results.speed(theirs, kib * KIB, read, pinned),
    )


def percent(text: str, bound: float, value: Callable[[Results, bool], Value], placed: bool = True) -> Goal:
    return Goal(text, "<=", bound, value, 100, "%", placed)


def microseconds(phase: str, bound: float) -> Goal:
    return Goal(
        f"{phase}, a group at n = 64", "<=", bound * 1e-6, lambda results, _: results.call(phase), 1e6, " us", False
    )


TRAINER = ("trainer_cpu",)
GOALS = (
    faster(QUEUE, 4, 24),
    faster(QUEUE, 64, 30),
    faster(QUEUE, 512, 30),
    faster(QUEUE, 64, 60, "header"),
    faster(ICEORYX2, 64, 4),
    faster(ICEORYX2, 512, 1.3),
    faster(ICEORYX2, 4096, 1.1),
    faster("faster-fifo", 64, 7),
    faster("pyzmq ipc", 64, 13),
    faster("torch.multiprocessing.Queue", 64, 400),
    faster(C_STREAM, 64, 0.75),
    faster(C_STREAM, 512, 0.9),
    Goal("2 producers, total of one", ">=", 0.95, lambda results, pinned: results.producers(2, pinned)),
    Goal("4 producers, total of one", ">=", 0.95, lambda results, pinned: results.producers(4, pinned)),
    Goal("2 producers, fairness", ">=", 0.95, lambda results, pinned: results.fairness(2, pinned), unit=""),
    Goal("4 producers, fairness", ">=", 0.95, lambda results, pinned: results.fairness(4, pinned), unit=""),
    percent(
        "CPU of both sides vs multiprocessing.Queue, 64 KiB", 0.05, lambda r, p: r.cpu(QUEUE, 65536, "all", p, BOTH)
    ),
    percent(
        "CPU of the trainer vs multiprocessing.Queue, 64 KiB", 0.07, lambda r, p: r.cpu(QUEUE, 65536, "all", p, TRAINER)
    ),
    Goal("latency at 1 kHz, 4 KiB, vs queue.Queue", "<=", 1, lambda r, p: r.latency(RING, IN_PROCESS, 4096, p)),
    Goal("latency at 1 kHz, 64 KiB, vs queue.Queue", "<=", 1, lambda r, p: r.latency(RING, IN_PROCESS, 65536, p)),
    Goal(
        "latency, spinning, 4 KiB, vs queue.Queue", "<=", 0.5, lambda r, p: r.latency("ring-spin", IN_PROCESS, 4096, p)
    ),
    Goal(
        "latency, spinning, 64 KiB, vs queue.Queue",
        "<=",
        0.5,
        lambda r, p: r.latency("ring-spin", IN_PROCESS, 65536, p),
    ),
    microseconds("publish", 0.4),
    microseconds("take", 0.25),
    microseconds("release", 0.05),
    percent("idle trainer, of a core", 0.005, lambda results, _: results.idle("trainer"), False),
    percent("idle worker, of a core", 0.005, lambda results, _: results.idle("worker"), False),
    Goal(
        "8 places, 50 ms a sample: groups lost of the ideal 160 a second",
        "<=",
        0.03,
        lambda r, _: r.engine("refill", lambda row: 1 - row["groups_per_s"] / row["ideal"]),
        100,
        "%",
        False,
    ),
    percent(
        "the trainer's CPU at 200 groups/s, of a core",
        0.05,
        lambda r, _: r.engine("trainer_cpu", lambda row: row["cpu_s_per_group"] * 200),
        False,
    ),
    Goal(
        "last publish to get returning, median",
        "<=",
        100e-6,
        lambda r, _: r.engine("publish_to_get", lambda row: row["median"]),
        1e6,
        " us",
        False,
    ),
    Goal(
        "get(8) at 4,096 pending vs few",
        "<=",
        1.25,
        lambda r, _: r.engine("get", lambda row: row["full"] / row["empty"]),
        placed=False,
    ),
    Goal(
        "get(8) after 32,768 tickets vs the first",
        "<=",
        1.25,
        lambda r, _: r.engine("get", lambda row: row["late"] / row["early"]),
        placed=False,
    ),
    *(
        Goal(
            f"update of 2 GiB by shm vs memcpy into {memory} memory",
            "<=",
            1.5,
            lambda r, _, memory=memory: r.update("shm", 2048 * KIB * KIB, memory),  # type: ignore[misc]
            placed=False,
        )
        for memory in ("new", "warm")
    ),
    Goal("cost at 65,536 slots vs 16", "<=", 1.25, lambda results, _: results.growth("capacity"), placed=False),
    Goal("cost at 64 workers vs 1", "<=", 1.25, lambda results, _: results.growth("attached"), placed=False),
)
