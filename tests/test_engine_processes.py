"""Processes and threads around an engine: forks, a close beside calls, scripts as modules, a keeper's orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import rewards
import torch
from engines import config, descendants, drain, until
from played import played

import mprollout as mp

pytestmark = pytest.mark.timeout(60)


def test_a_forked_child_has_no_engine_and_the_parent_keeps_its_own():
    """cpython#82300, LMCache#4917: closing does nothing in the child; everything else says whose the engine is."""
    with played() as on:
        on.publish(2)
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = ""
            try:
                on.engine.close()
                with on.engine.get(1):
                    said += "got a batch; "
            except mp.EngineClosed as error:
                said += str(error)
            for call in (on.engine.stats, on.engine.state_dict, lambda: on.engine.evaluate([]), on.engine.audit):
                try:
                    call()
                    said += "; no error"
                except mp.EngineClosed:
                    pass
            os.write(writes, said.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        said = os.read(reads, 1000).decode()
        os.close(reads)
        os.close(writes)
        assert said == "the engine belongs to the process that made it; a forked child has none"
        assert on.keeper.far.receive() is None  # nobody said Stop
        assert on.engine.get(2, timeout=10).tickets == [0, 1]
        assert on.engine.audit()["taken"] == 2


def test_close_ends_the_calls_of_other_threads():
    with mp.RolloutEngine(
        config(generator=mp.SimulatedConfig(tokens_per_s=0.5, update_s=60.0), workers=mp.WorkerConfig(devices=["cpu"]))
    ) as engine:
        ends: dict[str, BaseException] = {}

        def run(name: str, call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:
                ends[name] = error

        calls: dict[str, Callable[[], object]] = {
            "get": lambda: engine.get(4),
            "evaluate": lambda: engine.evaluate([{"prompt": "one", "answer": ""}]),
            "update": lambda: engine.update_weights({"w": torch.zeros(1)}),
        }
        threads = [threading.Thread(target=run, args=item) for item in calls.items()]
        for thread in threads:
            thread.start()
        until(lambda: engine._in_get is not None and len(engine._attendant._waiters) == 2, "all three wait")
        engine.close()
        for thread in threads:
            thread.join(5)
        assert {name: type(error) for name, error in ends.items()} == dict.fromkeys(calls, mp.EngineClosed)
        for call in (*calls.values(), engine.start, engine.stats, engine.state_dict):
            with pytest.raises(mp.EngineClosed):
                call()
        engine.close()


def test_an_engine_that_was_closed_or_never_started_says_so():
    engine = mp.RolloutEngine(config())
    with pytest.raises(mp.EngineClosed, match="not started"):
        engine.get(1)
    engine.close()
    with pytest.raises(mp.EngineClosed, match="make a new one"):
        engine.start()
    with played() as on, pytest.raises(mp.EngineClosed, match="started or closed before"):
        on.engine.start()


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "seen by close alone"])
def test_a_killed_keeper_leaves_neither_reward_processes_nor_what_they_started(seen):
    """sglang#40723, vllm#54002."""
    changes = {
        "reward": mp.RewardConfig(rewards.with_a_process),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=8),
        "gate": mp.GateConfig(max_live_groups=2),
        "sampling": mp.SamplingConfig(group_size=1),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        engine.get(1, timeout=20).release()
        until(lambda: descendants(engine._keeper.pid, "sleep 60"), "the reward's own process runs")
        below = descendants(engine._keeper.pid)
        assert len(below) > 2
        if not seen:
            engine._attendant.stop()
        os.kill(engine._keeper.pid, signal.SIGKILL)
        if seen:
            with pytest.raises(mp.KeeperLost, match="exit code -9"):
                drain(engine, 1)
            with pytest.raises(mp.KeeperLost, match="exit code -9"):
                engine.update_weights({"w": torch.zeros(1)})
        else:
            engine.close()
        assert psutil.wait_procs(below, timeout=10)[1] == []


def run_script(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=path, start_new_session=True
    )


SETTINGS = """
import sys; sys.path.insert(0, {tests!r})
import mprollout as mp, engines
def reward(sample: mp.RewardInput) -> float:
    return 42.0
async def rollout(session: object, prompt: object) -> None:
    session.append([5, 6, 7])
def config(reward, **more):
    workers = mp.WorkerConfig(devices=["cpu"], max_running_samples=8)
    return engines.config(reward=mp.RewardConfig(reward), workers=workers, **more)
"""


def test_functions_of_a_module_run_with_dash_m_are_found(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "helper.py").write_text("LIMIT = 4\n")
    (tmp_path / "pkg" / "train.py").write_text(
        "from .helper import LIMIT\n"
        + SETTINGS.format(tests=str(Path(__file__).parent))
        + textwrap.dedent(
            """
            if __name__ == "__main__":
                with mp.RolloutEngine(config(reward, rollout=rollout)) as engine:
                    with engine.get(LIMIT, timeout=20) as batch:
                        print([group.rewards.tolist() for group in batch], [group.lengths.tolist() for group in batch])
            """
        )
    )
    done = run_script(tmp_path, "-m", "pkg.train")
    assert done.stdout == f"{[[42.0] * 4] * 4} {[[3] * 4] * 4}\n", done.stderr


