"""`Taker`: which groups come next, and what becomes of them. Exactly n, in order, each once.

    ring -> held (ingested) -> parked (delivered) -> booked in the ledger -> Batch -> handed over
                 \\-> beyond `max_lag` under `lag_policy="recycle"`: discarded, its ticket sent back to the gate

Order: publish order, or ticket order under a strict lag bound (groups ahead of their turn stay held, uncopied). Invariant: nothing leaves
`held` unless n groups can be parked together; every step can be interrupted by a signal and run again (`resume`), and what is
parked is not yet taken for `state_dict`. Waiting is the caller's: this class never blocks. Not thread-safe: the engine's lock guards it.
"""

from __future__ import annotations

import array
import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mprollout import _native
from mprollout.batch import Batch, Group
from mprollout.config import EngineConfig
from mprollout.gate import Gate, is_strict
from mprollout.ledger import Ledger
from mprollout.ring import DELIVERED
from mprollout.schema import Field, Meta, index
from mprollout.updates import Updates

_KEPT = [index(())[name][0] for name in ("meta", "lengths", "rewards", "span_versions")]


class Head(NamedTuple):
    """What statistics need of a group that was taken."""

    ticket: int
    meta: Meta
    lengths: Sequence[int]
    rewards: Sequence[float]
    span_versions: Sequence[int]


class Taken(NamedTuple):
    """A batch as it is counted later, when the trainer may have released it: copies of a few fields (`_KEPT`)."""

    leases: list[_native.Lease]
    """For their tickets."""
    copies: list[tuple[bytes, ...]]
    now: int
    """Updates completed at its take."""

    @property
    def heads(self) -> list[Head]:
        """One a group."""
        return [
            Head(
                lease.ticket,
                Meta._make(_numbers(meta, "q")),
                _numbers(lengths, "i"),
                _numbers(rewards, "f"),
                _numbers(spans, "q"),
            )
            for lease, (meta, lengths, rewards, spans) in zip(self.leases, self.copies, strict=True)
        ]


def _numbers(data: bytes, code: str) -> Sequence[Any]:
    return array.array(code, data)


