"""A weight update, both ends of its protocol.

    Updates.push (trainer) --Update--> WeightSync (keeper) --Update--> workers --Applied--> WeightSync --UpdateDone--> Updates.push
      stage, then a transport             keeps the copy

Invariants: every attempt has a version number of its own, never used again, and exactly one `UpdateDone`, whether it was applied, refused,
given up or never sent (an interrupted trainer asks for the answer with `GiveUpUpdate`, as often as it likes). A version counts as
completed only when every living worker applied it; until then its tokens count as no newer than the updates completed before.
Workers that applied a refused version go back to the last good copy, which is kept for those that start again. A worker that is set
aside for an evaluation counts as one that starts again: an update completes without it, and it catches up before it claims.

The lag bound needs no more than this: *whoever claims has the last completed version, or a newer attempt*. Then no token of a ticket is
older than the update that was the last at its admission, and `gate` has the rest of the argument. It holds when the workers apply an
attempt one after another (`rolling`) as when they do it together: until all have, nothing is completed, those that wait for their turn have
the last completed version, and the tokens of those that had theirs count as no newer than it. What rolling changes is that tickets are
claimed during an update; with `max_lag=0` there is none to claim then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from mprollout import messages
from mprollout.config import EngineConfig
from mprollout.errors import GetTimeout, WeightUpdateFailed
from mprollout.gate import Gate
from mprollout.generator import UPDATE_PHASES, PauseMode
from mprollout.ring import WorkerWord
from mprollout.route import Route
from mprollout.stats import describe_workers
from mprollout.transports import make_transport

if TYPE_CHECKING:
    from mprollout.attendant import Attendant
    from mprollout.child import Worker
    from mprollout.keeper import Keeper
    from mprollout.taker import Taker
    from mprollout.weights import StagedWeights


class Updates:
    """The trainer's end: mints versions, pushes them, knows how old a token is."""

    def __init__(
        self,
        config: EngineConfig,
        gate: Gate,
        minted: int = 0,
        known: Mapping[int, int] = MappingProxyType({}),
        base: int = 0,
    ) -> None:
        """
        Args:
            minted: the highest version number that was ever used.
            known: updates by version, of those that earlier trainers pushed (`WeightSync.updates`).
            base: updates behind the loaded checkpoint's policy; this trainer's are counted from there.
        """
        self.version = 0
        """The last version that all workers applied (those set aside for an evaluation catch up before they claim)."""
        self.minted = minted
        self._config, self._gate, self._base = config, gate, base
        self.settings = config.weights
        """Of the next push; a benchmark compares some on one engine."""
        # version -> completed updates that its tokens count from, negative for those before the checkpoint; one that was
        # never sent has no tokens and the number of the one before
        self._completed_at = {0: -base}
        for version in range(1, minted + 1):
            before = self._completed_at[version - 1]
            self._completed_at[version] = known[version] - base if version in known else before
        self._unanswered = 0  # the last version that was sent, or was about to be when an interrupt came
        self._one_at_a_time = threading.Lock()
        self._pins: set[object] = set()  # of evaluations that want one version
        self._transport = make_transport(config)
        self._good: StagedWeights | None = None  # the last copy that all workers applied, which the keeper holds, too
        # One that no process reads any more: all workers have since applied a newer one (each applies one after the other), or it was refused.
        self._spare: StagedWeights | None = None

    @property
    def updates(self) -> int:
        """Updates behind the trainer's policy, from the run's first weights, over all its trainers."""
        return self._base + self._gate.updates

    def lag(self, version: int, now: int) -> int:
        """Updates completed between a token of that version and the moment when so many (`now`, of the gate's) were; 0 for one of a policy that
        this trainer has yet to reach again. The same whenever it is asked: a version that completes later was the newest then, too.
        """
        return max(0, now - self._completed_at[version])

    def push(self, source: Any, timeout_s: float | None, attendant: Attendant, taker: Taker) -> int:
        """See `RolloutEngine.update_weights`."""
        from mprollout.staging import stage
        from mprollout.weight_files import keep

        with self._one_at_a_time:
            attendant.raise_fault()
            settings = self.settings
            limit_s = settings.limit_s(timeout_s, len(self._config.workers.devices))
            if self._gate.awaits_weights:
                self._wait_for_what_is_ahead(limit_s, attendant, taker)
            with attendant.lock:
                taker.count()
                self._gate.check_update()
            self._wait_for_pins(limit_s, attendant)
            spare, self._spare = self._spare, None
            staged = stage(source, dtype=settings.dtype, rename=settings.rename, spare=spare)
            try:
                version = self._push(staged, limit_s, attendant)
                if settings.keep_versions:
                    keep(staged, Path(self._config.run_dir or ""), version, settings.keep_versions)
            except WeightUpdateFailed:
                self._spare = staged  # answered: whoever still reads it is being killed
                raise
            except BaseException:
                staged.close()  # perhaps the keeper has it
                raise
            self._good, self._spare = staged, self._good
            if not self._transport.holds_memory:
                self._let_memory_go()
            return version

    def close(self) -> None:
        """Give up the memory of the copies, and what the transport holds. The keeper has its own hold on the last good one."""
        self._transport.close()
        self._let_memory_go()

    def _let_memory_go(self) -> None:
        for staged in (self._good, self._spare):
            if staged is not None:
                staged.close()
        self._good = self._spare = None

    @contextlib.contextmanager
    def pinned(self, timeout_s: float | None, attendant: Attendant) -> Iterator[None]:
        """While this is open, an update that another thread pushes waits. Blocks while one is under way.

        Raises:
            GetTimeout: it did not end in time.
        """
        pin = object()
        try:
            with self.alone("evaluate", timeout_s):
                self._pins.add(pin)
            yield
        finally:
            self._pins.discard(pin)
            attendant.tell_news()

    def _wait_for_what_is_ahead(self, limit_s: float, attendant: Attendant, taker: Taker) -> None:
        """Until the groups are finished that the trainer before this one had admitted beyond this one's gate."""
        deadline = time.monotonic() + limit_s

        def ahead() -> list[int]:
            with attendant.lock:
                return taker.unfinished_ahead(attendant.segment)

        def check_time() -> None:
            if time.monotonic() > deadline:
                raise GetTimeout(
                    f"update_weights: tickets {ahead()}, admitted by the trainer before this one, are not finished after {limit_s:g} s, and with "
                    f"these weights they would break max_lag; {describe_workers(attendant.segment, attendant.states)}"
                )

        attendant.wait_news(lambda: not ahead(), check_time)

    @contextlib.contextmanager
    def alone(self, what: str, timeout_s: float | None) -> Iterator[None]:
        """No update is under way while this is open. Raises as `pinned`, whose `what` it names."""
        if not self._one_at_a_time.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise GetTimeout(f"{what}: an update was under way for longer than {timeout_s} s")
        try:
            yield
        finally:
            self._one_at_a_time.release()

    def _wait_for_pins(self, limit_s: float, attendant: Attendant) -> None:
        deadline = time.monotonic() + limit_s

        def check_time() -> None:
            if time.monotonic() > deadline:
                raise WeightUpdateFailed(
                    f"update_weights: an evaluation has kept version {self.version} pinned for longer than {limit_s:g} s; nothing was sent"
                )

        if self._pins:
            attendant.wait_news(lambda: not self._pins, check_time)

    def _push(self, staged: StagedWeights, limit_s: float, attendant: Attendant) -> int:
        def answered(version: int) -> bool:
            return version == 0 or (attendant.update_done is not None and attendant.update_done.version >= version)

        def give_up(why: str) -> None:
            attendant.send(messages.GiveUpUpdate(version=self._unanswered, why=why))

        if not answered(self._unanswered):  # an interrupted push may have sent it, and even its giving up, or neither
            give_up("interrupted")
            attendant.wait_news(lambda: answered(self._unanswered), lambda: None)
        version = self.mint()
        carriage = self._transport.prepare(staged, version, attendant.states)
        applied = False
        deadline = time.monotonic() + limit_s

        def check() -> None:
            carriage.look(attendant.states)
            if time.monotonic() > deadline:
                give_up(f"not applied by all workers within {limit_s:g} s")

        try:
            self._unanswered = version
            update = messages.Update(
                version=version,
                pause=self.settings.pause,
                rolling=self.settings.rolling,
                updates_before=self.updates,
                updates_after=self.updates + (not self._gate.awaits_weights),
                route=carriage.route,
            )
            attendant.send(update, [carriage.fd])
            carriage.depart()
            attendant.wait_news(lambda: answered(version), check)
            done = attendant.update_done
            assert done is not None
            applied = not done.failures
        except BaseException:
            give_up("interrupted")
            raise
        finally:
            carriage.end(applied)
        if done.failures:
            first = done.failures[0]
            raise WeightUpdateFailed(
                f"update {version}: not applied by all {len(self._config.workers.devices)} workers; the policy version stays "
                f"{self.version}, and workers that had applied it go back: {first.who}{first.error}; "
                f"{describe_workers(attendant.segment, attendant.states)}",
                worker=first.worker,
                pid=first.pid or None,
                worker_traceback=first.traceback,
            )
        with attendant.lock:
            self.complete(version)
        return version

    def mint(self) -> int:
        """A version number that was never used; until it is completed, its tokens count as no newer than the updates completed so far."""
        self.minted += 1
        self._completed_at[self.minted] = self._gate.updates
        return self.minted

    def complete(self, version: int) -> None:
        """All workers have applied it."""
        self.version = version
        self._gate.updated()
        self._completed_at[version] = self._gate.updates