def test_a_script_named_by_its_own_reward_without_a_main_guard_is_told_so(tmp_path):
    """Each worker would start an engine whose workers would start one ..."""
    (tmp_path / "naked.py").write_text(
        SETTINGS.format(tests=str(Path(__file__).parent))
        + textwrap.dedent(
            """
            print("started", flush=True)
            with mp.RolloutEngine(config("naked:reward")) as engine:
                engine.get(4, timeout=20)
            """
        )
    )
    done = run_script(tmp_path, "naked.py")
    assert done.returncode == 1 and done.stdout == "started\n"
    assert (
        "WorkerStartError" in done.stderr and "MainGuardMissing: a RolloutEngine is made inside worker 0" in done.stderr
    )
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_a_forked_child_that_exits_leaves_the_ring():
    """cpython#82300, LMCache#4917."""
    with mp.RolloutEngine(config()) as engine:
        batch = engine.get(4, timeout=20)
        before = batch.rewards.copy()
        pid = os.fork()
        if pid == 0:
            batch.release()
            os._exit(0)
        os.waitpid(pid, 0)
        assert (batch.rewards == before).all()
        batch.release()
        assert len(drain(engine)) == 36


def test_a_script_without_the_main_guard_gets_a_clear_error(tmp_path):
    script = tmp_path / "naked.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
            import mprollout as mp, engines
            def reward(sample: mp.RewardInput) -> float:
                return 1.0
            with mp.RolloutEngine(engines.config(reward=mp.RewardConfig(reward))) as engine:
                engine.get(4, timeout=20)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'if __name__ == "__main__":' in done.stderr and "WorkerStartError" in done.stderr


def test_a_reward_defined_in_the_script_works(tmp_path):
    script = tmp_path / "guarded.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
            import mprollout as mp, engines
            def reward(sample: mp.RewardInput) -> float:
                return 42.0
            def main():
                with mp.RolloutEngine(engines.config(reward=mp.RewardConfig(reward))) as engine:
                    print(engine.get(4, timeout=20).rewards.mean())
            if __name__ == "__main__":
                main()
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "42.0\n"


def test_the_engines_share_of_the_trainer_process_is_small():
    """The trainer's own memory, Python included and the ring apart, stays under 150 MB."""
    code = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        import psutil, mprollout as mp, engines
        if __name__ == "__main__":
            with mp.RolloutEngine(engines.config()) as engine:
                engines.drain(engine)
                print(psutil.Process().memory_full_info().uss - engine._keeper.segment.size_bytes)
        """
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(out) < 150e6


@pytest.mark.parametrize("end", ["SIGTERM", "exception", "exit"])
def test_a_trainer_that_ends_without_closing_its_engine_leaves_no_process(tmp_path, end):
    """sglang#23627: no handler, no `with`, no `close`."""
    last = {"SIGTERM": "time.sleep(60)", "exception": "raise ZeroDivisionError", "exit": "sys.exit(7)"}[end]
    (tmp_path / "train.py").write_text(
        SETTINGS.format(tests=str(Path(__file__).parent))
        + textwrap.dedent(
            f"""
            import time
            if __name__ == "__main__":
                engine = mp.RolloutEngine(config("exact"))
                engine.start()
                print("started", flush=True)
                sys.stdin.readline()
                {last}
            """
        )
    )
    command = [sys.executable, str(tmp_path / "train.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, text=True, **pipes) as trainer:
        assert trainer.stdout.readline() == "started\n"
        below = descendants(trainer.pid)
        assert len(below) == 2
        if end == "SIGTERM":
            trainer.terminate()
        trainer.communicate("go on\n", timeout=30)
    assert trainer.returncode == {"SIGTERM": -signal.SIGTERM, "exception": 1, "exit": 7}[end]
    assert psutil.wait_procs(below, timeout=10)[1] == []


def test_a_keeper_that_is_asked_to_end_ends_its_workers_and_is_missed():
    with mp.RolloutEngine(config(generator=mp.SimulatedConfig(tokens_per_s=0.5))) as engine:
        below = descendants(engine._keeper.pid)
        os.kill(engine._keeper.pid, signal.SIGTERM)
        with pytest.raises(mp.KeeperLost, match="exit code 0"):
            engine.get(4, timeout=20)
        assert psutil.wait_procs(below, timeout=10)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True], ids=["the gate is full", "in get"])
def test_who_has_nothing_to_do_uses_no_cpu(waits):
    """vllm#19036: nobody polls. The goal, 0.5% of a core over 10 s, is measured by bench/ on a quiet machine; here others may be at work."""
    changes = {
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=16),
        "generator": mp.SimulatedConfig(mean_tokens=12, tokens_per_s=0.01 if waits else 0.0),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        busy = (lambda: engine.stats().running_samples == 16) if waits else (lambda: engine.stats().pending == 10)
        until(busy, "all is done that can be done")
        processes = [psutil.Process(), psutil.Process(engine.stats().workers[0].pid)]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        if waits:
            with pytest.raises(mp.GetTimeout):
                engine.get(4, timeout=10)
        else:
            threading.Event().wait(10)
        used = [sum(process.cpu_times()[:2]) - was for process, was in zip(processes, before, strict=True)]
        assert max(used) <= 10 * 0.02, used
