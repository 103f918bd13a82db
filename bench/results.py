"""What a run of the benches recorded: rows, medians over their clean rounds, and numbers as text.

Invariant: rounds that ran under foreign load are left out of every median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

FOREIGN = 0.10  # a round in which others had more of the machine's CPU time than this does not count
FEWEST = 3  # clean rounds that a median needs
KIB = 1024
RING, QUEUE, IN_PROCESS, ICEORYX2, C_STREAM = (
    "ring",
    "multiprocessing.Queue",
    "queue.Queue in-process",
    "iceoryx2",
    "C stream",
)

BOTH = ("trainer_cpu", "producer_cpu")

Row = dict[str, Any]
Value = float | None


class Results:
    """The recorded rows of a run, and medians over their clean rounds."""

    def __init__(self, run: dict[str, Any], foreign: float) -> None:
        self.run, self.foreign = run, foreign
        self.rows: list[Row] = [bench["extra_info"] for bench in run["benchmarks"] if "test" in bench["extra_info"]]

    def find(self, test: str, **where: Any) -> list[Row]:
        return [row for row in self.rows if row["test"] == test and all(row.get(k) == v for k, v in where.items())]

    def clean(self, row: Row) -> list[Row]:
        rounds = [r for r in row["rounds"] if r["foreign"] <= self.foreign]
        return rounds if len(rounds) >= min(FEWEST, len(row["rounds"])) else []

    def median(self, number: Callable[[Row, Row], float], test: str, **where: Any) -> Value:
        """Median over clean rounds of number(ours, theirs)."""
        for row in self.find(test, **where):
            if rounds := self.clean(row):
                return statistics.median(number(r["ours"], r["theirs"]) for r in rounds)
        return None

    def side(self, row: Row, side: str, key: str) -> Value:
        """Median over clean rounds of one number of one side."""
        values = [r[side][key] for r in self.clean(row)]
        return statistics.median(values) if values else None

    def speed(self, theirs: str, size: int, read: str, pinned: bool) -> Value:
        """How many times as many groups a second the ring carries as `theirs`."""
        where = {"theirs": theirs, "size": size, "read": read, "pinned": pinned}
        return self.median(lambda a, b: b["seconds"] / a["seconds"], "throughput", **where)

    def cpu(self, theirs: str, size: int, read: str, pinned: bool, sides: Sequence[str]) -> Value:
        """The ring's CPU time a group as a share of theirs."""

        def share(a: Row, b: Row) -> float:
            return sum(a[side] for side in sides) / max(1e-12, sum(b[side] for side in sides))

        return self.median(share, "throughput", theirs=theirs, size=size, read=read, pinned=pinned)

    def latency(self, ours: str, theirs: str, size: int, pinned: bool) -> Value:
        """The ring's median latency as a share of theirs."""
        where = {"ours": ours, "theirs": theirs, "size": size, "pinned": pinned}
        return self.median(lambda a, b: a["median"] / b["median"], "latency", **where)

    def producers(self, n: int, pinned: bool) -> Value:
        where = {"ours": RING, "producers": n, "pinned": pinned}
        return self.median(lambda a, b: b["seconds"] / a["seconds"], "producers", **where)

    def fairness(self, n: int, pinned: bool) -> Value:
        return self.median(lambda a, _: jain(a["sent"]), "producers", ours=RING, producers=n, pinned=pinned)

    def call(self, phase: str) -> Value:
        return next((row["seconds"][phase] for row in self.find("calls")), None)

    def growth(self, test: str) -> Value:
        """Cost of a whole cycle at the largest x as a multiple of that at the smallest."""
        rows = sorted(self.find(test), key=lambda row: row["x"])
        return sum(rows[-1]["seconds"].values()) / sum(rows[0]["seconds"].values()) if len(rows) > 1 else None

    def engine(self, test: str, number: Callable[[Row], float]) -> Value:
        """The worst of a test's rows that ran without foreign load."""
        values = [number(row) for row in self.find(test) if row.get("foreign", 0) <= self.foreign]
        return max(values) if values and len(values) == len(self.find(test)) else None

    def update(self, transport: str, size: int, memory: str) -> Value:
        """Time of a weight update as a multiple of a memcpy's into `new` or `warm` memory."""
        where = {"transport": transport, "size": size}
        return self.median(lambda a, b: a["seconds"] / b[memory], "update", **where)

    def idle(self, who: str) -> Value:
        shares = [row["share"][who] for row in self.find("idle")]
        return max(shares) if shares else None


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def number(value: Value) -> str:
    """Three significant digits, without exponents."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:,.{digits}f}"


def micro(seconds: Value) -> str:
    return number(None if seconds is None else seconds * 1e6)


def placed(row: Row) -> str:
    return "pinned" if row["pinned"] else "unpinned"


def size_name(size: int) -> str:
    return f"{size // KIB} KiB" if size < 1024 * KIB else f"{size // KIB // KIB} MiB"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
