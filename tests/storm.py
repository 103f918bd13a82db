"""The trainer of a storm, a process of its own: `python storm.py FOLDER`. `test_storm.py` kills it and judges what it wrote.

    FOLDER/journal   append-only, a JSON line a step, on disk before the batch is released
    FOLDER/save      the checkpoint: the engine's state and the length of the journal, the "model", that it stands for

What it trained is the journal's lines up to the checkpoint that was loaded, and those after its own start.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import mprollout as mp

BATCH = 8
GROUP_SIZE = 2
MAX_LAG = 2
STEPS_PER_SAVE = 2
CALM = mp.SimulatedConfig(mean_tokens=12, sigma=0.7)
"""What is sampled, faults and speed apart: both are without influence on it."""
SAMPLING = mp.SamplingConfig(group_size=GROUP_SIZE, max_new_tokens=48)
FAULTS = {
    "exception": 0.03,
    "abort": 0.03,
    "swallow": 0.006,
    "die": 0.003,
    "hang": 0.001,
    "slow": 0.02,
    "short": 0.02,
}


def verdict(token_ids: Sequence[int]) -> int:
    """What decides all of a sample's reward."""
    return zlib.crc32(np.asarray(token_ids, np.int32).tobytes())


def value(token_ids: Sequence[int]) -> float:
    """One of six, so that many a pair has no spread."""
    return float(verdict(token_ids) % 6)


def judge(sample: mp.RewardInput) -> float:
    """`value`, but for a few samples: it raises, answers NaN, or never comes back."""
    match verdict(sample.token_ids) // 6 % 400:
        case 0 | 1 | 2 | 3:
            raise ArithmeticError("no verdict")
        case 4 | 5 | 6 | 7:
            return float("nan")
        case 8:
            time.sleep(600)
    return value(sample.token_ids)


def checksum(samples: Sequence[tuple[Any, Any, float]]) -> int:
    """Of (token ids, logprobs, reward) a sample: all that a trainer learns from."""
    total = 0
    for token_ids, logprobs, reward in samples:
        for array in (np.asarray(token_ids, np.int32), np.asarray(logprobs, np.float32), np.float32(reward)):
            total = zlib.crc32(array.tobytes(), total)
    return total


def config(folder: Path) -> mp.EngineConfig:
    return mp.EngineConfig(
        source=mp.SourceConfig(path=str(folder / "rows.jsonl"), epochs=1),
        generator=msgspec.structs.replace(CALM, tokens_per_s=500.0, prefill_s=0.002, faults=FAULTS),
        sampling=SAMPLING,
        reward=mp.RewardConfig("storm:judge", timeout_s=1.0),
        filter=mp.FilterConfig(zero_spread=True),
        workers=mp.WorkerConfig(
            devices=["cpu"] * 8, max_running_samples=6, progress_timeout_s=3.0, max_restarts=1_000_000
        ),
        gate=mp.GateConfig(groups_per_update=BATCH, max_lag=MAX_LAG),
        fault=mp.FaultConfig(sample_timeout_s=3.0, retry_delay_s=0.01, max_consecutive_failures=1000),
        run_dir=str(folder),
        orphan_timeout_s=60.0,
    )


def write(fd: int, **entry: Any) -> None:
    """One whole line, on disk when this returns."""
    line = json.dumps(entry).encode() + b"\n"
    assert os.write(fd, line) == len(line)
    os.fdatasync(fd)


def save(folder: Path, journal: int, engine: mp.RolloutEngine) -> None:
    """Prove the partition, save beside, rename, confirm."""
    audit = engine.audit()
    state = engine.state_dict()
    length = os.lseek(journal, 0, os.SEEK_END)
    with open(folder / "save.new", "w") as file:
        json.dump({"engine": state, "journal": length}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "save.new", folder / "save")
    engine.confirm(state)
    write(journal, saved=length, ledger=state["ledger"], audit=audit)


def find_engine(folder: Path) -> tuple[mp.RolloutEngine, str, dict[str, Any] | None]:
    """The living run, or a new one from the checkpoint; which of them it is; the checkpoint."""
    path = folder / "save"
    state = json.loads(path.read_bytes()) if path.exists() else None
    if state is not None:
        try:
            return mp.RolloutEngine.attach(folder, state["engine"]), "attached", state
        except mp.KeeperLost:
            pass  # killed while it answered
        except mp.ConfigError as error:
            if "no keeper is there" not in str(error):
                raise
    engine = mp.RolloutEngine(config(folder))
    if state is not None:
        engine.load_state_dict(state["engine"])
    return engine, "new" if state is None else "resumed", state


def train(folder: Path, journal: int) -> None:
    """Until the data ends. Raises KeeperLost."""
    engine, how, state = find_engine(folder)
    with engine:
        assert engine._keeper is not None
        loaded = None if state is None else state["journal"]
        write(journal, start=how, trainer=os.getpid(), keeper=engine._keeper.pid, loaded=loaded)
        if state is None:
            save(folder, journal, engine)
        baseline = 0 if state is None else engine.update_weights(folder / "weights")  # counts as no update
        updates: list[int] = []
        n, step = BATCH, 0
        while n:
            try:
                batch = engine.get(n, timeout=60)
            except mp.DataExhausted as error:
                n = error.available
                continue
            with batch:
                trained = []
                for group in batch:
                    samples = [(s.token_ids, s.logprobs, s.reward) for s in group.samples]
                    oldest = int(group.field("span_versions").min())
                    own_lag = sum(version > oldest for version in updates) if oldest >= baseline else None
                    trained.append([group.ticket, group.attempt, group.lag, own_lag, checksum(samples)])
                    del samples
                write(journal, trained=trained)
            if n == BATCH:
                updates.append(engine.update_weights(folder / "weights"))
            step += 1
            if step % STEPS_PER_SAVE == 0:
                save(folder, journal, engine)
        save(folder, journal, engine)


def main() -> None:
    folder = Path(sys.argv[1])
    journal = os.open(folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while True:
        try:
            train(folder, journal)
            return
        except mp.KeeperLost as error:
            write(journal, lost=str(error))
        except (
            mp.ConfigError
        ) as error:  # its keeper, whose trainer was killed beside it, was not yet to be heard a moment ago
            if "runs there" not in str(error):
                raise


if __name__ == "__main__":
    main()
