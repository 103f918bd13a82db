"""The native core: FIFO, exactly once through deaths, memory that stays under views, a taker that sleeps and wakes."""

import asyncio
import contextlib
import gc
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mprollout import _native as native

pytestmark = pytest.mark.timeout(180)

KIB = 1024


def make_segment(**changes: Any) -> native.Segment:
    sizes: dict[str, Any] = {
        "workers": 2,
        "entries": 8,
        "cells": 8,
        "descriptors": 16,
        "arena_bytes": 64 * KIB,
        "max_group_bytes": 8 * KIB,
        "max_prompt_bytes": 64,
        "schema": b"schema",
    }
    return native.Segment.create(**{**sizes, **changes})


class Rig:
    """A segment with all four handles in one process."""

    def __init__(self, **changes: Any) -> None:
        self.segment = make_segment(**changes)
        self.admitter = native.Admitter(self.segment)
        self.producer = native.Producer(self.segment, 0)
        self.consumer = native.Consumer(self.segment)

    def claim(self, producer: native.Producer | None = None) -> native.Claim:
        claim = (producer or self.producer).claim()
        assert claim is not None
        return claim

    def take(self) -> native.Lease:
        lease = self.consumer.take()
        assert lease is not None
        return lease

    def publish(self, *tickets: int, size: int = 16) -> None:
        for ticket in tickets:
            assert self.admitter.admit(ticket, b"p%d" % ticket)
            claim = self.claim()
            assert claim.ticket == ticket
            assert self.producer.publish(claim, [np.full(size, ticket, np.int64)])

    def words(self) -> dict[int, int]:
        return {row[0]: row[1] for row in self.segment.table()}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.consumer.close()


def fork(body: Callable[[], None]) -> int:
    """A child that dies with this process and never returns into pytest."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            native.die_with_parent(parent)
            body()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL  # else it had failed before


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ---- order and exactly once


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


# ---- room


def test_fields_arrive_as_typed_readonly_views(rig: Rig) -> None:
    rig.admitter.admit(1, b"")
    fields = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, np.float32),
        np.array([[1.5, 2.5]]),
        b"bytes",
        np.array(3, np.int64),
    ]
    assert rig.producer.publish(rig.claim(), fields)
    lease = rig.take()
    assert (lease.fields, lease.worker) == (5, 0)
    assert lease.nbytes == native.group_bytes([20, 0, 16, 5, 8])
    views = [lease.field(i, d) for i, d in enumerate(("int32", "float32", "<f8", "uint8", "int64"))]
    assert [v.tolist() for v in views] == [[0, 1, 2, 3, 4], [], [1.5, 2.5], list(b"bytes"), [3]]
    assert [v.dtype for v in views] == [np.int32, np.float32, np.float64, np.uint8, np.int64]
    for view in views:
        assert view.ctypes.data % 64 == 0 or view.size == 0
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    with pytest.raises(ValueError, match="field 3 of ticket 1: expected a multiple of 4 bytes"):
        lease.field(3, "int32")
    for index in (5, -1):
        with pytest.raises(IndexError, match="below 5"):
            lease.field(index, "int32")


@pytest.mark.parametrize("dtype", ["|u1", "<i4", ">i4", "<f8", "<c16", "<M8[s]", "V3", "S5", "(2,)<i4", "i4,f4"])
@pytest.mark.parametrize("items", [0, 1, 7])
def test_a_view_is_what_numpy_itself_makes(rig: Rig, dtype: str, items: int) -> None:
    rig.admitter.admit(1, b"")
    data = bytes(range(np.dtype(dtype).itemsize * items))
    assert rig.producer.publish(rig.claim(), [data])
    lease = rig.take()
    view = lease.field(0, dtype)
    like = np.frombuffer(data or bytes(np.dtype(dtype).itemsize), dtype)[: len(data)]
    assert type(view) is np.ndarray
    assert (view.dtype, view.shape, view.strides) == (like.dtype, like.shape, like.strides)
    for flag in ("c_contiguous", "f_contiguous", "aligned", "writebackifcopy"):
        assert getattr(view.flags, flag) == getattr(like.flags, flag), flag
    assert not view.flags.owndata and not view.flags.writeable
    assert view.tobytes() == memoryview(view.view("|u1")).tobytes() == data
    assert view.copy().tobytes() == data
    reference = weakref.ref(view)
    view.shape = (1, *view.shape)  # its own sizes are replaced
    del view
    assert reference() is None


def test_payload_layout_is_the_documented_one(rig: Rig) -> None:
    rig.admitter.admit(258, b"")
    assert rig.producer.publish(rig.claim(), [b"abc", b"", b"d"])
    segment, lease = rig.segment, rig.take()
    raw = os.pread(segment.fd, segment.size_bytes, 0)
    at = raw.rindex(b"abc") - 64
    table = np.frombuffer(raw, np.uint64, 8, at)
    assert lease.nbytes == 192
    assert table.tolist() == [3, 258, 64, 3, 128, 0, 128, 1]
    assert raw[at + 128 : at + 129] == b"d"
    assert raw[:16] == bytes.fromhex("1a0a4d50524f4c3102000000") + bytes([4, 3, 2, 1])


def test_group_too_large_leaves_the_claim_usable(rig: Rig) -> None:
    """slime#2384: both sizes named, the ring still works."""
    rig.admitter.admit(1, b"")
    claim = rig.claim()
    with pytest.raises(native.GroupTooLarge, match=r"8192 bytes, got 8256 for ticket 1"):
        rig.producer.publish(claim, [bytes(8 * KIB - 32)] * 1)
    assert claim.current
    assert rig.producer.publish(claim, [bytes(8 * KIB - 64)])
    assert rig.take().nbytes == 8 * KIB
    assert native.group_bytes([8 * KIB - 64]) == 8 * KIB


