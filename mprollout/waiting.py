"""Where the trainer waits, and for what.

    get -> Waiting.fill: look -> enough? -> sleep -> look ...          n groups parked, or a typed error that says why not
                         '-- Waits: the seconds by cause, once it is known which group was the last one

Invariant: the seconds of all causes together are those that the trainer was kept in `get` (from its first look that found too little to
its last one) and in `update_weights`. `Waits.split` guarantees it: it cuts the wait at the moments of one group, and the pieces are disjoint.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mprollout.config import EngineConfig
from mprollout.errors import DataExhausted, EngineAsleep, GetTimeout, RingStarved
from mprollout.ring import Plan, WorkerWord
from mprollout.schema import Meta
from mprollout.stats import describe_workers

if TYPE_CHECKING:
    from mprollout.attendant import Attendant
    from mprollout.sleeping import Sleeping
    from mprollout.taker import Taken, Taker

SAFETY_LOOK_S = 0.25
STARVED_S = 0.5
CAUSES = ("generation", "straggler", "reward", "workers", "gate", "weights")
_KEPT = 64
"""Waits that wait for their cause, and times without a ready worker that are remembered."""


class Waits:
    """The trainer's wait by cause. A statistic of the last group of each batch: whatever else was late, without it there was no batch.

    What the wait was for, at each moment of it, by where that group then was:

    | cause | the last group of the batch was |
    |---|---|
    | `gate` | not admitted: there was no credit, by the trainer's own settings |
    | `workers` | admitted and not claimed while no worker was ready, or given back by the death of one |
    | `generation` | waiting for a worker or a place, or generating (attempts that failed included) |
    | `straggler` | generating its last sample, for longer than any of its siblings took; no further worker could have hidden this |
    | `reward` | generated: being scored, filtered, handed over |
    | `weights` | (in `update_weights`) |

    More workers would have begun that last sample at its ticket's admission, at the best, and it would have taken as long. So of the time
    by which it outlasted its siblings (in a group of one: all other samples of the batch) only what the wait is longer than the delay
    from admission to its place counts as `straggler`; that delay, and what its siblings took as well, are `generation`.

    A `get` that was interrupted, or ran out of time, is settled with the next one that gets its groups.
    """

    def __init__(self) -> None:
        self.ns = dict.fromkeys(CAUSES, 0)
        """Split, by cause."""
        self.since_ns: int | None = None
        """Beginning of the wait under way in `get`."""
        self._unsettled: collections.deque[tuple[int, int]] = collections.deque(maxlen=_KEPT)
        self._due: collections.deque[tuple[list[tuple[int, int]], Taken]] = collections.deque()
        self._idle: collections.deque[tuple[int, int]] = collections.deque(maxlen=_KEPT)
        self._idle_since: int | None = None

    def begin(self, now_ns: int) -> None:
        """Too little is there: the trainer waits, if it did not yet."""
        if self.since_ns is None:
            self.since_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """The `get` is over. Without its groups, its wait stays unsettled; of more than 64 such, the oldest counts as generation."""
        if self.since_ns is not None:
            if len(self._unsettled) == _KEPT:
                start, end = self._unsettled.popleft()
                self.ns["generation"] += end - start
            self._unsettled.append((self.since_ns, now_ns))
            self.since_ns = None

    def on_workers(self, any_ready: bool, now_ns: int) -> None:
        """Whether a worker is ready has been told (on another thread)."""
        if not any_ready:
            self._idle_since = now_ns if self._idle_since is None else self._idle_since
        elif self._idle_since is not None:
            self._idle.append((self._idle_since, now_ns))
            self._idle_since = None

    def settle(self, now_ns: int, taken: Taken) -> None:
        """The groups are in hand. Says only what there is to split: `get`, between a publish and its return, has no time for more."""
        waits = [*self._unsettled, *([(self.since_ns, now_ns)] if self.since_ns is not None else [])]
        if waits:
            self._due.append((waits, taken))
            self._unsettled.clear()
            self.since_ns = None

    def split(self, admitted_ns: dict[int, int]) -> None:
        """Split what was settled, O(n) a batch. `admitted_ns`: of tickets, as far as it is known."""
        while self._due:
            waits, taken = self._due.popleft()
            heads = taken.heads
            last = max(heads, key=lambda head: head.meta.published_ns)
            meta = last.meta
            if len(last.lengths) == 1:  # no siblings: what it is behind is the rest of the batch
                others = (head.meta.generated_ns - head.meta.started_ns for head in heads if head is not last)
                meta = meta._replace(excess_ns=max(0, meta.excess_ns - max(others, default=0)))
            admitted = min(admitted_ns.get(last.ticket, meta.claimed_ns), meta.claimed_ns)
            for cause, ns in self._split(waits, meta, admitted).items():
                self.ns[cause] += ns

    def _split(self, waits: Sequence[tuple[int, int]], last: Meta, admitted: int) -> dict[str, int]:
        def within(start: float, end: float) -> int:
            return sum(max(0, int(min(b, end) - max(a, start))) for a, b in waits)

        claimed, generated = last.claimed_ns, last.generated_ns
        idle = [*self._idle, *([(self._idle_since, math.inf)] if self._idle_since is not None else [])]
        queued = within(admitted, claimed)
        if last.deaths == 0:
            queued_idle = sum(within(max(admitted, start), min(claimed, end)) for start, end in idle)
        else:
            queued_idle = queued
        made = within(claimed, generated)
        delay = last.started_ns - admitted  # what more workers would have hidden
        straggler = min(within(max(claimed, generated - last.excess_ns), generated), max(0, queued + made - delay))
        return {
            "gate": within(-math.inf, admitted),
            "workers": queued_idle,
            "generation": queued - queued_idle + made - straggler,
            "straggler": straggler,
            "reward": within(generated, math.inf),
        }


class Waiting:
    """The wait of `get`. Used by the thread that takes; one for each started engine."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        attendant: Attendant,
        taker: Taker,
        waits: Waits,
        sleeping: Sleeping,
    ) -> None:
        self._config, self._plan, self._attendant, self._taker, self._waits = config, plan, attendant, taker, waits
        self._sleeping = sleeping
        self._starved_since = math.inf

    def fill(self, n: int, timeout: float | None, check_open: Callable[[], object]) -> None:
        """Return when n groups are parked. One that is interrupted leaves them parked for the next.

        Raises:
            Exception: see `RolloutEngine.get`; whatever `check_open` raises, before each sleep.
        """
        attendant, taker = self._attendant, self._taker
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with attendant.lock:
            booked = taker.resume()
        while True:
            seen = taker.consumer.news()
            with attendant.lock:
                missing = taker.park(n)
                if missing == 0:
                    return
                if taker.to_recycle:
                    attendant.ring()
                attendant.raise_fault()
                if self._sleeping.asleep:
                    raise EngineAsleep(
                        f"get({n}): {n - missing} groups are deliverable, and the workers sleep: call wake() first"
                    )
                self._check_meetable(n, booked)
            self._check_room(n)
            left = min(SAFETY_LOOK_S, deadline - time.monotonic())
            if left <= 0:
                raise GetTimeout(self._late(n, missing, timeout))
            check_open()  # what another thread closes later, the next look says
            self._waits.begin(time.monotonic_ns())
            taker.consumer.wait(taker.wanted(missing), seen, left)

    def _late(self, n: int, missing: int, timeout: float | None) -> str:
        attendant, gate, ledger = self._attendant, self._attendant.admission.gate, self._attendant.admission.ledger
        return (
            f"get({n}): {n - missing} groups deliverable after {timeout} s; {gate.live} live, {attendant.segment.pending()} pending, "
            f"credit {gate.credit}, next in order: ticket {ledger.watermark}; {describe_workers(attendant.segment, attendant.states)}"
        )

    def _check_meetable(self, n: int, booked: int) -> None:
        admission = self._attendant.admission
        unadmitted = admission.unadmitted()
        if unadmitted is not None and (available := booked + admission.gate.live + unadmitted) < n:
            failures = {outcome: count for outcome, count in admission.ledger.counts.items() if outcome != "taken"}
            note = next(reversed(self._attendant.notes.values()), None) if failures else None
            raise DataExhausted(
                f"get({n}): the source has ended ({len(admission.source)} rows, epochs={self._config.source.epochs}); {available} groups are left"
                + (f"; {failures} ended otherwise" if failures else "")
                + (f"; the last failure: {note.error}" if note else ""),
                available=available,
            )
        admission.gate.check_get(n - booked, unadmitted)

    def _check_room(self, n: int) -> None:
        """Every ready worker lacks room and runs nothing: only a release can help, and this thread is the one that would release."""
        attendant = self._attendant

        def stuck(worker: int) -> bool:
            words = attendant.segment.worker_words(worker)
            return bool(words[WorkerWord.STARVED_FOR_ROOM] and not words[WorkerWord.RUNNING_GROUPS])

        ready = [i for i, state in attendant.states.items() if state.state == "ready"]
        if not ready or not all(stuck(i) for i in ready):  # the first that is not ends the look
            self._starved_since = math.inf
            return
        self._starved_since = min(self._starved_since, time.monotonic())
        if (
            time.monotonic() - self._starved_since > STARVED_S
        ):  # a release just now reaches the workers within milliseconds
            self._starved_since = math.inf
            with attendant.lock:
                if self._taker.park(n) == 0:
                    return
            raise RingStarved(
                f"get({n}): no worker has room for another group (arenas of {self._plan.arena_bytes:,} bytes, up to "
                f"{self._plan.max_group_bytes:,} a group) and {self._taker.consumer.leased_count} taken groups were not released (or views of released ones "
                "are kept): use `with engine.get(n) as batch:`, copy what you keep, or raise RingConfig.arena_bytes"
            )
