"""The keeper: owns the memory and the processes; recovers what the dead left. One thread, one selector.

    trainer --socket, pidfd--> keeper --socket, pidfd--> worker 0..W-1
                               holds the memfd, is parent and subreaper of all workers

    its loop  produces worker processes, re-issued tickets, news for the trainer / waits for sockets, pidfds and a 1 s tick / unblocked by the kernel

Invariants: a worker is recovered only after its death is proven (its pidfd is readable and its process group has been killed); what is
merely late is killed first (`kill`), then decided. A worker claims only after Go, and Go is sent only when it has the newest weights.
Nothing outlives this process: workers have PDEATHSIG on it, the memory has no name.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from mprollout import _native, messages
from mprollout.child import Worker, describe_exit, forget_running
from mprollout.config import FaultConfig, WorkerConfig
from mprollout.door import Door
from mprollout.evaluation import Shares
from mprollout.folders import make_folder, remove_folder
from mprollout.ledger import Reason
from mprollout.ring import SUSPECT_DEATHS, WorkerWord
from mprollout.sleeping import SleepSync
from mprollout.updates import WeightSync

TICK_S = 1.0
STOP_GRACE_S = 2.0


class KeeperRecord(msgspec.Struct, kw_only=True):
    """What the keeper needs to start; pickled by the trainer, carried over inherited descriptors only."""

    segment: dict[str, Any]
    workers: WorkerConfig
    fault: FaultConfig
    worker_record: bytes
    """Opaque to the keeper: handed to each worker (it may hold user code, which the keeper never loads)."""
    run_dir: str | None
    """Where the logs go, and the socket for monitors and for a trainer that attaches; None: a temporary folder, and no socket."""
    orphan_timeout_s: float
    trainer_record: bytes
    """Opaque to the keeper: handed to a trainer that attaches."""


class Keeper:
    """Made by `main` in its own process; `run` returns when everything has ended."""

    def __init__(self, trainer: messages.Channel, trainer_pid: int) -> None:
        self.trainer: messages.Channel | None = trainer
        self.trainer_pid, self.trainer_pidfd = trainer_pid, os.pidfd_open(trainer_pid)
        self.orphan_until = math.inf
        """When to give up waiting for a trainer that attaches; CLOCK_MONOTONIC, s. Infinite while there is a trainer."""
        self.confirmed = 0
        self.door: Door | None = None
        self.selector = selectors.DefaultSelector()
        self.workers: list[Worker] = []
        self.weights = WeightSync(self)
        self.shares = Shares(self)
        self.sleeping = SleepSync(self)
        self.ending = False
        self.segment: _native.Segment
        self.record: KeeperRecord
        self.temp_dir: Path

    # -- start ---------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Read the record, make the memory, spawn the workers."""
        assert self.trainer is not None
        self.trainer.socket.setblocking(True)
        received = self.trainer.receive()
        self.trainer.socket.setblocking(False)
        assert received is not None and isinstance(received[0], messages.Boot)
        self.record = pickle.loads(messages.read_blob(received[1][0]))
        self.temp_dir, self._lock_fd = make_folder()
        self.log_dir = Path(self.record.run_dir) / "logs" if self.record.run_dir else self.temp_dir
        self.log_dir.mkdir(parents=True, exist_ok=True)
        if self.record.run_dir is not None:
            self.door = Door(Path(self.record.run_dir), self.selector, self._on_visitor)
        self.segment = _native.Segment.create(**self.record.segment)
        count = len(self.record.workers.devices)
        self.attendant_bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(count)]
        self.workers = [Worker(index) for index in range(count)]
        self._welcome()
        for worker in self.workers:
            self._spawn(worker)

    def _welcome(self, *more: int) -> None:
        """Hand the memory to the trainer and listen to it."""
        assert self.trainer is not None
        booted = messages.Booted(
            temp_dir=str(self.temp_dir), highest_version=self.weights.answered, confirmed=self.confirmed
        )
        self.tell(booted, [self.segment.fd, self.attendant_bell, *self.bells, *more])
        self.selector.register(self.trainer, selectors.EVENT_READ, self._on_trainer)
        self.selector.register(self.trainer_pidfd, selectors.EVENT_READ, self._on_trainer_death)

    def _spawn(self, worker: Worker) -> None:
        worker.spawn(
            self.segment, self.record, self.temp_dir, self.log_dir, self.bells[worker.index], self.attendant_bell
        )
        assert worker.channel is not None
        self.selector.register(worker.channel, selectors.EVENT_READ, lambda w=worker: self._on_worker(w))
        self.selector.register(worker.pidfd, selectors.EVENT_READ, lambda w=worker: self._on_worker_death(w))
        self.tell_state(worker)

    # -- loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        next_tick = time.monotonic() + TICK_S
        while not self.ending:
            for key in list(self.selector.get_map().values()):
                if isinstance(key.fileobj, messages.Channel):
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if key.fileobj.wants_write else 0)
                    if key.events != events:
                        self.selector.modify(key.fileobj, events, key.data)
            next_spawn = min((w.start_at for w in self.workers if w.state == "restarting"), default=next_tick)
            for key, events in self.selector.select(max(0.0, min(next_tick, next_spawn) - time.monotonic())):
                if events & selectors.EVENT_WRITE and isinstance(key.fileobj, messages.Channel):
                    with contextlib.suppress(OSError):
                        key.fileobj.flush()
                if events & selectors.EVENT_READ and key.fileobj in self.selector.get_map():
                    key.data()
            for worker in self.workers:
                if worker.state == "restarting" and time.monotonic() >= worker.start_at:
                    self._spawn(worker)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._tick()

    def _tick(self) -> None:
        """What is late is killed here, and only here; its death is then handled as any other."""
        now = time.monotonic()
        settings = self.record.workers
        for worker in self.workers:
            if worker.state == "starting" and now - worker.start_at > settings.start_timeout_s:
                worker.kill(f"not ready after start_timeout_s={settings.start_timeout_s}")
            elif worker.state == "ready" and not worker.asleep:
                words = self.segment.worker_words(worker.index)
                running = words[WorkerWord.RUNNING_SAMPLES]
                silent_s = (time.monotonic_ns() - words[WorkerWord.HEARTBEAT_NS]) / 1e9
                stuck_s = (time.monotonic_ns() - words[WorkerWord.PROGRESS_NS]) / 1e9
                if running and stuck_s > settings.progress_timeout_s:
                    worker.kill(f"no progress for {stuck_s:.1f} s with {running} samples running")
                elif silent_s > settings.progress_timeout_s:
                    worker.kill(f"its event loop has not turned for {silent_s:.1f} s")
        self._reap_adopted()
        if now > self.orphan_until:
            self.ending = True

    # -- trainer -------------------------------------------------------------------------------------------------

    def _on_trainer_death(self) -> None:
        """The end, or with `orphan_timeout_s` the beginning of the wait for a successor: nothing is admitted meanwhile."""
        if self.record.orphan_timeout_s == 0:
            self.ending = True
            return
        self._let_trainer_go()
        self._forget(self.trainer_pidfd)
        os.close(self.trainer_pidfd)
        self.trainer_pid, self.trainer_pidfd = 0, -1
        self.weights.abandon("the trainer died")
        self.shares.abandon()
        self.sleeping.abandon()
        self.orphan_until = time.monotonic() + self.record.orphan_timeout_s

    def _let_trainer_go(self) -> None:
        if self.trainer is not None:
            self._forget(self.trainer)
            self.trainer.close()
            self.trainer = None

    # -- visitors ------------------------------------------------------------------------------------------------

    def _on_visitor(self, visitor: messages.Channel, message: messages.Message) -> bool:
        """Whether the visitor stays: as the trainer."""
        match message:
            case messages.Attach() if self.trainer_pidfd < 0 and not self.ending:
                self._take_in(visitor)
                return True
            case messages.Attach():
                text = f"the run has a living trainer (pid {self.trainer_pid}), or is ending"
                visitor.send(messages.Fault(kind="attach", message=text))
            case messages.Observe():
                for worker in self.workers:
                    if worker.last_told is not None:
                        visitor.send(worker.last_told)
                read_only = os.open(f"/proc/self/fd/{self.segment.fd}", os.O_RDONLY | os.O_CLOEXEC)
                visitor.send(messages.Observed(trainer_pid=self.trainer_pid), [read_only])
                os.close(read_only)
        return False

    def _take_in(self, visitor: messages.Channel) -> None:
        """A visitor becomes the trainer."""
        pid = visitor.peer()[0]
        self.trainer_pidfd = os.pidfd_open(pid)  # OSError: it died just now
        self.trainer, self.trainer_pid, self.orphan_until = visitor, pid, math.inf
        record = messages.blob(pickle.dumps((self.record.trainer_record, self.weights.updates)))
        self._welcome(record)
        os.close(record)
        for worker in self.workers:
            if worker.last_told is not None:
                self.tell(worker.last_told)

    # -- the trainer's messages ----------------------------------------------------------------------------------

    def _on_trainer(self) -> None:
        while self.trainer is not None:
            try:
                received = self.trainer.receive()
            except (EOFError, OSError):
                # Its descriptors close a moment before its pidfd tells; one that lives on has let its engine go.
                with selectors.DefaultSelector() as selector:
                    selector.register(self.trainer_pidfd, selectors.EVENT_READ)
                    self.ending = self.record.orphan_timeout_s == 0 or not selector.select(STOP_GRACE_S)
                self._let_trainer_go()
                return
            if received is None:
                return
            message, fds = received
            match message:
                case messages.Stop():
                    self._stop_workers()
                    self.ending = True
                case messages.Update():
                    self.weights.begin(message, fds[0])
                case messages.GiveUpUpdate():
                    self.weights.give_up(message)
                case messages.Evaluate():
                    self.shares.forward(message, fds[0])
                case messages.SetAside():
                    self.shares.set_aside(message)
                case messages.LetBack():
                    self.shares.let_back(message.id)
                case messages.Sleep():
                    self.sleeping.begin(message)
                case messages.Detach():
                    self._on_trainer_death()
                case messages.Confirmed():
                    self.confirmed = max(self.confirmed, message.resolved)
                case _:
                    raise AssertionError(f"keeper got {message!r} from the trainer")

    def tell(self, message: messages.Message, fds: list[int] | None = None) -> None:
        if self.trainer is not None:
            with contextlib.suppress(OSError):  # its death is reported by the pidfd
                self.trainer.send(message, fds)

    def tell_state(self, worker: Worker, **more: Any) -> None:
        worker.last_told = messages.WorkerState(
            worker=worker.index,
            pid=worker.pid,
            state=worker.told,
            restarts=worker.restarts,
            start_s=worker.start_s,
            **more,
        )
        self.tell(worker.last_told)

    # -- workers -------------------------------------------------------------------------------------------------

    def _on_worker(self, worker: Worker) -> None:
        assert worker.channel is not None
        while True:
            try:
                received = worker.channel.receive()
            except (EOFError, OSError):
                self._forget(worker.channel)  # the pidfd says the rest
                return
            if received is None:
                return
            message, fds = received
            match message:
                case messages.WorkerReady():
                    worker.start_s, worker.ever_ready, worker.served = message.start_s, True, True
                    self.weights.bring_up_to_date(worker)
                case messages.Applied():
                    self.weights.on_applied(worker, message)
                case messages.WorkerFailed():
                    worker.failed = message
                case messages.Slept():
                    self.sleeping.on_slept(worker, message)
                case messages.Evaluated():
                    self.shares.on_evaluated(message, fds)
                case messages.Note() | messages.Fault():
                    self.tell(message)
                case _:
                    raise AssertionError(f"keeper got {message!r} from worker {worker.index}")
            for fd in fds:
                os.close(fd)

    def let_go(self, worker: Worker) -> None:
        """It has the newest weights: it may claim, unless it is asleep, or to be, or set aside."""
        worker.state = "ready"
        self.sleeping.on_ready(worker)
        if worker.may_claim and not self.sleeping.wanted:
            worker.send(messages.Go())
        self.tell_state(worker)

    def _forget(self, fileobj: Any) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(fileobj)

    def _on_worker_death(self, worker: Worker) -> None:
        self._on_worker(worker)  # its last words
        exit_code = self._bury(worker)
        max_deaths = self.record.fault.max_deaths_per_ticket
        deaths = {row[0]: row[3] for row in self.segment.table()}  # before: what ends FAILED may be swept at once
        recovered = _native.recover(
            self.segment, worker.index, max_deaths, Reason.DEATHS, count_death=not worker.innocent_tickets
        )
        self.shares.on_death(worker)
        words = self.segment.worker_words(worker.index)
        forget_running(words)
        failed = worker.failed
        permanent = failed is not None and failed.permanent and not worker.ever_ready
        error = worker.kill_reason or (failed.error if failed else f"died with {describe_exit(exit_code)}")
        error += f"; {len(recovered.reissued)} tickets re-issued, {len(recovered.published)} published ones stay"
        published = words[WorkerWord.GROUPS_PUBLISHED]
        if published != worker.published:
            worker.published, worker.restarts_in_a_row = published, 0
        held = [*recovered.reissued, *recovered.failed]
        suspect_alone = len(held) == 1 and deaths.get(held[0], 0) >= SUSPECT_DEATHS
        if permanent or (worker.restarts_in_a_row >= self.record.workers.max_restarts and not suspect_alone):
            worker.state = "lost"
        else:
            worker.restarts_in_a_row += not suspect_alone  # the death is that ticket's, which ends FAILED in the end
            worker.state = "restarting"
            # A worker that served restarts at once; one that dies while starting waits longer each time.
            worker.failed_starts = 0 if worker.served else worker.failed_starts + 1
            worker.start_at = time.monotonic() + min(10.0, 0.25 * 2**worker.failed_starts - 0.25)
            worker.restarts += 1
        self.tell_state(
            worker,
            exit_code=exit_code,
            error=error,
            traceback=failed.traceback if failed else messages.clip(worker.log_tail(self.log_dir)),
            permanent=permanent,
        )
        for bell in (*self.bells, self.attendant_bell):  # tickets came back; a waker may have died owing a wake
            os.eventfd_write(bell, 1)
        self.weights.on_death(worker)
        self.sleeping.on_death(worker)

    def _bury(self, worker: Worker) -> int:
        self._forget(worker.pidfd)
        self._forget(worker.channel)
        exit_code = worker.bury(self.temp_dir)
        self._reap_adopted()
        return exit_code

    def _reap_adopted(self) -> None:
        """As subreaper this process inherits what a dead worker's processes left: end and reap it."""
        own = {worker.pid for worker in self.workers if worker.pidfd >= 0}
        for child in psutil.Process().children():
            if child.pid not in own:
                with contextlib.suppress(psutil.Error):
                    child.kill()
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)

    # -- end -----------------------------------------------------------------------------------------------------

    def _stop_workers(self) -> None:
        """Let ready workers give their tickets back, for a moment; kill the rest."""
        waiting = {worker.pidfd for worker in self.workers if worker.pidfd >= 0 and worker.state == "ready"}
        for worker in self.workers:
            if worker.pidfd in waiting:
                worker.send(messages.Stop())
        deadline = time.monotonic() + STOP_GRACE_S
        with selectors.DefaultSelector() as selector:
            for fd in (*waiting, self.trainer_pidfd):
                selector.register(fd, selectors.EVENT_READ)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fd == self.trainer_pidfd:
                        return
                    selector.unregister(key.fd)
                    waiting.discard(key.fd)

    def end(self) -> None:
        """Kill and reap everything, remove the temporary folder. Runs in every case, an exception of the keeper included."""
        for worker in self.workers:
            if worker.pidfd >= 0:
                worker.kill("the engine ended")
        for worker in self.workers:
            if worker.pidfd >= 0:
                self._bury(worker)
        self._reap_adopted()
        remove_folder(self.temp_dir)
        if self.door is not None:
            self.door.close()


def main() -> None:
    fd, trainer_pid = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _native.become_subreaper()
    keeper = Keeper(messages.Channel(socket.socket(fileno=fd)), trainer_pid)

    def on_term(*_: object) -> None:
        keeper.ending = True

    signal.signal(signal.SIGTERM, on_term)
    try:
        keeper.boot()
        keeper.run()
    except Exception as error:
        keeper.tell(messages.Fault(kind="keeper", message=f"{type(error).__name__}: {error}"))
        raise
    finally:
        if hasattr(keeper, "temp_dir"):
            keeper.end()


if __name__ == "__main__":
    main()
