"""Small engines over the simulated generator, and ways to wait for what they do."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import rewards

import mprollout as mp

TWO_WORKERS = mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16)


def config(rows: int = 40, **changes: Any) -> mp.EngineConfig:
    """One fast simulated worker, groups of 4, no reward process; `changes` replace whole parts. A second worker, and a reward
    process for each (`rewards.length`), cost half a CPU-second: for tests that are about them.
    """
    parts: dict[str, Any] = {
        "source": mp.SourceConfig(rows=[{"prompt": f"question {i}", "answer": str(i)} for i in range(rows)], epochs=1),
        "generator": mp.SimulatedConfig(mean_tokens=12),
        "sampling": mp.SamplingConfig(group_size=4, max_new_tokens=32),
        "reward": mp.RewardConfig(rewards.length_on_the_loop),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=16),
        "gate": mp.GateConfig(max_live_groups=10),
    }
    return mp.EngineConfig(**(parts | changes))


def attachable(
    run_dir: str, rows: int = 40, max_lag: int | None = None, orphan_timeout_s: float = 30.0
) -> mp.EngineConfig:
    """An engine that outlives its trainer; its rows are a file, so that they travel by their name."""
    path = Path(run_dir) / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(rows)))
    return config(
        workers=TWO_WORKERS,
        reward=mp.RewardConfig(rewards.length),
        source=mp.SourceConfig(path=str(path), epochs=1),
        gate=mp.GateConfig(max_live_groups=8, groups_per_update=4, max_lag=max_lag),
        run_dir=run_dir,
        orphan_timeout_s=orphan_timeout_s,
    )


def drain(engine: mp.RolloutEngine, n: int = 4, lags: list[int] | None = None) -> list[int]:
    """Take everything until the data ends; the tickets in the order taken. Appends each group's lag to `lags`."""
    tickets: list[int] = []
    while True:
        try:
            with engine.get(n, timeout=20) as batch:
                tickets += batch.tickets
                if lags is not None:
                    lags += [group.lag for group in batch]
        except mp.DataExhausted as error:
            if error.available == 0:
                return tickets
            n = error.available


def until(true: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition that another process brings about; a clear failure instead of a hang."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def descendants(pid: int, command: str = "") -> list[psutil.Process]:
    """All processes below `pid` whose command line holds `command`."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if command in " ".join(process.cmdline()):
                    found.append(process)
    return found


def marked(folder: str) -> list[psutil.Process]:
    """All living processes whose temporary folder is, or is below, `folder`: those of a run, orphans included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("TMPDIR", "").startswith(folder):
                found.append(process)
    return found


def write_safetensors(folder: Path) -> None:
    """A checkpoint of one tensor; without torch, whose import costs a trainer seconds."""
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
