"""Waiting: a taker that sleeps is woken by what it waits for, idle workers by their bells."""

import asyncio
import contextlib
import os
import select
import signal
import struct
import threading
import time

import engines
import pytest
from rigs import Rig, ended_well, fork

from mprollout import _native as native

pytestmark = pytest.mark.timeout(180)


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
    while struct.unpack("Q", os.pread(segment.fd, 8, 4096 + 2 * 128))[0] == (1 << 64) - 1:
        time.sleep(0)


def test_a_spinning_take_never_sleeps_and_never_arms(rig: Rig) -> None:
    """Nobody pays a system call for it: wake_at stays at never while it waits."""
    took: list[native.Lease] = []
    thread = threading.Thread(target=lambda: took.extend(rig.consumer.take(2, 30, spin=True)))
    thread.start()
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    rig.publish(0)
    rig.segment.wake_taker()  # it looks again, and goes on
    engines.until(lambda: time.clock_gettime_ns(clock) > 50_000_000, "50 ms of spinning")
    assert struct.unpack("Q", os.pread(rig.segment.fd, 8, 4096 + 2 * 128))[0] == (1 << 64) - 1
    rig.publish(1)
    thread.join()
    assert [lease.ticket for lease in took] == [0, 1]
    start = time.monotonic()
    assert rig.consumer.take(1, 0.12, spin=True) == []
    assert time.monotonic() - start >= 0.12


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


@pytest.mark.parametrize("spin", [False, True])
def test_signal_interrupts_wait(rig: Rig, spin: bool) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            rig.consumer.take(1, 30, spin=spin)
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
