"""A trainer dies and another takes its place: the workers live on, and every ticket trains once against the checkpoint that was loaded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from engines import attachable, descendants, drain, until, write_safetensors

import mprollout as mp
from mprollout.audit import prove
from mprollout.ledger import Ledger

pytestmark = pytest.mark.timeout(90)
WEIGHTS = {"w": torch.zeros(4)}
SCRIPT = """
import json, os, sys, time
sys.path.insert(0, {tests!r})
import mprollout as mp, engines
if __name__ == "__main__":
    engine = mp.RolloutEngine(engines.attachable({run_dir!r}, **{changes!r}))
    engine.start()
    trained, kept = [], []
    for step in range({steps}):
        batch = engine.get(4, timeout=30)
        trained.append(batch.tickets)
        kept.append(batch) if step >= {saved} and {keep} else batch.release()
        if engine.config.gate.max_lag is not None:
            engine.update_weights({run_dir!r} + "/weights")
        if step + 1 == {saved}:
            state = engine.state_dict()
            engine.confirm(state)
    engines.until(lambda: engine.stats().live == 8, "the gate is full")
    print(json.dumps([trained, state, [w.pid for w in engine.stats().workers]]), flush=True)
    time.sleep(60)
"""


def trainer(
    tmp_path: Path, steps: int, saved: int, keep: bool = True, **changes: Any
) -> tuple[subprocess.Popen[str], list[Any]]:
    """A trainer that has taken `steps` batches, its checkpoint being of step `saved`; what it says of itself."""
    script = tmp_path / "train.py"
    write_safetensors(tmp_path / "weights")
    tests = str(Path(__file__).parent)
    text = SCRIPT.format(tests=tests, run_dir=str(tmp_path), steps=steps, saved=saved, keep=keep, changes=changes)
    script.write_text(textwrap.dedent(text))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def kill(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """End a trainer as the kernel's OOM killer would; the processes that it had below it."""
    below = descendants(process.pid)
    process.kill()
    process.communicate(timeout=10)
    return below


@pytest.mark.parametrize("max_lag", [pytest.param(None, marks=pytest.mark.slow), 1])
def test_a_new_trainer_finds_the_workers_and_loses_nothing(tmp_path: Path, max_lag: int | None) -> None:
    process, (trained, state, pids) = trainer(tmp_path, steps=2, saved=1, max_lag=max_lag)
    below = kill(process)
    until(lambda: prove(tmp_path).state == "orphaned", "the keeper has noticed")
    assert (orphan := prove(tmp_path)).proven and orphan.tickets["taken"] == 8
    engine = mp.RolloutEngine.attach(tmp_path, state)
    with engine:
        attached = prove(tmp_path)
        assert (attached.state, attached.proven, attached.trainer_pid) == ("living", True, os.getpid())
        assert attached.tickets["taken"] == 4 == attached.tickets["parked"]  # those that the dead one kept
        assert [worker.pid for worker in engine.stats().workers] == pids
        assert engine.stats().workers[0].restarts == 0
        engine.update_weights(WEIGHTS)
        assert engine.policy_version == (1 if max_lag is None else 3)  # fresh: 1 and 2 were the dead trainer's
        assert engine.audit()["parked"] == 4
        with engine.get(4, timeout=20) as batch:
            assert batch.tickets == trained[1]  # taken, not in the checkpoint, still in memory: first, and the same
        rest = drain_with_updates(engine, max_lag)
        assert sorted(trained[0] + trained[1] + rest) == list(range(40))
        assert engine.audit() == {"taken": 40}
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert not (tmp_path / "keeper.sock").exists()


def drain_with_updates(engine: mp.RolloutEngine, max_lag: int | None) -> list[int]:
    if max_lag is None:
        return drain(engine)
    tickets: list[int] = []
    while True:
        engine.update_weights(WEIGHTS)
        try:
            with engine.get(4, timeout=20) as batch:
                tickets += batch.tickets
                assert max(group.lag for group in batch) <= max_lag
        except mp.DataExhausted:
            return tickets


@pytest.mark.slow
def test_groups_whose_memory_went_back_are_made_again_in_their_place(tmp_path: Path) -> None:
    """In ticket order the gap between the checkpoint and what is live comes first, although every entry behind it is taken."""
    process, (trained, state, _) = trainer(tmp_path, steps=4, saved=1, keep=False, max_lag=1)
    assert trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    kill(process)
    with mp.RolloutEngine.attach(tmp_path, state) as engine:
        until(lambda: engine.stats().live == 8, "8 were live: 16 to 23")
        assert drain_with_updates(engine, 1) == list(range(4, 40))
        assert engine.audit() == {"taken": 40}


@pytest.mark.slow
def test_a_trainer_that_lives_keeps_its_run(tmp_path: Path) -> None:
    process, (_, state, _) = trainer(tmp_path, steps=1, saved=1)
    with pytest.raises(mp.ConfigError, match=f"living trainer .pid {process.pid}"):
        mp.RolloutEngine.attach(tmp_path, state)
    with pytest.raises(mp.ConfigError, match=r"an engine \(keeper pid \d+\) runs there"):
        mp.RolloutEngine(attachable(str(tmp_path))).start()
    kill(process)
    mp.RolloutEngine.attach(tmp_path, state).close()