@pytest.mark.parametrize(
    ("wrong", "error"), [(np.zeros((4, 4))[:, 1], ValueError), ("text", TypeError), (7, TypeError)]
)
def test_unusable_buffers_are_refused_by_index(rig: Rig, wrong: Any, error: type[Exception]) -> None:
    rig.admitter.admit(1, b"")
    claim = rig.claim()
    with pytest.raises(error, match=r"arrays\[1\]: expected a C-contiguous buffer"):
        rig.producer.publish(claim, [b"", wrong])
    assert claim.current


def test_full_arena_claims_nothing_and_says_so() -> None:
    rig = Rig(arena_bytes=16 * KIB)
    for ticket in range(4):
        rig.admitter.admit(ticket, b"")
    held = [rig.claim(), rig.claim()]
    assert rig.producer.claim() is None
    assert rig.producer.starved_for_room
    assert rig.words() == {0: native.RUNNING, 1: native.RUNNING, 2: native.READY, 3: native.READY}
    assert rig.producer.publish(held[0], [bytes(KIB)])
    assert rig.producer.claim() is None  # trimmed: 7 KiB free, 8 needed
    assert rig.producer.starved_for_room
    lease = rig.take()
    rig.consumer.deliver([lease])
    assert lease.release() == 0
    assert rig.claim().ticket == 2
    assert not rig.producer.starved_for_room


def test_descriptors_run_out_like_room() -> None:
    rig = Rig(descriptors=1)
    rig.publish(0)
    rig.admitter.admit(1, b"")
    assert rig.producer.claim() is None
    assert rig.producer.starved_for_room
    lease = rig.take()
    rig.consumer.deliver([lease])
    lease.release()
    assert rig.claim().ticket == 1


def test_release_in_any_order_gives_all_room_back(rig: Rig) -> None:
    shuffle = random.Random(1)
    for round_ in range(40):
        tickets = range(8 * round_, 8 * round_ + 8)
        rig.publish(*tickets, size=shuffle.randrange(1, 500))
        leases = [rig.take() for _ in tickets]
        assert [lease.ticket for lease in leases] == list(tickets)
        shuffle.shuffle(leases)
        rig.consumer.deliver(leases)
        assert [lease.release() for lease in leases] == [0] * 8
        assert len(rig.admitter.sweep()) == 8
    assert rig.producer.free_bytes == rig.segment.arena_bytes


def test_prompts_have_one_slot_an_entry(rig: Rig) -> None:
    with pytest.raises(native.GroupTooLarge, match="max_prompt_bytes 64 bytes, got 65"):
        rig.admitter.admit(0, bytes(65))
    for ticket in range(8):
        assert rig.admitter.admit(ticket, bytes([ticket]) * 64)
    assert not rig.admitter.admit(8, b"")
    assert rig.producer.end(rig.claim(), native.FAILED, 1)
    assert [rig.claim().prompt for _ in range(7)] == [bytes([t]) * 64 for t in range(1, 8)]
    assert not rig.admitter.admit(8, b"")
    rig.admitter.sweep()
    assert rig.admitter.admit(8, b"")
    with pytest.raises(ValueError, match="ticket >= 0, got -1"):
        rig.admitter.admit(-1, b"")


def test_second_admitter_adopts_what_stands(rig: Rig) -> None:
    rig.publish(1)
    rig.admitter.admit(2, b"two")
    adopted = native.Admitter(rig.segment)
    with pytest.raises(ValueError, match="which stands in the table"):
        adopted.admit(2, b"")
    assert [adopted.admit(t, b"") for t in range(10, 17)] == [True] * 6 + [False]
    assert rig.claim().prompt == b"two"


# ---- leases and views


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


# ---- from Python's lists

TYPES = {"|u1": (0, 255), "<i4": (-(1 << 31), (1 << 31) - 1), "<i8": (-(1 << 63), (1 << 63) - 1)}


