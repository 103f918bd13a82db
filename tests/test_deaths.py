"""Trainer, keeper, workers and a reward process are killed in every combination, in many an order, at any moment: nothing is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import pytest
from engines import descendants, marked, until, write_safetensors

PHASES = ("start", "work", "update", "close")
FOUR = ("trainer", "keeper", "worker 0", "worker 1")
FIVE = (*FOUR, "reward")
KEEPER_LOST = 3

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import mprollout as mp, engines

def main() -> None:
    phase, reward, folder = sys.argv[1:]
    changes = dict(
        reward=mp.RewardConfig("regex", kwargs={{"pattern": "x"}}) if reward == "process" else mp.RewardConfig("exact"),
        workers=mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16),
        generator=mp.SimulatedConfig(mean_tokens=12, tokens_per_s=500, update_s=0.3 if phase == "update" else 0.0),
        run_dir=folder + "/run",
    )
    with mp.RolloutEngine(engines.config(rows=24, **changes)) as engine:
        engine.get(4, timeout=30).release()
        print("ready", flush=True)
        sys.stdin.readline()
        if phase == "update":
            engine.update_weights(folder + "/weights")
        if phase != "close":
            engines.drain(engine)

if __name__ == "__main__":
    try:
        main()
    except mp.KeeperLost:
        sys.exit({lost})
"""


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """All but the empty one."""
    return [chosen for size in range(1, len(names) + 1) for chosen in itertools.combinations(names, size)]


class Deaths:
    """Runs of one small engine, one after the other in one folder, as a supervisor starts them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.dice = folder, random.Random(seed)
        self.stale: set[Path] = set()
        """What a kill of trainer and keeper together left on disk, for the next start to clean."""
        (folder / "tmp").mkdir()
        write_safetensors(folder / "weights")
        text = SCRIPT.format(tests=str(Path(__file__).parent), lost=KEEPER_LOST)
        (folder / "train.py").write_text(textwrap.dedent(text))

    def run(self, order: Sequence[str], phase: str) -> None:
        """One run: it reaches its phase, those of `order` are killed in turn, and everything ends."""
        reward = "process" if "reward" in order else "none"
        log = open(self.folder / "log", "w+")  # noqa: SIM115 (a pipe would be held open by orphans)
        trainer = subprocess.Popen(
            [sys.executable, str(self.folder / "train.py"), phase, reward, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.folder / "tmp")},
        )
        assert trainer.stdin is not None and trainer.stdout is not None
        try:
            if phase != "start":
                assert trainer.stdout.readline() == b"ready\n"
            with contextlib.ExitStack() as stack:
                victims = [self._find(trainer, name) for name in order]
                for fd in victims:
                    stack.callback(os.close, fd)
                if phase != "start":
                    trainer.stdin.write(b"go\n")
                    trainer.stdin.flush()
                time.sleep(self.dice.uniform(0, {"start": 0.5, "work": 0.05, "update": 0.3, "close": 0.02}[phase]))
                for fd in victims:
                    with contextlib.suppress(ProcessLookupError):  # it ended with one that was killed before
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                    time.sleep(self.dice.choice((0.0, 0.0, 0.005)))
            with contextlib.suppress(BrokenPipeError):
                trainer.stdin.close()  # as good as a line
            trainer.wait(40)
            until(lambda: not marked(str(self.folder)), "no process is left", 10)
            self._check(order, phase, trainer.returncode)
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], "left:", marked(str(self.folder)), sep="\n")
            raise
        finally:
            trainer.kill()
            trainer.wait()
            trainer.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                trainer.stdin.close()
            log.close()
            for process in marked(str(self.folder)):
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _find(self, trainer: subprocess.Popen[bytes], name: str) -> int:
        """The pidfd of a victim, as soon as there is one."""
        found: list[int] = []

        def look() -> bool:
            assert trainer.poll() is None, "the trainer has ended by itself"
            if name == "trainer":
                pids = [trainer.pid]
            elif name == "keeper":
                pids = [process.pid for process in descendants(trainer.pid, "mprollout.keeper")]
            else:
                index = name.removeprefix("worker ") if name != "reward" else "0"
                workers = [
                    process
                    for process in descendants(trainer.pid, "mprollout.worker_process")
                    if process.cmdline()[-1] == index
                ]
                pids = [process.pid for process in workers]
                if name == "reward":
                    pids = [
                        child.pid
                        for worker in workers
                        for child in descendants(worker.pid)
                        if "resource_tracker" not in " ".join(child.cmdline())
                    ]
            with contextlib.suppress(ProcessLookupError):
                found.extend(os.pidfd_open(pid) for pid in pids[:1])
            return bool(found)

        until(look, f"there is a {name}", 30)
        return found[0]

    def _check(self, order: Sequence[str], phase: str, returncode: int) -> None:
        tmp, door = self.folder / "tmp", self.folder / "run" / "keeper.sock"
        left = {*tmp.glob("mprollout-*"), *([door] if door.exists() else [])}
        if {"trainer", "keeper"} <= set(order):
            self.stale = left
            return
        if phase != "start":  # there, its start may have been cut short before it cleaned
            self.stale = set()
        assert left <= self.stale, f"left on disk: {left}, {self.stale} by the runs before"
        if "trainer" in order:
            assert returncode == -signal.SIGKILL
        else:
            assert returncode in ((0, KEEPER_LOST) if "keeper" in order else (0,))


def die(folder: Path, seed: int, orders: Iterable[tuple[tuple[str, ...], str]]) -> None:
    deaths = Deaths(folder, seed)
    for order, phase in orders:
        try:
            deaths.run(order, phase)
        except BaseException as error:
            error.add_note(f"seed {seed}: killed {', then '.join(order)} at {phase}")
            raise
    deaths.run((), "close")  # cleans after the last one


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("half", [0, 1])
def test_every_combination_of_deaths_leaves_nothing(tmp_path: Path, half: int) -> None:
    """sglang#40723, vllm#54002: each once; trainer and keeper in both orders. What both at once leave on disk goes with the next start."""
    dice = random.Random(0)
    orders = [tuple(dice.sample(chosen, len(chosen))) for chosen in [*subsets(FOUR), ("reward",), FIVE]]
    orders += [order[::-1] for order in orders if {"trainer", "keeper"} <= set(order)]
    dice.shuffle(orders)
    die(tmp_path, half, list(zip(orders, itertools.cycle(PHASES)))[half::2])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_combination_of_deaths_in_every_phase_leaves_nothing(tmp_path: Path) -> None:
    """sglang#40723, vllm#54002: a hundred and more, each in another order, at another moment."""
    dice = random.Random(1)
    orders = [(tuple(dice.sample(names, len(names))), phase) for names in subsets(FIVE) for phase in PHASES]
    dice.shuffle(orders)
    die(tmp_path, 1, orders)
