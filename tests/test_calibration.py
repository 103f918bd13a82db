"""Calibration: a generator measured, and its settings put in its place."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import mprollout as mp
from mprollout.calibration import calibrate, from_toml, to_toml
from mprollout.cli import main
from mprollout.simulation import TrainerModel, VirtualLoop, simulate
from mprollout.sweep import as_simulated

pytestmark = pytest.mark.timeout(120)


def config(generator: mp.SimulatedConfig | mp.SGLangConfig, running: int = 12, **changes: object) -> mp.EngineConfig:
    """One worker, groups of 4."""
    parts: dict[str, object] = {
        "source": mp.SourceConfig(rows=[{"prompt": f"question {i}", "answer": "x"} for i in range(64)]),
        "generator": generator,
        "sampling": mp.SamplingConfig(group_size=4, max_new_tokens=200),
        "reward": mp.RewardConfig("exact"),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=running),
        "gate": mp.GateConfig(groups_per_update=3, max_lag=1),
    }
    return mp.EngineConfig(**{**parts, **changes})  # type: ignore[arg-type]


def measured(asked: mp.EngineConfig, seconds: float = 20.0) -> mp.SimulatedConfig:
    """In virtual time, for which the simulated generator's speeds are exact."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(calibrate(asked, seconds))
    finally:
        loop.close()


def test_the_speeds_of_a_known_generator_are_found() -> None:
    known = mp.SimulatedConfig(speeds=[(1, 50.0), (4, 160.0), (12, 240.0)], prefill_s=0.3, update_s=0.7, sigma=0.6)
    found = measured(config(known))
    assert [running for running, _ in found.speeds] == [1, 2, 4, 8, 12]
    expected = {1: 50.0, 2: 50 + 110 / 3, 4: 160.0, 8: 200.0, 12: 240.0}
    for running, speed in found.speeds:
        assert speed == pytest.approx(expected[running], rel=0.06), running
    assert found.prefill_s == pytest.approx(0.3, abs=0.005)
    assert found.update_s == pytest.approx(0.7)
    mean = sum(found.lengths) / len(found.lengths)
    assert len(found.lengths) > 200 and mean == pytest.approx(64, rel=0.1)


def test_what_was_measured_predicts_the_run_that_it_was_measured_on() -> None:
    known = mp.SimulatedConfig(speeds=[(1, 50.0), (4, 160.0), (12, 240.0)], prefill_s=0.3, update_s=0.7, sigma=0.6)
    trainer = TrainerModel(groups_per_step=3, step_s=4.0, steps=40)
    truth = simulate(as_simulated(config(known), known, trainer), trainer)
    found = measured(config(known))
    predicted = simulate(as_simulated(config(known), found, trainer), trainer)
    assert predicted.wall_s == pytest.approx(truth.wall_s, rel=0.05)
    assert truth.wall_s > 1.5 * 40 * 4.0, "the generator decides, not the trainer"


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = mp.SimulatedConfig(speeds=[(1, 50.25), (8, 160.5)], prefill_s=0.25, update_s=0.5, lengths=[3, 4])
    (tmp_path / "speeds.toml").write_text(to_toml(found, "test"))
    assert from_toml(tmp_path / "speeds.toml") == found
    (tmp_path / "other.toml").write_text("[sampling]\ngroup_size = 4\n")
    with pytest.raises(
        mp.ConfigError, match=r"other.toml: expected the \[generator\] that `mprollout calibrate` writes"
    ):
        from_toml(tmp_path / "other.toml")


def test_the_command_writes_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "run.toml").write_text(
        f'[source]\npath = "{tmp_path}/prompts.jsonl"\n[generator]\nbackend = "simulated"\ntokens_per_s = 2000\nmean_tokens = 20\n'
        '[reward]\nfunction = "exact"\n[workers]\ndevices = ["cpu"]\nmax_running_samples = 2\n'
    )
    out = tmp_path / "speeds.toml"
    assert main(["calibrate", str(tmp_path / "run.toml"), "--out", str(out), "--seconds", "0.1"]) == 0
    assert [running for running, _ in from_toml(out).speeds] == [1, 2]
    said = capsys.readouterr()
    assert said.out.strip() == str(out) and "2 at once: " in said.err
    assert main(["calibrate", str(tmp_path / "run.toml"), "--out", str(out), "--seconds", "0"]) == 2
    assert main(["calibrate", str(tmp_path / "run.toml"), "--out", str(tmp_path / "no" / "speeds.toml")]) == 2


HELD_OUT = {
    "synchronous, 12 places": (12, mp.SamplingConfig(group_size=4, max_new_tokens=64), mp.GateConfig(groups_per_update=4, max_lag=0), 0.3),
    "one update of lag, 24 places": (24, mp.SamplingConfig(group_size=8, max_new_tokens=48), mp.GateConfig(groups_per_update=4, max_lag=1), 0.5),
    "no bound, 32 places": (32, mp.SamplingConfig(group_size=4, max_new_tokens=64), mp.GateConfig(groups_per_update=6, max_live_groups=12), 0.2),
}  # fmt: skip
STEPS = 15


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_predicts_three_held_out_settings_of_a_real_model(tiny_model: Path, tmp_path: Path) -> None:
    """Real SGLang on the CPU, calibrated once; then three runs whose places, lengths, lag bound and trainer it has not seen: the wall
    time of each within 10%. Minutes; on an otherwise idle machine (`pytest -m long tests/test_calibration.py -s` prints the numbers).
    """
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(64)))
    (tmp_path / "run.toml").write_text(
        f'[source]\npath = "{tmp_path}/prompts.jsonl"\n[generator]\nbackend = "sglang"\nmodel = "{tiny_model}"\ndtype = "float32"\n'
        '[sampling]\nmax_new_tokens = 64\n[reward]\nfunction = "exact"\n[workers]\ndevices = ["cpu"]\nmax_running_samples = 32\n'
    )
    out = tmp_path / "speeds.toml"
    program = [
        sys.executable,
        "-m",
        "mprollout",
        "calibrate",
        str(tmp_path / "run.toml"),
        "--out",
        str(out),
        "--seconds",
        "5",
    ]
    subprocess.run(program, check=True, timeout=900)
    found, model = from_toml(out), mp.SGLangConfig(model=str(tiny_model), dtype="float32")
    print(found.speeds, found.prefill_s, found.update_s)
    errors = {}
    for name, (running, sampling, gate, step_s) in HELD_OUT.items():
        asked = config(model, running, sampling=sampling, gate=msgspec.structs.replace(gate, await_weights=True))
        with mp.RolloutEngine(asked) as engine:
            engine.update_weights(tiny_model)  # what the first one sets up is paid here
            began = time.monotonic()
            for _ in range(STEPS):
                engine.get(gate.groups_per_update, timeout=120).release()
                time.sleep(step_s)
                engine.update_weights(tiny_model)
            wall_s = time.monotonic() - began
            lengths = engine.stats().lengths_delivered
        trainer = TrainerModel(groups_per_step=gate.groups_per_update, step_s=step_s, steps=STEPS)
        predicted_s = simulate(as_simulated(asked, found, trainer), trainer).wall_s
        errors[name] = predicted_s / wall_s - 1
        print(f"{name}: measured {wall_s:.2f} s, predicted {predicted_s:.2f} s, {errors[name]:+.1%}; lengths {lengths}")
    assert all(abs(error) < 0.10 for error in errors.values()), errors