class Taker:
    """The consumer's side of one engine."""

    def __init__(
        self,
        consumer: _native.Consumer,
        config: EngineConfig,
        extra_fields: tuple[Field, ...],
        ledger: Ledger,
        gate: Gate,
        updates: Updates,
        recycled: dict[int, int] | None = None,
    ) -> None:
        self.consumer, self._ledger, self._gate, self._updates = consumer, ledger, gate, updates
        self._extra_fields = extra_fields
        self._ticket_order, self._settings = is_strict(config.gate), config.gate
        self._taken_before = ledger.taken
        self.parked: list[_native.Lease] = []
        """Delivered, not yet handed over."""
        self.recycled = recycled or {}
        """How often a ticket that is not yet resolved was sent back."""
        self.to_recycle: list[Group] = []
        """Held, and never to be delivered: `recycle` discards them."""
        self._again: dict[int, _native.Lease] = {}  # by ticket: what a dead trainer had taken, in its order
        self.lags: collections.Counter[int] = collections.Counter()
        """Groups taken, by lag. Statistics."""
        self.lengths = np.zeros(len(DELIVERED), np.int64)
        """Samples of groups taken, by `length_bucket`. Statistics, as all that follows."""
        self.tokens_delivered = self.samples_taken = 0
        self.reward_last = self.reward_sum = 0.0
        """Mean reward of the samples in the last batch; the sum of the rewards of all samples taken."""
        self.groups_recycled = self.groups_masked = self.tokens_discarded = 0
        self._uncounted: collections.deque[Taken] = collections.deque()

    @property
    def policy_version(self) -> int:
        """The last version that all workers applied."""
        return self._updates.version

    def adopt(self, segment: _native.Segment) -> None:
        """Against a loaded state, find out what is live: entries of the table, groups in the ring, groups that a dead trainer had taken."""
        while (lease := self.consumer.take()) is not None:
            if not lease.delivered:
                continue
            if self._ledger.is_resolved(lease.ticket):  # the checkpoint has it; only its memory was not given back
                lease.release()
            else:
                self._again[lease.ticket] = lease
        table = {row[0] for row in segment.table() if row[1] != _native.DONE}
        live = table | {lease.ticket for lease in self.consumer.held()} | self._again.keys()
        self._ledger.adopt(live, parked=self._again.keys())
        self._gate.admitted = len(live)

    def unfinished_ahead(self, segment: _native.Segment) -> list[int]:
        """Tickets still to be sampled that the gate would not admit yet: an attached trainer's predecessor, who was further, did.

        Sampled with the checkpoint's weights they would be over the lag bound at their turn; with the predecessor's they are not.
        """
        if not self._ticket_order:
            return []
        assert self._settings.max_lag is not None and self._settings.groups_per_update is not None
        room, first = (self._settings.max_lag + 1) * self._settings.groups_per_update, self._ledger.watermark
        while room:
            room -= not self._ledger.is_resolved(first)
            first += 1
        unfinished = (_native.READY, _native.RUNNING)
        return [row[0] for row in segment.table() if row[0] >= first and row[1] in unfinished]

    def resume(self) -> int:
        """Finish what an interrupt cut; returns how many of the parked groups are booked (neither live nor to come)."""
        self._deliver(self.parked)
        self.count()
        return sum(self._ledger.is_resolved(lease.ticket) for lease in self.parked)

    def park(self, n: int) -> int:
        """Have n groups parked, if so many can be delivered now; returns how many are missing."""
        while (missing := n - len(self.parked)) > 0:
            leases = self._deliverable(missing)
            if len(leases) < missing:
                if self._ticket_order and not self.to_recycle:
                    self.to_recycle = self._in_the_way()
                return missing - len(leases)
            if not (stale := self._stale(leases)):
                # Parked before they are delivered: what an interrupt leaves between the two, `resume` does.
                self.parked = [*self.parked, *leases]
                self._deliver(leases)
            else:
                self.to_recycle = [*self.to_recycle, *stale]
        return 0

    def _in_the_way(self) -> list[Group]:
        """Held groups of an earlier trainer that leave no entries for a batch of those before them: the last in order are made again.

        Each trainer that dies may leave as many live tickets as there are entries, all behind its successor's first.
        """
        following = self._ledger.peek_ticket()
        excess = self._ledger.ahead - self._gate.max_live_groups
        if excess <= 0:
            return []
        held = sorted(lease.ticket for lease in self.consumer.held() if lease.ticket > following)
        leases = [self.consumer.find(ticket) for ticket in held[-excess:]]
        return [Group(lease, self._extra_fields) for lease in leases if lease is not None]

    def wanted(self, missing: int) -> int:
        """Publications worth waking for: in ticket order any may be the one whose turn it is."""
        return 1 if self._ticket_order else missing

    def book(self, n: int) -> tuple[Batch, Taken]:
        """The first n parked groups as a batch: they are taken, as soon as somebody counts."""
        leases, now = self.parked[:n], self._gate.updates
        taken = Taken(leases, _native.copies(leases, _KEPT), now)
        self._uncounted.append(taken)
        return Batch(leases, functools.partial(self._group, now=now)), taken

    def count(self) -> None:
        """Bring ledger, gate and statistics up to what was taken. Whoever reads them calls it first: `get`, between a publish and its
        return, has no time for it, and what is parked in the ledger is safe. An interrupt may cost a statistic, never a ticket.
        """
        while self._uncounted:
            heads = [head for head in self._uncounted[0].heads if not self._ledger.is_resolved(head.ticket)]
            for head in heads:
                lag = self._lag(head.meta, head.span_versions, self._uncounted[0].now)
                self._ledger.resolve(head.ticket, "taken")
                self.recycled.pop(head.ticket, None)
                self.lags[lag] += 1
                self.groups_masked += self._is_masked(lag)
            if heads:
                lengths, rewards = (
                    [n for head in heads for n in head.lengths],
                    [r for head in heads for r in head.rewards],
                )
                self._count_samples(np.array(lengths), np.array(rewards))
            self._uncounted.popleft()
        self._ledger.park(
            lease.ticket for lease in self.parked
        )  # of an interrupted `get`; before the table forgets them
        self._gate.taken = self._ledger.taken - self._taken_before

    def _count_samples(self, lengths: npt.NDArray[np.int64], rewards: npt.NDArray[np.float64]) -> None:
        # 2^i to 2^(i+1) - 1 have the exponent i + 1, and 0 has 0: as `length_bucket`
        counts = np.bincount(np.frexp(lengths)[1], minlength=len(self.lengths) + 1)
        self.lengths += counts[1 : len(self.lengths) + 1]
        self.lengths[0] += counts[0]
        self.lengths[-1] += counts[len(self.lengths) + 1 :].sum()
        self.tokens_delivered += int(lengths.sum())
        total = float(rewards.sum())
        self.samples_taken += len(rewards)
        self.reward_sum += total
        self.reward_last = total / max(1, len(rewards))

    def hand_over(self, n: int) -> None:
        """The caller has them: one step that no signal cuts."""
        del self.parked[:n]

    def _deliverable(self, n: int) -> list[_native.Lease]:
        """Up to n groups that may be delivered now, in order; they stay held."""
        nothing_held = not (self.parked or self.to_recycle or self._again or self.consumer.held_count)
        if nothing_held and not self._ticket_order:
            return self.consumer.try_take(n)
        parked, over = {lease.ticket for lease in self.parked}, {group.ticket for group in self.to_recycle}
        if not self._ticket_order:
            gone = parked | over
            held = [lease for lease in (*self._again.values(), *self.consumer.held()) if lease.ticket not in gone]
            return held[:n] if len(held) >= n else held + self.consumer.try_take(n - len(held))
        if published := self.consumer.available():
            self.consumer.try_take(published)
        leases: list[_native.Lease] = []
        ticket = self._ledger.watermark
        while len(leases) < n:
            if ticket not in parked and not self._ledger.is_resolved(ticket):  # ended ones are skipped
                if ticket in over:
                    break  # it comes again
                if (lease := self._again.get(ticket) or self.consumer.find(ticket)) is None:
                    break  # a live one is waited for
                leases.append(lease)
            ticket += 1
        return leases

    def _deliver(self, leases: list[_native.Lease]) -> None:
        self.consumer.deliver(leases)  # idempotent
        if self._again:
            for lease in leases:
                self._again.pop(lease.ticket, None)

    # -- lag -----------------------------------------------------------------------------------------------------

    def _group(self, lease: _native.Lease, now: int) -> Group:
        """As it is taken when so many updates are completed."""
        group = Group(lease, self._extra_fields)
        group.lag = self._lag(group.meta, group.field("span_versions").tolist(), now)
        group.masked = self._is_masked(group.lag)
        return group

    def _lag(self, meta: Meta, span_versions: Sequence[int], now: int) -> int:
        if meta.oldest_version in (meta.version, -1):  # its tokens are of one version, or it has none
            return self._updates.lag(meta.version, now)
        # not that of the lowest version: an attached trainer's first one is a step back in what was learnt
        return max(self._updates.lag(version, now) for version in set(span_versions))

    def _is_masked(self, lag: int) -> bool:
        return self._settings.max_lag is not None and not self._ticket_order and lag > self._settings.max_lag

    def _stale(self, leases: list[_native.Lease]) -> list[Group]:
        """Those over the lag that the settings do not mask. Under the strict bound only what a dead trainer left can be: before it come
        tickets that this trainer makes again, so its turn may come later than it was admitted for.
        """
        settings = self._settings
        if settings.max_lag is None or not (
            self._ledger.adopted if self._ticket_order else settings.lag_policy == "recycle"
        ):
            return []
        groups = [self._group(lease, self._gate.updates) for lease in leases]
        return [
            group
            for group in groups
            if group.lag > settings.max_lag
            and (self._ticket_order or self.recycled.get(group.ticket, 0) < settings.max_recycles)
        ]

    def recycle(self) -> None:
        """Discard what is over the lag and send its tickets back: the credit returns, and the admission spends it on them first.

        Called on a thread that no signal interrupts.
        """
        for group in self.to_recycle:
            self.groups_recycled += 1
            self.tokens_discarded += int(group.lengths.sum())
            self.recycled[group.ticket] = self.recycled.get(group.ticket, 0) + 1
            self._deliver([group.lease])
            group.lease.release()
            self._ledger.send_back(group.ticket)
            self._gate.ended += 1
        self.to_recycle = []
