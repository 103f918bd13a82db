"""Who dies, and when: what is lost by it (nothing), what comes again, what is left behind (nothing)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import rewards
from engines import TWO_WORKERS, config, descendants, drain, until, write_safetensors

import mprollout as mp

pytestmark = pytest.mark.timeout(90)


def test_all_workers_lost_reaches_get_with_pid_and_exit_code():
    """NeMo-RL#3488: kill -9 of all workers, restarts used up: get raises within 5 s."""
    changes = {
        "workers": mp.WorkerConfig(devices=["cpu", "cpu"], max_restarts=0),
        "generator": mp.SimulatedConfig(tokens_per_s=1.0),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        pids = [worker.pid for worker in engine.stats().workers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(mp.WorkersLost) as caught:
            engine.get(4, timeout=30)
        assert time.monotonic() - start < 5
        assert caught.value.pid in pids and caught.value.exit_code == -signal.SIGKILL


def test_a_killed_workers_tickets_come_again_and_none_twice():
    """slime#1615: kill -9 of 1 of 2 workers mid-run: its tickets once more, exactly n delivered, none twice."""
    slow = mp.SimulatedConfig(mean_tokens=12, tokens_per_s=300)
    with mp.RolloutEngine(config(rows=200, workers=TWO_WORKERS, generator=slow)) as engine:
        tickets = engine.get(8, timeout=20).tickets
        until(lambda: engine.stats().workers[0].running_samples > 0, "worker 0 runs samples")
        os.kill(engine.stats().workers[0].pid, signal.SIGKILL)
        tickets += drain(engine, 8)
        assert sorted(tickets) == list(range(200))
        assert engine.stats().workers[0].restarts == 1 and engine.stats().outcomes == {"taken": 200}


def test_a_paused_worker_is_proven_dead_before_its_tickets_come_again_and_nothing_of_it_is_late():
    """miles#2254: stopped between claim and publish, and let go again, whatever has become of it, once its tickets are made elsewhere."""
    workers = mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16, progress_timeout_s=1.0)
    slow = mp.SimulatedConfig(mean_tokens=12, tokens_per_s=300)
    with mp.RolloutEngine(config(rows=120, workers=workers, generator=slow)) as engine:
        tickets = engine.get(8, timeout=20).tickets
        until(lambda: engine.stats().workers[0].running_samples > 0, "worker 0 runs samples")
        paused = psutil.Process(engine.stats().workers[0].pid)
        paused.suspend()
        until(lambda: engine.stats().workers[0].restarts == 1, "it is missed")
        assert not paused.is_running()
        tickets += drain(engine, 8)
        assert sorted(tickets) == list(range(120)) and engine.stats().outcomes == {"taken": 120}


@pytest.mark.slow
def test_a_storm_of_worker_deaths_loses_and_doubles_nothing():
    rng = np.random.default_rng(5)
    workers = mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16, max_restarts=100)
    with mp.RolloutEngine(
        config(rows=400, workers=workers, generator=mp.SimulatedConfig(mean_tokens=12, tokens_per_s=400))
    ) as engine:
        tickets: list[int] = []
        for _ in range(6):
            tickets += engine.get(4, timeout=30).tickets
            victim = engine.stats().workers[int(rng.integers(2))]
            until(lambda: engine.stats().workers[victim.worker].state == "ready", "it works")  # noqa: B023
            os.kill(engine.stats().workers[victim.worker].pid, signal.SIGKILL)
            until(lambda: engine.stats().workers[victim.worker].restarts > victim.restarts, "it is started again")  # noqa: B023
        tickets += drain(engine)
        assert sorted(tickets) == list(range(400))
        assert engine.audit() == {"taken": 400}


def test_a_worker_killed_while_starting_is_started_again():
    """sglang#23627: a death in start-up leaves nothing and is retried."""
    engine = mp.RolloutEngine(config(workers=TWO_WORKERS, generator=mp.SimulatedConfig(start_s=0.8)))
    thread = threading.Thread(target=engine.start)
    thread.start()
    until(lambda: engine._attendant and len(engine._attendant.states) == 2, "both workers are starting")
    os.kill(engine._attendant.states[0].pid, signal.SIGKILL)
    thread.join(30)
    try:
        assert engine.stats().workers[0].restarts == 1
        assert sorted(drain(engine)) == list(range(40))
    finally:
        engine.close()