class _Attempt(msgspec.Struct):
    version: int
    pause: PauseMode
    rolling: bool
    updates_after: int
    fd: int
    turns: list[int] = []
    """Workers that are still to get it."""
    awaiting: set[int] = set()
    """Those that have got it and not yet answered."""
    applied: set[int] = set()
    failures: list[messages.Applied] = []
    route: Route | None = None


class WeightSync:
    """The keeper's end: which copy each worker must have before it may claim. Runs on the keeper's only thread."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._attempt: _Attempt | None = None
        self._good: tuple[int, int] | None = None  # version, memfd of the last copy that all workers applied
        self.answered = 0
        """The highest version that has had its UpdateDone."""
        self.updates: dict[int, int] = {}
        """Updates, from the run's first weights, that the tokens of each version count from: those before it, until all workers applied it."""

    def begin(self, message: messages.Update, fd: int) -> None:
        """Send a new copy to every worker that runs. Owns the descriptor."""
        assert self._attempt is None, "the trainer sends one update at a time"
        told = [
            worker for worker in self._keeper.workers if worker.state in ("ready", "syncing") and not worker.evaluation
        ]
        route = message.route
        if route is not None and any(route.to(worker.index, worker.restarts) is None for worker in told):
            route = None  # one that the trainer did not know of
        if route is not None and len(told) < len(route.first_ranks):
            route = None  # one has died: the others would wait for it
        self._attempt = _Attempt(
            message.version, message.pause, message.rolling, message.updates_after, fd, route=route
        )
        self.updates[message.version] = message.updates_before
        for worker in told:
            self._send_newest(worker)
        self._maybe_end()

    def bring_up_to_date(self, worker: Worker) -> None:
        """A worker's engine runs and claims nothing: let it go, or send the newest copy first."""
        if self._attempt is None and worker.version == (self._good[0] if self._good is not None else 0):
            self._keeper.let_go(worker)
        else:
            worker.state = "syncing"
            self._send_newest(worker)

    def on_applied(self, worker: Worker, message: messages.Applied) -> None:
        """A worker's answer, to this attempt or to an earlier copy."""
        attempt = self._attempt
        current = attempt is not None and message.version == attempt.version
        if not message.error:
            worker.version = message.version
        if attempt is not None and current:
            attempt.awaiting.discard(worker.index)
            if message.error:
                attempt.failures.append(message)
            else:
                attempt.applied.add(worker.index)
        if message.error and (message.harmed or worker.state == "syncing"):
            worker.kill(f"weight update {message.version} failed: {message.error}", innocent_tickets=True)
        elif worker.state == "syncing" and (current or attempt is None):
            self._keeper.let_go(worker)
        self._maybe_end()

    def on_death(self, worker: Worker) -> None:
        """A dead worker is waited for no longer: its successor gets the newest copy."""
        if self._attempt is not None:
            self._attempt.awaiting.discard(worker.index)
            if worker.index in self._attempt.turns:
                self._attempt.turns.remove(worker.index)
            self._maybe_end()

    def give_up(self, message: messages.GiveUpUpdate) -> None:
        """The trainer waits no longer: who has not answered by now is late, and killed."""
        attempt = self._attempt
        if attempt is not None and attempt.version == message.version:
            late, attempt.awaiting = attempt.awaiting, set()
            attempt.failures += [self._late(self._keeper.workers[index], message) for index in sorted(late)]
            if not late:
                attempt.failures.append(messages.Applied(worker=-1, version=message.version, error=message.why))
            for index in late:
                self._keeper.workers[index].kill(
                    f"weight update {message.version} was not applied: {message.why}",
                    innocent_tickets=True,
                )
            self._maybe_end()
        elif message.version > self.answered:  # minted, and interrupted before it was sent
            self._answer(message.version, [messages.Applied(worker=-1, version=message.version, error=message.why)])

    def _late(self, worker: Worker, message: messages.GiveUpUpdate) -> messages.Applied:
        phase = self._keeper.segment.worker_words(worker.index)[WorkerWord.UPDATE_PHASE]
        where = f"in phase `{UPDATE_PHASES[phase - 1]}`" if phase else "it has not begun"
        return messages.Applied(
            worker=worker.index, version=message.version, pid=worker.pid, error=f"{where}: {message.why}"
        )

    def abandon(self, why: str) -> None:
        """The trainer is gone: whatever it was pushing is given up."""
        if self._attempt is not None:
            self.give_up(messages.GiveUpUpdate(version=self._attempt.version, why=why))

    def _send_newest(self, worker: Worker) -> None:
        """The copy under way, when it is the worker's turn; else the last good one."""
        if self._attempt is not None:
            self._attempt.turns.append(worker.index)
            self._next_turns(self._attempt)
        elif self._good is not None:
            worker.send(messages.Update(version=self._good[0], pause="retract"), [self._good[1]])

    def _next_turns(self, attempt: _Attempt) -> None:
        while attempt.turns and not attempt.failures and not (attempt.rolling and attempt.awaiting):
            worker = self._keeper.workers[attempt.turns.pop(0)]
            if not worker.evaluation:  # it was set aside meanwhile
                attempt.awaiting.add(worker.index)
                route = attempt.route.to(worker.index, worker.restarts) if attempt.route is not None else None
                worker.send(messages.Update(version=attempt.version, pause=attempt.pause, route=route), [attempt.fd])

    def _maybe_end(self) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        self._next_turns(attempt)
        if attempt.awaiting:
            return
        if not attempt.applied and not attempt.failures:
            if any(worker.state != "lost" for worker in self._keeper.workers):
                return  # the first worker that gets ready applies it
            attempt.failures.append(messages.Applied(worker=-1, version=attempt.version, error="all workers are lost"))
        self._attempt = None
        if attempt.failures:
            os.close(attempt.fd)
            self._take_back(attempt)
        else:
            if self._good is not None:
                os.close(self._good[1])
            self._good = (attempt.version, attempt.fd)
            self.updates[attempt.version] = attempt.updates_after
        self._answer(attempt.version, attempt.failures)
        for index in attempt.turns:  # one failed before it was their turn
            if self._keeper.workers[index].state == "syncing":
                self.bring_up_to_date(self._keeper.workers[index])

    def _answer(self, version: int, failures: list[messages.Applied]) -> None:
        self.answered = version
        self._keeper.tell(messages.UpdateDone(version=version, failures=failures))

    def _take_back(self, attempt: _Attempt) -> None:
        """Workers that applied a refused update get the last good copy again (what they sample meanwhile is stamped with the refused version)."""
        for worker in (self._keeper.workers[index] for index in attempt.applied):
            if worker.state == "ready" and self._good is not None:
                worker.state = "syncing"
                self._send_newest(worker)
            elif worker.pidfd >= 0:
                worker.kill(
                    f"weight update {attempt.version} was refused and there is no earlier copy",
                    innocent_tickets=True,
                )