def through(rig: Rig, field: Any, dtype: str) -> list[Any]:
    """What arrives of one field."""
    rig.admitter.sweep()
    assert rig.admitter.admit(through.ticket, b"")  # type: ignore[attr-defined]
    through.ticket += 1  # type: ignore[attr-defined]
    claim = rig.claim()
    try:
        assert rig.producer.publish(claim, [b"before", field, b"after"])
    except BaseException:
        assert claim.current
        rig.producer.end(claim, native.FAILED, 1)
        raise
    lease = rig.take()
    rig.consumer.deliver([lease])
    assert (bytes(lease.field(0, "|u1")), bytes(lease.field(2, "|u1"))) == (b"before", b"after")
    return lease.field(1, dtype).tolist()


through.ticket = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", TYPES)
def test_lists_of_whole_numbers_arrive_exactly(rig: Rig, dtype: str) -> None:
    low, high = TYPES[dtype]
    dice = random.Random(1)
    numbers = [low, high, 0, 1, True, *(dice.randint(low, high) >> dice.randrange(60) for _ in range(99))]
    numbers = [min(max(n, low), high) for n in numbers]
    raw = np.array(numbers[:7], dtype)
    for parts in ([numbers], [numbers, [], tuple(numbers)], [numbers[:1], raw, bytes(raw), numbers], (), [[]]):
        want = [int(n) for part in parts for n in (np.frombuffer(part, dtype) if isinstance(part, bytes) else part)]
        assert through(rig, (dtype, parts), dtype) == want
    for wrong in (low - 1, high + 1):
        with pytest.raises((ValueError, OverflowError)):
            through(rig, (dtype, [[1, wrong]]), dtype)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_lists_of_real_numbers_and_of_triples_arrive_exactly(rig: Rig, dtype: str) -> None:
    """SGLang's output_token_logprobs: [logprob, token id, None]."""
    dice = random.Random(2)
    numbers = [0.0, -1e30, 7, float("-inf"), *(-dice.expovariate(1) for _ in range(99))]
    want = np.array(numbers, dtype).tolist()
    triples = [[x, i, None] if i % 2 else (x, i, "text") for i, x in enumerate(numbers)]
    assert through(rig, (dtype, [numbers]), dtype) == want
    assert through(rig, (dtype, [triples, numbers]), dtype) == want + want
    assert native.first_of_each(triples) == numbers == native.first_of_each(tuple(triples))
    for rows in ([[]], [1.0], ["ab"]):
        with pytest.raises(TypeError, match="first_of_each"):
            native.first_of_each(rows)


def test_numbers_that_only_python_can_convert_are_converted(rig: Rig) -> None:
    class Odd:
        def __index__(self) -> int:
            return 7

    assert through(rig, ("<i4", [[1, np.int64(2), Odd()], [np.uint8(3)]]), "<i4") == [1, 2, 7, 3]
    assert through(rig, ("<f4", [[np.float32(0.5), np.float64(1.5), [np.float16(2), 3]]]), "<f4") == [0.5, 1.5, 2]


def test_a_list_that_changes_while_it_is_converted_is_measured_again(rig: Rig) -> None:
    class Grows:
        def __index__(self) -> int:
            other.extend([9] * 500)
            return 1

    other = [5]
    assert through(rig, ("<i4", [[Grows()], other]), "<i4") == [1, 5] + [9] * 500


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (("<i4", [[1, 2.0]]), TypeError, "part 0: expected a number, got float at 1"),
        (("<i4", [[1], [None]]), TypeError, "part 1: expected a number, got NoneType at 0"),
        (("<i4", [[[1]]]), TypeError, "got list"),
        (("<f4", [["1.0"]]), TypeError, "got str"),
        (("<f4", [[[None, 5, None]]]), TypeError, "got NoneType"),
        (("<f4", [1.0]), TypeError, "part 0: expected a C-contiguous buffer, got float"),
        (("<f4", [np.zeros(3)]), ValueError, "part 0: expected a buffer of <f4 items"),
        (("<i4", [b"abc"]), ValueError, "part 0: expected a buffer of <i4 items"),
        (("<i2", [[1]]), ValueError, "got <i2"),
        (("<i4",), TypeError, r"\(dtype, parts\)"),
        (("|u1", [[256]]), ValueError, "fits 1 bytes, got 256 at 0"),
        (np.array([object()]), ValueError, "without Python objects"),
    ],
)
def test_lists_that_do_not_fit_are_refused_by_place(rig: Rig, wrong: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=r"arrays\[1\].*" + says if says[0] != "g" else says):
        through(rig, wrong, "|u1")
    assert rig.producer.free_bytes == rig.segment.arena_bytes


def test_lists_beyond_the_extent_are_refused_before_a_byte(rig: Rig) -> None:
    with pytest.raises(native.GroupTooLarge, match="8192 bytes"):
        through(rig, ("<i8", [[1] * 1100]), "<i8")


# ---- many entries, many claims


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


# ---- death


def checked(ticket: int, size: int) -> list[bytes]:
    data = random.Random(ticket * 1000 + size).randbytes(size)
    return [data, b"%d %d" % (ticket, zlib.crc32(data))]


