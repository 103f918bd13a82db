"""Four producers that are killed, stopped and continued at random instants: nothing is lost, doubled or changed."""

import os
import random
import signal
import time
import zlib

import pytest
from rigs import data_of, fork, kill, make_segment, publish_hard

from mprollout import _native as native

WORKERS = 4


def storm(kills_wanted: int, seed: int) -> dict[str, int]:
    """slime#1615, NeMo-RL#3599, cloudtoid/interprocess#56: what happened, counted."""
    segment = make_segment(workers=WORKERS, entries=16, cells=16, descriptors=8)
    admitter, consumer = native.Admitter(segment), native.Consumer(segment)
    dice = random.Random(seed)
    workers = {w: fork(lambda w=w: publish_hard(segment, w)) for w in range(WORKERS)}
    stopped: set[int] = set()
    done = {"kills": 0, "kills of stopped ones": 0, "stops": 0, "reissued": 0, "taken": 0, "views kept": 0}
    admitted, ended, seen = 0, 0, set()
    kept: list[tuple[native.Lease, object, int]] = []
    next_fault = time.monotonic()
    while done["kills"] < kills_wanted or ended < admitted:
        on = done["kills"] < kills_wanted
        if not on:
            for worker in stopped:
                os.kill(workers[worker], signal.SIGCONT)
            stopped.clear()
        while on and admitter.admit(admitted, b""):
            admitted += 1
        consumer.wait(1, consumer.news(), 0.001)
        while (lease := consumer.take()) is not None:
            data = data_of(lease)
            assert lease.ticket not in seen
            seen.add(lease.ticket)
            consumer.deliver([lease])
            kept.append((lease, data, zlib.crc32(data)))  # read again when it is given back
            lease.release()
            del data, lease
        dice.shuffle(kept)
        while len(kept) > dice.randrange(6) or (kept and not on):
            lease, data, checksum = kept.pop()
            assert zlib.crc32(data) == checksum  # type: ignore[call-overload]
            done["views kept"] += 1
            del data, lease
        for _, state, *_ in admitter.sweep():
            assert state == native.DONE
            ended += 1
        if on and time.monotonic() >= next_fault:
            worker = dice.randrange(WORKERS)
            if dice.random() < 0.4:
                os.kill(workers[worker], signal.SIGCONT if worker in stopped else signal.SIGSTOP)
                done["stops"] += worker not in stopped
                stopped ^= {worker}
            else:
                kill(workers[worker])
                done["kills of stopped ones"] += worker in stopped
                stopped.discard(worker)
                recovered = native.recover(segment, worker, max_deaths=254, reason=1)
                assert recovered.failed == []
                assert native.recover(segment, worker, max_deaths=254, reason=1).reissued == []
                done["reissued"] += len(recovered.reissued)
                workers[worker] = fork(lambda worker=worker: publish_hard(segment, worker))
                done["kills"] += 1
            next_fault = time.monotonic() + dice.random() * 0.006
    for worker, pid in workers.items():
        kill(pid)
        native.recover(segment, worker, max_deaths=254, reason=1)
    assert seen == set(range(admitted))
    assert segment.table() == []
    assert [native.Producer(segment, w).free_bytes for w in range(WORKERS)] == [segment.arena_bytes] * WORKERS
    consumer.close()
    return done | {"taken": len(seen)}


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_four_producers_survive_kills_and_stops() -> None:
    """slime#1615, cloudtoid/interprocess#56."""
    done = storm(200, 1)
    print(done)
    assert done["kills of stopped ones"] > 0 and done["stops"] > 20 and done["reissued"] > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_four_producers_survive_thousands_of_kills_and_stops() -> None:
    done = storm(3000, 2)
    print(done)
    assert done["kills of stopped ones"] > 100 and done["stops"] > 500


@pytest.mark.parametrize("seconds", [pytest.param(3, id="3 s"), pytest.param(60, id="60 s", marks=pytest.mark.long)])
@pytest.mark.timeout(120)
def test_a_stopped_worker_keeps_its_memory_until_its_proven_end(seconds: int) -> None:
    """cloudtoid/interprocess#56: stopped amid its work; the others and the taker go on for laps; then it, too."""
    segment = make_segment(workers=2, entries=16, cells=16, descriptors=8)
    admitter, consumer = native.Admitter(segment), native.Consumer(segment)
    workers = [fork(lambda w=w: publish_hard(segment, w)) for w in (0, 1)]
    admitted, taken, by = 0, 0, [0, 0]

    def go_on(until: float, admit: bool = True) -> None:
        nonlocal admitted, taken
        while time.monotonic() < until and (admit or taken < admitted):
            while admit and admitter.admit(admitted, b""):
                admitted += 1
            consumer.wait(1, consumer.news(), 0.01)
            while (lease := consumer.take()) is not None:
                data_of(lease)
                taken, by[lease.worker] = taken + 1, by[lease.worker] + 1
                consumer.deliver([lease])
                lease.release()
            admitter.sweep()

    go_on(time.monotonic() + 0.2)
    os.kill(workers[0], signal.SIGSTOP)
    os.waitid(os.P_PID, workers[0], os.WSTOPPED | os.WNOWAIT)
    go_on(time.monotonic() + 0.05)  # what it had published before
    held = [row for row in segment.table() if row[1] in (native.RUNNING, native.PUBLISHING) and row[4] == 0]
    before = list(by)
    go_on(time.monotonic() + seconds)
    assert by[0] == before[0] and by[1] > before[1] + 32 * seconds  # for many laps of the ring
    still = [row for row in segment.table() if row[1] in (native.RUNNING, native.PUBLISHING) and row[4] == 0]
    assert still == held  # nobody took its ticket away
    os.kill(workers[0], signal.SIGCONT)
    go_on(time.monotonic() + 0.3)
    assert by[0] > before[0]
    go_on(time.monotonic() + 20, admit=False)
    assert taken == admitted
    for worker, pid in enumerate(workers):
        kill(pid)
        assert native.recover(segment, worker, max_deaths=3, reason=1).reissued == []
        assert native.Producer(segment, worker).free_bytes == segment.arena_bytes
    consumer.close()
