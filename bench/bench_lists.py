"""What an inference engine returns, Python's lists, into the ring: natively in one pass, beside the same through NumPy.

8 samples of 8,192 tokens as SGLang gives them: token ids as ints, logprobs as (logprob, id, None). Both ways publish the same
group into the same segment and the payload is verified at the end; what is timed is the way from the lists to the extent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mprollout import _native
from mprollout.generator import VersionSpan
from mprollout.ring import RolledSample, encode_group

SAMPLES, TOKENS = 8, 8192
DTYPES = ("<i4", "<f4", "|u1")


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """`SAMPLES` answers; every number its own object, as after unpickling."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(SAMPLES):
        ids = rng.integers(0, 151_936, TOKENS).tolist()
        logprobs = (-rng.exponential(1.0, TOKENS)).tolist()
        triples = [(logprob, token, None) for logprob, token in zip(logprobs, ids, strict=True)]
        made.append({"output_ids": ids, "output_token_logprobs": triples})
    return made


class Ring:
    """One worker, one taker, room for a few groups."""

    def __init__(self) -> None:
        room = _native.group_bytes([SAMPLES * TOKENS * n for n in (4, 4, 1)]) + 65536
        self.segment = _native.Segment.create(
            workers=1, entries=4, cells=4, descriptors=8, arena_bytes=4 * room, max_group_bytes=room, max_prompt_bytes=64, schema=b""
        )  # fmt: skip
        self.admitter, self.producer = _native.Admitter(self.segment), _native.Producer(self.segment, 0)
        self.consumer = _native.Consumer(self.segment)
        self.ticket = 0

    def claim(self) -> tuple[tuple[_native.Claim], dict[str, Any]]:
        """A claim; the group of the last one is taken and released first."""
        while (lease := self.consumer.take()) is not None:
            self.consumer.deliver([lease])
            lease.release()
        self.admitter.sweep()
        assert self.admitter.admit(self.ticket, b"")
        self.ticket += 1
        claim = self.producer.claim()
        assert claim is not None
        return (claim,), {}


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring()
    yield ring
    ring.consumer.close()
    ring.segment.close()


def by_numpy(answers: list[dict[str, Any]]) -> list[Any]:
    return [
        np.concatenate([np.asarray(a["output_ids"], "<i4") for a in answers]),
        np.concatenate([np.asarray([t[0] for t in a["output_token_logprobs"]], "<f4") for a in answers]),
        np.concatenate([np.ones(len(a["output_ids"]), "|u1") for a in answers]),
    ]


def by_lists(answers: list[dict[str, Any]]) -> list[Any]:
    return [
        ("<i4", [a["output_ids"] for a in answers]),
        ("<f4", [a["output_token_logprobs"] for a in answers]),
        ("|u1", [b"\1" * len(a["output_ids"]) for a in answers]),
    ]


@pytest.mark.parametrize("way", [by_numpy, by_lists], ids=lambda way: way.__name__)
def test_sglang_lists_to_the_extent(benchmark: Any, way: Any, answers: list[dict[str, Any]], ring: Ring) -> None:
    benchmark.group = f"SGLang's lists to the extent, {SAMPLES} samples x {TOKENS} tokens"

    def publish(claim: _native.Claim) -> None:
        assert ring.producer.publish(claim, way(answers))

    benchmark.pedantic(publish, setup=ring.claim, rounds=30, warmup_rounds=3)
    lease = ring.consumer.take()
    assert lease is not None
    for index, (dtype, want) in enumerate(zip(DTYPES, by_numpy(answers), strict=True)):
        assert np.array_equal(lease.field(index, dtype), want)


def rolled(answer: dict[str, Any], native: bool) -> RolledSample:
    triples, n = answer["output_token_logprobs"], len(answer["output_ids"])
    return RolledSample(
        token_ids=list(answer["output_ids"]),
        logprobs=_native.first_of_each(triples) if native else [triple[0] for triple in triples],
        loss_mask=bytearray(b"\1" * n),
        finish_reason="length",
        versions=[VersionSpan(0, 0, n)],
    )


def through_numpy(samples: list[RolledSample]) -> list[Any]:
    """What `encode_group` made before publish took lists."""
    return [
        np.concatenate([np.asarray(field, dtype) for field in parts])
        for dtype, parts in encode_group([0, 0, 0, 0], [1, 2, 3], samples, [0.0] * SAMPLES)
    ]


@pytest.mark.parametrize("native", [False, True], ids=["by_numpy", "by_lists"])
def test_a_workers_path_from_answer_to_extent(
    benchmark: Any, native: bool, answers: list[dict[str, Any]], ring: Ring
) -> None:
    """With all that the worker does between: the generator's lists, the samples, eleven fields."""
    benchmark.group = f"a worker's whole path from answer to extent, {SAMPLES} samples x {TOKENS} tokens"

    def publish(claim: _native.Claim) -> None:
        samples = [rolled(answer, native) for answer in answers]
        fields = encode_group([0, 0, 0, 0], [1, 2, 3], samples, [0.0] * SAMPLES) if native else through_numpy(samples)
        assert ring.producer.publish(claim, fields)

    benchmark.pedantic(publish, setup=ring.claim, rounds=30, warmup_rounds=3)
    lease = ring.consumer.take()
    assert lease is not None
    want = by_numpy(answers)
    assert np.array_equal(lease.field(6, "<i4"), want[0])
    assert np.array_equal(lease.field(7, "<f4"), want[1])
    assert np.array_equal(lease.field(8, "|u1"), want[2])
