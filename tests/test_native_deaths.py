"""Deaths of producers and takers at any instant: decided by single words, nothing lost, nothing doubled."""

import gc
import os
import random
import signal
import time

import numpy as np
import pytest
from rigs import Rig, data_of, ended_well, fork, kill, make_segment, publish_hard

from mprollout import _native as native

pytestmark = pytest.mark.timeout(180)


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
            data_of(lease)
            assert lease.ticket not in seen
            seen.add(lease.ticket)
            consumer.deliver([lease])
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
            data_of(lease)
            kept.append(lease)
        if kept and (lease is None or dice.random() < 0.5):
            lease = kept.pop(dice.randrange(len(kept)))
            consumer.deliver([lease])
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
