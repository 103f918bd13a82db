"""Claims: the lowest ticket first, one owner a ticket, whatever returns or is retried."""

import os
import random
import signal

import pytest
from rigs import KIB, Rig, ended_well, fork

from mprollout import _native as native

pytestmark = pytest.mark.timeout(180)


def test_groups_come_in_publish_order_and_surplus_stays(rig: Rig) -> None:
    """slime#2238: two takes of four out of ten-like supply leave the rest in order."""
    rig.publish(*range(8))
    assert rig.segment.pending() == 8
    first = [rig.take() for _ in range(4)]
    assert [lease.ticket for lease in first] == [0, 1, 2, 3]
    assert rig.segment.pending() == 4
    assert rig.consumer.held() == first
    assert rig.consumer.held()[0] is first[0]
    assert [rig.take().ticket for _ in range(4)] == [4, 5, 6, 7]
    assert rig.consumer.take() is None


def test_claim_takes_the_lowest_ticket_first(rig: Rig) -> None:
    for ticket in (30, 10, 20):
        assert rig.admitter.admit(ticket, str(ticket).encode())
    claims = [rig.claim() for _ in range(3)]
    assert [(c.ticket, c.prompt, c.attempt, c.deaths) for c in claims] == [
        (t, str(t).encode(), 0, 0) for t in (10, 20, 30)
    ]
    assert rig.producer.claim() is None
    assert not rig.producer.starved_for_room
    assert rig.producer.claims == 3


def test_table_names_each_live_ticket_and_sweep_empties_it(rig: Rig) -> None:
    rig.publish(1, 2)
    for ticket in (3, 4, 5):
        rig.admitter.admit(ticket, b"")
    assert rig.producer.end(rig.claim(), native.FILTERED, 77)
    claim = rig.claim()
    assert rig.words() == {
        1: native.PUBLISHING,
        2: native.PUBLISHING,
        3: native.FILTERED,
        4: native.RUNNING,
        5: native.READY,
    }
    rig.consumer.deliver([rig.take()])
    assert sorted(rig.admitter.sweep()) == [(1, native.DONE, 0, 0, 0), (3, native.FILTERED, 77, 0, 0)]
    assert rig.admitter.sweep() == []
    assert rig.words() == {2: native.PUBLISHING, 4: native.RUNNING, 5: native.READY}
    assert claim.current
    with pytest.raises(ValueError, match="not live, got 4"):
        rig.admitter.admit(4, b"")
    # The entry is used again under a later generation.
    assert rig.admitter.admit(9, b"")
    assert {row[0]: row[6] for row in rig.segment.table()}[9] == 2


def test_stale_attempt_cannot_publish(rig: Rig) -> None:
    rig.admitter.admit(7, b"x")
    stale = rig.claim()
    assert native.recover(rig.segment, 0, max_deaths=3, reason=9).reissued == [7]
    other = native.Producer(rig.segment, 1)
    claim = rig.claim(other)
    assert (claim.ticket, claim.deaths) == (7, 1)
    assert not stale.current
    assert not rig.producer.publish(stale, [b"old"])
    assert rig.producer.free_bytes == rig.segment.arena_bytes
    assert not rig.producer.publish(stale, [b"old"])
    assert rig.producer.retry(stale) is None
    assert not rig.producer.end(stale, native.FAILED, 1)
    assert not rig.producer.give_back(stale)
    assert rig.segment.pending() == 0
    assert other.publish(claim, [b"new"])
    assert bytes(rig.take().field(0, "uint8")) == b"new"


def test_later_producer_of_a_worker_supersedes_the_earlier(rig: Rig) -> None:
    rig.admitter.admit(7, b"x")
    stale = rig.claim()
    successor = native.Producer(rig.segment, 0)
    assert (rig.producer.incarnation, successor.incarnation) == (1, 2)
    assert not stale.current
    assert not rig.producer.publish(stale, [b"old"])
    with pytest.raises(RuntimeError, match="incarnation 1"):
        rig.producer.claim()


def test_paused_worker_that_resumes_cannot_publish(rig: Rig) -> None:
    """miles#2254: its ticket was re-issued while it was stopped."""
    rig.admitter.admit(7, b"x")
    claimed, go, result = os.pipe(), os.pipe(), os.pipe()

    def worker() -> None:
        producer = native.Producer(rig.segment, 1)
        claim = producer.claim()
        assert claim is not None
        os.write(claimed[1], b"!")
        os.read(go[0], 1)
        os.write(result[1], b"%d" % producer.publish(claim, [b"late"]))

    pid = fork(worker)
    assert os.read(claimed[0], 1) == b"!"
    os.kill(pid, signal.SIGSTOP)
    assert native.recover(rig.segment, 1, max_deaths=3, reason=9).reissued == [7]
    os.write(go[1], b"!")
    os.kill(pid, signal.SIGCONT)
    assert os.read(result[0], 1) == b"0"
    assert ended_well(pid)
    assert rig.segment.pending() == 0
    assert rig.claim().ticket == 7
    for end in (*claimed, *go, *result):
        os.close(end)


