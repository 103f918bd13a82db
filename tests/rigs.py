"""Segments, their handles in one process, and processes that are killed at work on them."""

import os
import random
import signal
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from mprollout import _native as native

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


def data_of(lease: native.Lease) -> Any:
    """What `publish_hard` published as this group, after a look at its label; a view."""
    data, label = lease.field(0, "uint8"), bytes(lease.field(1, "uint8"))
    assert label == b"%d %d" % (lease.ticket, zlib.crc32(data))
    return data