def test_the_keepers_death_is_a_typed_error_and_ends_the_workers():
    changes = {
        "workers": TWO_WORKERS,
        "reward": mp.RewardConfig(rewards.length),
        "generator": mp.SimulatedConfig(tokens_per_s=1.0),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        workers = [psutil.Process(worker.pid) for worker in engine.stats().workers]
        children = [child for worker in workers for child in worker.children(recursive=True)]
        assert len(workers + children) == 4  # a reward process each
        os.kill(engine._keeper.pid, signal.SIGKILL)
        with pytest.raises(mp.KeeperLost, match="exit code -9"):
            engine.get(4, timeout=30)
        _, alive = psutil.wait_procs(workers + children, timeout=10)
        assert alive == []


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import mprollout as mp, engines, rewards
def main():
    changes = {{"workers": engines.TWO_WORKERS, "reward": mp.RewardConfig(rewards.length)}}
    slow = mp.SimulatedConfig(start_s={start_s}, update_s={update_s}, tokens_per_s={tokens_per_s}, mean_tokens=12)
    with mp.RolloutEngine(engines.config(rows=100000, generator=slow, **changes)) as engine:
        print("started", flush=True)
        {body}
if __name__ == "__main__":
    main()
"""
BODIES = {
    "start": (60.0, 0.0, 0.0, "pass"),
    "get": (0.0, 0.0, 0.1, 'print("phase", flush=True); engine.get(4)'),
    "train": (0.0, 0.0, 100.0, 'print("phase", flush=True); import time; time.sleep(60)'),
    "update": (
        0.0,
        60.0,
        100.0,
        'print("phase", flush=True); engine.update_weights({weights!r})',
    ),
}


def run_phase(tmp_path: Path, phase: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A trainer in its own process that has reached `phase`, and all processes below it."""
    start_s, update_s, tokens_per_s, body = BODIES[phase]
    script, weights = tmp_path / "train.py", tmp_path / "weights"
    write_safetensors(weights)
    settings = {"start_s": start_s, "update_s": update_s, "tokens_per_s": tokens_per_s}
    body = body.format(weights=str(weights))
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), body=body, **settings))
    trainer = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    if phase == "start":
        until(
            lambda: len(descendants(trainer.pid, "mprollout.worker_process")) == 2,
            "two workers are starting",
        )
    else:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "started\n" and trainer.stdout.readline() == "phase\n"
    return trainer, descendants(trainer.pid)


@pytest.mark.parametrize("phase", BODIES)
def test_ctrl_c_ends_everything_within_5_s(tmp_path, phase):
    trainer, below = run_phase(tmp_path, phase)
    start = time.monotonic()
    trainer.send_signal(signal.SIGINT)
    _, stderr = trainer.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert trainer.returncode == -signal.SIGINT and "KeyboardInterrupt" in stderr
    assert psutil.wait_procs(below, timeout=1)[1] == []


@pytest.mark.parametrize("phase", BODIES)
def test_a_killed_trainer_leaves_no_process(tmp_path, phase):
    """sglang#23627, sglang#16756: kill -9 of the trainer, workers starting or at work: nothing is left after 10 s."""
    trainer, below = run_phase(tmp_path, phase)
    trainer.kill()
    trainer.communicate(timeout=30)
    assert psutil.wait_procs(below, timeout=10)[1] == []


def test_a_killed_keeper_and_trainer_leave_no_process(tmp_path):
    """vllm#54002: both at once: the workers end by themselves, and the next start cleans the folder."""
    trainer, below = run_phase(tmp_path, "train")
    keeper = descendants(trainer.pid, "mprollout.keeper")[0]
    for pid in (keeper.pid, trainer.pid):
        os.kill(pid, signal.SIGKILL)
    trainer.communicate(timeout=30)
    assert psutil.wait_procs(below, timeout=10)[1] == []
    mp.RolloutEngine(config()).__enter__().close()  # the autouse fixture sees that its folder is gone