def publish_hard(segment: native.Segment, worker: int) -> None:
    producer, dice = native.Producer(segment, worker), random.Random(os.getpid())
    while True:
        claim = producer.claim()
        if claim is None:
            continue
        if dice.random() < 0.1:
            claim = producer.retry(claim)
            assert claim is not None
        assert producer.publish(claim, checked(claim.ticket, dice.randrange(4000)))


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_under_kills() -> None:
    """slime#1615, NeMo-RL#3599: producers are killed at random instants, recovered, continued."""
    segment = make_segment()
    admitter, consumer = native.Admitter(segment), native.Consumer(segment)
    dice = random.Random(5)
    workers = {w: fork(lambda w=w: publish_hard(segment, w)) for w in (0, 1)}
    admitted, ended, kills, decided = 0, [], 0, 0
    next_kill = time.monotonic()
    seen = set()
    while kills < 150 or len(ended) < admitted:
        if kills < 150 and admitter.admit(admitted, b""):
            admitted += 1
        consumer.wait(1, consumer.news(), 0.001)
        while (lease := consumer.take()) is not None:
            data, label = lease.field(0, "uint8"), bytes(lease.field(1, "uint8"))
            assert label == b"%d %d" % (lease.ticket, zlib.crc32(data))
            assert lease.ticket not in seen
            seen.add(lease.ticket)
            consumer.deliver([lease])
            del data
            assert lease.release() == 0
        ended += admitter.sweep()
        if kills < 150 and time.monotonic() >= next_kill:
            worker = dice.randrange(2)
            kill(workers[worker])
            recovered = native.recover(segment, worker, max_deaths=200, reason=1)
            decided += len(recovered.reissued)
            assert recovered.failed == []
            assert native.recover(segment, worker, max_deaths=200, reason=1).reissued == []
            workers[worker] = fork(lambda worker=worker: publish_hard(segment, worker))
            kills += 1
            next_kill = time.monotonic() + dice.random() * 0.006
    for worker, pid in workers.items():
        kill(pid)
        native.recover(segment, worker, max_deaths=200, reason=1)
    assert seen == set(range(admitted))
    assert sorted(e[0] for e in ended) == list(range(admitted))
    assert {e[1] for e in ended} == {native.DONE}
    assert sum(e[4] for e in ended) == decided
    assert segment.table() == []
    assert [native.Producer(segment, w).free_bytes for w in (0, 1)] == [segment.arena_bytes] * 2
    consumer.close()


def take_hard(segment: native.Segment) -> None:
    consumer, dice = native.Consumer(segment), random.Random(os.getpid())
    kept: list[native.Lease] = []
    while True:
        lease = consumer.take()
        if lease is not None:
            data, label = lease.field(0, "uint8"), bytes(lease.field(1, "uint8"))
            assert label == b"%d %d" % (lease.ticket, zlib.crc32(data))
            kept.append(lease)
        if kept and (lease is None or dice.random() < 0.5):
            lease = kept.pop(dice.randrange(len(kept)))
            consumer.deliver([lease])
            data = None
            lease.release()


@pytest.mark.slow
def test_killed_takers_lose_no_group() -> None:
    segment = make_segment()
    admitter = native.Admitter(segment)
    worker = fork(lambda: publish_hard(segment, 0))
    dice, admitted, ended = random.Random(6), 0, []
    for _ in range(60):
        taker = fork(lambda: take_hard(segment))
        end = time.monotonic() + dice.random() * 0.012
        while time.monotonic() < end:
            if admitter.admit(admitted, b""):
                admitted += 1
            ended += admitter.sweep()
        kill(taker)
    consumer = native.Consumer(segment)
    while len(ended) < admitted:
        lease = consumer.take()
        if lease is not None:
            consumer.deliver([lease])
            lease.release()
        ended += admitter.sweep()
    kill(worker)
    assert [e[0] for e in sorted(ended)] == list(range(admitted))
    while (lease := consumer.take()) is not None:
        assert lease.delivered
        lease.release()
    native.recover(segment, 0, max_deaths=3, reason=1)
    assert native.Producer(segment, 0).free_bytes == segment.arena_bytes
    consumer.close()


def test_deaths_are_counted_and_bounded(rig: Rig) -> None:
    rig.admitter.admit(1, b"")
    for deaths in range(3):
        assert rig.claim().deaths == deaths
        recovered = native.recover(rig.segment, 0, max_deaths=2, reason=4095)
        assert (recovered.published, recovered.reissued, recovered.failed) == (
            ([], [1], []) if deaths < 2 else ([], [], [1])
        )
    assert rig.admitter.sweep() == [(1, native.FAILED, 4095, 0, 3)]
    rig.admitter.admit(2, b"")
    rig.claim()
    assert native.recover(rig.segment, 0, max_deaths=0, reason=1, count_death=False).reissued == [2]
    assert rig.claim().deaths == 0


