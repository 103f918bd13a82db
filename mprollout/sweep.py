"""`mprollout simulate CONFIG`: the same run under many settings, in virtual time, and which of them to take.

    EngineConfig, calibrated speeds, lengths --a config for each combination--> simulation.simulate --> Outcome, a line each --> recommendation

Invariant: all lines have the same prompts, lengths, speeds and trainer; only the four swept settings differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tyro

from mprollout import record
from mprollout.calibration import from_toml
from mprollout.config import EngineConfig, RewardConfig, SimulatedConfig, SourceConfig
from mprollout.errors import ConfigError, EngineFault, GateStarved
from mprollout.simulation import SimulationReport, TrainerModel, costly_reward, simulate

CLOSE = 0.95
"""Settings with so much of the best throughput count as fast."""


@dataclasses.dataclass(kw_only=True)
class SimulateArgs:
    """Predict what settings would do to a run, in virtual time and without a model: the trainer's wait, idle places, lag, discarded tokens,
    throughput; for every combination of the values given, with a recommendation.

    Example: `mprollout simulate run.toml --settings speeds.toml --step-s 4 --max-lag 0 1 2 --workers 1 2 4 --plot sweep.html`

    The speeds come from a calibration (`--settings`; `mprollout calibrate run.toml --out speeds.toml`), or from the config's own `[generator]` if that is a simulated one. The lengths are
    the calibration's, or those of a recorded run (`--lengths RUN`). Without any values to sweep the config is simulated as it stands. Each
    sample's length is drawn by itself; that samples of one prompt have similar ones is not modelled.
    Exit codes: 0 done; 2 the config cannot be used, or no combination can run.
    """

    config: tyro.conf.Positional[Path]
    """An engine's config, TOML. Its prompts and its reward function are not used."""
    settings: Path | None = None
    """What a calibration wrote; needed unless the config's generator is a simulated one."""
    lengths: Path | None = None
    """Draw the lengths of completions from this recording (a run's folder, or that of its recording)."""
    concurrency: tuple[int, ...] = ()
    """Values of `workers.max_running_samples`."""
    max_live_groups: tuple[int, ...] = ()
    """Values of `gate.max_live_groups`."""
    max_lag: tuple[int, ...] = ()
    """Values of `gate.max_lag`."""
    workers: tuple[int, ...] = ()
    """Numbers of workers, each as fast as the calibrated one."""
    step_s: float = 4.0
    """Seconds of a training step, without waiting."""
    steps: int = 50
    """Training steps; each takes `gate.groups_per_update` groups (8 where that is not set) and pushes weights."""
    reward_s: float = 0.0
    """Mean seconds of a reward."""
    plot: Path | None = None
    """An HTML page with the plots."""
    json: bool = False
    """One JSON object instead of the table."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one combination of settings gives."""

    workers: int
    concurrency: int
    max_live_groups: int | None
    max_lag: int | None
    error: str = ""
    """Why it cannot run; the numbers below are then 0."""
    wall_s: float = 0.0
    steps_per_hour: float = 0.0
    tokens_per_s: float = 0.0
    """Delivered."""
    trainer_wait: float = 0.0
    """Share of the time, updates included."""
    waits_for: str = ""
    """What most of it was for."""
    idle_places: float = 0.0
    """Share of the workers' sample places, over time, in which nothing was generated."""
    lag_mean: float = 0.0
    lag_max: int = 0
    tokens_discarded: float = 0.0
    """Share of those sampled."""


def run_simulate(args: SimulateArgs) -> None:
    """Simulate, print, plot."""
    config = EngineConfig.from_toml(args.config)
    generator = _generator(args, config)
    for name, least in (("steps", 1), ("step_s", 0), ("reward_s", 0)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= {least}; got {getattr(args, name):g}")
    trainer = TrainerModel(groups_per_step=config.gate.groups_per_update or 8, step_s=args.step_s, steps=args.steps)
    plain = as_simulated(config, generator, trainer, args.reward_s)
    swept = list(combinations(plain, args.workers, args.concurrency, args.max_live_groups, args.max_lag))
    outcomes = []
    for number, one in enumerate(swept):
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(swept)}", end="", file=sys.stderr, flush=True)
        outcomes.append(outcome(one, trainer))
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    best = recommend(outcomes)
    if args.plot is not None:
        args.plot.write_text(sweep_page(outcomes, best, str(args.config)))
    if args.json:
        print(
            json.dumps(
                {
                    "outcomes": msgspec.to_builtins(outcomes),
                    "recommended": msgspec.to_builtins(best),
                    "why": why(best, outcomes),
                }
            )
        )
    else:
        _print(outcomes, best)


