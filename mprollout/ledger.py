"""`Ledger`: which tickets ended how, on the trainer's side of the live table.

    next_ticket -> admit -> ... -> resolve(taken | filtered:* | failed:*)          every ticket exactly once

Invariant: every ticket below `watermark` is resolved, every resolved ticket above it stands in `_above`, every other ticket is live
or not yet admitted: a partition. `resolve` guarantees it by refusing a ticket that is resolved already; memory is the watermark plus
the exceptions above it, whatever the size of the data.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Collection, Sequence
from typing import Any

from mprollout.errors import ConfigError

_FORMAT = 1


class Reason(enum.IntEnum):
    """Why a ticket ended FILTERED or FAILED: the reason code of its word."""

    OVER_LONG = 1
    PROMPT = 2
    GENERATION = 3
    ABORT = 4
    REWARD = 5
    TIMEOUT = 6
    TOO_LARGE = 7
    DEATHS = 8
    ROLLOUT = 9
    FILTER = 10
    """The filter function failed; its rejections have the reasons that follow."""
    ZERO_SPREAD = 11


FIRST_OWN_REASON = 64
"""Reason code of `FilterConfig.reasons[0]`; the others follow."""


def reason_name(code: int, own: Sequence[str]) -> str:
    """The name of a reason code, as outcomes and statistics have it; `own`: `FilterConfig.reasons`."""
    return own[code - FIRST_OWN_REASON] if code >= FIRST_OWN_REASON else Reason(code).name.lower()


class Ledger:
    """Not thread-safe: the engine's lock guards it.

    Example:
        >>> ledger = Ledger()
        >>> [ledger.next_ticket() for _ in range(3)]
        [0, 1, 2]
        >>> ledger.resolve(1, "taken"); ledger.watermark
        0
        >>> ledger.resolve(0, "failed:reward"); ledger.watermark
        2
        >>> Ledger.from_state(ledger.state()).next_ticket()
        2
    """

    def __init__(self) -> None:
        self.watermark = 0
        """All tickets below are resolved. In ticket order it is the next one to deliver."""
        self._ended: collections.Counter[str] = collections.Counter()
        self._above: set[int] = set()
        self._adopted: set[int] = set()  # live already when this ledger began; skipped by `next_ticket`
        self._sent_back: set[int] = set()  # handed out once, and to be handed out again
        self._forgotten = 0  # `_above` holds none below this
        self._next = 0

    @property
    def taken(self) -> int:
        """Tickets that the trainer has."""
        return self.resolved - sum(self._ended.values())

    @property
    def counts(self) -> dict[str, int]:
        """Resolved tickets by outcome: `taken`, `filtered:<reason>`, `failed:<reason>`. Statistics, not the proof."""
        return {**({"taken": self.taken} if self.taken else {}), **self._ended}

    def next_ticket(self) -> int:
        """Hand out the lowest ticket that is neither resolved nor handed out."""
        if self._sent_back:
            ticket = min(self._sent_back)
            self._sent_back.discard(ticket)
            return ticket
        while self._next in self._above or self._next in self._adopted or self._next < self.watermark:
            self._next += 1
        ticket, self._next = self._next, self._next + 1
        return ticket

    def peek_ticket(self) -> int:
        """The ticket that `next_ticket` would hand out."""
        if self._sent_back:
            return min(self._sent_back)
        ticket = self.next_ticket()
        self._next = ticket
        return ticket

    def send_back(self, ticket: int) -> None:
        """A ticket that is not resolved is to be handed out again, before all others."""
        assert not self.is_resolved(ticket), ticket
        self._sent_back.add(ticket)
        self._adopted.discard(ticket)

    @property
    def sent_back(self) -> frozenset[int]:
        """Tickets that wait to be handed out again."""
        return frozenset(self._sent_back)

    @property
    def resolved(self) -> int:
        """Tickets with an outcome."""
        self._forget_passed()
        return self.watermark + len(self._above)

    @property
    def admitted_below(self) -> int:
        """All tickets below were handed out or are resolved."""
        return self._next

    def adopt(self, live: Collection[int]) -> None:
        """Tickets that are live although this ledger has not handed them out: a trainer before this one did."""
        self._adopted |= {ticket for ticket in live if not self.is_resolved(ticket)}

    def is_handed_out(self, ticket: int) -> bool:
        """Whether the ticket has left for the live table, or is resolved."""
        return ticket < self._next or ticket in self._adopted or self.is_resolved(ticket)

    @property
    def ahead(self) -> int:
        """Live tickets behind the one that is handed out next: those of an earlier trainer, when this one starts further back."""
        if not self._adopted:
            return 0
        following = self.peek_ticket()
        return sum(ticket > following for ticket in self._adopted)

    def is_resolved(self, ticket: int) -> bool:
        return ticket < self.watermark or ticket in self._above

    def resolve(self, ticket: int, outcome: str) -> None:
        """Record the one outcome of a ticket.

        Raises:
            AssertionError: the ticket was resolved before, or never handed out: a broken promise, never a user's error.
        """
        if self.is_resolved(ticket) or not self.is_handed_out(ticket):
            raise AssertionError(
                f"ticket {ticket} ({outcome}) is resolved twice or was never admitted; watermark {self.watermark}, next {self._next}"
            )
        if outcome != "taken":
            self._ended[outcome] += 1
        self._adopted.discard(ticket)
        # Each step leaves a consistent state behind, since a signal may raise between any two (the main thread takes).
        self._above.add(ticket)
        watermark = self.watermark
        while watermark in self._above:
            watermark += 1
        self.watermark = watermark
        self._forget_passed()

    def _forget_passed(self) -> None:
        """The exceptions below the watermark are none; at the cost of those passed since the last time, not of all above."""
        if self._forgotten < self.watermark:
            self._above.difference_update(range(self._forgotten, self.watermark))
            self._forgotten = self.watermark

    def state(self, without: Collection[int] = ()) -> dict[str, Any]:
        """JSON-able: the watermark and the runs [first, last] of resolved tickets above it; `without` counts as not resolved."""
        self._forget_passed()
        watermark = min([self.watermark, *without])
        runs: list[list[int]] = []
        for ticket in sorted({*range(watermark, self.watermark), *self._above}.difference(without)):
            if runs and runs[-1][1] == ticket - 1:
                runs[-1][1] = ticket
            else:
                runs.append([ticket, ticket])
        return {"format": _FORMAT, "watermark": watermark, "resolved_above": runs, "ended": dict(self._ended)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        """Every ticket that the state does not hold as resolved is handed out again, lowest first.

        Raises:
            ConfigError: not a state of this format.
        """
        try:
            if state["format"] != _FORMAT:
                raise ValueError("another format")
            ledger = cls()
            ledger.watermark = ledger._next = ledger._forgotten = int(state["watermark"])
            ledger._above = {ticket for first, last in state["resolved_above"] for ticket in range(first, last + 1)}
            ledger._ended.update(state["ended"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"state: expected a ledger state of format {_FORMAT}, got {state!r:.200} ({error!r})"
            ) from error
        return ledger