def test_recovery_touches_neither_published_nor_leased_groups(rig: Rig) -> None:
    """A worker publishes and dies while the trainer holds a lease."""
    rig.publish(1, 2, 3)
    first = rig.take()
    view = first.field(0, "int64")
    rig.consumer.deliver([first])
    rig.admitter.admit(4, b"")
    rig.claim()
    recovered = native.recover(rig.segment, 0, max_deaths=3, reason=1)
    assert (sorted(recovered.published), recovered.reissued) == ([2, 3], [4])
    rig.producer = native.Producer(rig.segment, 0)
    claim = rig.claim()
    assert rig.producer.publish(claim, [np.full(16, 4)])
    assert view.tolist() == [1] * 16
    assert [rig.take().field(0, "int64")[0] for _ in range(3)] == [2, 3, 4]


def test_entry_reused_while_its_former_group_is_leased_is_decided_by_generation(rig: Rig) -> None:
    """One entry may be named by two live descriptors: only the exact word counts."""
    leases = []
    for ticket in range(6):
        rig.publish(ticket)
        if ticket == 5:
            break
        leases.append(rig.take())
        rig.consumer.deliver(leases[-1:])
        rig.admitter.sweep()
    recovered = native.recover(rig.segment, 0, max_deaths=3, reason=1)
    assert (recovered.published, recovered.reissued) == ([5], [])


def test_recover_refuses_what_does_not_fit(rig: Rig) -> None:
    for wrong in ((2, 1, 1), (-1, 1, 1), (0, 255, 1), (0, 1, 4096)):
        with pytest.raises(ValueError, match="recover"):
            native.recover(rig.segment, *wrong)


def test_live_taker_is_not_replaced_and_a_dead_one_is(rig: Rig) -> None:
    rig.publish(*range(5))
    with pytest.raises(native.TakerBusy, match=f"process {os.getpid()}"):
        native.Consumer(rig.segment)
    rig.consumer.close()
    ready = os.pipe()

    def taker() -> None:
        consumer = native.Consumer(rig.segment)
        leases = [consumer.take() for _ in range(4)]
        assert leases[1] is not None
        consumer.deliver([leases[1]])
        leases[1].release()
        assert leases[2] is not None
        consumer.deliver([leases[2]])
        os.write(ready[1], b"!")
        signal.pause()

    pid = fork(taker)
    assert os.read(ready[0], 1) == b"!"
    with pytest.raises(native.TakerBusy, match=f"process {pid}"):
        native.Consumer(rig.segment)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie takes nothing any more
    consumer = native.Consumer(rig.segment)
    assert consumer.wait(4, consumer.news(), 0)
    leases = [consumer.take() for _ in range(4)]
    assert [(x.ticket, x.delivered) for x in leases if x] == [(0, False), (2, True), (3, False), (4, False)]
    assert [x.ticket for x in consumer.held()] == [0, 3, 4]
    consumer.close()
    os.waitpid(pid, 0)
    os.close(ready[0])
    os.close(ready[1])


def test_forked_child_leaves_everything(rig: Rig) -> None:
    """LMCache#4917, cpython#82300."""
    rig.publish(1)
    lease = rig.take()
    rig.consumer.deliver([lease])
    rig.admitter.admit(2, b"")
    claim = rig.claim()

    def child() -> None:
        lease.release()
        rig.consumer.close()
        for call in (
            rig.consumer.take,
            lambda: rig.producer.publish(claim, []),
            lambda: rig.producer.end(claim, native.FAILED, 1),
        ):
            with pytest.raises(RuntimeError, match="forked child"):
                call()
        rig.segment.close()

    assert ended_well(fork(child))
    with pytest.raises(native.TakerBusy):
        native.Consumer(rig.segment)
    assert lease.field(0, "int64").tolist() == [1] * 16
    assert rig.producer.publish(claim, [b"x"])
    assert rig.take().ticket == 2


def test_forked_child_that_drops_everything_gives_nothing_back(rig: Rig) -> None:
    """cpython#82300: a child's copies of the handles die with it, and with nothing else."""
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    rig.consumer.close()
    rig.consumer = native.Consumer(rig.segment, bell)
    rig.publish(1, 2)
    leases = rig.consumer.try_take(2)
    view = leases[0].field(0, "<i8")
    rig.consumer.deliver(leases)
    rig.producer.set_idle(True)
    before = rig.producer.free_bytes

    def child() -> None:
        nonlocal view, leases
        with pytest.raises(RuntimeError, match="forked child"):
            rig.admitter.admit(3, b"")
        with pytest.raises(RuntimeError, match="forked child"):
            rig.admitter.sweep()
        native.release(leases)
        view = leases = None  # type: ignore[assignment]
        rig.consumer.close()
        rig.__dict__.clear()
        gc.collect()

    assert ended_well(fork(child))
    with pytest.raises(BlockingIOError):
        os.eventfd_read(bell)
    assert rig.producer.free_bytes == before
    assert view.tolist() == [1] * 16
    assert native.release(leases) == 1
    assert rig.producer.free_bytes > before
    del view
    assert rig.producer.free_bytes == rig.segment.arena_bytes
    os.close(bell)


