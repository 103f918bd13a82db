"""Leases: exactly n or none, memory that stays under views, nothing undelivered lost."""

import gc
import os
import random
import threading
import time

import pytest
from rigs import Rig

from mprollout import _native as native

pytestmark = pytest.mark.timeout(180)


def test_views_keep_memory_after_release(rig: Rig) -> None:
    """spdl#1636, dora#1833: what escaped never changes under the reader."""
    rig.publish(1, size=100)
    lease = rig.take()
    view = lease.field(0, "int64")
    part = view[10:20].reshape(2, 5)
    rig.consumer.deliver([lease])
    used = rig.segment.arena_bytes - rig.producer.free_bytes
    assert lease.release() == 1
    assert lease.release() == 1
    del view, lease
    rig.publish(2, 3, 4, size=900)
    assert part.tolist() == [[1] * 5] * 2
    before = rig.producer.free_bytes
    del part
    assert rig.producer.free_bytes == before + used
    for lease in (rig.take(), rig.take(), rig.take()):
        rig.consumer.deliver([lease])
        assert lease.release() == 0
        with pytest.raises(RuntimeError, match="not released"):
            lease.field(0, "int64")


def test_copies_outlive_the_release_and_leased_groups_are_counted(rig: Rig) -> None:
    rig.publish(1, 2, size=3)
    leases = rig.consumer.try_take(2)
    assert rig.consumer.leased_count == 0
    rig.consumer.deliver(leases)
    view = leases[1].field(0, "int64")
    copies = native.copies(leases, [0, 0])
    assert rig.consumer.leased_count == 2
    assert [[memoryview(part).cast("q").tolist() for part in row] for row in copies] == [[[1] * 3] * 2, [[2] * 3] * 2]
    assert native.release(leases) == 1 and rig.consumer.leased_count == 1  # the view keeps its group
    del view
    assert rig.consumer.leased_count == 0
    with pytest.raises(RuntimeError, match="not released, got ticket 1"):
        native.copies(leases, [0])
    with pytest.raises(TypeError, match=r"leases\[0\]: expected a Lease"):
        native.copies([None], [0])  # type: ignore[list-item]


def test_undelivered_lease_is_never_lost(rig: Rig) -> None:
    rig.publish(1)
    rig.take()
    gc.collect()
    [lease] = rig.consumer.held()
    with pytest.raises(RuntimeError, match="ticket 1 undelivered"):
        lease.release()
    rig.consumer.close()
    del lease
    consumer = native.Consumer(rig.segment)
    again = consumer.take()
    assert again is not None
    assert (again.ticket, again.delivered) == (1, False)
    consumer.deliver([again])
    assert consumer.held() == []
    assert rig.words() == {1: native.DONE}
    consumer.deliver([again])
    del again  # delivered: its memory goes back with it
    assert rig.producer.free_bytes == rig.segment.arena_bytes
    consumer.close()


def test_deliver_checks_all_before_the_first(rig: Rig) -> None:
    rig.publish(1, 2)
    lease = rig.take()
    other = Rig()
    other.publish(3)
    with pytest.raises(ValueError, match=r"leases\[1\]: expected a lease of this Consumer, got ticket 3"):
        rig.consumer.deliver([lease, other.take()])
    assert rig.words()[1] == native.PUBLISHING
    assert not lease.delivered


def test_close_with_live_views_is_safe(rig: Rig) -> None:
    """cpython#155003."""
    rig.publish(1)
    view = rig.take().field(0, "int64")
    words = rig.segment.global_words
    rig.consumer.close()
    with pytest.raises(native.TakerBusy, match="views of an earlier Consumer's groups in this process, got 1"):
        native.Consumer(rig.segment)
    rig.segment.close()
    with pytest.raises(ValueError, match="closed"):
        rig.segment.table()
    assert view.tolist() == [1] * 16
    words[0] = 5
    assert words[0] == 5


@pytest.mark.slow
def test_descriptors_and_files_stay_constant_over_many_groups(rig: Rig) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = files()
    for ticket in range(100_000):
        rig.publish(ticket)
        lease = rig.take()
        assert lease.field(0, "int64")[0] == ticket
        rig.consumer.deliver([lease])
        lease.release()
        rig.admitter.sweep()
    assert files() == before
    assert rig.producer.free_bytes == rig.segment.arena_bytes


