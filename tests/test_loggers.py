"""Loggers: what `RolloutEngine.log` sends where, read back from where it went."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import engines
import pytest

import mprollout as mp
from mprollout import history
from mprollout.history import Logged

pytestmark = pytest.mark.timeout(90)


class Kept:
    """A logger of the user's own."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, Mapping[str, float]]] = []
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append((step, metrics))

    def close(self) -> None:
        self.closed += 1


def trained(run_dir: Path, *loggers: str) -> Kept:
    """Two steps of a run, logged."""
    kept = Kept()
    with mp.RolloutEngine(engines.config(run_dir=str(run_dir), loggers=list(loggers))) as engine:
        engine.loggers.append(kept)
        for step in (1, 2):
            engine.get(4, timeout=20).release()
            engine.log(step, {"loss": 1 / step, "eval/accuracy": 0.25 * step, "note": "x", "bad": float("inf")})
    assert kept.closed == 1
    return kept


def test_a_logger_gets_the_trainers_numbers_and_the_engines(tmp_path: Path) -> None:
    kept = trained(tmp_path)
    assert [step for step, _ in kept.lines] == [1, 2]
    (_, first), (_, second) = kept.lines
    assert (first["loss"], first["eval/accuracy"], second["loss"]) == (1.0, 0.25, 0.5)
    assert (first["engine/taken"], second["engine/taken"]) == (4, 8)
    assert second["engine/outcomes/taken"] == 8 and second["engine/waited_s/generation"] > 0
    assert not {"note", "bad"} & first.keys()
    assert all(type(value) is float for value in first.values())
    (life,) = history.read(tmp_path)
    assert life.of(Logged)[1].metrics == {"loss": 0.5, "eval/accuracy": 0.5}


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept = trained(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    for name in ("loss", "eval/accuracy", "engine/taken", "engine/waited_s/generation"):
        points = [(event.step, event.tensor_proto.float_val[0]) for event in found.Tensors(name)]
        assert points == [(step, pytest.approx(metrics[name])) for step, metrics in kept.lines], name


def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (62 MB; CI goes without)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    trained(tmp_path, "wandb")
    wandb.teardown()  # its own process, which else ends with this one
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = path.read_bytes()  # records of protobuf, as they are
    assert data.count(b"loss") >= 2 and b"eval/accuracy" in data and b"engine/waited_s/generation" in data
    assert b"bad" not in data


def test_trackio_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed (it needs an older pillow than SGLang)")
    trained(tmp_path / "seven", "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "mprollout.db") as database:
        rows = database.execute("select step, metrics from metrics where run_name = 'seven' order by step").fetchall()
    found = [(step, json.loads(metrics)["loss"]) for step, metrics in rows]
    assert found == [(1, 1.0), (2, 0.5)]


def test_what_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        mp.ConfigError, match=r"loggers must be a list of tensorboard, wandb, trackio; got \['mlflow'\]"
    ):
        engines.config(loggers=["mlflow"])
    with pytest.raises(mp.ConfigError, match="needs run_dir"):
        engines.config(loggers=["tensorboard"])
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import engines, mprollout as mp\n"
        f"mp.RolloutEngine(engines.config(run_dir={str(tmp_path)!r}, loggers=['tensorboard'])).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ConfigError: EngineConfig.loggers: 'tensorboard' is not installed" in done.stderr
    assert done.stderr.strip().endswith("pip install tensorboard")
