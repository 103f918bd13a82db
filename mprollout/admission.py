"""`Admission`: credit becomes READY tickets, endings become credit. The gate at work, between source and live table.

    sweep ended entries -> ledger, gate -> credit -> source.encode -> admit (FREE -> READY)

Invariant: a ticket is handed out by the ledger only after its entry is READY (peek, admit, then next), so a failed admit loses nothing.
What fails without end (prompts, rewards, filters) is told as a permanent fault instead of being tried for ever.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from mprollout import _native, messages
from mprollout.config import EngineConfig
from mprollout.errors import ConfigError, EngineFault, PromptsFailing, RewardFault, SourceError
from mprollout.gate import Gate
from mprollout.ledger import FIRST_OWN_REASON, Ledger, Reason, reason_name
from mprollout.ring import WorkerWord
from mprollout.source import PromptSource

log = logging.getLogger("mprollout")
_Kind = Literal["failed", "filtered", "rejected"]


class Admission:
    """Not thread-safe: the engine's lock guards it, with gate and ledger.

    Args:
        notes: the last failures by ticket, for the fault's text.
        on_failing: called once prompts fail without end: the fault's kind, its text, the note it is about.
    """

    def __init__(
        self,
        segment: _native.Segment,
        config: EngineConfig,
        source: PromptSource,
        gate: Gate,
        ledger: Ledger,
        notes: collections.OrderedDict[int, messages.Note],
        on_failing: Callable[[type[EngineFault], str, messages.Note | None], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.admitted_ns: dict[int, int] = {}
        """By live ticket: the moment of its admission. Those that an earlier trainer admitted are not in it."""
        self._now_ns = now_ns
        self.source, self.gate, self.ledger = source, gate, ledger
        self.segment, self.notes, self._on_failing = segment, notes, on_failing
        self._faults, self._filter, self._over_long = config.fault, config.filter, config.source.over_long
        self._in_a_row: collections.Counter[str] = collections.Counter()
        self._published_before = 0
        self.stopped = False
        """Nothing is admitted any more: there is a permanent fault."""
        self._admitter = _native.Admitter(segment)

    def unadmitted(self) -> int | None:
        """Tickets that the source still has to give; None: endless."""
        last = self.source.last_ticket
        return None if last is None else max(0, last - self.ledger.resolved - self.gate.live)

    def turn(self) -> bool:
        """Collect what ended, spend the credit. Returns whether something ended FILTERED or FAILED."""
        with self.ledger.turn():
            return self._turn()

    def _turn(self) -> bool:
        ended = False
        for ticket, state, reason, _attempt, _deaths in self._admitter.sweep():
            self.admitted_ns.pop(ticket, None)
            if state != _native.DONE:  # which was counted when it was delivered
                self._end(ticket, state, reason)
                ended = True
        try:
            self.gate.ahead = self.ledger.ahead
            while not self.stopped and self.gate.credit > 0 and self._admit_one():
                self.gate.ahead = self.ledger.ahead
        except (SourceError, ConfigError) as error:
            self.stopped = True
            self._on_failing(EngineFault, f"the source cannot go on: {type(error).__name__}: {error}", None)
        return ended

    def _admit_one(self) -> bool:
        ticket, last = self.ledger.peek_ticket(), self.source.last_ticket
        if last is not None and ticket >= last:
            return False
        data = self.source.encode(ticket)
        try:
            if not self._admitter.admit(ticket, data):
                return False
        except _native.GroupTooLarge as error:
            text = f"row {self.source.row(ticket)[0]}: {error} (RingConfig.max_prompt_bytes)"
            if self._over_long == "refuse":
                raise SourceError(text) from error
            log.warning("over-long, filtered: %s", text)
            self._count_admitted()
            self._end(ticket, _native.FILTERED, Reason.OVER_LONG, text)
            return True
        self.admitted_ns[ticket] = self._now_ns()
        self._count_admitted()
        return True

    def _count_admitted(self) -> None:
        self.ledger.next_ticket()
        self.gate.admitted += 1

    def _end(self, ticket: int, state: int, reason: int, error: str = "") -> None:
        """A live ticket is FILTERED or FAILED: its one outcome, its credit back."""
        name = reason_name(reason, self._filter.reasons)
        self.ledger.resolve(ticket, f"{'filtered' if state == _native.FILTERED else 'failed'}:{name}")
        self.gate.ended += 1
        if reason == Reason.OVER_LONG and self._over_long == "refuse":
            return  # the worker's own fault names the row, and is on its way
        rejected = reason == Reason.ZERO_SPREAD or reason >= FIRST_OWN_REASON
        kind: _Kind = "failed" if state == _native.FAILED else "rejected" if rejected else "filtered"
        self._count_ending(ticket, name, kind, error)

    def _count_ending(self, ticket: int, reason: str, kind: _Kind, error: str) -> None:
        """So many endings of a kind in a row, and nothing published between them, are no prompt's own fault."""
        published = sum(
            self.segment.worker_words(index)[WorkerWord.GROUPS_PUBLISHED] for index in range(self.segment.workers)
        )
        if published != self._published_before:
            self._in_a_row.clear()
            self._published_before = published
        self._in_a_row[kind] += 1
        count, note = self._in_a_row[kind], self.notes.get(ticket)
        if note is None and not error:  # its own note comes by way of the keeper and may be later than its end
            note = next((other for other in reversed(self.notes.values()) if other.reason == reason), None)
        last = note.error if note else error or reason
        if kind == "failed" and count >= self._faults.max_consecutive_failures:
            fault = RewardFault if reason == "reward" else PromptsFailing
            text = f"{count} prompts in a row ended FAILED and nothing was published between them; the last: {last}"
        elif (
            kind == "filtered"
            and count >= max(len(self.source), self._faults.max_consecutive_failures)
            and self.unadmitted() != 0
        ):
            fault, text = (
                PromptsFailing,
                f"{count} prompts in a row were filtered ({reason}), a whole pass over the rows; the last: {last}",
            )
        elif kind == "rejected" and count >= (self._filter.max_consecutive or math.inf):
            fault = PromptsFailing
            text = (
                f"{count} groups in a row were rejected by the filter ({reason} the last) and none was published between them "
                f"(FilterConfig.max_consecutive={self._filter.max_consecutive})"
            )
        else:
            return
        self.stopped = True
        self._on_failing(fault, text, note)


class Bells:
    """Rings the workers that say that they sleep. In turn: with few CPUs, who is rung first gets most of a few tickets."""

    def __init__(self, segment: _native.Segment, bells: Sequence[int]) -> None:
        self._segment, self._bells, self._first = segment, bells, 0

    def ring_idle(self) -> None:
        """After admitting or releasing."""
        if not (idle := self._segment.idle_workers()):
            return
        before = idle & (1 << self._first) - 1
        order = [*_bits(idle ^ before), *_bits(before)]
        for worker in order:
            os.eventfd_write(self._bells[worker], 1)
        self._first = (order[0] + 1) % len(self._bells)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
