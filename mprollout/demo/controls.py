"""The evidence: controls that must not learn, and the table over fresh seeds.

shuffled rewards    the same job, every completion scored against another prompt's answer: accuracy must not rise
no pushes           the same job, the weights never sent: the workers' accuracy must not change
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Literal

from mprollout.demo.args import DemoArgs
from mprollout.demo.run import DemoResult, run_demo

UNCHANGED = 0.01
"""Greedy answers may differ in a rounding when requests are batched in another way: at most 5 of 500."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlArgs:
    """Run the demo twice so that nothing can be learned: with shuffled rewards, and without pushing weights."""

    steps: int = 100
    """Updates in each control."""
    workers: int = 2
    """Worker processes."""
    seed: int = 0
    """As for `mprollout demo`."""
    backend: Literal["sglang", "simulated"] = "sglang"
    """As for `mprollout demo`."""
    out: Path | None = None
    """Folder for the two run folders. Default: `runs/controls-TIME`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedArgs:
    """Run the demo over several seeds and print a Markdown table."""

    first_seed: int = 100
    """The first of the seeds; the others follow."""
    seeds: int = 5
    """How many."""
    steps: int = 250
    """Updates in each run."""
    workers: int = 2
    """Worker processes."""
    out: Path | None = None
    """Folder for the run folders. Default: `runs/seeds-TIME`."""


def _folder(given: Path | None, name: str) -> Path:
    return given or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def judge(control: str, result: DemoResult) -> tuple[bool, str]:
    """Whether a control behaved, and the rule in words."""
    if result.interrupted or len(result.accuracies) < 2:
        return False, "was interrupted"
    began, ended = result.accuracies[0][1], result.accuracies[-1][1]
    if control == "shuffled rewards":
        return ended <= began, "ends no higher than it began"
    return abs(ended - began) <= UNCHANGED, f"the workers' accuracy changes by at most {UNCHANGED}"


def run_controls(args: ControlArgs) -> bool:
    """Run both controls, print a table and the verdict.

    Returns:
        whether both behaved as controls must
    """
    folder = _folder(args.out, "controls")
    common = {"steps": args.steps, "workers": args.workers, "seed": args.seed, "backend": args.backend}
    runs = {
        "shuffled rewards": DemoArgs(**common, rewards="shuffled", out=folder / "shuffled"),  # type: ignore[arg-type]
        "no pushes": DemoArgs(**common, push=False, max_lag=None, out=folder / "no-pushes"),  # type: ignore[arg-type]
    }
    lines, good = ["| control | held-out before | after | must hold | held |", "|---|---|---|---|---|"], True
    for control, demo in runs.items():
        result = run_demo(demo)
        held, rule = judge(control, result)
        good = good and held
        lines.append(
            f"| {control} | {_number(result.began_at)} | {_number(result.ended_at)} | {rule} | {'yes' if held else 'NO'} |"
        )
        if result.interrupted:
            break
    print(
        "\n".join(lines),
        "\nverdict:",
        "nothing was learned where nothing can be" if good else "a control FAILED",
        flush=True,
    )
    return good


def run_seeds(args: SeedArgs) -> bool:
    """Run the demo once a seed and print what came of it.

    Returns:
        whether at least four fifths of the seeds at least doubled their accuracy
    """
    folder, results = _folder(args.out, "seeds"), []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        results.append(run_demo(DemoArgs(seed=seed, steps=args.steps, workers=args.workers, out=folder / str(seed))))
        if results[-1].interrupted:
            break
    doubled = sum(factor(result) >= 2 for result in results)
    print(
        seed_table(results, args.first_seed),
        f"{doubled} of {args.seeds} seeds at least doubled it.",
        sep="\n\n",
        flush=True,
    )
    return doubled >= 0.8 * args.seeds


def factor(result: DemoResult) -> float:
    """Held-out accuracy at the end over that at the beginning."""
    return (result.ended_at or 0.0) / max(result.began_at or 0.0, 1e-9)


def seed_table(results: list[DemoResult], first_seed: int) -> str:
    """Markdown: a row a seed."""
    lines = [
        "| seed | held-out accuracy before | after | factor | steps | seconds in all |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {seed} | {_number(result.began_at)} | {_number(result.ended_at)} | {factor(result):.1f} | {result.steps} | {result.seconds:.0f} |"
        for seed, result in enumerate(results, first_seed)
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
