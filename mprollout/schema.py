"""What a group in the ring consists of: the fields, in the order of the native ones. It stands in the segment, too.

Fields of the user's own (values, routed experts, images as tensors) come behind these and travel the same way:
`RingConfig.extra_fields` declares them, a rollout function fills them (`session.sample.extra[name] = array`), `Group.field` reads them.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Literal, NamedTuple

import msgspec


class Field(msgspec.Struct, frozen=True):
    """One array of a group: as many items as `per` says, one after another over its samples, each of `shape`."""

    name: str
    dtype: str
    """A numpy dtype string of a number, little endian: `<f4`, `|u1`, ..."""
    per: Literal["group", "prompt_token", "sample", "token", "span", "item"]
    """`item`: as many as each sample has of them, none to `max_items` (images, tool calls); how many each has is the field `<name>.counts`."""
    shape: tuple[int, ...] = ()
    max_items: int = 0
    """Of one sample, where the field is per item."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        return int(self.dtype[2:]) * math.prod(self.shape)

    def misfit(self) -> str:
        """Why it cannot be an extra field; empty if it can."""
        if not re.fullmatch(r"\|[biu]1|<[iuf][248]|<c(8|16)", self.dtype):
            return f"dtype {self.dtype!r} is none of a number, little endian (`<f4`, `|u1`, ...)"
        if self.per not in ("sample", "token", "item"):
            return f"an extra field is per 'sample', 'token' or 'item'; got {self.per!r}"
        if (self.per == "item") != (self.max_items >= 1):
            return f"{self.name!r}: max_items >= 1 goes with per='item', and with nothing else; got {self.max_items} and {self.per!r}"
        if not all(n >= 1 for n in self.shape):
            return f"shape {self.shape} has a dimension below 1"
        return f"{self.name!r} is a field already" if self.name in index(()) else ""


class Meta(NamedTuple):
    """A group's `meta`. Moments are of CLOCK_MONOTONIC, in ns (in a simulation: of its clock)."""

    row: int
    version: int
    """The worker's policy version when the group was done."""
    deaths: int
    """Workers that died on the ticket."""
    claimed_ns: int
    """Its worker claimed it, for the last time."""
    started_ns: int
    """The sample that ended last had its place."""
    generated_ns: int
    """That sample was generated, and with it all."""
    published_ns: int
    """It was scored, filtered, and about to be published."""
    excess_ns: int
    """How much longer that sample took to generate than the longest of its siblings; of a group of one: how long it took."""
    oldest_version: int
    """The lowest version of its tokens; -1: it has none."""


class Sampled(NamedTuple):
    """How a group's tokens were sampled: `SamplingConfig`, or its row's own settings. A trainer that recomputes logprobs needs them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: float = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


SCHEMA: tuple[Field, ...] = (
    Field("meta", "<i8", "group"),  # `Meta`
    Field("prompt_ids", "<i4", "prompt_token"),
    Field("lengths", "<i4", "sample"),
    Field("rewards", "<f4", "sample"),
    Field("finish_reasons", "|u1", "sample"),  # index into FINISH_REASONS
    Field("span_counts", "<i4", "sample"),
    Field("token_ids", "<i4", "token"),
    Field("logprobs", "<f4", "token"),
    Field("loss_mask", "|u1", "token"),
    Field("span_versions", "<i8", "span"),
    Field("span_ends", "<i4", "span"),  # a span starts where the last one of its sample ended
    Field("span_old_kv", "|u1", "span"),  # 1: on key-value entries of older weights
    Field("sampled", "<f8", "group"),  # `Sampled`
)


COUNTS = ".counts"


@functools.cache
def stored(extra: tuple[Field, ...]) -> tuple[Field, ...]:
    """Extra fields as they stand in the segment: behind one per item, how many items each sample has."""
    return tuple(
        field
        for given in extra
        for field in ((given, Field(given.name + COUNTS, "<i4", "sample")) if given.per == "item" else (given,))
    )


@functools.cache
def index(extra: tuple[Field, ...]) -> dict[str, tuple[int, Field]]:
    """The native index and the field by name."""
    return {field.name: (i, field) for i, field in enumerate(SCHEMA + extra)}


@functools.cache
def schema_bytes(extra: tuple[Field, ...] = ()) -> bytes:
    """The schema as it stands in the segment (JSON): a reader needs no side channel."""
    return msgspec.json.encode(SCHEMA + extra)


@functools.cache
def extra_of(schema: bytes) -> tuple[Field, ...]:
    """The extra fields of a segment's schema."""
    return msgspec.json.decode(schema, type=tuple[Field, ...])[len(SCHEMA) :]