def _generator(args: SimulateArgs, config: EngineConfig) -> SimulatedConfig:
    if args.settings is not None:
        generator = from_toml(args.settings)
    elif isinstance(config.generator, SimulatedConfig):
        generator = config.generator
    else:
        raise ConfigError(
            f"{args.config}: how fast {config.generator.model} is must be measured first: mprollout calibrate {args.config} --out speeds.toml, "
            "then --settings speeds.toml"
        )
    if args.lengths is None:
        return generator
    return msgspec.structs.replace(generator, lengths=recorded_lengths(args.lengths))


def recorded_lengths(folder: Path) -> list[int]:
    """Tokens of every delivered sample of a recording.

    Raises:
        ConfigError: no recording lies there.
    """
    if (folder / record.RECORD_FOLDER).is_dir():
        folder = folder / record.RECORD_FOLDER
    record.about(folder)  # says what is missing
    with record.ReplaySource(folder) as source:
        return [int(n) for row in record.read(folder) for n in source.group(row).lengths]


def as_simulated(
    config: EngineConfig, generator: SimulatedConfig, trainer: TrainerModel, reward_s: float = 0.0
) -> EngineConfig:
    """The same run for `simulation.simulate`: no model, no rows, no processes."""
    reward = RewardConfig("exact")
    if reward_s:
        reward = RewardConfig(costly_reward, kwargs={"mean_s": reward_s}, max_concurrency=config.reward.workers)
    return msgspec.structs.replace(
        config,
        source=SourceConfig(rows=[{"prompt": "x", "answer": "x"}] * trainer.groups_per_step),
        generator=generator,
        reward=reward,
        filter=type(config.filter)(),
        gate=msgspec.structs.replace(config.gate, await_weights=False),
        rollout=None,
        run_dir=None,
        record=None,
        loggers=[],
        orphan_timeout_s=0.0,
        weights=msgspec.structs.replace(config.weights, keep_versions=0),
        ring=type(config.ring)(),
    )


def combinations(
    config: EngineConfig,
    workers: Sequence[int],
    concurrency: Sequence[int],
    max_live_groups: Sequence[int],
    max_lag: Sequence[int],
) -> Iterable[EngineConfig | Outcome]:
    """A config for each combination; an `Outcome` with its error where there can be none. What is not swept stays as it is."""
    gate = config.gate
    lives: Sequence[int | None] = max_live_groups or [gate.max_live_groups]
    lags: Sequence[int | None] = max_lag or [gate.max_lag]
    many, places = workers or [len(config.workers.devices)], concurrency or [config.workers.max_running_samples]
    for w, c, live, lag in itertools.product(many, places, lives, lags):
        try:
            yield msgspec.structs.replace(
                config,
                workers=msgspec.structs.replace(config.workers, devices=["cpu"] * w, max_running_samples=c),
                gate=msgspec.structs.replace(gate, max_live_groups=live, max_lag=lag),
            )
        except ConfigError as error:
            yield Outcome(workers=w, concurrency=c, max_live_groups=live, max_lag=lag, error=str(error))


def outcome(config: EngineConfig | Outcome, trainer: TrainerModel) -> Outcome:
    """Simulate one combination."""
    if isinstance(config, Outcome):
        return config
    workers, gate = config.workers, config.gate
    swept: dict[str, Any] = {
        "workers": len(workers.devices),
        "concurrency": workers.max_running_samples,
        "max_live_groups": gate.max_live_groups,
        "max_lag": gate.max_lag,
    }
    try:
        report = simulate(config, trainer)
    except (ConfigError, GateStarved, EngineFault) as error:
        return Outcome(**swept, error=str(error))
    return Outcome(**swept, **_numbers(report, len(workers.devices) * workers.max_running_samples))


def _numbers(report: SimulationReport, places: int) -> dict[str, Any]:
    waited = sum(report.waited_s.values())
    most = max(report.waited_s, key=lambda cause: report.waited_s[cause])
    return {
        "wall_s": report.wall_s,
        "steps_per_hour": 3600 * len(report.trainer_wait_s) / report.wall_s,
        "tokens_per_s": sum(report.delivered_lengths) / report.wall_s,
        "trainer_wait": waited / report.wall_s,
        "waits_for": most if waited else "",
        "idle_places": 1 - report.busy_sample_s / (report.wall_s * places),
        "lag_mean": statistics.fmean(report.lags),
        "lag_max": max(report.lags),
        "tokens_discarded": report.tokens_discarded / max(1, sum(report.issued_lengths)),
    }


def recommend(outcomes: Sequence[Outcome]) -> Outcome:
    """Of those with at least 95% of the best throughput: the fewest workers, then the lowest lag bound, then the fewest places and groups.

    Raises:
        ConfigError: none can run; says why the first cannot.
    """
    able = [one for one in outcomes if not one.error]
    if not able:
        raise ConfigError(f"none of {len(outcomes)} combinations can run; the first: {outcomes[0].error}")
    fast = CLOSE * max(one.steps_per_hour for one in able)

    def cost(one: Outcome) -> tuple[float, ...]:
        unbounded = float("inf")
        lag = unbounded if one.max_lag is None else one.max_lag
        return one.workers, lag, one.concurrency, one.max_live_groups or unbounded

    return min((one for one in able if one.steps_per_hour >= fast), key=cost)


