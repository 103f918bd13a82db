"""`Ledger`: which tickets have no outcome yet, and how many ended how; the trainer's side of the live table.

    next_ticket -> live -> (park) -> resolve(taken | filtered:* | failed:*)          every ticket exactly once
         ^------ send_back <------'

Invariant: every ticket below `next` is in exactly one of three: handed out and unresolved, waiting to be handed out (again), resolved.
The first two are held, one slot each; the third is the rest. So memory is what is live, however large the data and however far one
straggler is left behind. `resolve` guarantees "once" by refusing what holds no slot. The slots are words of a `LedgerFile`, which stands
in the run folder for whoever audits from outside; what this class has besides (`_slot`, `_waiting`) only finds them.

Every change may be cut by a signal between any two steps (the main thread takes) and be done again: the store into the file comes
first, the step that this process goes by is one, and slots that were lost track of are found when free ones run out.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mprollout.errors import ConfigError
from mprollout.ledger_file import Kind, LedgerFile, Owner, Snapshot, Word, decode, ending, runs, unpack_ending

_FORMAT = 2
_FEW = 64
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class _State(msgspec.Struct, kw_only=True):
    """What a checkpoint keeps."""

    format: int
    next: _Count
    unresolved: list[tuple[_Count, _Count]]
    """Runs of tickets below `next`, first and last, in order."""
    ended: dict[str, _Count]


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
        self._file = LedgerFile([], _FEW)
        self._slot: dict[int, int] = {}  # by ticket without an outcome
        self._free: list[int] = []
        self._waiting: list[int] = []  # a heap; those that were handed out since are dropped when they come up
        self._adopted: set[int] = set()  # handed out, and not by this ledger
        self._passed = 0  # all below are resolved

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """No ticket at or above it was ever handed out."""
        return self._file.header[Word.NEXT]

    @property
    def watermark(self) -> int:
        """The lowest ticket without an outcome. In ticket order it is the next one to deliver."""
        ticket = self._passed  # it only grows
        for _ in range(_FEW):
            if not self.is_resolved(ticket):
                break
            ticket += 1
        else:  # behind a straggler there may be millions
            ticket = min(self._slot, default=self.next)
        self._passed = ticket
        return ticket

    @property
    def resolved(self) -> int:
        """Tickets with an outcome."""
        return self.next - len(self._slot)

    @property
    def taken(self) -> int:
        """Tickets that the trainer has."""
        return self.resolved - sum(self._file.counts)

    @property
    def counts(self) -> dict[str, int]:
        """Resolved tickets by outcome: `taken`, `filtered:<reason>`, `failed:<reason>`. Statistics, not the proof."""
        return {**({"taken": self.taken} if self.taken else {}), **self._ended}

    @property
    def _ended(self) -> dict[str, int]:
        return {name: count for name, count in zip(self._file.outcomes, self._file.counts, strict=True) if count}

    @property
    def adopted(self) -> bool:
        """Whether tickets of an earlier trainer are still to be taken."""
        return bool(self._adopted)

    @property
    def ahead(self) -> int:
        """Live tickets behind the one that is handed out next: those of an earlier trainer, when this one starts further back."""
        if not self._adopted:
            return 0
        following = self.peek_ticket()
        return sum(ticket > following for ticket in self._adopted)

    def is_resolved(self, ticket: int) -> bool:
        return ticket < self.next and ticket not in self._slot

    def snapshot(self) -> Snapshot:
        """All of it, as somebody from outside reads it."""
        return decode(self._file.bytes, "the ledger")

    # -- changes -------------------------------------------------------------------------------------------------

    def peek_ticket(self) -> int:
        """The ticket that `next_ticket` would hand out."""
        while self._waiting:
            ticket = self._waiting[0]
            if ticket in self._slot and self._kind(ticket) == Kind.WAITING:
                return ticket
            heapq.heappop(self._waiting)
        return self.next

    def next_ticket(self) -> int:
        """Hand out the lowest ticket that waits, or a new one."""
        ticket = self.peek_ticket()
        self._put(ticket, Kind.OPEN)
        if ticket == self.next:
            self._file.header[Word.NEXT] = ticket + 1
        return ticket

    def park(self, tickets: Iterable[int]) -> None:
        """They are about to be delivered to this process: their entries are no longer what proves that none is lost. Nothing for those that are resolved."""
        slots, slot_of = self._file.slots, self._slot
        for ticket in tickets:
            if (slot := slot_of.get(ticket)) is not None:
                slots[slot] = ticket << 2 | Kind.PARKED

    def send_back(self, ticket: int) -> None:
        """A ticket that is not resolved is to be handed out again, before all others."""
        assert not self.is_resolved(ticket), ticket
        self._adopted.discard(ticket)
        heapq.heappush(self._waiting, ticket)
        self._put(ticket, Kind.WAITING)

    def adopt(self, live: Collection[int], parked: Collection[int] = ()) -> None:
        """Tickets that are live although this ledger has not handed them out: a trainer before this one did.

        Args:
            live: all of them. What is unresolved between them, and below, is handed out again.
            parked: those of them that were delivered to that trainer.
        """
        self._adopted |= {ticket for ticket in live if not self.is_resolved(ticket)}
        for ticket in self._adopted:
            self._put(ticket, Kind.PARKED if ticket in parked else Kind.OPEN)
        after = max(self._adopted, default=-1) + 1
        for ticket in range(self.next, after):
            if ticket not in self._slot:
                heapq.heappush(self._waiting, ticket)
                self._put(ticket, Kind.WAITING)
        self._file.header[Word.NEXT] = max(self.next, after)

    def resolve(self, ticket: int, outcome: str) -> None:
        """Record the one outcome of a ticket.

        Raises:
            AssertionError: the ticket was resolved before, or never handed out: a broken promise, never a user's error.
        """
        if ticket >= self.next or ticket not in self._slot or self._kind(ticket) == Kind.WAITING:
            raise AssertionError(
                f"ticket {ticket} ({outcome}) is resolved twice or was never admitted; watermark {self.watermark}, next {self.next}"
            )
        self._adopted.discard(ticket)
        slot = self._slot[ticket]
        if outcome == "taken":
            self._file.slots[slot] = 0
            del self._slot[ticket]
            return
        which = self._outcome(outcome)
        slots, counts = self._file.slots, self._file.counts
        if slots[slot] >= 0:
            slots[slot] = ending(which, counts[which])
        which, before = unpack_ending(slots[slot])
        counts[which] = before + 1
        del self._slot[ticket]  # before the slot is empty: done again behind that, it would be counted twice
        slots[slot] = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """While entries of the table are filled and emptied that this ledger learns of a moment later: whoever looks from outside looks again."""
        self._file.header[Word.TURN] += 1
        try:
            yield
        finally:
            self._file.header[Word.TURN] += 1

    def _kind(self, ticket: int) -> int:
        word = self._file.slots[self._slot[ticket]]
        return word & 3 if word > 0 else 0  # negative: it is ending

    def _put(self, ticket: int, kind: Kind) -> None:
        if ticket not in self._slot:
            self._slot[ticket] = self._free_slot()
        self._file.slots[self._slot[ticket]] = ticket << 2 | kind

    def _free_slot(self) -> int:
        """Nothing is given back one by one: when the free ones run out, all that no ticket holds are free, half of them at least."""
        if not self._free:
            file, used = self._file, set(self._slot.values())
            if 2 * len(used) > len(file.slots):
                self._file = file = file.rewritten(file.outcomes, 2 * len(file.slots), file.owner, file.path)
            self._free = [slot for slot in reversed(range(len(file.slots))) if slot not in used]
        return self._free.pop()

    def _outcome(self, name: str) -> int:
        if name not in self._file.outcomes:
            file = self._file
            self._file = file.rewritten([*file.outcomes, name], len(file.slots), file.owner, file.path)
        return self._file.outcomes.index(name)

    # -- where it stands -----------------------------------------------------------------------------------------

    def keep_in(self, path: Path, owner: Owner, live: int, own_reasons: Sequence[str] = ()) -> None:
        """From now on this file has every change, in the place of what had its name.

        Args:
            live: how many tickets may be live, so that there is room before the disk is full.
            own_reasons: `FilterConfig.reasons`, for the same end.

        Raises:
            ConfigError: it cannot be written; names it.
        """
        file = self._file
        codes = [*Reason, *range(FIRST_OWN_REASON, FIRST_OWN_REASON + len(own_reasons))]
        names = [f"{kind}:{reason_name(code, own_reasons)}" for kind in ("filtered", "failed") for code in codes]
        outcomes = list(dict.fromkeys([*file.outcomes, *names]))
        slots = max(len(file.slots), 2 * max(live, len(self._slot)) + _FEW)
        try:
            self._file = file.rewritten(outcomes, slots, owner, path)
        except OSError as error:
            raise ConfigError(f"EngineConfig.run_dir: the ledger cannot be kept there: {error}") from error

    def let_go(self) -> None:
        """From now on in memory; the file stays as it is, for an audit of the ended run."""
        file = self._file
        if file.path is not None:
            self._file = file.rewritten(file.outcomes, len(file.slots), file.owner, None)

    def state(self, without: Collection[int] = ()) -> dict[str, Any]:
        """JSON-able: `next` and the runs [first, last] of tickets below it that are not resolved; `without` counts as not resolved."""
        unresolved = runs(ticket for ticket in {*self._slot, *without} if ticket < self.next)
        return {"format": _FORMAT, "next": self.next, "unresolved": unresolved, "ended": self._ended}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        """Every ticket that the state does not hold as resolved is handed out again, lowest first.

        Raises:
            ConfigError: not a state of this format.
        """
        try:
            if state["format"] != _FORMAT:
                raise ValueError(f"format {state['format']!r}")
            told = msgspec.convert(state, _State)
            ends = [0, *(ticket for first, last in told.unresolved for ticket in (first, last + 1)), told.next]
            if sorted(ends) != ends:
                raise ValueError(f"tickets that are out of order, or not below next={told.next}")
            ledger = cls()
            for first, last in told.unresolved:
                for ticket in range(first, last + 1):
                    ledger._put(ticket, Kind.WAITING)
                    ledger._waiting.append(ticket)  # in order, so a heap
            ledger._file.header[Word.NEXT] = told.next
            for outcome, count in told.ended.items():
                which = ledger._outcome(outcome)  # its file may be a new one
                ledger._file.counts[which] = count
            if ledger.taken < 0:
                raise ValueError("more endings than tickets")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"state: expected a ledger state of format {_FORMAT}, got {state!r:.200} ({error!r})"
            ) from error
        return ledger