def test_released_memory_is_poisoned_when_asked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads released memory by an address it kept (a copy to a device, say) sees it."""

    def raw() -> bytes:
        return os.pread(rig.segment.fd, rig.segment.size_bytes, 0)

    mark = bytes(range(1, 17)) * 8
    for poison in (False, True):
        monkeypatch.setenv("MPROLLOUT_POISON", "1" if poison else "0")
        producer = native.Producer(rig.segment, 0)
        rig.admitter.admit(poison, b"")
        producer.publish(rig.claim(producer), [mark])
        lease = rig.take()
        rig.consumer.deliver([lease])
        view, at = lease.field(0, "|u1"), raw().index(mark)
        lease.release()
        assert bytes(view) == mark and producer.free_bytes < rig.segment.arena_bytes
        del view
        assert producer.free_bytes == rig.segment.arena_bytes
        assert raw()[at : at + 128] == (b"\xee" * 128 if poison else mark)


# ---- the segment


def test_monitors_attach_read_only(rig: Rig) -> None:
    rig.publish(1)
    rig.segment.global_words[3] = 9
    fd = os.open(f"/proc/self/fd/{rig.segment.fd}", os.O_RDONLY)  # a monitor's own descriptor need not write
    monitors = [native.Segment.attach(rig.segment.fd, read_only=True), native.Segment.attach(fd, True)]
    os.close(fd)
    for monitor in monitors:
        assert monitor.read_only and not rig.segment.read_only
        assert monitor.table() == rig.segment.table() and monitor.pending() == 1
        assert monitor.global_words[3] == 9 and monitor.worker_words(1)[0] == 0 and monitor.idle_workers() == 0
        with pytest.raises(TypeError, match="read-only"):
            monitor.global_words[3] = 1
        for refused in (
            lambda m=monitor: native.Producer(m, 0),
            lambda m=monitor: native.Consumer(m),
            lambda m=monitor: native.Admitter(m),
            lambda m=monitor: native.recover(m, 0, 1, 1),
            monitor.wake_taker,
        ):
            with pytest.raises(ValueError, match="read-only"):
                refused()


def test_the_mapping_lies_where_it_says(rig: Rig) -> None:
    import ctypes

    assert rig.segment.address % 4096 == 0
    assert ctypes.string_at(rig.segment.address, 8) == b"\x1a\nMPROL1"
    view = memoryview((ctypes.c_char * rig.segment.size_bytes).from_address(rig.segment.address))
    assert len(view) == rig.segment.size_bytes


def test_huge_pages_are_used_where_the_system_grants_them() -> None:
    granted = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    if not any(word in granted for word in ("[always]", "[within_size]", "[advise]", "[force]")):
        pytest.skip(f"no huge pages in shared memory here: {granted.strip()}")
    segment = make_segment(arena_bytes=64 << 20)
    smaps = Path("/proc/self/smaps").read_text().split("memfd:mprollout")[-1]
    mapped = next(line for line in smaps.splitlines() if line.startswith("ShmemPmdMapped:"))
    assert int(mapped.split()[1]) >= (segment.arena_bytes >> 10)


def test_segment_is_private_sealed_and_as_large_as_it_says() -> None:
    segment = make_segment(schema=b"\0any\xff")
    status = os.fstat(segment.fd)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == segment.size_bytes
    assert not os.get_inheritable(segment.fd)
    for size in (0, 2 * segment.size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    other = native.Segment.attach(segment.fd)
    assert other.schema == b"\0any\xff"
    for name in (
        "workers",
        "entries",
        "cells",
        "descriptors",
        "arena_bytes",
        "max_group_bytes",
        "max_prompt_bytes",
        "size_bytes",
    ):
        assert getattr(other, name) == getattr(segment, name)
    assert status.st_blocks * 512 >= segment.size_bytes  # populated


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"workers": 65},
        {"entries": 0},
        {"entries": -1},
        {"cells": 12},
        {"cells": 4},
        {"descriptors": 1 << 15},
        {"arena_bytes": 1 << 62},
        {"max_group_bytes": 33 * KIB},
        {"max_prompt_bytes": 0},
        {"max_group_bytes": 32 * KIB + 1},
    ],
)
def test_wrong_sizes_are_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        make_segment(**wrong)


def test_want_of_memory_names_the_bytes() -> None:
    def child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
        with pytest.raises(MemoryError, match=r"expected \d{12} bytes of memory, got Cannot allocate memory from mmap"):
            make_segment(arena_bytes=100 << 30)

    assert ended_well(fork(child))


def test_creation_survives_a_storm_of_signals() -> None:
    """pmem#168."""
    hits = []
    previous = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for _ in range(4):
            segment = make_segment(arena_bytes=32 * KIB * KIB)
            assert os.fstat(segment.fd).st_blocks * 512 >= segment.size_bytes
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits


