"""Nobody waits for what is lost, late or stopped; and runs that are killed and resumed again and again train every row once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import engines
import numpy as np
import pytest
from engines import until

import mprollout as mp

pytestmark = pytest.mark.timeout(90)
ONE_WORKER = mp.WorkerConfig(devices=["cpu"], max_running_samples=64)


async def slow_judge(sample: mp.RewardInput) -> float:
    if sample.prompt.row == 3:
        await asyncio.sleep(60)
    return 1.0


def test_swallowed_completions_are_missed_by_their_deadline_and_tried_again() -> None:
    """SkyRL#1173, verl#7155: the engine never answers for some samples; each is named, its group is retried, the batch completes."""
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=12, faults={"swallow": 0.02}),
        "fault": mp.FaultConfig(sample_timeout_s=0.5, retry_delay_s=0.001, max_attempts=10),
    }
    with mp.RolloutEngine(engines.config(workers=ONE_WORKER, **changes)) as engine:
        assert sorted(engines.drain(engine)) == list(range(40))
        stats, notes = engine.stats(), engine._attendant.notes  # type: ignore[union-attr]
        assert stats.retried >= 1
        assert stats.outcomes == {"taken": 40}
        until(lambda: notes, "a note of each")
        assert all("exceeded sample_timeout_s=0.5" in note.error and "sample " in note.error for note in notes.values())


def test_a_judge_that_sleeps_keeps_nobody_waiting_who_does_not_need_it() -> None:
    """slime#2176: the target is met without the straggler: get returns; close cancels the judge and gives its prompt back."""
    with mp.RolloutEngine(engines.config(workers=ONE_WORKER, reward=mp.RewardConfig(slow_judge))) as engine:
        tickets = engine.get(4, timeout=20).tickets
        began = time.monotonic()
        for _ in range(8):
            tickets += engine.get(4, timeout=20).tickets
        assert time.monotonic() - began < 5
        assert 3 not in tickets
        assert len(set(tickets)) == 36
        assert engine.stats().workers[0].rewarding_samples >= 1
        state, began = engine.state_dict(), time.monotonic()
    assert time.monotonic() - began < 5
    assert state["ledger"]["unresolved"][0] == [3, 3]  # the next start begins with it


def test_a_stopped_worker_delays_only_its_own_and_resumes() -> None:
    """cloudtoid/interprocess#56: SIGSTOP, then SIGCONT: nothing of it is taken away meanwhile, nothing is made twice."""
    changes = {"generator": mp.SimulatedConfig(mean_tokens=12, tokens_per_s=400)}
    with mp.RolloutEngine(engines.config(rows=80, workers=engines.TWO_WORKERS, **changes)) as engine:
        tickets = engine.get(4, timeout=20).tickets
        stopped = engine.stats().workers[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            for _ in range(8):
                tickets += engine.get(4, timeout=20).tickets
            held = [row[0] for row in engine._attendant.segment.table() if row[1:5:3] == (2, 0)]  # type: ignore[union-attr]
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        tickets += engines.drain(engine)
        assert sorted(tickets) == list(range(80))
        assert not set(held) & set(tickets[:36])
        assert engine.stats().workers[0].restarts == 0


TRAINER = """
import json, os, sys
sys.path.insert(0, {tests!r})
import mprollout as mp, engines
def main():
    save, log = sys.argv[1], sys.argv[2]
    engine = mp.RolloutEngine(engines.config(rows={rows}, generator=mp.SimulatedConfig(mean_tokens=12, tokens_per_s=2000)))
    state = json.load(open(save)) if os.path.exists(save) else None
    if state is not None:
        engine.load_state_dict(state["engine"])
    with engine:
        if state is not None:
            import torch
            engine.update_weights({{"w": torch.zeros(1)}})
        trained = state["trained"] if state is not None else []
        while len(trained) < {rows}:
            with engine.get(4, timeout=30) as batch:
                trained = trained + batch.tickets                   # the "model" is the list of what it saw
            with open(save + ".new", "w") as file:
                json.dump({{"engine": engine.state_dict(), "trained": trained}}, file)
            os.replace(save + ".new", save)
            print(len(trained), flush=True)
if __name__ == "__main__":
    main()
"""


def kill_and_resume(tmp_path: Path, kills: int, rows: int) -> None:
    script, save = tmp_path / "train.py", tmp_path / "save.json"
    script.write_text(textwrap.dedent(TRAINER.format(tests=str(Path(__file__).parent), rows=rows)))
    rng = np.random.default_rng(7)
    killed = 0
    while True:
        with subprocess.Popen(
            [sys.executable, str(script), str(save), ""], stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as trainer:
            assert trainer.stdout is not None
            if killed < kills:
                for _ in range(int(rng.integers(1, 4))):
                    trainer.stdout.readline()
                trainer.kill()
                killed += 1
            trainer.stdout.read()
        if trainer.returncode == 0:
            break
    assert sorted(json.loads(save.read_text())["trained"]) == list(range(rows))


@pytest.mark.slow
def test_every_row_trains_once_over_kills_and_resumes(tmp_path: Path) -> None:
    """NeMo-RL#3599, vime#324: counted against the checkpoint that was loaded."""
    kill_and_resume(tmp_path, kills=4, rows=60)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_row_trains_once_over_a_hundred_kills_and_resumes(tmp_path: Path) -> None:
    """NeMo-RL#3599, vime#324."""
    kill_and_resume(tmp_path, kills=100, rows=1200)
