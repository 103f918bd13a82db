"""Reports about other systems' shared memory, restated over a segment: who frees it, and what a large batch costs."""

import contextlib
import gc
import os
import resource
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from rigs import ended_well, fork, kill, make_segment

from mprollout import _native as native
from mprollout.batch import Batch
from mprollout.generator import VersionSpan
from mprollout.ring import RolledSample, encode_group
from mprollout.schema import schema_bytes

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20


def holders(inode: int) -> set[int]:
    """The processes that have a segment's file open or mapped. The kernel frees it with the last one's end."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text().splitlines()
            if any(line.split()[4] == str(inode) for line in maps if ":mprollout" in line):
                found.add(int(process.name))
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # that of this very look
                    if fd.stat().st_ino == inode and ":mprollout" in os.readlink(fd):
                        found.add(int(process.name))
    return found


def test_the_last_holder_frees_the_memory_and_no_other() -> None:
    """cpython#82300: who attached and exits takes nothing along; no resource_tracker unlinks what others use."""
    segment = make_segment(arena_bytes=4 * MIB)
    inode = os.fstat(segment.fd).st_ino
    admitter, producer, consumer = native.Admitter(segment), native.Producer(segment, 0), native.Consumer(segment)
    admitter.admit(1, b"prompt")
    claim = producer.claim()
    assert claim is not None and producer.publish(claim, [b"payload"])
    code = (
        "import sys; from mprollout import _native as n; s = n.Segment.attach(int(sys.argv[1]));"
        "n.Producer(s, 1).claim();"
        "assert s.pending() == 1 and not [m for m in sys.modules if 'resource_tracker' in m]"
    )
    script = [sys.executable, "-c", code, str(segment.fd)]
    assert subprocess.run(script, pass_fds=[segment.fd], timeout=60).returncode == 0
    assert ended_well(fork(lambda: None))  # it had all of it mapped
    assert holders(inode) == {os.getpid()} and segment.pending() == 1

    told, go, shared = os.pipe(), os.pipe(), [segment]

    def outlives() -> None:
        os.read(go[0], 1)
        lease = native.Consumer(shared[0]).take()  # the taker before has closed
        assert lease is not None
        os.write(told[1], bytes(lease.field(0, "|u1")))
        os.read(go[0], 1)

    pid = fork(outlives)
    consumer.close()
    segment.close()
    shared.clear()
    del admitter, producer, consumer, claim, segment
    gc.collect()
    assert holders(inode) == {pid}
    os.write(go[1], b"!")
    assert os.read(told[0], 99) == b"payload"
    kill(pid)
    assert holders(inode) == set()
    for end in (*told, *go):
        os.close(end)