def copy_of(image: bytes, seals: bool = True) -> int:
    import fcntl

    fd = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, image)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def test_attach_refuses_every_corrupted_header() -> None:
    """boostorg/interprocess#128: also a segment whose creator died before the magic."""
    segment = make_segment()
    good = os.pread(segment.fd, segment.size_bytes, 0)
    dice = random.Random(7)

    def attach(image: bytes, seals: bool = True) -> None:
        fd = copy_of(image, seals)
        try:
            native.Segment.attach(fd)
        finally:
            os.close(fd)

    attach(good)
    with pytest.raises(native.SegmentError, match="expected seals"):
        attach(good, seals=False)
    with pytest.raises(native.SegmentError, match="expected magic"):
        attach(bytes(8) + good[8:])
    with pytest.raises(native.SegmentError, match="expected file size"):
        attach(good[:-4096])
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(256 if dice.random() < 0.8 else 4096)
            bad[at] = dice.randrange(256)
        if bad != good:
            with pytest.raises(native.SegmentError, match="expected"):
                attach(bytes(bad))
    for fd in (-1, 999_999):
        with pytest.raises(native.SegmentError, match="expected an open memfd"):
            native.Segment.attach(fd)
    read, write = os.pipe()
    with pytest.raises(native.SegmentError, match="another kind of file"):
        native.Segment.attach(read)
    os.close(read)
    os.close(write)


def test_import_brings_no_numpy() -> None:
    """The keeper runs without it."""
    code = f"import sys, importlib.util as u; s = u.spec_from_file_location('mprollout._native', {native.__file__!r}); m = u.module_from_spec(s); s.loader.exec_module(m); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-S", "-c", code], timeout=30).returncode == 0


def test_die_with_parent_exits_when_the_parent_is_another() -> None:
    assert not ended_well(fork(lambda: native.die_with_parent(1 << 22)))


# ---- waiting


def test_wait_times_out_and_needs_exactly_count(rig: Rig) -> None:
    rig.publish(0)
    start = time.monotonic()
    assert not rig.consumer.wait(2, rig.consumer.news(), 0.12)
    assert time.monotonic() - start >= 0.12
    assert rig.consumer.wait(1, rig.consumer.news(), 10)
    for wrong in (0, -1, 1 << 40):
        with pytest.raises(ValueError, match="count"):
            rig.consumer.wait(wrong, 0, 0)
    with pytest.raises(ValueError, match="nan"):
        rig.consumer.wait(1, 0, float("nan"))


def test_wait_wakes_on_the_publish_that_reaches_count(rig: Rig) -> None:
    for count in (1, 2, 3):
        thread = threading.Thread(target=rig.publish, args=range(10 * count, 10 * count + count))
        seen = rig.consumer.news()
        thread.start()
        assert rig.consumer.wait(count, seen, 30) or rig.consumer.wait(count, rig.consumer.news(), 30)
        thread.join()
        assert [rig.take().ticket for _ in range(count)] == list(range(10 * count, 10 * count + count))
        rig.consumer.deliver(rig.consumer.held())
        rig.admitter.sweep()


def until_asleep(segment: native.Segment) -> None:
    """Returns when wake_at is armed (the third hot word)."""
    import struct

    while struct.unpack("Q", os.pread(segment.fd, 8, 4096 + 2 * 128))[0] == (1 << 64) - 1:
        time.sleep(0)


@pytest.mark.parametrize("what", ["wake_taker", "end", "recover"])
def test_news_wakes_a_sleeper_at_once(rig: Rig, what: str) -> None:
    rig.admitter.admit(1, b"")
    claim = rig.claim()

    def news() -> None:
        until_asleep(rig.segment)
        if what == "wake_taker":
            rig.segment.wake_taker()
        elif what == "end":
            rig.producer.end(claim, native.FAILED, 3)
        else:
            native.recover(rig.segment, 1, 1, 1)

    thread = threading.Thread(target=news)
    seen = rig.consumer.news()
    thread.start()
    start = time.monotonic()
    assert not rig.consumer.wait(1, seen, 30)
    assert time.monotonic() - start < 10
    thread.join()
    assert rig.consumer.news() != seen
    assert not rig.consumer.wait(1, seen, 30)  # news before the wait are not slept over


def test_signal_interrupts_wait(rig: Rig) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            rig.consumer.wait(1, rig.consumer.news(), 30)
        assert time.monotonic() - start < 10
    finally:
        signal.signal(signal.SIGALRM, previous)
    rig.publish(1)
    assert rig.consumer.wait(1, rig.consumer.news(), 0)


def test_second_waiter_in_the_process_is_refused(rig: Rig) -> None:
    errors: list[BaseException] = []

    def second() -> None:
        until_asleep(rig.segment)
        try:
            rig.consumer.wait(1, rig.consumer.news(), 0)
        except RuntimeError as error:
            errors.append(error)
        rig.segment.wake_taker()

    thread = threading.Thread(target=second)
    thread.start()
    rig.consumer.wait(1, rig.consumer.news(), 30)
    thread.join()
    assert "one waiter" in str(errors[0])


