"""`Attendant`: the trainer's background thread. It keeps READY tickets in reserve and hears what the keeper says.

    `Admission.turn` -> bells                                       credit in, tickets out
    keeper's socket -> states, notes, faults, answers -> `news`     what the main thread waits for

    its loop  produces READY tickets, news / waits for its bell (take, ending, update, release), the keeper's socket and pidfd / unblocked by the kernel

Invariant: gate and ledger change under `lock` only.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec

from mprollout import messages
from mprollout.admission import Admission, Bells
from mprollout.config import EngineConfig
from mprollout.errors import (
    EngineClosed,
    EngineFault,
    KeeperLost,
    WorkersLost,
    WorkerStartError,
)
from mprollout.evaluation import EvaluationItem
from mprollout.gate import Gate
from mprollout.history import History
from mprollout.keeper_process import KeeperProcess
from mprollout.ledger import Ledger
from mprollout.source import PromptSource
from mprollout.stats import engine_stats, tell_monitors
from mprollout.taker import Taker
from mprollout.waiting import Waits

log = logging.getLogger("mprollout")

SAFETY_LOOK_S = 0.25
"""Nothing depends on it: whoever dies between a change and its bell is missed by the keeper, who tells. A look costs 0.2 ms of CPU."""
NEWS_LOOK_S = 0.05
NOTES_KEPT = 64


class Attendant:
    """Started by the engine's `start`, stopped by its `close`. Everything public but `lock` may be read from the main thread at any time."""

    def __init__(
        self,
        keeper: KeeperProcess,
        source: PromptSource,
        gate: Gate,
        ledger: Ledger,
        config: EngineConfig,
        taker: Taker,
        waits: Waits,
        history: History | None = None,
    ) -> None:
        self.keeper, self._taker, self._waits, self._history = keeper, taker, waits, history
        self.segment = keeper.segment
        self.lock = threading.Lock()
        self.states: dict[int, messages.WorkerState] = {}
        """By worker; a new dict with every change, so that whoever iterates over one is not disturbed."""
        self.notes: collections.OrderedDict[int, messages.Note] = collections.OrderedDict()
        """The last failures, by ticket."""
        self.fault: EngineFault | None = None
        self.update_done: messages.UpdateDone | None = None
        self.sleep_done: messages.SleepDone | None = None
        self.aside: dict[int, list[int] | None] = {}
        """By evaluation that asked for it: the workers set aside, once the keeper has answered."""
        self.evaluations: dict[int, dict[int, messages.Evaluated | list[EvaluationItem]]] = {}
        """Answers by evaluation and worker; the key is there from `evaluate`'s start to its end."""
        self.admission = Admission(self.segment, config, source, gate, ledger, self.notes, self._on_failing)
        self._bells = Bells(self.segment, keeper.worker_bells)
        self._stopping = False
        self._waiters: list[threading.Lock] = []
        self._thread = threading.Thread(target=self._run, name="mprollout-attendant", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Called before the keeper is closed, since the thread listens on its descriptors."""
        self._stopping = True
        self.tell_news()
        self.segment.wake_taker()
        self.ring()
        self._thread.join()

    def ring(self) -> None:
        """Make it look: credit may have come."""
        os.eventfd_write(self.keeper.bell, 1)

    def raise_fault(self) -> None:
        """Raise the permanent fault, if there is one."""
        if self.fault is not None:
            raise self.fault

    def wait_news(self, true: Callable[[], Any], give_up: Callable[[], None]) -> None:
        """Block until `true()`; raises the permanent fault, and whatever `give_up` raises. Ctrl-C gets through."""
        # A lock of this wait alone: a signal that raises inside a Condition's methods, which are Python, can leave its
        # lock held for ever.
        told = threading.Lock()
        told.acquire()
        self._waiters.append(told)
        try:
            while not true():
                if self._stopping:
                    raise EngineClosed("the engine was closed by another thread")
                self.raise_fault()
                give_up()
                told.acquire(timeout=NEWS_LOOK_S)
        finally:
            self._waiters.remove(told)

    def tell_news(self) -> None:
        """Make whoever is in `wait_news` look."""
        for told in tuple(self._waiters):
            with contextlib.suppress(RuntimeError):  # told already
                told.release()

    def send(self, message: messages.Message, fds: list[int] | None = None) -> None:
        """Send to the keeper; its death is reported as a fault, not here."""
        with contextlib.suppress(OSError):
            self.keeper.channel.send(message, fds)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for fileobj in (self.keeper.channel, self.keeper.bell, self.keeper.pidfd):
                    selector.register(fileobj, selectors.EVENT_READ)
                while not self._stopping and not isinstance(self.fault, KeeperLost):
                    self._admit()
                    for key, _ in selector.select(NEWS_LOOK_S if self.keeper.channel.wants_write else SAFETY_LOOK_S):
                        if key.fileobj == self.keeper.bell:
                            with contextlib.suppress(BlockingIOError):
                                os.eventfd_read(self.keeper.bell)
                        else:
                            self._hear_keeper()
                    with contextlib.suppress(OSError):
                        self.keeper.channel.flush()
        except Exception as error:
            log.exception("the attendant thread failed")
            self._set_fault(EngineFault(f"the attendant thread failed: {type(error).__name__}: {error}"))

    def _admit(self) -> None:
        """Let the admission take its turn, and wake whom it concerns."""
        with self.lock:
            self._taker.recycle()  # here, because no signal interrupts this thread
            self._taker.count()
            self._waits.split(self.admission.admitted_ns)  # before the turn forgets tickets that ended
            ended = self.admission.turn()
            tell_monitors(self, self._taker, self._waits)
            due = self._history is not None and self._history.due
            stats = engine_stats(self, self._taker, self._waits) if due else None
        if ended:
            self.segment.wake_taker()
        self._bells.ring_idle()
        if self._history is not None:
            if stats is not None:
                self._history.look(stats)
            self._history.write()

    # -- faults --------------------------------------------------------------------------------------------------

    def _on_failing(self, kind: type[EngineFault], text: str, note: messages.Note | None) -> None:
        self._set_fault(self._blame(kind, text, note))

    def _blame(self, kind: type[EngineFault], text: str, source: messages.Note | messages.Fault | None) -> EngineFault:
        if source is None:
            return kind(text)
        state = self.states.get(source.worker)
        return kind(text, worker=source.worker, pid=state.pid if state else None, worker_traceback=source.traceback)

    def _set_fault(self, fault: EngineFault) -> None:
        if self.fault is None or isinstance(fault, KeeperLost):
            self.fault, self.admission.stopped = fault, True
        self.tell_news()
        self.segment.wake_taker()

    # -- the keeper's messages -----------------------------------------------------------------------------------

    def _hear_keeper(self) -> None:
        while True:
            try:
                received = self.keeper.channel.receive()
            except (EOFError, OSError):
                if not self._stopping:
                    self._on_keeper_death()
                return
            if received is None:
                return
            message, fds = received
            self._on_message(message, fds)
            self.tell_news()
            for fd in fds:
                os.close(fd)

    def _on_message(self, message: messages.Message, fds: list[int]) -> None:
        match message:
            case messages.WorkerState():
                before = self.states.get(message.worker)
                self.states = {**self.states, message.worker: message}
                any_ready = any(state.state == "ready" for state in self.states.values())
                self._waits.on_workers(any_ready, time.monotonic_ns())
                if self._history is not None:
                    self._history.on_worker(message)
                self._judge(message, newly=before is None or before.state not in ("evaluating", "asleep"))
            case messages.UpdateDone():
                self.update_done = message
            case messages.SleepDone():
                self.sleep_done = message
            case messages.Aside():
                if message.id in self.aside:
                    self.aside[message.id] = message.workers
            case messages.Evaluated():
                if (parts := self.evaluations.get(message.id)) is not None:
                    parts[message.worker] = (
                        message
                        if message.error or message.absent
                        else msgspec.msgpack.decode(messages.read_blob(fds.pop()), type=list[EvaluationItem])
                    )
            case messages.Note():
                level = logging.WARNING if message.final else logging.INFO
                log.log(level, "ticket %d, attempt %d: %s", message.ticket, message.attempt, message.error)
                self.notes[message.ticket] = message
                while len(self.notes) > NOTES_KEPT:
                    self.notes.popitem(last=False)
            case messages.Fault():
                kind = KeeperLost if message.kind == "keeper" else EngineFault
                self._set_fault(self._blame(kind, message.message, message))
            case _:
                raise AssertionError(f"the trainer got {message!r}")

    def _judge(self, message: messages.WorkerState, newly: bool) -> None:
        who = f"worker {message.worker} (pid {message.pid})"
        if message.state == "ready" and newly:
            log.info("%s is ready after %.1f s", who, message.start_s)
        elif message.state in ("restarting", "lost"):
            log.warning("%s: %s; %s", who, message.error, message.state)
        about = {
            "worker": message.worker,
            "pid": message.pid,
            "exit_code": message.exit_code,
            "worker_traceback": message.traceback,
        }
        if message.permanent:
            self._set_fault(WorkerStartError(f"{who} cannot start: {message.error}", **about))  # type: ignore[arg-type]
        elif len(self.states) == self.segment.workers and all(state.state == "lost" for state in self.states.values()):
            text = f"all {self.segment.workers} workers are lost and their restarts are used up; the last, {who}: {message.error} (exit code {message.exit_code})"
            self._set_fault(WorkersLost(text, **about))  # type: ignore[arg-type]

    def _on_keeper_death(self) -> None:
        self.keeper.end_orphans()
        code = self.keeper.exit_code
        text = f"the keeper (pid {self.keeper.pid}) died{f' with exit code {code}' if code is not None else ''}; its workers ended with it"
        self._set_fault(KeeperLost(text, pid=self.keeper.pid, exit_code=code))


@contextlib.contextmanager
def log_to(say: Callable[[str], None]) -> Iterator[None]:
    """What engines log in the block (a worker is ready, a prompt failed) goes to `say`, a line or more each."""
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class StartProgress:
    """How many workers are ready, on a terminal's stderr; elsewhere the logger alone tells."""

    def __init__(self, attendant: Attendant, wanted: bool) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._count, self._attendant, self._began = attendant.segment.workers, attendant, time.monotonic()
        self._status = console.status("starting the workers") if console.is_terminal and wanted else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def settled(self) -> bool:
        """Every worker is ready or lost, and one at least is ready."""
        states = [state.state for state in self._attendant.states.values()]
        return len(states) == self._count and set(states) <= {"ready", "lost"} and "ready" in states

    def show(self) -> None:
        if self._status is not None:
            ready = sum(state.state == "ready" for state in self._attendant.states.values())
            self._status.update(
                f"starting the workers: {ready} of {self._count} ready, {time.monotonic() - self._began:.0f} s"
            )
