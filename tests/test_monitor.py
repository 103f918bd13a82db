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


# What only the engine knows, or what another moment shows otherwise.
OF_ITS_MOMENT = {"outcomes", "progress_s", "workers"}


def test_top_shows_what_the_engine_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "workers": engines.TWO_WORKERS,
        "generator": mp.SimulatedConfig(mean_tokens=12, tokens_per_s=100, faults={"abort": 0.05}),
        "fault": mp.FaultConfig(max_attempts=20, retry_delay_s=0.001),
        "run_dir": str(tmp_path),
    }
    with mp.RolloutEngine(engines.config(**changes)) as engine:
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
        for name in stats.__struct_fields__:
            if name not in OF_ITS_MOMENT:
                assert seen[name] == getattr(stats, name), name
        assert seen["tokens_generated"] > seen["tokens_delivered"] > 0
        assert seen["retried"] > 0 and seen["discarded"].keys() == {"abort"}
        assert seen["lags"] == {0: 4} and seen["ended_by"] == {}
        assert sum(seen["lengths_issued"].values()) >= 14 * 4 == sum(seen["lengths_delivered"].values()) + 40
        assert sum(seen["waited_s"].values()) > 0 and seen["waiting_s"] == 0.0
        program = [sys.executable, "-m", "mprollout.cli", "top", str(tmp_path), "--once", "--json"]
        shown = json.loads(subprocess.run(program, capture_output=True, text=True, check=True, timeout=30).stdout)
        assert (shown["taken"], shown["pending"]) == (4, 10)
        assert shown["waited_s"] == seen["waited_s"] and shown["reward_mean"] == seen["reward_mean"]
        assert main(["top", str(tmp_path), "--once"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "4 taken" in text and "groups by lag 0: 4" in text
        assert "the trainer waited for generation" in text
        assert len(engines.drain(engine)) == 36  # nobody was disturbed
    assert main(["top", str(tmp_path), "--once"]) == 2
    assert "nobody keeps a run there" in capsys.readouterr().err


def test_top_tells_who_keeps_the_trainer_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"generator": mp.SimulatedConfig(tokens_per_s=0.5), "run_dir": str(tmp_path)}
    with mp.RolloutEngine(engines.config(**changes)) as engine:
        view = RunView(tmp_path)
        with pytest.raises(mp.GetTimeout):
            engine.get(4, timeout=0.6)
        seen = view.look()
        view.close()
        assert seen["running_samples"] == 16
        assert seen["progress_s"] > 0.5
        assert seen["live"] == 10
        oldest = seen["straggler"]
        assert oldest["ticket"] in range(10) and oldest["attempt"] == 0 and oldest["since_s"] > 0.5
        assert main(["top", str(tmp_path), "--once"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"the oldest straggler ticket {oldest['ticket']}, attempt 0 on worker {oldest['worker']}" in text
