"""The table of ratios and the plot of a run: `python bench/report.py build/bench.json build/bench.png`.

Invariant: every goal is printed with its number and `met` or `MISSED`, or with why there is no number; rounds that ran
under foreign load are left out of every median and counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

from calls import PHASES
from goals import GOALS, Goal
from results import BOTH, FEWEST, FOREIGN, KIB, RING, Results, Row, jain, micro, number, placed, size_name, table

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
