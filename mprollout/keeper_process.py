"""The trainer's handle on the keeper process: starting it, and making sure that it and all below it end.

    trainer --KeeperProcess.start--> keeper --> workers          returns the mapped segment, the control channel, the bells

Freed: everything by `close`, whatever state it was left in. After the keeper's death `end_orphans` ends what it could not.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil

from mprollout import _native, messages
from mprollout.config import EngineConfig
from mprollout.errors import ConfigError, KeeperLost
from mprollout.keeper import KeeperRecord, worker_environment
from mprollout.ring import Plan, WorkerWord, segment_arguments

BOOT_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


class KeeperProcess:
    """A running keeper, from the constructor's return to `close`."""

    def __init__(self, config: EngineConfig, plan: Plan) -> None:
        """Start it and wait until the memory stands (the workers start meanwhile).

        Raises:
            ConfigError: the config cannot be sent to another process.
            KeeperLost: it ended, or did not answer within 60 s.
        """
        for index in range(len(config.workers.devices)):
            worker_environment(
                config.workers, index, Path()
            )  # raises for a GPU that CUDA_VISIBLE_DEVICES does not name
        log_dir = Path(config.run_dir).resolve() / "logs" if config.run_dir else None
        try:
            if log_dir is not None:
                log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"EngineConfig.run_dir={config.run_dir!r}: no folder can be made there: {error}"
            ) from error
        record = KeeperRecord(
            segment=segment_arguments(plan),
            workers=config.workers,
            fault=config.fault,
            worker_record=_worker_record(config),
            log_dir=str(log_dir) if log_dir else None,
        )
        self.segment: _native.Segment | None = None
        self.bell = -1
        self.worker_bells: list[int] = []
        self._temp_dir: str | None = None
        self.channel, theirs = messages.Channel.pair()
        root = str(Path(__file__).resolve().parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mprollout.keeper", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches the trainer alone, which then ends the keeper in order
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        )
        theirs.close()
        self.pid, self.pidfd = self.process.pid, os.pidfd_open(self.process.pid)
        try:
            self._boot(record)
        except BaseException:
            self.close()
            raise

    def _boot(self, record: KeeperRecord) -> None:
        blob = messages.blob(pickle.dumps(record))
        self.channel.send(messages.Boot(), [blob])
        os.close(blob)
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            if not selector.select(BOOT_TIMEOUT_S):
                raise KeeperLost(f"the keeper (pid {self.pid}) did not answer within {BOOT_TIMEOUT_S} s", pid=self.pid)
        try:
            received = self.channel.receive()
        except EOFError:
            received = None
        if received is None or not isinstance(received[0], messages.Booted):
            why = received[0].message if received and isinstance(received[0], messages.Fault) else "its stderr says why"
            raise KeeperLost(f"the keeper (pid {self.pid}) ended while starting: {why}", pid=self.pid)
        self._temp_dir = received[0].run_dir
        segment_fd, self.bell, *self.worker_bells = received[1]
        self.segment = _native.Segment.attach(segment_fd)
        os.close(segment_fd)

    def stop(self) -> None:
        """Ask it to end everything and wait, at most 5 s; then kill. Does not raise, but for a second Ctrl-C."""
        with contextlib.suppress(OSError):
            self.channel.send(messages.Stop())
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except BaseException as error:
            self.process.kill()  # ends the workers by PDEATHSIG
            self.process.wait()
            self.end_orphans()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise  # a second Ctrl-C: no more patience

    def end_orphans(self) -> None:
        """After the keeper's death: end the workers' process groups that still stand, remove its temporary folder."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_TIMEOUT_S)
        if self.segment is not None:
            sessions = {self.segment.worker_words(index)[WorkerWord.PID] for index in range(self.segment.workers)} - {0}
            for (
                pid
            ) in psutil.pids():  # a worker leads its own session; all that it started is in it, its leader dead or not
                with contextlib.suppress(OSError):
                    if os.getsid(pid) in sessions:
                        os.kill(pid, signal.SIGKILL)
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def close(self) -> None:
        """Stop it and let go of everything but the mapping that views still hold."""
        try:
            self.stop()
        finally:
            self.channel.close()
            for fd in (self.pidfd, self.bell, *self.worker_bells):
                if fd >= 0:
                    os.close(fd)
            if self.segment is not None:
                self.segment.close()


def _worker_record(config: EngineConfig) -> bytes:
    """(main's module name, its path, sys.path, config): the config by pickle, since it may name the user's functions; rows travel one by one."""
    source = msgspec.structs.replace(config.source, path="-", rows=None, reasoning_gym=None)
    try:
        pickled = pickle.dumps(msgspec.structs.replace(config, source=source))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the config cannot be sent to the workers: {error}; give functions of a module's top level, or 'module:function'"
        ) from error
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    functions = (config.reward.function, config.filter.function, config.rollout)
    if not any(getattr(function, "__module__", None) == "__main__" for function in functions):
        name = path = None
    return pickle.dumps((name, os.path.abspath(path) if path else None, sys.path, pickled))
