"""Sleep and wake: the GPUs change hands between the trainer and the workers. Both ends of the protocol.

    Sleeping.sleep (trainer) --Sleep--> SleepSync (keeper) --Sleep--> workers --Slept--> SleepSync --SleepDone--> Sleeping.sleep

A worker that falls asleep claims nothing more, retracts what it runs (nothing is lost: it goes on with `wake`) and releases the memory of
its engine. Invariants: `sleep` returns only when no living worker holds such memory; one that dies asleep is started again by `wake`
alone, and one that was still starting falls asleep as soon as it is ready. A worker claims again only with the newest weights.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from mprollout import messages
from mprollout.errors import EngineFault, GetTimeout
from mprollout.stats import describe_workers

if TYPE_CHECKING:
    from mprollout.attendant import Attendant
    from mprollout.child import Worker
    from mprollout.keeper import Keeper


class Sleeping:
    """The trainer's end. One call at a time: the engine's lock for updates guards it."""

    def __init__(self, asleep: bool = False) -> None:
        self.asleep = asleep
        """From the beginning of `sleep` to the end of `wake`, whether they succeed or not."""
        self._requests = 0

    def change(self, asleep: bool, timeout_s: float | None, attendant: Attendant) -> None:
        """See `RolloutEngine.sleep` and `wake`."""
        verb = "sleep" if asleep else "wake"
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._requests += 1
        request = messages.Sleep(id=self._requests, asleep=asleep)

        def check_time() -> None:
            if time.monotonic() > deadline:
                raise GetTimeout(
                    f"{verb}: not all workers did so within {timeout_s} s; {describe_workers(attendant.segment, attendant.states)}"
                )

        attendant.raise_fault()
        self.asleep = True
        attendant.send(request)
        attendant.wait_news(
            lambda: attendant.sleep_done is not None and attendant.sleep_done.id >= request.id, check_time
        )
        assert attendant.sleep_done is not None
        self.asleep = asleep
        if attendant.sleep_done.failures:
            raise EngineFault(f"{verb}: {'; '.join(attendant.sleep_done.failures)}")


class SleepSync:
    """The keeper's end. Runs on the keeper's only thread."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.wanted = False
        """The workers are, or are to fall, asleep."""
        self._id = 0
        """Of the request that has no answer yet; 0: there is none."""
        self._asked: set[int] = set()
        self._failures: list[str] = []

    def begin(self, message: messages.Sleep) -> None:
        """Ask every worker that runs; those still starting are asked when they are ready (`on_ready`)."""
        self.wanted, self._id, self._failures = message.asleep, message.id, []
        for worker in self._keeper.workers:
            if worker.state in ("ready", "syncing"):
                self._ask(worker)
            elif worker.state == "restarting":
                worker.start_at = math.inf if message.asleep else time.monotonic()
        self._maybe_end()

    def on_ready(self, worker: Worker) -> None:
        """It has the newest weights: if the others sleep, so must it."""
        if self.wanted != worker.asleep:
            self._ask(worker)

    def on_slept(self, worker: Worker, message: messages.Slept) -> None:
        """A worker's answer."""
        self._asked.discard(worker.index)
        if message.error:
            self._failures.append(f"worker {worker.index} (pid {worker.pid}): {message.error}")
            worker.kill(f"{'sleep' if message.asleep else 'wake'} failed: {message.error}", innocent_tickets=True)
        else:
            worker.asleep = message.asleep
            if worker.asleep != self.wanted:  # the trainer thought better of it meanwhile
                self._ask(worker)
            elif worker.state == "ready":
                self._keeper.let_go(worker)
        self._maybe_end()

    def on_death(self, worker: Worker) -> None:
        """It holds no memory any more, and gets none before the others."""
        self._asked.discard(worker.index)
        if self.wanted and worker.state == "restarting":
            worker.start_at = math.inf
        self._maybe_end()

    def abandon(self) -> None:
        """The trainer is gone, and with it what it needed the GPUs for."""
        if self.wanted:
            self.begin(messages.Sleep(id=0, asleep=False))

    def _ask(self, worker: Worker) -> None:
        if worker.index not in self._asked:
            self._asked.add(worker.index)
            worker.send(messages.Sleep(id=self._id, asleep=self.wanted))

    def _maybe_end(self) -> None:
        on_their_way = self._asked or (
            self.wanted and any(w.state in ("starting", "syncing") for w in self._keeper.workers)
        )
        if self._id and not on_their_way:
            self._keeper.tell(messages.SleepDone(id=self._id, failures=self._failures))
            self._id = 0
