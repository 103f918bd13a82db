"""The segment: private, sealed, of the size that it says, refused where it is corrupt or does not fit."""

import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rigs import KIB, Rig, ended_well, fork, make_segment

from mprollout import _native as native

pytestmark = pytest.mark.timeout(180)


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
