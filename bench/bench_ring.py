"""One group from a producer process to usable arrays in this one: the ring beside multiprocessing.Queue, in the same run.

A message is one group of `SIZE` bytes as named arrays. The consumer touches every byte (a sum, checked against what was sent).
The rest of the ring's rivals and its goals come with the ring's own issue; this file keeps `make bench` honest until then.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mprollout import _native

GROUPS = 300
SIZES = [4096, 65536, 524288]
ROUNDS = 7
FORK = multiprocessing.get_context(
    "fork"
)  # a forked child has the segment's descriptor; it forks before anything else runs


def payload(size: int) -> list[np.ndarray]:
    """Token ids, logprobs, loss mask: 4 + 4 + 1 bytes a token."""
    tokens = size // 9
    return [np.arange(tokens, dtype="<i4"), np.linspace(-3, 0, tokens, dtype="<f4"), np.ones(tokens, dtype="|u1")]


def checksum(arrays: list[np.ndarray]) -> int:
    return sum(int(array.view(np.uint8).sum(dtype=np.int64)) for array in arrays)


def ring_producer(fd: int, size: int, go: Any, rounds: int) -> None:
    segment = _native.Segment.attach(fd)
    producer, arrays = _native.Producer(segment, 0), payload(size)
    for _ in range(rounds):
        go.acquire()
        sent = 0
        while sent < GROUPS:
            claim = producer.claim()
            if claim is not None:
                producer.publish(claim, arrays)
                sent += 1


def queue_producer(queue: Any, size: int, go: Any, rounds: int) -> None:
    arrays = dict(zip(("token_ids", "logprobs", "loss_mask"), payload(size), strict=True))
    for _ in range(rounds):
        go.acquire()
        for _ in range(GROUPS):
            queue.put(arrays)


def start(target: Callable[..., None], *args: Any) -> Any:
    process = FORK.Process(target=target, args=args, daemon=True)
    process.start()
    return process


@pytest.fixture(params=SIZES, ids=lambda size: f"{size // 1024}KiB")
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def ring(size: int) -> Iterator[Callable[[], int]]:
    room = _native.group_bytes([array.nbytes for array in payload(size)])
    segment = _native.Segment.create(
        workers=1,
        entries=64,
        cells=64,
        descriptors=256,
        arena_bytes=130 * room,
        max_group_bytes=room,
        max_prompt_bytes=64,
        schema=b"",
    )
    admitter, consumer, go = _native.Admitter(segment), _native.Consumer(segment), FORK.Semaphore(0)
    process = start(ring_producer, segment.fd, size, go, ROUNDS)
    ticket = 0

    def run() -> int:
        nonlocal ticket
        go.release()
        admitted = taken = total = 0
        while taken < GROUPS:
            admitter.sweep()
            while admitted < GROUPS and admitter.admit(ticket, b""):
                ticket, admitted = ticket + 1, admitted + 1
            seen = consumer.news()
            if (lease := consumer.take()) is None:
                consumer.wait(1, seen, 1.0)
                continue
            consumer.deliver([lease])
            total += checksum([lease.field(0, "<i4"), lease.field(1, "<f4"), lease.field(2, "|u1")])
            lease.release()
            taken += 1
        return total

    yield run
    process.terminate()
    process.join()
    consumer.close()
    segment.close()


@pytest.fixture
def queue(size: int) -> Iterator[Callable[[], int]]:
    channel, go = FORK.Queue(), FORK.Semaphore(0)
    process = start(queue_producer, channel, size, go, ROUNDS)

    def run() -> int:
        go.release()
        return sum(checksum(list(channel.get().values())) for _ in range(GROUPS))

    yield run
    process.terminate()
    process.join()


@pytest.mark.parametrize("transport", ["ring", "queue"])
def test_groups_from_another_process(benchmark: Any, transport: str, size: int, request: pytest.FixtureRequest) -> None:
    benchmark.group = f"one group of {size // 1024} KiB, every byte touched ({GROUPS} groups a round)"
    run = request.getfixturevalue(transport)
    total = benchmark.pedantic(run, rounds=ROUNDS - 1, warmup_rounds=1)
    assert total == GROUPS * checksum(payload(size))