def test_publish_wakes_a_sleeping_process(rig: Rig) -> None:
    ready = os.pipe()
    rig.consumer.close()

    def taker() -> None:
        consumer = native.Consumer(rig.segment)
        os.write(ready[1], b"!")
        while consumer.take() is None:
            consumer.wait(1, consumer.news(), 30)

    pid = fork(taker)
    os.read(ready[0], 1)
    until_asleep(rig.segment)
    rig.publish(1)
    assert ended_well(pid)
    os.close(ready[0])
    os.close(ready[1])


def test_idle_workers_are_a_mask_and_the_dead_leave_it(rig: Rig) -> None:
    other = native.Producer(rig.segment, 1)
    rig.producer.set_idle(True)
    other.set_idle(True)
    assert rig.segment.idle_workers() == 0b11
    rig.producer.set_idle(False)
    assert rig.segment.idle_workers() == 0b10
    native.recover(rig.segment, 1, 1, 1)
    assert rig.segment.idle_workers() == 0


def test_bell_rings_when_room_comes_back_to_idle_workers() -> None:
    rig = Rig()
    rig.consumer.close()
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    consumer = native.Consumer(rig.segment, bell)

    def rang() -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(bell) > 0
        return False

    for idle, late in ((False, False), (True, False), (True, True)):
        rig.publish(idle * 2 + late)
        rig.producer.set_idle(idle)
        lease = consumer.take()
        assert lease is not None
        view = lease.field(0, "int64") if late else None
        consumer.deliver([lease])
        lease.release()
        if late:
            assert not rang()
        del view, lease
        assert rang() == idle
        rig.producer.set_idle(False)
        rig.admitter.sweep()
    consumer.close()
    os.close(bell)
    with pytest.raises(ValueError, match="eventfd"):
        native.Consumer(rig.segment, 999_999)
    assert select.select([], [], [], 0) == ([], [], [])


def test_asyncio_awaits_groups_by_the_takers_bell_without_a_thread(rig: Rig) -> None:
    """Workers are other processes: each has the bell's descriptor, as the keeper hands it to them."""
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    with pytest.raises(RuntimeError, match="taker_bell"):
        rig.consumer.arm(1, rig.consumer.news())
    rig.segment.taker_bell = bell
    go = os.pipe()

    def worker() -> None:
        producer = native.Producer(rig.segment, 1)
        for i in range(3):
            os.read(go[0], 1)
            claim = producer.claim()
            assert claim is not None
            if i < 2:
                assert producer.publish(claim, [b"x"])
            else:
                producer.end(claim, native.FAILED, 1)

    async def taken(count: int) -> list[native.Lease]:
        loop, rung, consumer = asyncio.get_running_loop(), asyncio.Event(), rig.consumer
        loop.add_reader(rig.segment.taker_bell, rung.set)
        try:
            while True:
                seen = consumer.news()
                if leases := consumer.try_take(count):
                    return leases
                rung.clear()
                if consumer.arm(count, seen):
                    with pytest.raises(RuntimeError, match="one waiter"):
                        consumer.wait(1, seen, 0)
                    await rung.wait()  # no time-out here: a wake that is lost hangs the test
                consumer.disarm()
                if rig.words().get(2) == native.FAILED:
                    return []
        finally:
            loop.remove_reader(rig.segment.taker_bell)

    async def run() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        taking = asyncio.create_task(taken(2))
        await asyncio.sleep(0.1)
        os.write(go[1], b"!")
        await asyncio.sleep(0.1)
        assert not taking.done()  # one is not two, and woke nobody
        os.write(go[1], b"!")
        assert [lease.ticket for lease in await asyncio.wait_for(taking, 20)] == [0, 1]
        assert ticks > 5
        taking = asyncio.create_task(taken(1))
        await asyncio.sleep(0.05)
        os.write(go[1], b"!")  # an ending is news
        assert await asyncio.wait_for(taking, 20) == []
        ticking.cancel()

    for ticket in range(3):
        rig.admitter.admit(ticket, b"")
    pid = fork(worker)
    asyncio.run(run())
    assert ended_well(pid)
    rig.segment.taker_bell = -1
    assert rig.segment.taker_bell == -1
    with pytest.raises(ValueError, match="eventfd"):
        rig.segment.taker_bell = 999_999
    for end in (*go, bell):
        os.close(end)


def test_arming_sees_what_is_there_already(rig: Rig) -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    rig.segment.taker_bell = bell
    seen = rig.consumer.news()
    rig.publish(1)
    assert not rig.consumer.arm(1, seen)
    assert rig.consumer.arm(2, seen)
    rig.consumer.disarm()
    rig.segment.wake_taker()
    assert os.eventfd_read(bell) == 1
    assert not rig.consumer.arm(2, seen)
    assert rig.consumer.arm(2, rig.consumer.news())
    rig.publish(2)
    assert os.eventfd_read(bell) == 1
    rig.consumer.disarm()
    rig.publish(3)
    with pytest.raises(BlockingIOError):  # nobody sleeps: no system call
        os.eventfd_read(bell)
    os.close(bell)
