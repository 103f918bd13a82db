"""Small engines over the simulated generator, and reward functions that workers can import."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import mprollout as mp
from mprollout.rollout import Session
from mprollout.source import Prompt


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


async def async_index(sample: mp.RewardInput) -> float:
    return float(sample.index)


outage_calls = 0


async def down_twice(sample: mp.RewardInput) -> float:
    """Raises in its calls 1 to 15 and 41 to 55 in this process."""
    global outage_calls
    outage_calls += 1
    if (outage_calls - 1) % 40 < 15 and outage_calls < 60:
        raise ConnectionError(f"the judge is down in call {outage_calls}")
    return 1.0


async def poisonous_row_0(session: Session, prompt: Prompt) -> None:
    """Ends its worker, a moment after it started, for row 0."""
    if prompt.row == 0:
        await asyncio.sleep(0.05)
        os._exit(13)
    await session.generate()


def with_a_process(sample: mp.RewardInput) -> float:
    """Leaves a process of its own running, as a sandbox or a compiler may be."""
    subprocess.Popen(["sleep", "60"])
    return 1.0


def judge_group(samples: list[mp.RewardInput]) -> list[float]:
    """The index of each sample in its group; no verdict for rows that say so."""
    if samples[0].prompt.fields.get("judge") == "absent":
        raise LookupError("there is no judge for this row")
    return rank(samples)


async def echo(session: Session, prompt: Prompt) -> None:
    """Samples, then repeats the prompt as the engine rendered it."""
    await session.generate()
    session.append(session.prompt_ids)


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


def attachable(
    run_dir: str, rows: int = 40, max_lag: int | None = None, orphan_timeout_s: float = 30.0
) -> mp.EngineConfig:
    """An engine that outlives its trainer; its rows are a file, so that they travel by their name."""
    path = Path(run_dir) / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(rows)))
    return config(
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