def private_bytes() -> int:
    """Of this process and of nobody else: the ring's pages do not count."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


SAMPLES, TOKENS, GROUPS = 8, 8192, 32


def take_a_large_batch() -> None:
    """In a process of its own: what it takes at most is known."""
    sizes = {"arena_bytes": 80 * MIB, "max_group_bytes": 2 * MIB, "entries": GROUPS, "cells": GROUPS}
    segment = make_segment(**sizes, descriptors=GROUPS, schema=schema_bytes())
    admitter = native.Admitter(segment)

    def publish() -> None:
        producer, ids = native.Producer(segment, 0), np.arange(TOKENS, dtype=np.int32)
        for ticket in range(GROUPS):
            sample = RolledSample(
                token_ids=ids + ticket,
                logprobs=np.full(TOKENS, -0.5, np.float32),
                loss_mask=np.ones(TOKENS, np.uint8),
                finish_reason="stop",
                versions=[VersionSpan(7, 0, TOKENS)],
            )
            samples = [sample] * SAMPLES
            claim = producer.claim()
            assert claim is not None
            assert producer.publish(claim, encode_group([ticket, 7, 0, 0], [1, 2], samples, [1.0] * SAMPLES))

    for ticket in range(GROUPS):
        assert admitter.admit(ticket, b"")
    assert ended_well(fork(publish))
    consumer = native.Consumer(segment)
    gc.collect()
    before = private_bytes()
    leases = consumer.try_take(GROUPS)
    consumer.deliver(leases)
    ring = sum(lease.nbytes for lease in leases)
    batch = Batch(leases)
    tokens = 0
    for ticket, group in enumerate(batch):
        for sample in group.samples:
            at = sample.token_ids.ctypes.data - segment.address
            assert 0 < at < segment.size_bytes and not sample.token_ids.flags.owndata
            assert int(sample.token_ids[-1]) == TOKENS - 1 + ticket and float(sample.logprobs.sum()) == -0.5 * TOKENS
            tokens += len(sample.token_ids)
        del sample, group
    assert tokens == SAMPLES * TOKENS * GROUPS and ring > 9 * tokens
    looked = private_bytes() - before
    assert looked < ring / 4, f"{looked} bytes of views over {ring}"
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    packed = batch.packed()
    copied = sum(array.nbytes for array in packed[:-1])  # the last holds fields of the user's own: there are none
    assert int(packed.token_ids[-1]) == TOKENS - 1 + GROUPS - 1
    batch.release()
    kept = private_bytes() - before
    assert kept < copied + ring / 2, f"{kept} bytes are kept of a copy of {copied}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak_before
    print(f"ring {ring}, views {looked}, copy {copied}, kept {kept}, peak {peak} above")
    assert peak < copied + ring / 2
    consumer.close()


def test_a_batch_of_256_long_samples_is_views_and_copies_once_when_asked() -> None:
    """slime#1709, verl#2847: 256 samples x 8,192 tokens; the peak is the ring and one batch."""
    run = [sys.executable, "-c", "import test_native_cases as t; t.take_a_large_batch()"]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(run, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=100)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_torch_tensor_kept_past_release_keeps_its_memory() -> None:
    """spdl#1636, dora#1833: its storage is the ring's, and stays, though NumPy's array and the lease are gone."""
    import torch

    segment = make_segment()
    admitter, producer, consumer = native.Admitter(segment), native.Producer(segment, 0), native.Consumer(segment)

    def publish(ticket: int) -> None:
        admitter.sweep()
        assert admitter.admit(ticket, b"")
        claim = producer.claim()
        assert claim is not None and producer.publish(claim, [np.full(900, ticket)])

    publish(1)
    lease = consumer.take()
    assert lease is not None
    consumer.deliver([lease])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows no read-only tensors, and says so
        part = torch.from_numpy(lease.field(0, "<i8"))[10:20].view(2, 5)
    assert lease.release() == 1
    del lease
    for ticket in range(2, 20):  # through the whole arena
        publish(ticket)
        other = consumer.take()
        assert other is not None
        consumer.deliver([other])
        other.release()
        del other
    assert part.tolist() == [[1] * 5] * 2
    free = producer.free_bytes
    del part
    gc.collect()
    assert producer.free_bytes > free
    consumer.close()


# ---- words that somebody scribbled over


def hot(segment: native.Segment, name: str, value: int) -> None:
    os.pwrite(segment.fd, struct.pack("<Q", value), 4096 + 128 * ["tail", "head"].index(name))


def test_a_tail_beyond_the_filled_cells_raises_and_loses_nothing() -> None:
    """What a corrupt tail promises is not there: an error, no batch with holes, no loop that no signal ends."""
    segment = make_segment()
    admitter, producer, consumer = native.Admitter(segment), native.Producer(segment, 0), native.Consumer(segment)
    admitter.admit(1, b"")
    claim = producer.claim()
    assert claim is not None and producer.publish(claim, [b"payload"])
    hot(segment, "tail", 5)
    for take in (lambda: consumer.try_take(4), lambda: consumer.take(4, None)):
        with pytest.raises(native.SegmentError, match="more filled cells below the tail"):
            take()
    assert [lease.ticket for lease in consumer.held()] == [1]
    consumer.close()


def test_a_cell_filled_beyond_the_tail_raises_at_once() -> None:
    segment = make_segment()
    consumer = native.Consumer(segment)
    raw = os.pread(segment.fd, segment.size_bytes, 0)
    index = struct.unpack_from("<Q", raw, 88 + 8 * 8)[0]  # the ninth of the header's offsets
    os.pwrite(segment.fd, struct.pack("<Q", 1 << 40 | 1), index + 8 * 2)  # position 2 in its first lap
    assert consumer.wait(3, consumer.news(), 0)
    start = time.monotonic()
    with pytest.raises(native.SegmentError, match="expected 3 groups, as its last cell says, got 0"):
        consumer.take(3, 30)
    assert time.monotonic() - start < 10
    consumer.close()