def test_an_exception_leaves_the_run_to_the_next_trainer(tmp_path: Path) -> None:
    def train() -> tuple[list[int], dict[str, Any]]:
        with contextlib.suppress(ZeroDivisionError), mp.RolloutEngine(attachable(str(tmp_path))) as engine:
            pids = [worker.pid for worker in engine.stats().workers]
            state = engine.state_dict()
            engine.get(4, timeout=20)
            raise ZeroDivisionError
        return pids, state

    pids, state = train()
    with mp.RolloutEngine.attach(tmp_path, state) as engine:
        assert [worker.pid for worker in engine.stats().workers] == pids
        engine.update_weights(WEIGHTS)
        assert sorted(drain(engine)) == list(range(40))


@pytest.mark.slow
def test_an_older_state_than_the_confirmed_one_is_refused_and_the_run_waits_on(tmp_path: Path) -> None:
    process, (_, state, _) = trainer(tmp_path, steps=2, saved=2)
    kill(process)
    older = json.loads(json.dumps(state))
    older["ledger"] = Ledger().state()
    with pytest.raises(mp.ConfigError, match="a newer one with 8 was confirmed"):
        mp.RolloutEngine.attach(tmp_path, older)
    mp.RolloutEngine.attach(tmp_path, state).close()


@pytest.mark.slow
def test_nobody_comes_in_time(tmp_path: Path) -> None:
    process, (_, state, _) = trainer(tmp_path, steps=1, saved=1, orphan_timeout_s=0.5)
    below = kill(process)
    assert psutil.wait_procs(below, timeout=10)[1] == []
    until(lambda: not (tmp_path / "keeper.sock").exists(), "the keeper has cleaned up")
    with pytest.raises(mp.ConfigError, match="no keeper is there"):
        mp.RolloutEngine.attach(tmp_path, state)


@pytest.mark.slow
def test_workers_go_on_working_while_nobody_takes(tmp_path: Path) -> None:
    """What was admitted is finished and stays pending; nothing more is admitted."""
    process, (trained, state, pids) = trainer(tmp_path, steps=1, saved=1)
    process.send_signal(signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)  # a worker's death in the meantime is handled as ever
    process.kill()
    process.communicate(timeout=10)
    with mp.RolloutEngine.attach(tmp_path, state) as engine:
        until(
            lambda: 0 < engine.stats().live == engine.stats().pending + engine.stats().held, "all that was live is made"
        )
        assert engine.stats().workers[0].restarts == 1
        engine.update_weights(WEIGHTS)
        assert sorted(trained[0] + drain(engine)) == list(range(40))


def test_a_batch_trains_again_unless_a_saved_state_holds_it(tmp_path: Path) -> None:
    """Death between `state_dict` and the save: from the older checkpoint. Death between the save and `confirm`: it is not needed."""

    def first() -> tuple[list[list[int]], list[dict[str, Any]]]:
        taken, states = [], []
        with contextlib.suppress(ZeroDivisionError), mp.RolloutEngine(attachable(str(tmp_path))) as engine:
            for _ in range(2):
                taken.append(engine.get(4, timeout=20).tickets)
                states.append(json.loads(json.dumps(engine.state_dict())))
            engine.confirm(states[0])
            raise ZeroDivisionError
        return taken, states

    taken, (confirmed, saved) = first()
    with contextlib.suppress(ZeroDivisionError), mp.RolloutEngine.attach(tmp_path, confirmed) as engine:
        engine.update_weights(WEIGHTS)
        rest = drain(engine)
        raise ZeroDivisionError
    assert sorted(taken[0] + rest) == list(range(40))
    with mp.RolloutEngine.attach(tmp_path, saved) as engine:
        engine.update_weights(WEIGHTS)
        assert sorted(taken[0] + taken[1] + drain(engine)) == list(range(40))


def test_what_a_trainer_that_was_further_had_admitted_keeps_the_lag_bound(tmp_path: Path) -> None:
    """Two steps are lost, and with them two updates: the groups at their end are not sampled with the older weights, steps too early."""
    slow = mp.SimulatedConfig(mean_tokens=12, sigma=0.0, tokens_per_s=24)
    config = msgspec.structs.replace(attachable(str(tmp_path), max_lag=1), generator=slow)
    with contextlib.suppress(ZeroDivisionError), mp.RolloutEngine(config) as engine:
        state = engine.state_dict()
        for _ in range(2):
            engine.get(4, timeout=20).release()
            engine.update_weights(WEIGHTS)
        raise ZeroDivisionError
    with mp.RolloutEngine.attach(tmp_path, state) as engine:
        assert drain_with_updates(engine, 1) == list(range(40))
        assert max(engine.stats().lags) <= 1