def test_retry_keeps_room_and_kills_the_old_handle() -> None:
    rig = Rig(arena_bytes=16 * KIB)
    rig.admitter.admit(1, b"")
    rig.admitter.admit(2, b"")
    first, second = rig.claim(), rig.claim()
    assert rig.producer.free_bytes == 0
    again = rig.producer.retry(first)
    assert again is not None
    assert (again.ticket, again.attempt) == (1, 1)
    assert (first.current, again.current, second.current) == (False, True, True)
    assert not rig.producer.publish(first, [b"old"])
    assert rig.producer.free_bytes == 0
    assert rig.producer.claims == 2
    assert rig.producer.publish(again, [b"new"])
    assert rig.take().attempt == 1


def test_give_back_makes_the_ticket_ready_at_the_same_attempt(rig: Rig) -> None:
    rig.admitter.admit(1, b"p")
    claim = rig.producer.retry(rig.claim())
    assert claim is not None
    assert rig.producer.give_back(claim)
    assert not rig.producer.give_back(claim)
    assert rig.producer.free_bytes == rig.segment.arena_bytes
    again = rig.claim()
    assert (again.ticket, again.attempt, again.deaths) == (1, 1, 0)
    assert not claim.current


def test_attempts_beyond_255_are_refused(rig: Rig) -> None:
    rig.admitter.admit(1, b"")
    claim = rig.claim()
    for _ in range(255):
        again = rig.producer.retry(claim)
        assert again is not None
        claim = again
    with pytest.raises(OverflowError, match="ticket 1"):
        rig.producer.retry(claim)
    assert claim.current


def test_another_producers_claim_is_refused(rig: Rig) -> None:
    rig.admitter.admit(1, b"")
    with pytest.raises(ValueError, match="worker 1"):
        native.Producer(rig.segment, 1).publish(rig.claim(), [b""])


def test_claims_stay_in_ticket_order_through_returns_and_late_admissions() -> None:
    """The hints that spare a look at the whole table must neither hide a ticket nor change the order."""
    rig = Rig(entries=64, cells=64, descriptors=64, max_group_bytes=256)
    dice, ready, mine, ended, next_ticket = random.Random(4), set(), {}, 0, 1000
    for _ in range(20_000):
        step = dice.random()
        if step < 0.45 and len(ready) + len(mine) < 64:
            ticket = next_ticket + 1 if dice.random() < 0.95 else dice.choice([*range(1000)])
            if ticket not in ready and ticket not in mine and rig.admitter.admit(ticket, b"%d" % ticket):
                next_ticket = max(ticket, next_ticket)
                ready.add(ticket)
        elif step < 0.85:
            claim = rig.producer.claim()
            assert (claim is None) == (not ready)
            if claim is not None:
                assert claim.ticket == min(ready) and claim.prompt == b"%d" % claim.ticket
                ready.remove(claim.ticket)
                mine[claim.ticket] = claim
        elif step < 0.9 and mine:
            ticket, claim = mine.popitem()
            assert rig.producer.give_back(claim)
            ready.add(ticket)
        elif step < 0.902:
            assert sorted(native.recover(rig.segment, 0, 250, 1, False).reissued) == sorted(mine)
            rig.producer = native.Producer(rig.segment, 0)
            ready |= set(mine)
            mine.clear()
        elif mine:
            ticket = dice.choice([*mine])
            rig.producer.end(mine.pop(ticket), native.FILTERED, 5)
            ended += 1
        if dice.random() < 0.2:
            ended -= len(rig.admitter.sweep())
            assert ended == 0
    rig.consumer.close()


def test_a_return_reaches_another_worker_that_looked_before(rig: Rig) -> None:
    other = native.Producer(rig.segment, 1)
    for ticket in range(4):
        rig.admitter.admit(ticket, b"")
    claims = [rig.claim() for _ in range(3)]
    assert rig.claim(other).ticket == 3 and other.claim() is None
    assert rig.producer.give_back(claims[1])
    assert rig.claim(other).ticket == 1
    native.recover(rig.segment, 0, 3, 1)
    assert [rig.claim(other).ticket for _ in range(2)] == [0, 2]
    assert other.claim() is None


def test_endings_are_swept_from_every_corner_of_a_large_table() -> None:
    rig = Rig(entries=10_000, cells=16_384, descriptors=16_384, arena_bytes=1 << 22, max_group_bytes=128)
    rig.admitter.sweep()
    assert all(rig.admitter.admit(ticket, b"") for ticket in range(10_000))
    claims = [rig.claim() for _ in range(10_000)]
    for ticket in (9_999, 0, 63, 64, 4_095, 4_096, 8_191):
        rig.producer.end(claims[ticket], native.FAILED, 1)
    assert sorted(row[0] for row in rig.admitter.sweep()) == [0, 63, 64, 4_095, 4_096, 8_191, 9_999]
    assert rig.admitter.sweep() == []


def test_second_admitter_adopts_what_stands(rig: Rig) -> None:
    rig.publish(1)
    rig.admitter.admit(2, b"two")
    adopted = native.Admitter(rig.segment)
    with pytest.raises(ValueError, match="which stands in the table"):
        adopted.admit(2, b"")
    assert [adopted.admit(t, b"") for t in range(10, 17)] == [True] * 6 + [False]
    assert rig.claim().prompt == b"two"