_HELPS = {
    "generation": "more or faster workers, or a larger max_lag, would shorten it",
    "straggler": "a larger max_lag or a shorter max_new_tokens would shorten it; more workers would not",
    "reward": "more reward workers would shorten it",
    "gate": "a larger max_live_groups or max_lag would shorten it",
    "weights": "fewer updates would shorten it",
    "workers": "the workers were not ready",
}


def why(best: Outcome, outcomes: Sequence[Outcome]) -> str:
    """The recommendation in words."""
    top = max(one.steps_per_hour for one in outcomes)
    words = (
        f"{best.steps_per_hour / top:.0%} of the best throughput ({best.steps_per_hour:,.0f} steps an hour) with the fewest workers, then the lowest lag; "
        f"the trainer waits {best.trainer_wait:.0%} of the time"
    )
    return f"{words}, most of it for {best.waits_for}: {_HELPS[best.waits_for]}" if best.trainer_wait > 0.05 else words


_COLUMNS: dict[str, tuple[str, Callable[[Outcome], str]]] = {
    "workers": ("workers", lambda o: str(o.workers)),
    "concurrency": ("places", lambda o: str(o.concurrency)),
    "max_live_groups": ("live", lambda o: "-" if o.max_live_groups is None else str(o.max_live_groups)),
    "max_lag": ("max_lag", lambda o: "-" if o.max_lag is None else str(o.max_lag)),
    "steps_per_hour": ("steps/h", lambda o: f"{o.steps_per_hour:,.0f}"),
    "tokens_per_s": ("tokens/s", lambda o: f"{o.tokens_per_s:,.0f}"),
    "trainer_wait": ("waits", lambda o: f"{o.trainer_wait:.1%}"),
    "waits_for": ("most for", lambda o: o.waits_for),
    "idle_places": ("idle places", lambda o: f"{o.idle_places:.1%}"),
    "lag": ("lag mean / max", lambda o: f"{o.lag_mean:.2f} / {o.lag_max}"),
    "tokens_discarded": ("discarded", lambda o: f"{o.tokens_discarded:.1%}"),
}


def _print(outcomes: Sequence[Outcome], best: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for head, _ in _COLUMNS.values():
        table.add_column(head, no_wrap=True)
    for one in outcomes:
        cells = [show(one) for _, show in _COLUMNS.values()]
        shown = [*cells[:4], f"cannot run: {one.error}"] if one.error else cells
        table.add_row(*shown, style="bold" if one is best else "")
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    console.print(f"recommended: {named(best)}: {why(best, outcomes)}", highlight=False, soft_wrap=True, markup=False)


def named(one: Outcome) -> str:
    """The combination in words."""
    live = "" if one.max_live_groups is None else f", max_live_groups {one.max_live_groups}"
    return f"{one.workers} workers, {one.concurrency} places each{live}, max_lag {one.max_lag}"


def _short(one: Outcome) -> str:
    live = "" if one.max_live_groups is None else f", live {one.max_live_groups}"
    return f"{one.workers} x {one.concurrency}{live}, lag {one.max_lag}"


def sweep_page(outcomes: Sequence[Outcome], best: Outcome, what: str) -> str:
    """All combinations as a page: throughput against waiting and lag, and the table."""
    import html

    from mprollout.plots import Plot, figure, html_table, page

    able = [one for one in outcomes if not one.error]
    plots = []
    for name, title, y, about in (
        ("throughput", "Throughput", "steps_per_hour", "Steps an hour."),
        ("wait", "The trainer's wait", "trainer_wait", "Share of the time."),
        ("idle", "Idle places", "idle_places", "Share of the workers' sample places, over time."),
        ("lag", "Mean lag", "lag_mean", "Updates, of the groups taken."),
    ):
        fig = figure("", title.lower(), hovermode="closest", height=380)
        fig.add_bar(
            x=[_short(one) for one in able],
            text=[named(one) for one in able],
            textposition="none",
            y=[getattr(one, y) for one in able],
            marker={"color": ["#d62728" if one is best else "#1f77b4" for one in able]},
        )
        plots.append(Plot(name, title, fig, about))
    rows = [{head: show(one) for head, show in _COLUMNS.values()} for one in able]
    before = f"<p><b>Recommended</b> (red): {html.escape(named(best))}: {html.escape(why(best, outcomes))}</p>"
    return page(f"Simulated: {what}", plots, before, html_table(rows))
