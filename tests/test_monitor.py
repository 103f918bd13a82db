"""`mprollout top`: what a stranger's process sees of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engines
import pytest
from engines import until

import mprollout as mp
from mprollout.cli import main
from mprollout.monitor import RunView

pytestmark = pytest.mark.timeout(60)


def test_top_shows_what_the_engine_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mp.RolloutEngine(engines.config(run_dir=str(tmp_path))) as engine:
        engine.get(4, timeout=20).release()
        until(lambda: engine.stats().pending == 10, "the gate is full")
        view = RunView(tmp_path)
        try:
            until(lambda: view.look()["taken"] == 4 and view.look()["live"] == 10, "the attendant has told")
            seen, stats = view.look(), engine.stats()
        finally:
            view.close()
        assert (seen["pending"], seen["admitted"], seen["policy_version"]) == (10, 14, 0)
        assert [worker["pid"] for worker in seen["workers"]] == [worker.pid for worker in stats.workers]
        assert seen["tokens_generated"] == stats.tokens_generated > 0
        assert seen["waiting_s"] == 0.0
        program = [sys.executable, "-m", "mprollout.cli", "top", str(tmp_path), "--once", "--json"]
        shown = json.loads(subprocess.run(program, capture_output=True, text=True, check=True, timeout=30).stdout)
        assert (shown["taken"], shown["pending"]) == (4, 10)
        assert main(["top", str(tmp_path), "--once"]) == 0
        assert "4 taken" in capsys.readouterr().out
        assert len(engines.drain(engine)) == 36  # nobody was disturbed
    assert main(["top", str(tmp_path), "--once"]) == 2
    assert "nobody keeps a run there" in capsys.readouterr().err


def test_top_tells_how_long_the_trainer_waits(tmp_path: Path) -> None:
    changes = {"generator": mp.SimulatedConfig(tokens_per_s=0.5), "run_dir": str(tmp_path)}
    with mp.RolloutEngine(engines.config(**changes)) as engine:
        view = RunView(tmp_path)
        with pytest.raises(mp.GetTimeout):
            engine.get(4, timeout=0.6)
        seen = view.look()
        view.close()
        assert seen["running_samples"] == 32
        assert seen["slowest_worker_since_s"] > 0.5
        assert seen["live"] == 10
