"""The evidence: controls that must not learn, the table over fresh seeds, and what a bound on the lag costs in learning.

shuffled rewards    the same job, every completion scored against another prompt's answer: accuracy must not rise
no pushes           the same job, the weights never sent: the workers' accuracy must not change
max_lag 2 and 0     the same jobs, generation ahead of the training or in turns with it: the accuracy must be the same within noise
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from pathlib import Path
from typing import Literal

from mprollout.demo.args import DemoArgs
from mprollout.demo.run import DemoResult, run_demo
from mprollout.errors import ConfigError

UNCHANGED = 0.01
"""Greedy answers may differ in a rounding when requests are batched in another way: at most 5 of 500."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlArgs:
    """Run the demo twice so that nothing can be learned: with shuffled rewards, and without pushing weights.

    Example: `mprollout demo-controls --seed 201`.

    Exit codes: 0 nothing was learned; 1 a control learned, or was interrupted; 2 a wrong setting or an engine error.
    """

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
    """Run the demo over several seeds and print a Markdown table.

    Example: `mprollout demo-seeds --first-seed 201 --seeds 5`.

    Exit codes: 0 four fifths of the seeds doubled their accuracy; 1 fewer did, or it was interrupted; 2 a wrong setting or an engine error.
    """

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagArgs:
    """Run the demo over several seeds with `max_lag` 2 and synchronously (0), plot all curves, and say whether they end alike.

    Example: `mprollout demo-lags --seeds 3`.

    Exit codes: 0 they end alike within noise; 1 they do not, or a run was interrupted; 2 a wrong setting or an engine error.
    """

    first_seed: int = 300
    """The first of the seeds; the others follow."""
    seeds: int = 3
    """How many, two at least."""
    steps: int = 250
    """Updates in each run."""
    max_lag: int = 2
    """The bound that is compared with 0."""
    workers: int = 2
    """Worker processes."""
    backend: Literal["sglang", "simulated"] = "sglang"
    """As for `mprollout demo`."""
    out: Path | None = None
    """Folder for the run folders and `lags.png`. Default: `runs/lags-TIME`."""

    def __post_init__(self) -> None:
        if self.seeds < 2 or self.max_lag < 1:
            raise ConfigError(f"LagArgs: expected --seeds >= 2 and --max-lag >= 1; got {self.seeds} and {self.max_lag}")


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


def run_lags(args: LagArgs) -> bool:
    """Run the demo once a seed and bound, print a table, and plot the curves.

    Returns:
        whether the two bounds end alike: `alike` of their accuracies at the end
    """
    folder = _folder(args.out, "lags")
    results: dict[int, list[DemoResult]] = {0: [], args.max_lag: []}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for max_lag, of_bound in results.items():
            out = folder / f"seed-{seed}-lag-{max_lag}"
            demo = DemoArgs(
                seed=seed, steps=args.steps, workers=args.workers, backend=args.backend, max_lag=max_lag, out=out
            )
            of_bound.append(run_demo(demo))
            if of_bound[-1].interrupted:
                return False
    ends = {max_lag: [settled(result) for result in of_bound] for max_lag, of_bound in results.items()}
    good, rule = alike(ends[0], ends[args.max_lag])
    plot_lags(results, folder / "lags.png")
    lines = [f"| seed | max_lag 0 | seconds | max_lag {args.max_lag} | seconds |", "|---|---|---|---|---|"]
    for i in range(args.seeds):
        cells = [f"{ends[max_lag][i]:.3f} | {results[max_lag][i].seconds:.0f}" for max_lag in results]
        lines.append(f"| {args.first_seed + i} | {' | '.join(cells)} |")
    print("\n".join(lines), f"\n{rule}: {'yes' if good else 'NO'}; curves: {folder / 'lags.png'}", flush=True)
    return good


def settled(result: DemoResult) -> float:
    """Held-out accuracy at the end: the mean of the last three measurements, which differ by more than a hundredth from one to the next."""
    return statistics.fmean(accuracy for _, accuracy in result.accuracies[-3:])


def alike(synchronous: list[float], ahead: list[float]) -> tuple[bool, str]:
    """Whether the mean of `ahead` is not below that of `synchronous` by more than two standard errors of their difference (Welch's)."""
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (synchronous, ahead)))
    difference = statistics.fmean(ahead) - statistics.fmean(synchronous)
    return difference >= -2 * error, f"difference {difference:+.3f}, not below {-2 * error:.3f} (two standard errors)"


def plot_lags(results: dict[int, list[DemoResult]], path: Path) -> None:
    """Held-out accuracy over the steps, one thin curve a seed and the bold mean, one colour a bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title="synchronous and ahead", xlabel="step (policy updates)", ylabel="held-out accuracy (greedy)"
    )
    for (max_lag, of_bound), color in zip(results.items(), ("tab:gray", "tab:orange"), strict=True):
        for result in of_bound:
            axes.plot(*zip(*result.accuracies, strict=True), color=color, alpha=0.35, linewidth=1)
        steps = [step for step, _ in of_bound[0].accuracies]
        means = [statistics.fmean(result.accuracies[i][1] for result in of_bound) for i in range(len(steps))]
        axes.plot(steps, means, "o-", color=color, label=f"max_lag = {max_lag}, mean of {len(of_bound)} seeds")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