def test_batches_are_taken_exactly_or_not_at_all(rig: Rig) -> None:
    """A drain that took more than was needed lost the rest."""
    rig.publish(*range(5))
    assert rig.consumer.available() == 5
    assert rig.consumer.peek(9) == [0, 1, 2, 3, 4]
    assert rig.consumer.try_take(6) == [] and rig.segment.pending() == 5
    first = rig.consumer.try_take(3)
    assert [lease.ticket for lease in first] == [*rig.consumer.peek(0), 0, 1, 2]
    assert rig.consumer.held() == first and rig.consumer.peek(1) == [3]
    start = time.monotonic()
    assert rig.consumer.take(3, 0.1) == []
    assert time.monotonic() - start >= 0.1
    thread = threading.Thread(target=rig.publish, args=(5,))
    thread.start()
    assert [lease.ticket for lease in rig.consumer.take(3, None)] == [3, 4, 5]
    thread.join()
    for wrong in (0, -1, 1 << 40):
        with pytest.raises(ValueError, match="count"):
            rig.consumer.try_take(wrong)


def test_adopted_groups_count_as_available(rig: Rig) -> None:
    """An adopted backlog is part of what a batch can be made from."""
    rig.publish(*range(6))
    held = rig.consumer.try_take(4)
    rig.consumer.deliver(held[:1])
    rig.consumer.close()
    del held
    consumer = native.Consumer(rig.segment)
    assert (consumer.available(), rig.segment.pending()) == (5, 2)
    assert consumer.peek(8) == [1, 2, 3, 4, 5]
    assert consumer.try_take(6) == []
    assert consumer.wait(5, consumer.news(), 0) and not consumer.wait(6, consumer.news(), 0)
    assert [lease.ticket for lease in consumer.try_take(5)] == [1, 2, 3, 4, 5]
    consumer.close()


def test_held_groups_are_found_by_ticket_in_any_order_of_delivery(rig: Rig) -> None:
    dice, waiting = random.Random(3), []
    for round_ in range(300):
        tickets = [8 * round_ + i for i in range(dice.randrange(1, 9 - len(waiting)))] if len(waiting) < 8 else []
        rig.publish(*tickets)
        waiting += tickets
        if tickets:
            rig.consumer.try_take(len(tickets))
        assert [lease.ticket for lease in rig.consumer.held()] == waiting
        for ticket in dice.sample(waiting, dice.randrange(len(waiting) + 1)):
            if dice.random() < 0.5:
                lease = rig.consumer.find(ticket)
            else:
                [lease] = [held for held in rig.consumer.held() if held.ticket == ticket]
            assert lease is not None
            assert lease.ticket == ticket
            rig.consumer.deliver([lease])
            assert dice.random() < 0.7 or rig.consumer.find(ticket) is None
            waiting.remove(ticket)
            lease.release()
        rig.admitter.sweep()


def test_views_and_releases_of_a_whole_batch(rig: Rig) -> None:
    rig.publish(*range(4))
    leases = rig.consumer.try_take(4)
    rows = native.views(leases, ["<i8"])
    assert [row[0].tolist() for row in rows] == [[ticket] * 16 for ticket in range(4)]
    assert not rows[0][0].flags.writeable and len(rows[0]) == 1
    with pytest.raises(RuntimeError, match="undelivered"):
        native.release(leases)
    rig.consumer.deliver(leases)
    kept = rows[2][0][3:5]
    del rows
    assert native.release(leases) == 1
    assert native.release(leases) == 1
    assert kept.tolist() == [2, 2]
    del kept
    assert native.release(leases) == 0
    assert rig.producer.free_bytes == rig.segment.arena_bytes
    with pytest.raises(RuntimeError, match="not released"):
        native.views(leases, ["<i8"])
    for call in (native.release, rig.consumer.deliver, lambda x: native.views(x, [])):
        with pytest.raises(TypeError, match=r"leases\[1\]: expected a Lease"):
            call([leases[0], 7])


def test_views_of_fields_that_are_not_there_are_refused(rig: Rig) -> None:
    rig.publish(1)
    [lease] = rig.consumer.try_take(1)
    with pytest.raises(IndexError, match="below 1"):
        native.views([lease], ["<i8", "<i8"])
    for dtype in ("O", "V0", "no type"):
        with pytest.raises((ValueError, TypeError)):
            native.views([lease], [dtype])
    rig.consumer.deliver([lease])
    assert lease.release() == 0


def test_statistics_words_are_shared_and_writable(rig: Rig) -> None:
    other = native.Segment.attach(rig.segment.fd)
    rig.segment.global_words[63] = -7
    rig.segment.worker_words(1)[0] = 1 << 62
    assert (other.global_words[63], other.worker_words(1)[0], other.worker_words(0)[0]) == (-7, 1 << 62, 0)
    assert (other.global_words.format, other.global_words.shape) == ("q", (64,))
    with pytest.raises(ValueError, match=r"expected 0\.\.1, got 2"):
        other.worker_words(2)
