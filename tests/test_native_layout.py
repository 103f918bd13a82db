"""The bytes of a segment. Who changes them raises kVersion in native/segment.h and mends native/README.md."""

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from mprollout import _native as native

GOLDEN = Path(__file__).with_name("segment_v2.txt")
SHAPE = {
    "workers": 2,
    "entries": 4,
    "cells": 4,
    "descriptors": 3,
    "arena_bytes": 5000,
    "max_group_bytes": 600,
    "max_prompt_bytes": 70,
}
SCHEMA = b"the schema"
HOT = ["tail", "head", "wake_at", "wake_sequence", "idle", "taker", "taker_epoch", "admitted", "front"]


def up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def regions() -> Iterator[tuple[str, int, int]]:
    """Name, start and size of each region, by the table in native/README.md and by nothing else."""
    workers, entries, cells, descriptors = (SHAPE[name] for name in ("workers", "entries", "cells", "descriptors"))
    at = 0
    for name, alignment, size in (
        ("header", 4096, 4096),
        ("hot words", 128, 9 * 128),
        ("global statistics", 128, 64 * 8),
        ("worker statistics", 128, workers * 64 * 8),
        ("controls", 128, workers * 64),
        ("table words", 128, entries * 8),
        ("table records", 128, entries * 16),
        ("admissions", 128, cells * 8),
        ("ended bits", 128, (up(entries, 64) // 64 + up(entries, 4096) // 4096) * 8),
        ("index cells", 128, cells * 8),
        ("descriptors", 128, workers * descriptors * 64),
        ("schema", 128, len(SCHEMA)),
        ("prompts", 4096, entries * up(SHAPE["max_prompt_bytes"], 64)),
        ("arenas", 4096, workers * up(SHAPE["arena_bytes"], 4096)),
    ):
        at = up(at, alignment)
        yield name, at, size
        at += size
    yield "end", up(at, 4096), 0


def image() -> bytes:
    """A used one: a group taken, one pending, a ticket failed, one back after a death; statistics, an idle worker."""
    segment = native.Segment.create(**SHAPE, schema=SCHEMA)
    admitter, consumer = native.Admitter(segment), native.Consumer(segment)
    producers = [native.Producer(segment, worker) for worker in range(2)]
    for ticket, worker in ((0x100, 0), (0x101, 1)):
        assert admitter.admit(ticket, b"prompt %d" % worker)
        claim = producers[worker].claim()
        assert claim is not None
        if worker == 1:
            claim = producers[1].retry(claim)
            assert claim is not None
        assert producers[worker].publish(claim, [b"abc", b"", struct.pack("<2q", ticket, -1)])
    assert consumer.take() is not None
    for ticket in (0x102, 0x103):
        assert admitter.admit(ticket, b"p" * 70)
    claim = producers[0].claim()
    assert claim is not None and producers[0].end(claim, native.FAILED, 0xABC)
    assert producers[1].claim() is not None
    assert native.recover(segment, 1, max_deaths=3, reason=1).reissued == [0x103]
    segment.global_words[1] = -2
    segment.worker_words(1)[63] = 77
    producers[1].set_idle(True)
    raw = os.pread(segment.fd, segment.size_bytes, 0)
    consumer.close()
    return raw


def words(raw: bytes) -> str:
    """Each region, and in it each 64-bit word that is not 0; of the taker (a pid) only that it is there."""
    lines = []
    for name, start, size in regions():
        lines.append(f"{name}: {start} + {size}")
        for at in range(start, start + up(size, 8), 8):
            word = raw[at : at + 8]
            if any(word):
                hot = f"  # {HOT[(at - start) // 128]}" if name == "hot words" else ""
                lines.append(f"  {at - start:4} {'process' if hot.endswith('taker') else word.hex(' ')}{hot}")
    return "\n".join(lines) + "\n"


def test_the_bytes_of_a_used_segment_are_these() -> None:
    raw = image()
    assert words(raw) == GOLDEN.read_text(), (
        "the layout has changed: raise kVersion, mend native/README.md, then run python tests/test_native_layout.py"
    )
    covered = bytearray(raw)
    for _, start, size in regions():
        covered[start : start + size] = bytes(size)
    assert not any(covered)  # nothing lies between the regions
    assert len(raw) == [*regions()][-1][1]


def test_another_version_is_refused_by_its_number() -> None:
    for version in (1, 3):
        raw = bytearray(image())
        raw[8:12] = struct.pack("<I", version)
        fd = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, raw)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(native.SegmentError, match=f"expected version 2 at offset 8, got {version}"):
            native.Segment.attach(fd)
        os.close(fd)


if __name__ == "__main__":
    GOLDEN.write_text(words(image()))
