"""`Worker`: one worker process as its parent sees it: spawned, killed, its death proven, buried.

    spawn --> worker_process (own session, own folder, own GPUs) --death--> bury

Invariant: `bury` returns only after the death is proven by the pidfd and the whole process group is killed. What follows from a death is the keeper's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mprollout import _native, messages
from mprollout.config import WorkerConfig
from mprollout.errors import ConfigError
from mprollout.ring import WorkerWord

if TYPE_CHECKING:
    from mprollout.keeper import KeeperRecord


class Worker:
    """One worker number, over all its incarnations."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = "lost"
        self.restarts = 0
        self.restarts_in_a_row = self.published = self.failed_starts = 0
        self.ever_ready = self.served = False
        self.version = 0
        """Of the weights that it applied."""
        self.evaluation = 0
        """The one that it is set aside for; 0: none."""
        self.asleep = False
        self.innocent_tickets = False
        """Killed for a reason that is no ticket's fault."""
        self.pid = self.pidfd = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: messages.Channel | None = None
        self.failed: messages.WorkerFailed | None = None
        self.kill_reason = ""
        self.start_at = 0.0
        """When to spawn again (state restarting), or when it was spawned (state starting); CLOCK_MONOTONIC, s."""
        self.start_s = 0.0
        self.last_told: messages.WorkerState | None = None

    @property
    def may_claim(self) -> bool:
        """Once it has the newest weights."""
        return not self.asleep and not self.evaluation

    @property
    def told(self) -> str:
        """Its state, for the trainer."""
        if self.state != "ready" or self.may_claim:
            return self.state
        return "asleep" if self.asleep else "evaluating"

    def spawn(
        self,
        segment: _native.Segment,
        record: KeeperRecord,
        temp_dir: Path,
        log_dir: Path,
        bell: int,
        attendant_bell: int,
    ) -> None:
        """Start the next incarnation and hand it the memory."""
        folder = temp_dir / f"w{self.index}"
        folder.mkdir(exist_ok=True)
        channel, theirs = messages.Channel.pair()
        log = os.open(self._log(log_dir), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",  # what lies in the current folder is none of its modules
                "-m",
                "mprollout.worker_process",
                str(theirs.fileno()),
                str(os.getpid()),
                str(self.index),
            ],
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # its whole process group can be ended; Ctrl-C goes to the trainer alone
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=worker_environment(record.workers, self.index, folder),
        )
        os.close(log)
        theirs.close()
        self.pid, self.channel = self.process.pid, channel
        self.pidfd = os.pidfd_open(self.pid)
        self.failed, self.kill_reason, self.served, self.innocent_tickets = None, "", False, False
        self.version, self.evaluation, self.asleep = 0, 0, False
        self.state, self.start_at = "starting", time.monotonic()
        words = segment.worker_words(self.index)
        words[WorkerWord.PID], words[WorkerWord.RESTARTS], words[WorkerWord.VERSION] = self.pid, self.restarts, 0
        words[WorkerWord.HEARTBEAT_NS] = words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
        forget_running(words)
        blob = messages.blob(record.worker_record)
        channel.send(messages.Boot(worker=self.index), [blob, segment.fd, bell, attendant_bell])
        os.close(blob)

    def send(self, message: messages.Message, fds: list[int] | None = None) -> None:
        """Send; its death is reported by the pidfd, not here."""
        assert self.channel is not None
        with contextlib.suppress(OSError):
            self.channel.send(message, fds)

    def kill(self, reason: str, innocent_tickets: bool = False) -> None:
        """End its process group; the pidfd reports the death."""
        self.kill_reason, self.innocent_tickets = reason, innocent_tickets
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def bury(self, temp_dir: Path) -> int:
        """Prove the death, end what is left of its group, close its descriptors. Returns the exit code, negative for a signal."""
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # before the reaping: its number cannot name another group yet
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert status is not None and self.process is not None and self.channel is not None
        exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self.process.returncode = exit_code
        os.close(self.pidfd)
        self.channel.close()
        self.channel, self.pidfd = None, -1
        shutil.rmtree(temp_dir / f"w{self.index}", ignore_errors=True)
        return exit_code

    def log_tail(self, log_dir: Path) -> str:
        """The last of what it wrote."""
        with contextlib.suppress(OSError):
            return self._log(log_dir).read_bytes()[-2000:].decode(errors="replace")
        return ""

    def _log(self, log_dir: Path) -> Path:
        return log_dir / f"worker-{self.index}.log"


def forget_running(words: memoryview) -> None:
    """What a dead worker was at work on, it is not any more."""
    words[WorkerWord.RUNNING_SAMPLES] = words[WorkerWord.RUNNING_GROUPS] = words[WorkerWord.REWARDING_SAMPLES] = 0
    words[WorkerWord.UPDATE_PHASE] = 0


def worker_environment(settings: WorkerConfig, index: int, folder: Path) -> dict[str, str]:
    """The environment of one worker: its own GPUs, its own temporary folder, this package importable."""
    environment = dict(os.environ)
    environment["TMPDIR"] = str(folder)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
    )
    device = settings.devices[index]
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # several engines on few cores trip over each other's thread pools
    else:
        numbers = [int(number) for number in (device if isinstance(device, list) else [device])]
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        names = [str(number) for number in range(max(numbers) + 1)]
        if visible is not None:
            names = visible.split(",") if visible else [""] * len(names)  # "": no GPU is to be seen, and none is
        if max(numbers) >= len(names):
            raise ConfigError(
                f"WorkerConfig.devices: GPU {max(numbers)} is asked for, CUDA_VISIBLE_DEVICES={visible!r} has {len(names)}"
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(filter(None, (names[number] for number in numbers)))
    environment.update(settings.env)
    return environment


def describe_exit(code: int) -> str:
    """`exit code 1`, or `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
