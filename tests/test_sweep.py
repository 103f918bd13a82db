"""`mprollout simulate`: a sweep, its numbers against the simulation's own, its recommendation."""

from __future__ import annotations

import json
from pathlib import Path

import engines
import pytest

import mprollout as mp
from mprollout.cli import main
from mprollout.simulation import TrainerModel, simulate
from mprollout.sweep import Outcome, as_simulated, recommend, recorded_lengths, why

pytestmark = pytest.mark.timeout(120)

RUN = """
[source]
path = "no such file: prompts are not read"
[generator]
{generator}
[sampling]
group_size = 4
max_new_tokens = 1000
[reward]
function = "math"
[workers]
devices = ["cpu", "cpu"]
max_running_samples = 32
[gate]
groups_per_update = 4
max_lag = 1
await_weights = true
"""
TAIL = 'backend = "simulated"\nlengths = [40, 40, 40, 40, 40, 40, 40, 40, 40, 400]\ntokens_per_s = 50\nmax_tokens_per_s = 800'
SGLANG = 'backend = "sglang"\nmodel = "some/model"'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(generator=TAIL))
    return path


def test_every_combination_is_what_its_own_simulation_says(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sweep.html"
    arguments = [
        "--max-lag",
        "0",
        "2",
        "--workers",
        "1",
        "2",
        "--max-live-groups",
        "2",
        "24",
        "--steps",
        "6",
        "--plot",
        str(page),
    ]
    assert main(["simulate", str(run), *arguments, "--step-s", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    outcomes = [Outcome(**each) for each in said["outcomes"]]
    assert len({(o.workers, o.max_live_groups, o.max_lag) for o in outcomes}) == 8
    starved = [o for o in outcomes if o.error]
    assert [o.max_live_groups for o in starved] == [2] * 4 and all("live" in o.error for o in starved)
    for o in outcomes:
        assert o.error or (o.lag_max <= o.max_lag and o.tokens_discarded == 0)
    sync, free = (
        next(o for o in outcomes if (o.workers, o.max_live_groups, o.max_lag) == (2, 24, lag)) for lag in (0, 2)
    )
    assert free.steps_per_hour > 1.3 * sync.steps_per_hour and free.trainer_wait < sync.trainer_wait
    assert free.idle_places < sync.idle_places < 1 and sync.waits_for in ("straggler", "generation")

    config = mp.EngineConfig.from_toml(run)
    config = mp.EngineConfig(
        **{f: getattr(config, f) for f in config.__struct_fields__ if f != "gate"},
        gate=mp.GateConfig(groups_per_update=4, max_lag=2, max_live_groups=24),
    )
    trainer = TrainerModel(groups_per_step=4, step_s=2.0, steps=6)
    report = simulate(as_simulated(config, config.generator, trainer), trainer)
    assert free.wall_s == pytest.approx(report.wall_s)
    assert free.steps_per_hour == pytest.approx(3600 * 6 / report.wall_s)
    assert free.tokens_per_s == pytest.approx(sum(report.delivered_lengths) / report.wall_s)
    assert free.trainer_wait == pytest.approx(sum(report.waited_s.values()) / report.wall_s)
    assert free.idle_places == pytest.approx(1 - report.busy_sample_s / (report.wall_s * 64))
    text = page.read_text()
    assert text.count("Plotly.newPlot") == 4 and "Recommended" in text
    assert said["recommended"] in said["outcomes"] and "of the best throughput" in said["why"]


def outcome(workers: int, max_lag: int | None, steps_per_hour: float, **more: object) -> Outcome:
    return Outcome(
        workers=workers, concurrency=8, max_live_groups=None, max_lag=max_lag, steps_per_hour=steps_per_hour, **more
    )  # type: ignore[arg-type]


def test_the_cheapest_of_the_fast_is_recommended() -> None:
    slow, fast, faster = outcome(1, 0, 90), outcome(2, 2, 196), outcome(4, 1, 200)
    assert recommend([slow, fast, faster]) is fast
    assert recommend([fast, outcome(2, 1, 195), outcome(2, None, 200)]).max_lag == 1
    assert recommend([outcome(1, 0, 0, error="cannot"), slow]) is slow
    with pytest.raises(mp.ConfigError, match="none of 1 combinations can run; the first: cannot"):
        recommend([outcome(1, 0, 0, error="cannot")])
    waits = outcome(2, 1, 200, trainer_wait=0.4, waits_for="straggler")
    assert "more workers would not" in why(waits, [waits])


def test_lengths_come_from_a_recorded_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "seven"
    with mp.RolloutEngine(engines.config(run_dir=str(folder), record="run")) as engine:
        lengths = []
        for _ in range(3):
            with engine.get(4, timeout=20) as batch:
                lengths += [int(n) for group in batch for n in group.lengths]
    assert recorded_lengths(folder) == recorded_lengths(folder / "record") == lengths
    assert main(["simulate", str(run), "--lengths", str(folder), "--steps", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "recommended: 2 workers, 32 places each, max_lag 1: 100% of the best throughput" in text
    assert main(["simulate", str(run), "--lengths", str(tmp_path)]) == 2
    assert "no recording" in capsys.readouterr().err


def test_what_is_missing_is_said_in_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_text(RUN.format(generator=SGLANG))
    assert main(["simulate", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"mprollout calibrate {run} --out speeds.toml" in said
    run.write_text(RUN.format(generator=TAIL))
    assert main(["simulate", str(run), "--steps", "0"]) == 2
    assert capsys.readouterr().err == "mprollout: --steps must be >= 1; got 0\n"
    assert main(["simulate", str(run), "--max-live-groups", "1"]) == 2
    assert "none of 1 combinations can run" in capsys.readouterr().err
