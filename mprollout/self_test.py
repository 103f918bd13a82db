"""The ring at work for a second, between two processes: `mprollout doctor` runs it in a process of its own, so that a crash has an exit code.

    this process: admit -> take -> compare -> release           a child: claim -> publish           (one memfd; both as in a run)

Every group carries its ticket and a checksum of its bytes. Prints one JSON object; `python -m mprollout.self_test [SECONDS]`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple, NoReturn

from mprollout import _native

_ENTRIES = 64
_ARENA_BYTES = 64 << 20
_PAYLOAD = bytes(range(256)) * 256
"""64 KiB: eight samples of some 900 tokens with logprobs and mask."""


class Result(NamedTuple):
    """What went through."""

    groups: int
    seconds: float
    nbytes: int
    huge_bytes: int
    """Of the segment, in huge pages."""
    segment_bytes: int


def run(seconds: float) -> Result:
    """Blocks for so long.

    Raises:
        RuntimeError: a group was not what had been published, or none came.
        OSError: there is no memory for the segment.
    """
    segment = _native.Segment.create(
        workers=1, entries=_ENTRIES, cells=_ENTRIES, descriptors=2 * _ENTRIES, arena_bytes=_ARENA_BYTES,
        max_group_bytes=2 * len(_PAYLOAD), max_prompt_bytes=64, schema=b"self-test",
    )  # fmt: skip
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _native.die_with_parent(parent)
        _publish(segment)
    try:
        return _take(segment, seconds)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _publish(segment: _native.Segment) -> NoReturn:
    """All that is admitted, until the parent kills this process."""
    producer = _native.Producer(segment, 0)
    while True:
        claim = producer.claim()
        if claim is None:
            time.sleep(0)
            continue
        at = claim.ticket % 256
        data = _PAYLOAD[at:] + _PAYLOAD[:at]
        producer.publish(claim, [data, b"%d %d" % (claim.ticket, zlib.crc32(data))])


def _take(segment: _native.Segment, seconds: float) -> Result:
    admitter, consumer = _native.Admitter(segment), _native.Consumer(segment)
    began, groups, nbytes, ticket = time.monotonic(), 0, 0, 0
    while (now := time.monotonic()) < began + seconds or groups == 0:
        admitter.sweep()
        while admitter.admit(ticket, b""):
            ticket += 1
        leases = consumer.take(1, 0.05)
        consumer.deliver(leases)
        for lease in leases:
            data, label = bytes(lease.field(0, "uint8")), bytes(lease.field(1, "uint8"))
            if label != b"%d %d" % (lease.ticket, zlib.crc32(data)):
                raise RuntimeError(f"the group of ticket {lease.ticket} is not what was published: {label!r}")
            groups, nbytes = groups + 1, nbytes + len(data)
            lease.release()
        if groups == 0 and now > began + 10 * seconds:
            raise RuntimeError(f"no group came within {now - began:.0f} s")
    consumer.close()
    return Result(groups, now - began, nbytes, _huge_bytes(segment.address), segment.size_bytes)


def _huge_bytes(address: int) -> int:
    """Of the mapping at that address, in huge pages."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{address:x}-.*?^ShmemPmdMapped: *(\d+) kB", text, re.DOTALL | re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    print(json.dumps(run(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)._asdict()))
