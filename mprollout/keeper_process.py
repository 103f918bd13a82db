"""The trainer's handle on the keeper process: starting it, and making sure that it and all below it end.

    trainer --KeeperProcess.start--> keeper --> workers          returns the mapped segment, the control channel, the bells
    a new trainer --KeeperProcess.attach--> the keeper of a run whose trainer died                                    the same

Freed: everything by `close`, whatever state it was left in. After the keeper's death `end_orphans` ends what it could not.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil

from mprollout import _native, messages
from mprollout.child import worker_environment
from mprollout.config import EngineConfig, SourceConfig
from mprollout.door import knock, remove_stale
from mprollout.errors import ConfigError, KeeperLost
from mprollout.folders import clean_stale_folders, remove_folder
from mprollout.functions import main_of
from mprollout.keeper import KeeperRecord
from mprollout.ring import Plan, WorkerWord, segment_arguments

BOOT_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


class KeeperProcess:
    """A running keeper, from `start` or `attach` to `close`."""

    def __init__(
        self,
        channel: messages.Channel,
        pid: int,
        process: subprocess.Popen[bytes] | None,
        run_dir: str | None = None,
    ) -> None:
        self.channel, self.pid, self.pidfd = channel, pid, os.pidfd_open(pid)
        self.segment: _native.Segment
        self.bell = -1
        self.worker_bells: list[int] = []
        self.booted: messages.Booted | None = None
        self.updates: dict[int, int] = {}
        """By version, of those that trainers before this one pushed (`WeightSync.updates`)."""
        self._process = process
        """None: it is not this process's child (attached)."""
        self._run_dir = Path(run_dir).resolve() if run_dir is not None else None

    @classmethod
    def start(cls, config: EngineConfig, plan: Plan) -> KeeperProcess:
        """Start one and wait until the memory stands (the workers start meanwhile).

        Raises:
            ConfigError: the config cannot be sent to another process, or the run folder cannot be used.
            KeeperLost: it ended, or did not answer within 60 s.
        """
        for index in range(len(config.workers.devices)):
            worker_environment(
                config.workers, index, Path()
            )  # raises for a GPU that CUDA_VISIBLE_DEVICES does not name
        record = KeeperRecord(
            segment=segment_arguments(plan),
            workers=config.workers,
            fault=config.fault,
            worker_record=_worker_record(config),
            run_dir=_make_run_dir(config.run_dir) if config.run_dir else None,
            orphan_timeout_s=config.orphan_timeout_s,
            trainer_record=_pickled(msgspec.structs.replace(config, source=_without_rows(config))),
        )
        channel, theirs = messages.Channel.pair()
        root = str(Path(__file__).resolve().parent.parent)
        with contextlib.ExitStack() as stack:
            log = None  # the trainer's own stderr
            if record.run_dir is not None:  # it may outlive the trainer, whose pipes it must not hold open
                log = stack.enter_context(open(Path(record.run_dir) / "logs" / "keeper.log", "ab"))
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mprollout.keeper", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the trainer alone, which then ends the keeper in order
                stdin=subprocess.DEVNULL,
                stdout=log or subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
            )
        theirs.close()
        keeper = cls(channel, process.pid, process, record.run_dir)
        try:
            blob = messages.blob(pickle.dumps(record))
            channel.send(messages.Boot(), [blob])
            os.close(blob)
            for fd in keeper._receive_boot():
                os.close(fd)
        except BaseException:
            keeper.close()
            raise
        return keeper

    @classmethod
    def attach(cls, run_dir: str) -> tuple[KeeperProcess, EngineConfig]:
        """Take the place of a trainer that died, within its `orphan_timeout_s`.

        Returns:
            The keeper, and the config of the run (without the rows, where they were given as a Python object).

        Raises:
            ConfigError: nobody keeps that run any more, or its trainer lives.
            KeeperLost: the keeper ended meanwhile.
        """
        try:
            channel = knock(Path(run_dir))
        except OSError as error:
            raise ConfigError(
                f"attach({run_dir!r}): no keeper is there ({error}); start a new engine with the state"
            ) from error
        keeper = cls(channel, channel.peer()[0], None, run_dir)
        try:
            channel.send(messages.Attach())
            (record,) = keeper._receive_boot()
            # from a process of this user's: `knock` asked the kernel
            pickled, keeper.updates = pickle.loads(messages.read_blob(record))
            config: EngineConfig = pickle.loads(pickled)
        except BaseException:
            keeper.detach()
            raise
        return keeper, config

    def _receive_boot(self) -> list[int]:
        """Take the memory and the bells; returns the descriptors that are left."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ)
            if not selector.select(BOOT_TIMEOUT_S):
                raise KeeperLost(f"the keeper (pid {self.pid}) did not answer within {BOOT_TIMEOUT_S} s", pid=self.pid)
        try:
            received = self.channel.receive()
        except (EOFError, OSError):
            received = None
        if received is not None and isinstance(received[0], messages.Fault) and received[0].kind == "attach":
            raise ConfigError(f"attach: the keeper (pid {self.pid}) refuses: {received[0].message}")
        if received is None or not isinstance(received[0], messages.Booted):
            why = (
                received[0].message
                if received and isinstance(received[0], messages.Fault)
                else "its stderr (logs/keeper.log in the run folder) says why"
            )
            raise KeeperLost(f"the keeper (pid {self.pid}) ended while starting: {why}", pid=self.pid)
        self.booted = received[0]
        segment_fd, self.bell, *fds = received[1]
        self.segment = _native.Segment.attach(segment_fd)
        os.close(segment_fd)
        self.worker_bells, left = fds[: self.segment.workers], fds[self.segment.workers :]
        return left

    @property
    def exit_code(self) -> int | None:
        """Of a keeper that has ended; None where only its parent knows it (attached)."""
        return self._process.wait() if self._process is not None else None

    def _ended(self, timeout_s: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.pidfd, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def stop(self) -> None:
        """Ask it to end everything and wait, at most 5 s; then kill. Does not raise, but for a second Ctrl-C."""
        with contextlib.suppress(OSError):
            self.channel.send(messages.Stop())
        try:
            self._ended(CLOSE_TIMEOUT_S)
        finally:
            if not self._ended(0):  # late, or a second Ctrl-C: no more patience
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # ends the workers by PDEATHSIG
            self.end_orphans()

    def end_orphans(self) -> None:
        """After the keeper's death: end the workers' sessions that still stand, remove what it left on disk. A tidy end leaves nothing to do."""
        if self._ended(CLOSE_TIMEOUT_S):
            self.exit_code  # noqa: B018 (reaps it)
        if self._run_dir is not None:
            remove_stale(self._run_dir)
        if self.booted is None:  # its folder's name is not known here
            clean_stale_folders()
            return
        if not Path(self.booted.temp_dir).exists():
            return
        sessions = {self.segment.worker_words(index)[WorkerWord.PID] for index in range(self.segment.workers)} - {0}
        for (
            pid
        ) in psutil.pids():  # a worker leads its own session; all that it started is in it, its leader dead or not
            with contextlib.suppress(OSError):
                if os.getsid(pid) in sessions:
                    os.kill(pid, signal.SIGKILL)
        remove_folder(Path(self.booted.temp_dir))

    def detach(self) -> None:
        """Leave the run as it is, for another trainer. Of a keeper that has died meanwhile nothing is left."""
        with contextlib.suppress(OSError):
            self.channel.send(messages.Detach())
        if self._ended(0):
            self.end_orphans()
        elif self._process is not None:
            self._process.returncode = 0  # it lives on, and nobody here waits for it
        self.let_go()

    def let_go(self) -> None:
        """Close the descriptors."""
        self.channel.close()
        for fd in (self.pidfd, self.bell, *self.worker_bells):
            if fd >= 0:
                os.close(fd)
        if self.booted is not None:
            self.segment.close()

    def close(self) -> None:
        """Stop it and let go of everything but the mapping that views still hold."""
        try:
            self.stop()
        finally:
            self.let_go()


def _make_run_dir(run_dir: str) -> str:
    folder = Path(run_dir).resolve()
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            channel = knock(folder)
            pid = channel.peer()[0]
            channel.close()
            raise ConfigError(
                f"EngineConfig.run_dir={run_dir!r}: an engine (keeper pid {pid}) runs there; attach to it, or take another folder"
            )
    except OSError as error:
        raise ConfigError(f"EngineConfig.run_dir={run_dir!r}: no folder can be made there: {error}") from error
    return str(folder)


def _without_rows(config: EngineConfig) -> SourceConfig:
    """What can be opened again by its name stays; rows that were given as an object are the trainer's own."""
    return config.source if config.source.rows is None else msgspec.structs.replace(config.source, path="-", rows=None)


def _pickled(config: EngineConfig) -> bytes:
    try:
        return pickle.dumps(config)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the config cannot be sent to the workers: {error}; give functions of a module's top level, or 'module:function'"
        ) from error


def _worker_record(config: EngineConfig) -> bytes:
    """(main's module name, its path, sys.path, config): the config by pickle, since it may name the user's functions; rows travel one by one."""
    source = msgspec.structs.replace(config.source, path="-", rows=None, reasoning_gym=None)
    pickled = _pickled(msgspec.structs.replace(config, source=source))
    main = main_of(config.reward.function, config.filter.function, config.rollout)
    return pickle.dumps((*main, sys.path, pickled))
