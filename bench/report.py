"""The table of ratios and the plot of a run: `python bench/report.py build/bench.json build/bench.png`.

Invariant: every goal is printed with its number and `met` or `MISSED`, or with why there is no number; rounds that ran
under foreign load are left out of every median and counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calls import PHASES

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


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


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


BOTH, TRAINER = ("trainer_cpu", "producer_cpu"), ("trainer_cpu",)
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


# ---- the tables


def goals(results: Results) -> str:
    def row(goal: Goal) -> tuple[str, ...]:
        bound = f"{goal.sense} {number(goal.bound * goal.scale)}{goal.unit}"
        pinned = goal.verdict(results, True) if goal.placed else "(not placed)"
        return goal.text, bound, goal.verdict(results, False), pinned

    return table(("goal", "bound", "unpinned", "pinned"), map(row, GOALS))


def throughputs(results: Results) -> str:
    rows = []
    found = results.find("throughput")
    for size, read, theirs in sorted({(row["size"], row["read"], row["theirs"]) for row in found}):
        cells = [size_name(size), "every byte" if read == "all" else "header", theirs]
        for pinned in (False, True):
            where = {"theirs": theirs, "size": size, "read": read, "pinned": pinned}
            row = next(iter(results.find("throughput", **where)), {"rounds": []})
            cells += [number(results.speed(**where)), micro(results.side(row, "theirs", "seconds"))]
            cells += [micro(results.side(row, "ours", "seconds")), number(results.cpu(**where, sides=BOTH))]
        rows.append(cells)
    columns = ["ratio", "us", "ring us", "CPU"]
    return table(["size", "read", "rival", *columns, *(f"{name} pinned" for name in columns)], rows)


def latencies(results: Results) -> str:
    rows = []
    for row in results.find("latency"):
        where = {key: row[key] for key in ("ours", "theirs", "size", "pinned")}
        cells = [micro(results.side(row, side, key)) for key in ("median", "p99") for side in ("ours", "theirs")]
        about = row["ours"], row["theirs"], size_name(row["size"]), placed(row)
        rows.append((*about, number(results.latency(**where)), *cells))
    header = ("ours", "rival", "size", "CPUs", "ours / rival", "median us", "rival median", "p99 us", "rival p99")
    return table(header, rows)


def several(results: Results) -> str:
    rows = []
    for row in results.find("producers"):
        where = {key: row[key] for key in ("ours", "producers", "pinned")}
        total = results.median(lambda a, b: b["seconds"] / a["seconds"], "producers", **where)
        fair = least = None
        if row["ours"] == RING:  # the others are told equal shares
            fair = results.median(lambda a, _: jain(a["sent"]), "producers", **where)
            least = results.median(lambda a, _: min(a["sent"]) / max(a["sent"]), "producers", **where)
        cells = row["ours"], str(row["producers"]), placed(row)
        rows.append((*cells, number(total), number(fair), number(least)))
    return table(("transport", "producers", "CPUs", "total vs one", "fairness", "least / most"), rows)


def limits(results: Results) -> str:
    copies = [
        (f"memcpy between mappings, {size_name(row['size'])}", row, gigabytes(row)) for row in results.find("copy")
    ]
    words = [
        (f"{'futex' if row['futex'] else 'spin'} ping-pong, {placed(row)}", row, "one way")
        for row in results.find("ping_pong")
    ]
    return table(
        ("limit", "us", "that is"), [(what, micro(row["seconds"]), note) for what, row, note in copies + words]
    )


def gigabytes(row: Row) -> str:
    return f"{number(row['size'] / row['seconds'] / 1e9)} GB/s"


def calls(results: Results) -> str:
    rows = []
    for test, unit in (("calls", "groups at once"), ("capacity", "slots"), ("attached", "workers")):
        for row in results.find(test):
            seconds = row["seconds"]
            cells = [micro(value) for value in (*seconds.values(), sum(seconds.values()))]
            rows.append((f"{row.get('x', row.get('n')):,} {unit}", *cells))
    return table(("us a group", *PHASES, "all"), rows)


def engine(results: Results) -> str:
    rows = [
        ("8 places, 50 ms a sample", f"{number(row['groups_per_s'])} groups/s of {row['ideal']:.0f}")
        for row in results.find("refill")
    ]
    for row in results.find("trainer_cpu"):
        text = f"{micro(row['cpu_s_per_group'])} us a group at {number(row['groups_per_s'])} groups/s, {row['running']:,} samples running"
        rows.append((f"the trainer's CPU, {row['order']}", text))
    names = {
        "publish_to_get": "last publish to get returning",
        "publish_to_take": "the same with the ring's bare handles",
    }
    rows.extend(
        (name, f"{micro(row['median'])} us median, {micro(row['p99'])} us p99")
        for test, name in names.items()
        for row in results.find(test)
    )
    for row in results.find("get"):
        cells = (f"{name} {micro(row[name])} us" for name in ("full", "empty", "early", "late"))
        rows.append((f"get(8) and release, {row['order']}", ", ".join(cells)))
    return table(("what", "measured"), rows)


def updates(results: Results) -> str:
    rows = []
    for row in results.find("update"):
        seconds = results.side(row, "ours", "seconds")
        about = row["transport"], size_name(row["size"])
        ratios = (number(results.update(row["transport"], row["size"], memory)) for memory in ("new", "warm"))
        milli = (number(None if value is None else value * 1e3) for value in (seconds, row["first"]))
        speed = number(None if seconds is None else row["size"] / seconds / 1e9)
        rows.append((*about, *milli, f"{speed} GB/s", *ratios))
    return table(("transport", "size", "ms", "the first, ms", "that is", "vs new memory", "vs warm memory"), rows)


def update_costs(results: Results) -> str:
    rows = []
    for row in results.find("update_cost"):
        rows.extend(
            (
                mode,
                *(f"{cost[key]:,.0f}" for key in ("lost", "recomputed", "discarded")),
                f"{cost['pushing_s'] * 1e3:,.0f}",
            )
            for mode, cost in row["modes"].items()
        )
    return table(("an update", "tokens not generated", "recomputed", "discarded", "update_weights, ms"), rows)


def report(results: Results) -> str:
    machine = results.run["machine_info"]
    compared = [row for row in results.rows if "rounds" in row]
    rounds = sum(len(row["rounds"]) for row in compared)
    loaded = sum(r["foreign"] > FOREIGN for row in compared for r in row["rounds"])
    empty = sum(not results.clean(row) for row in compared)
    commit = results.run["commit_info"]
    about = (
        f"{machine['cpu'].get('brand_raw', platform.processor())}, {machine['cpu'].get('count')} CPUs, "
        f"Linux {machine['release']}, Python {machine['python_version']}; {results.run['datetime'][:16]}, "
        f"commit {commit.get('id', '?')[:9]}{' with changes' if commit.get('dirty') else ''}"
    )
    kept = "left out" if results.foreign == FOREIGN else "COUNTED ALL THE SAME (--keep-loaded)"
    load = (
        f"{loaded} of {rounds} rounds ran beside more than {FOREIGN:.0%} foreign CPU and are {kept}; "
        f"{empty} of {len(compared)} rows have fewer than {FEWEST} clean rounds and so no number."
    )
    parts = [
        about, load, *(f"skipped: {why}" for why in results.run["skipped"]),
        "\nGoals\n", goals(results),
        "\nOne producer: ratio = times the rival's speed; CPU = the ring's CPU time as a share of the rival's\n",
        throughputs(results),
        "\nSeveral producers, 64 KiB, every byte\n", several(results),
        "\nOne-way latency at 1 kHz\n", latencies(results),
        "\nWhat the machine allows\n", limits(results),
        "\nThe ring's calls alone, in one process\n", calls(results),
        "\nThe whole engine, simulated generator\n", engine(results),
        "\nWeight updates, one simulated worker: ratio = times a memcpy of the same bytes\n", updates(results),
        *(f"\nA weight update, SGLang on the tiny model: {row['running']} samples running, {number(row['tokens_per_s'])} tokens/s\n"
          for row in results.find("update_cost")), update_costs(results),
        "\nIdle engine, share of a core\n",
        table(("state", "trainer", "worker"), [
            (row["state"], *(f"{row['share'][who]:.2%}" for who in ("trainer", "worker")))
            for row in results.find("idle")
        ]),
    ]  # fmt: skip
    return "\n".join(parts)


# ---- the plot


def plot(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((speeds, delays), (capacity, attached)) = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    rows = results.find("throughput", read="all", pinned=False)
    curves: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for side in ("ours", "theirs"):
            seconds = [r[side]["seconds"] for r in results.clean(row)]
            curves.setdefault(row[side], {}).setdefault(row["size"], []).extend(seconds)
    for name, points in curves.items():
        xs = [size for size in sorted(points) if points[size]]
        ys = [1 / statistics.median(points[size]) for size in xs]
        speeds.loglog(xs, ys, "o-", base=2, label=name, linewidth=3 if name == RING else 1)
    speeds.set(title="groups a second, every byte touched, unpinned", xlabel="bytes a group")
    speeds.set_yscale("log", base=10)
    speeds.legend(fontsize=7)

    bars: dict[str, float] = {}
    for row in results.find("latency", size=64 * KIB, pinned=False):
        for side in ("ours", "theirs"):
            if medians := [r[side]["median"] * 1e6 for r in results.clean(row)]:
                bars[row[side]] = statistics.median(medians)
    order = sorted(bars, key=bars.__getitem__)
    delays.barh(order, [bars[name] for name in order])
    delays.set(title="one-way latency at 1 kHz, 64 KiB, unpinned: median, us", xscale="log")

    for axes, test, what in ((capacity, "capacity", "slots"), (attached, "attached", "workers")):
        found = sorted(results.find(test), key=lambda row: row["x"])
        for phase in found[0]["seconds"] if found else ():
            axes.plot([row["x"] for row in found], [row["seconds"][phase] * 1e6 for row in found], "o-", label=phase)
        axes.set(title=f"cost of a call by {what}, us a group", xlabel=what)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path, nargs="?")
    parser.add_argument("--keep-loaded", action="store_true", help="count rounds under foreign load, too")
    arguments = parser.parse_args()
    results = Results(json.loads(arguments.json.read_text()), float("inf") if arguments.keep_loaded else FOREIGN)
    print(report(results))
    if arguments.png:
        plot(results, arguments.png)


if __name__ == "__main__":
    main()
