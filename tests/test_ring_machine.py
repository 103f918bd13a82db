"""The ring against a model of lists and dicts: whatever is called in whatever order, both say the same."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mprollout import _native as native

WORKERS, ENTRIES, MAX_GROUP, ARENA, DESCRIPTORS, MAX_DEATHS, REASON = 2, 5, 1024, 4096, 6, 2, 99
STATES = {"ready": native.READY, "running": native.RUNNING, "published": native.PUBLISHING, "done": native.DONE}
lengths = st.lists(st.sampled_from([64, 0, 1, 63, 65, 200, 500, 800]), min_size=1, max_size=4)
happened: Counter[str] = Counter()
"""Over all examples, so that a machine that never gets far is not taken for a proof."""


@dataclass
class Ticket:
    state: str = "ready"
    """ready, running, published, done, or the number of FILTERED or FAILED."""
    attempt: int = 0
    deaths: int = 0
    reason: int = 0
    worker: int = 0


@dataclass(eq=False)
class Group:
    """A published group, from its publication to the return of its memory."""

    ticket: int
    worker: int
    attempt: int
    payload: list[bytes]
    delivered: bool = False
    lease: Any = None
    views: list[Any] = field(default_factory=list)
    released: bool = False


def payload_of(ticket: int, attempt: int, sizes: list[int]) -> list[bytes]:
    dice = np.random.default_rng([ticket, attempt])
    return [dice.bytes(size) for size in sizes]


class Ring(RuleBasedStateMachine):
    @initialize(poison=st.booleans())
    def start(self, poison: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("MPROLLOUT_POISON", "1" if poison else "0")
        self.segment = native.Segment.create(
            workers=WORKERS,
            entries=ENTRIES,
            cells=8,
            descriptors=DESCRIPTORS,
            arena_bytes=ARENA,
            max_group_bytes=MAX_GROUP,
            max_prompt_bytes=64,
            schema=b"",
        )
        self.admitter = native.Admitter(self.segment)
        self.producers = [native.Producer(self.segment, w) for w in range(WORKERS)]
        self.incarnations = [1] * WORKERS
        self.consumer: native.Consumer | None = native.Consumer(self.segment)
        self.next_ticket = 0
        self.live: dict[int, Ticket] = {}  # what stands in the table
        self.claims: list[tuple[native.Claim, int, int]] = []  # (claim, ticket, worker)
        self.stale: list[tuple[native.Claim, int]] = []
        self.queue: list[Group] = []  # published and not taken: the ring itself
        self.taken: list[Group] = []  # taken, memory not given back, in FIFO order
        self.adopted: list[Group] = []  # of them those that a new Consumer has not given out again

    def teardown(self) -> None:
        if not hasattr(self, "segment"):
            return
        try:
            if sys.exc_info()[0] is None:  # else a second error would hide the first
                self.finish()
        finally:
            self.patch.undo()

    # ---- the admitter

    @rule(skip=st.integers(0, 2))
    def admit(self, skip: int) -> None:
        ticket = self.next_ticket + skip
        room = len(self.live) < ENTRIES
        assert self.admitter.admit(ticket, b"p%d" % ticket) == room
        if room:
            self.live[ticket] = Ticket()
            self.next_ticket = ticket + 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def admit_a_live_one(self, data: Any) -> None:
        with pytest.raises(ValueError, match="not live"):
            self.admitter.admit(data.draw(st.sampled_from(sorted(self.live))), b"")

    @rule()
    def sweep(self) -> None:
        ended = {
            (t, STATES.get(x.state, x.state), x.reason, x.attempt, x.deaths)
            for t, x in self.live.items()
            if x.state not in ("ready", "running", "published")
        }
        swept = self.admitter.sweep()
        assert set(swept) == ended and len(swept) == len(ended)
        for ticket, *_ in ended:
            del self.live[ticket]

    @rule()
    def another_admitter(self) -> None:
        self.admitter = native.Admitter(self.segment)

    # ---- the workers

    def room(self, worker: int) -> bool:
        """Whether a claim finds a descriptor."""
        return self.in_use(worker) < DESCRIPTORS

    def in_use(self, worker: int) -> int:
        groups = sum(g.worker == worker for g in (*self.queue, *self.taken))
        return groups + sum(w == worker for _, _, w in self.claims) + sum(w == worker for _, w in self.stale)

    @rule(worker=st.integers(0, WORKERS - 1))
    def claim(self, worker: int) -> None:
        producer = self.producers[worker]
        free = producer.free_bytes
        claim = producer.claim()
        ready = sorted(t for t, x in self.live.items() if x.state == "ready")
        if claim is None:
            assert producer.starved_for_room == bool(ready)
            assert not ready or free < MAX_GROUP * 3 or not self.room(worker)
            happened["starved" if ready else "nothing ready"] += 1
            return
        assert ready and claim.ticket == ready[0] and claim.prompt == b"p%d" % ready[0]
        assert self.room(worker) and producer.free_bytes == free - MAX_GROUP
        ticket = self.live[claim.ticket]
        assert (claim.attempt, claim.deaths, claim.current) == (ticket.attempt, ticket.deaths, True)
        ticket.state, ticket.worker = "running", worker
        self.claims.append((claim, claim.ticket, worker))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), sizes=lengths, how=st.sampled_from(["bytes", "array", "lists"]))
    def publish(self, data: Any, sizes: list[int], how: str) -> None:
        self.publish_claim(data.draw(st.integers(0, len(self.claims) - 1)), sizes, how)

    def publish_claim(self, at: int, sizes: list[int], how: str) -> None:
        claim, ticket, worker = self.claims.pop(at)
        payload = payload_of(ticket, claim.attempt, sizes)
        fields: list[Any] = list(payload)
        if how == "array":
            fields = [np.frombuffer(field, np.uint8) for field in payload]
        elif how == "lists":
            fields = [("|u1", [list(field[:7]), field[7:]]) for field in payload]
        if native.group_bytes(sizes) > MAX_GROUP:
            with pytest.raises(native.GroupTooLarge, match=f"ticket {ticket}"):
                self.producers[worker].publish(claim, fields)
            assert claim.current
            self.claims.append((claim, ticket, worker))
            happened["too large"] += 1
            return
        free = self.producers[worker].free_bytes
        assert self.producers[worker].publish(claim, fields)
        assert self.producers[worker].free_bytes == free + MAX_GROUP - native.group_bytes(sizes)
        assert not claim.current and not self.producers[worker].publish(claim, fields)
        self.live[ticket].state = "published"
        self.queue.append(Group(ticket, worker, claim.attempt, payload))
        happened["published"] += 1

    @rule(worker=st.integers(0, WORKERS - 1), groups=st.lists(lengths, min_size=1, max_size=4))
    def work(self, worker: int, groups: list[list[int]]) -> None:
        """Most of what goes on: without it few examples would get as far as a full ring."""
        for sizes in groups:
            self.sweep()
            self.admit(0)
            before = len(self.claims)
            self.claim(worker)
            if len(self.claims) > before:
                self.publish_claim(before, sizes, "bytes")

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def retry(self, data: Any) -> None:
        at = data.draw(st.integers(0, len(self.claims) - 1))
        claim, ticket, worker = self.claims[at]
        again = self.producers[worker].retry(claim)
        self.live[ticket].attempt += 1
        assert again is not None and (again.ticket, again.attempt) == (ticket, self.live[ticket].attempt)
        assert again.current and not claim.current and not self.producers[worker].publish(claim, [])
        self.claims[at] = (again, ticket, worker)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        claim, ticket, worker = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        assert self.producers[worker].give_back(claim) and not claim.current
        self.live[ticket].state, self.live[ticket].worker = "ready", 0

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), state=st.sampled_from([native.FILTERED, native.FAILED]), reason=st.integers(0, 4095))
    def end(self, data: Any, state: int, reason: int) -> None:
        claim, ticket, worker = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        assert self.producers[worker].end(claim, state, reason) and not claim.current
        self.live[ticket].state, self.live[ticket].reason = state, reason  # type: ignore[assignment]

    @rule(worker=st.integers(0, WORKERS - 1), count_death=st.booleans(), reborn=st.booleans())
    def die_and_recover(self, worker: int, count_death: bool, reborn: bool) -> None:
        """reborn=False: its tickets are taken away while it lives on, as from one that was stopped; its claims are stale.

        Then the death must count: else it could claim the ticket again under the very word of its stale claim. Nobody
        may recover such a worker (its death is not proven), so this is more than is promised.
        """
        count_death |= not reborn
        mine = {ticket for _, ticket, w in self.claims if w == worker}
        over = {t for t in mine if count_death and self.live[t].deaths == MAX_DEATHS}
        published = sorted(g.ticket for g in (*self.queue, *self.taken) if g.worker == worker and not g.delivered)
        done = native.recover(self.segment, worker, MAX_DEATHS, REASON, count_death)
        assert (sorted(done.failed), sorted(done.reissued)) == (sorted(over), sorted(mine - over))
        assert sorted(done.published) == published
        again = native.recover(self.segment, worker, MAX_DEATHS, REASON, count_death)
        assert (again.failed, again.reissued) == ([], []) and sorted(again.published) == published
        for ticket in mine:
            live = self.live[ticket]
            live.deaths += count_death
            if ticket in over:
                live.state, live.reason = native.FAILED, REASON  # type: ignore[assignment]
            else:
                live.state, live.worker = "ready", 0
        happened["died with claims"] += bool(mine)
        happened["failed by deaths"] += bool(over)
        self.stale += [(claim, worker) for claim, _, w in self.claims if w == worker]
        self.claims = [each for each in self.claims if each[2] != worker]
        if reborn:
            old = self.producers[worker]
            self.producers[worker] = native.Producer(self.segment, worker)
            self.incarnations[worker] += 1
            assert self.producers[worker].incarnation == self.incarnations[worker]
            with pytest.raises(RuntimeError, match="incarnation"):
                old.claim()
            for claim, w in self.stale:
                assert w != worker or not old.publish(claim, [b"late"])
            self.stale = [each for each in self.stale if each[1] != worker]

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), what=st.sampled_from(["publish", "retry", "end", "give_back"]))
    def use_a_stale_claim(self, data: Any, what: str) -> None:
        claim, worker = self.stale.pop(data.draw(st.integers(0, len(self.stale) - 1)))
        producer = self.producers[worker]
        assert not claim.current
        if what == "publish":
            assert not producer.publish(claim, [b"late"])
        elif what == "retry":
            assert producer.retry(claim) is None
        elif what == "end":
            assert not producer.end(claim, native.FAILED, 1)
        else:
            assert not producer.give_back(claim)
        happened["stale"] += 1

    # ---- the taker

    def next_ones(self) -> list[Group]:
        return [*self.adopted, *self.queue]

    def took(self, lease: native.Lease) -> None:
        group = self.next_ones()[0]
        assert (lease.ticket, lease.worker, lease.attempt) == (group.ticket, group.worker, group.attempt)
        assert lease.delivered == group.delivered
        assert (lease.fields, lease.nbytes) == (len(group.payload), native.group_bytes([*map(len, group.payload)]))
        assert [bytes(lease.field(i, "|u1")) for i in range(lease.fields)] == group.payload
        if self.adopted:
            self.adopted.pop(0)
        else:
            self.taken.append(self.queue.pop(0))
        group.lease = lease

    @precondition(lambda self: self.consumer)
    @rule(count=st.integers(1, 4), how=st.sampled_from(["take", "try_take", "take n"]))
    def take(self, count: int, how: str) -> None:
        assert self.consumer is not None
        there = len(self.next_ones())
        assert self.consumer.available() == there
        assert self.consumer.peek(count) == [g.ticket for g in self.next_ones()[:count]]
        if how == "take":
            lease = self.consumer.take()
            leases = [] if lease is None else [lease]
            assert len(leases) == min(there, 1)
        else:
            leases = self.consumer.try_take(count) if how == "try_take" else self.consumer.take(count, 0)
            assert len(leases) == (count if there >= count else 0)
        for lease in leases:
            self.took(lease)
        happened["taken"] += len(leases)

    def leased(self) -> list[Group]:
        return [g for g in self.taken if g.lease is not None]

    @precondition(lambda self: self.consumer and self.leased())
    @rule(data=st.data(), release=st.booleans())
    def deliver(self, data: Any, release: bool) -> None:
        assert self.consumer is not None
        groups = data.draw(st.lists(st.sampled_from(self.leased()), min_size=1, max_size=4, unique_by=id))
        self.consumer.deliver([g.lease for g in groups])
        for group in groups:
            if not group.delivered:
                group.delivered, self.live[group.ticket].state = True, "done"
            if release:
                self.release_one(group)

    @precondition(lambda self: self.leased())
    @rule(data=st.data(), part=st.slices(20))
    def view(self, data: Any, part: slice) -> None:
        group = data.draw(st.sampled_from(self.leased()))
        if not group.payload:
            return
        index = data.draw(st.integers(0, len(group.payload) - 1))
        view = group.lease.field(index, "|u1")[part]
        if view.size:
            group.views.append((view, group.payload[index][part]))

    @precondition(lambda self: any(g.views for g in self.taken))
    @rule(data=st.data())
    def drop_views(self, data: Any) -> None:
        group = data.draw(st.sampled_from([g for g in self.taken if g.views]))
        group.views.pop(data.draw(st.integers(0, len(group.views) - 1)))
        self.forget()

    @precondition(lambda self: self.leased())
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.release_one(data.draw(st.sampled_from(self.leased())))

    def release_one(self, group: Group) -> None:
        if not group.delivered:
            with pytest.raises(RuntimeError, match=f"ticket {group.ticket} undelivered"):
                group.lease.release()
            return
        assert group.lease.release() == len(group.views)
        group.released = True
        happened["released with views" if group.views else "released"] += 1
        self.forget()

    def forget(self) -> None:
        """What was released and has no views any more is the worker's again."""
        self.taken = [g for g in self.taken if not g.released or g.views]

    @rule()
    def another_taker(self) -> None:
        """By the rule of a take-over: what was taken and not given back comes again, first and in order."""
        if self.consumer is not None:
            with pytest.raises(native.TakerBusy, match="this one"):
                native.Consumer(self.segment)
            self.consumer.close()
            self.consumer = None
        if any(g.views for g in self.taken):
            with pytest.raises(native.TakerBusy, match="views of an earlier"):
                native.Consumer(self.segment)
            return
        for group in self.taken:
            group.lease = None
        self.forget()
        self.taken = [g for g in self.taken if not g.delivered]  # a delivered lease that dies is released
        self.consumer = native.Consumer(self.segment)
        self.adopted = list(self.taken)
        happened["take-over with groups"] += bool(self.adopted)

    # ---- what is always so

    @invariant()
    def the_table_says_the_same(self) -> None:
        if not hasattr(self, "segment"):
            return
        rows = {
            ticket: (state, attempt, deaths, reason)
            for ticket, state, attempt, deaths, _, reason, _ in self.segment.table()
        }
        assert rows == {t: (STATES.get(x.state, x.state), x.attempt, x.deaths, x.reason) for t, x in self.live.items()}
        assert self.segment.pending() == len(self.queue)

    @invariant()
    def views_do_not_change(self) -> None:
        for group in getattr(self, "taken", []):
            for view, want in group.views:
                assert bytes(view) == want

    @invariant()
    def the_taker_holds_what_it_holds(self) -> None:
        if getattr(self, "consumer", None) is None:
            return
        held = [lease.ticket for lease in self.consumer.held()]  # type: ignore[union-attr]
        undelivered = [g for g in self.leased() if not g.delivered]
        assert held == [g.ticket for g in undelivered]
        for group in undelivered:
            assert self.consumer.find(group.ticket) is group.lease  # type: ignore[union-attr]

    @invariant()
    def room_is_what_the_model_says(self) -> None:
        for worker, producer in enumerate(getattr(self, "producers", [])):
            used = sum(
                native.group_bytes([*map(len, g.payload)]) for g in (*self.queue, *self.taken) if g.worker == worker
            )
            claims = sum(w == worker for _, _, w in self.claims) + sum(w == worker for _, w in self.stale)
            assert producer.free_bytes == ARENA - used - claims * MAX_GROUP
            assert producer.claims == claims

    def finish(self) -> None:
        """Everything comes out, and all room comes back."""
        for group in self.taken:
            group.views.clear()
        self.another_taker()
        assert self.consumer is not None
        while (lease := self.consumer.take()) is not None:
            self.took(lease)
            self.consumer.deliver([lease])
            assert lease.release() == 0
        for worker in range(WORKERS):
            native.recover(self.segment, worker, MAX_DEATHS, REASON)
            assert native.Producer(self.segment, worker).free_bytes == ARENA
        assert self.consumer.available() == self.segment.pending() == 0
        self.consumer.close()


def play(**bounds: Any) -> None:
    happened.clear()
    run_state_machine_as_test(Ring, settings=settings(deadline=None, suppress_health_check=list(HealthCheck), **bounds))
    print(dict(happened))


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_the_ring_is_a_queue_and_a_table() -> None:
    play(
        max_examples=120, stateful_step_count=60, derandomize=True
    )  # what it must have met below is then no matter of luck
    for what in ("published", "too large", "taken", "released", "died with claims", "take-over with groups"):
        assert happened[what] > 0, happened


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_the_ring_is_a_queue_and_a_table_at_length() -> None:
    play(max_examples=5000, stateful_step_count=200)
    assert all(happened.values()), happened
