"""Small engines over the simulated generator, and reward functions that workers can import."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil

import mprollout as mp


def length(sample: mp.RewardInput) -> float:
    return float(len(sample.token_ids))


def broken(sample: mp.RewardInput) -> float:
    raise ZeroDivisionError("this reward is broken for good")


def broken_for_row_3(sample: mp.RewardInput) -> float:
    if sample.prompt.row == 3:
        raise LookupError("row 3 is poison")
    return 1.0


def nan_for_row_3(sample: mp.RewardInput) -> float:
    return float("nan") if sample.prompt.row == 3 and sample.index == 1 else 1.0


def one_reward_too_many(samples: list[mp.RewardInput]) -> list[float]:
    return [1.0] * (len(samples) + 1)


def rank(samples: list[mp.RewardInput]) -> list[float]:
    return [float(sample.index) for sample in samples]


def config(rows: int = 40, **changes: Any) -> mp.EngineConfig:
    """Two fast simulated workers, groups of 4; `changes` replace whole parts."""
    parts: dict[str, Any] = {
        "source": mp.SourceConfig(rows=[{"prompt": f"question {i}", "answer": str(i)} for i in range(rows)], epochs=1),
        "generator": mp.SimulatedConfig(mean_tokens=12),
        "sampling": mp.SamplingConfig(group_size=4, max_new_tokens=32),
        "reward": mp.RewardConfig(length),
        "workers": mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16),
        "gate": mp.GateConfig(max_live_groups=10),
    }
    return mp.EngineConfig(**(parts | changes))


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
