"""Sizes of the segment, its memory limit, its statistics words, and how a group is written into it.

    EngineConfig --plan--> Plan --Segment.create (keeper)--> memfd        RolledSample[] --encode_group--> lists --Producer.publish--> extent

Invariant: a `Plan` that exists can deliver: every arena holds worst-case extents for what the order may keep in it, twice over, since
first-fit can leave holes of up to the size of its neighbours (k live extents of at most G bytes block at most 2k + 1 places of G bytes).
`plan` guarantees it by arithmetic and `check_memory` refuses what the cgroup or the machine cannot hold, before anything is made.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mprollout.config import EngineConfig, SamplingConfig, SGLangConfig
from mprollout.errors import ConfigError, MemoryBudgetError
from mprollout.gate import is_strict
from mprollout.generator import FINISH_REASONS, VersionSpan
from mprollout.limits import memory_limit
from mprollout.schema import COUNTS, SCHEMA, Field, Meta, Sampled, schema_bytes

SUSPECT_DEATHS = 2  # a ticket that saw so many workers die runs alone
SPANS_PER_SAMPLE = 64  # version spans that the worst-case extent has room for


class WorkerWord(enum.IntEnum):
    """Statistics words of one worker (of 64); the writer is the worker unless said otherwise."""

    PID = 0  # keeper
    RESTARTS = 1  # keeper
    RUNNING_SAMPLES = 2
    TOKENS_GENERATED = 3  # of training samples whose generation finished
    SAMPLES_FINISHED = 4  # of training
    GROUPS_PUBLISHED = 5
    ATTEMPTS_RETRIED = 6
    VERSION = 7
    HEARTBEAT_NS = 8  # CLOCK_MONOTONIC, each turn of the watch task
    PROGRESS_NS = 9  # CLOCK_MONOTONIC of the last finished sample or update, or of the start of work after idleness
    RUNNING_GROUPS = 10
    REWARDING_SAMPLES = 11
    PEAK_RUNNING_SAMPLES = 12
    STARVED_FOR_ROOM = 13  # 1 while a READY ticket stands and this arena has no room for it
    OLDEST_TICKET = 14  # of the running ones, the one claimed first; means nothing while RUNNING_GROUPS is 0
    OLDEST_CLAIM_NS = 15  # CLOCK_MONOTONIC
    # 16 to 46: ISSUED and DISCARDED
    EVALUATED_SAMPLES = 47  # generated for evaluations
    EVALUATED_TOKENS = 48
    UPDATE_PHASE = 49  # 1 + its index in UPDATE_PHASES while an update is under way, else 0
    UPDATE_BEGAN_NS = 50  # CLOCK_MONOTONIC of the last update's first phase, and of its end
    UPDATE_ENDED_NS = 51


ISSUED = range(16, 34)
"""Worker words: training samples whose generation finished, by `length_bucket`; writer: the worker."""
DISCARDED = range(34, 47)
"""Worker words: tokens sampled and never published, by the `Reason` of it, 0 being a filter's own reasons; writer: the worker.
What an attempt lost that was published all the same (a sample that an update aborted, one that a group goes without) counts as ABORT."""


class GlobalWord(enum.IntEnum):
    """Statistics words of the trainer's side (of 64), for monitors; the writer is the attendant's thread."""

    POLICY_VERSION = 0
    UPDATES = 1
    ADMITTED = 2
    TAKEN = 3
    ENDED = 4  # otherwise than taken, those sent back included
    LIVE = 5
    HELD = 6
    HIGHEST_LAG = 7
    GROUPS_MASKED = 8
    GROUPS_RECYCLED = 9
    TOKENS_DISCARDED = 10  # with groups that were recycled; workers have their own
    WAITING_SINCE_NS = 11  # CLOCK_MONOTONIC of the `get` under way; 0: none
    TOKENS_DELIVERED = 12


LAGS = range(13, 22)
"""Global words: groups taken by lag; the last: of that lag or a higher one. Writer: the attendant's thread, as of all that follow."""
DELIVERED = range(22, 40)
"""Global words: samples of taken groups, by `length_bucket`."""
ENDED_BY = range(40, 53)
"""Global words: tickets ended FILTERED or FAILED, by `Reason` (each belongs to one of the two states), 0 being a filter's own reasons."""
WAITED_NS = range(53, 59)
"""Global words: the trainer's wait by `waiting.CAUSES`, in ns."""
REWARD_MEANS = range(59, 61)
"""Global words, the bits of a float64: mean reward of the samples in the last batch; of all samples taken."""


def length_bucket(tokens: int) -> int:
    """Bucket i has the completions of 2^i to 2^(i+1) - 1 tokens; the first also those of none, the last all longer ones."""
    return min(max(tokens.bit_length() - 1, 0), len(ISSUED) - 1)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `Segment.create` is asked for; sizes in bytes."""

    workers: int
    entries: int
    cells: int
    descriptors: int
    arena_bytes: int
    max_group_bytes: int
    max_prompt_bytes: int
    max_live_groups: int
    spare: int
    """Entries for tickets that an attached trainer has to admit before those that its predecessor left."""
    extra_fields: tuple[Field, ...] = ()


def _context_length(config: EngineConfig) -> int | None:
    """The context length that the model folder states, before any engine is started."""
    if not isinstance(config.generator, SGLangConfig):
        return config.generator.context_length
    try:
        stated = json.loads((Path(config.generator.model) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    value = stated.get("max_position_embeddings")
    return value if isinstance(value, int) else None


def plan(config: EngineConfig) -> Plan:
    """Compute the segment's sizes from the settings.

    Raises:
        ConfigError: an explicit size cannot deliver; names the numbers.
    """
    sampling, gate, workers = config.sampling, config.gate, len(config.workers.devices)
    batch = gate.groups_per_update or 1
    if gate.max_live_groups is not None:
        live = gate.max_live_groups
    elif is_strict(gate):
        live = ((gate.max_lag or 0) + 1) * batch
    else:
        live = max(2 * batch, 2 * workers * -(-config.workers.max_running_samples // sampling.group_size))
    context = _context_length(config) or 8192
    prompt_tokens = config.source.max_prompt_tokens or context
    # Eight bytes a token leave room for long words, an answer and a few more fields.
    max_prompt_bytes = config.ring.max_prompt_bytes or max(65536, 8 * prompt_tokens)
    max_group_bytes = config.ring.max_group_bytes or _worst_group_bytes(
        sampling, prompt_tokens, config.ring.stored_fields
    )
    # In ticket order one worker may hold all live groups while another is lost for good; in publish order what is published can
    # always be taken, so a worker needs its share and room for a batch. A batch stays leased while the next is made.
    spare = batch if config.orphan_timeout_s and is_strict(gate) else 0
    kept = live + spare if is_strict(gate) else max(-(-live // workers), batch)
    extents = 2 * (kept + batch) + 1
    arena_bytes = config.ring.arena_bytes or _round_up(extents * max_group_bytes, 4096)
    if arena_bytes < 2 * max_group_bytes:
        raise ConfigError(
            f"RingConfig.arena_bytes={arena_bytes:,} must hold at least two groups of max_group_bytes={max_group_bytes:,} "
            f"(group_size={sampling.group_size}, max_new_tokens={sampling.max_new_tokens}, prompts up to {prompt_tokens:,} tokens)"
        )
    total = workers * (arena_bytes // max_group_bytes)
    if total < 2 * batch:
        raise ConfigError(
            f"RingConfig.arena_bytes={arena_bytes:,} x {workers} workers hold {total} groups of {max_group_bytes:,} bytes; "
            f"two batches of groups_per_update={batch} are needed (one leased while the next is made)"
        )
    return Plan(
        workers=workers,
        entries=live + spare,
        cells=max(2, 1 << (live + spare - 1).bit_length()),
        descriptors=live + spare + 4 * batch + 16,
        arena_bytes=arena_bytes,
        max_group_bytes=max_group_bytes,
        max_prompt_bytes=_round_up(max_prompt_bytes, 64),
        max_live_groups=live,
        extra_fields=config.ring.stored_fields,
        spare=spare,
    )


def doubts(config: EngineConfig, plan: Plan) -> list[str]:
    """What of the settings works and is hardly meant, with the numbers."""
    workers, fault = config.workers, config.fault
    found = []
    places, samples = (
        len(workers.devices) * workers.max_running_samples,
        plan.max_live_groups * config.sampling.group_size,
    )
    if samples < places:
        found.append(
            f"{plan.max_live_groups} live groups of {config.sampling.group_size} samples cannot keep {len(workers.devices)} workers x "
            f"{workers.max_running_samples} sample places busy: {places - samples} of {places} places stay empty; raise max_live_groups, "
            "max_lag or groups_per_update, or lower max_running_samples"
        )
    if (batch := config.gate.groups_per_update or 0) > plan.max_live_groups:
        found.append(
            f"GateConfig.max_live_groups={plan.max_live_groups} is below groups_per_update={batch}: a get of all that one update takes "
            "can never be met; raise it, or take several smaller batches an update"
        )
    found += [
        f"FaultConfig.{name}={limit_s:g} is longer than WorkerConfig.progress_timeout_s={workers.progress_timeout_s:g}: a worker "
        "that has nothing else to finish is killed before that deadline is over; raise the latter"
        for name in ("episode_timeout_s", "sample_timeout_s", "group_timeout_s")
        if (limit_s := getattr(fault, name)) is not None and limit_s > workers.progress_timeout_s
    ]
    return found


def segment_arguments(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of `Segment.create` and `Segment.size_of`."""
    sizes: dict[str, Any] = msgspec.structs.asdict(plan)
    del sizes["max_live_groups"], sizes["spare"]
    del sizes["extra_fields"]
    return {**sizes, "schema": schema_bytes(plan.extra_fields)}


def segment_bytes(plan: Plan) -> int:
    """Size of the segment in bytes.

    Raises:
        ConfigError: a size is outside of what the layout can address.
    """
    from mprollout import _native

    try:
        return _native.Segment.size_of(**segment_arguments(plan))
    except ValueError as error:
        raise ConfigError(f"the shared memory cannot be laid out: {error}") from error


def check_memory(nbytes: int, plan: Plan, root: Path = Path("/")) -> None:
    """Refuse a segment that the limit cannot hold, before it is made (a SIGBUS or an OOM kill later is no error message).

    Raises:
        MemoryBudgetError: names size, limit and remedy.
    """
    left, why = memory_limit(root)
    if nbytes > left:
        raise MemoryBudgetError(
            f"the shared memory needs {nbytes:,} bytes ({plan.workers} arenas of {plan.arena_bytes:,}, {plan.entries} prompts of "
            f"{plan.max_prompt_bytes:,}) but only {left:,} are left ({why}); lower max_live_groups, max_new_tokens or group_size, "
            "set RingConfig.arena_bytes, or raise the limit"
        )


def encode_group(
    meta: Sequence[int],
    prompt_ids: Sequence[int],
    samples: Sequence[RolledSample],
    rewards: Sequence[float],
    extra: Sequence[Field] = (),
    sampled: Sequence[float] = Sampled(),
) -> list[tuple[str, list[Any]]]:
    """The fields of one group in the order of the schema: lists, which `Producer.publish` writes into the extent in one pass.

    Raises:
        ValueError: token ids, logprobs, loss masks and extra fields of a sample differ in length: never padded.
    """
    spans = [span for sample in samples for span in sample.versions]
    for i, sample in enumerate(samples):
        if not len(sample.token_ids) == len(sample.logprobs) == len(sample.loss_mask):
            raise ValueError(
                f"sample {i}: {len(sample.token_ids)} token ids, {len(sample.logprobs)} logprobs, {len(sample.loss_mask)} mask entries"
            )
    parts: dict[str, list[Any]] = {
        "meta": [meta],
        "prompt_ids": [prompt_ids],
        "lengths": [[len(s.token_ids) for s in samples]],
        "rewards": [rewards],
        "finish_reasons": [[FINISH_REASONS.index(s.finish_reason) for s in samples]],
        "span_counts": [[len(s.versions) for s in samples]],
        "token_ids": [s.token_ids for s in samples],
        "logprobs": [s.logprobs for s in samples],
        "loss_mask": [s.loss_mask for s in samples],
        "span_versions": [[span.version for span in spans]],
        "span_ends": [[span.end for span in spans]],
        "span_old_kv": [[span.old_kv for span in spans]],
        "sampled": [sampled],
    }
    return [(field.dtype, parts[field.name]) for field in SCHEMA] + [
        ("|u1", [_extra_bytes(sample, i, field) for i, sample in enumerate(samples)]) for field in extra
    ]


def _extra_bytes(sample: RolledSample, i: int, field: Field) -> Any:
    import numpy as np

    items = sample.extra.get(field.name.removesuffix(COUNTS))
    if items is None:
        raise ValueError(f"sample {i}: the rollout function set no extra[{field.name!r}]")
    if field.name.endswith(COUNTS):
        return np.array([len(items)], field.dtype).view("|u1")
    given = np.reshape(items, (-1, *field.shape)) if field.per == "item" and not len(items) else items
    count = {"token": len(sample.token_ids), "item": len(items)}.get(field.per)
    want = field.shape if count is None else (count, *field.shape)
    if np.shape(given) != want:
        raise ValueError(f"sample {i}: extra[{field.name!r}] has shape {np.shape(given)}, expected {want}")
    if field.per == "item" and len(items) > field.max_items:
        raise ValueError(
            f"sample {i}: extra[{field.name!r}] has {len(items)} items, at most max_items={field.max_items}"
        )
    return np.ascontiguousarray(given, field.dtype).reshape(-1).view("|u1")


class RolledSample(msgspec.Struct, kw_only=True):
    """A finished completion before it is written: what a rollout session made."""

    token_ids: list[int]
    logprobs: list[float]
    loss_mask: bytearray
    """One byte a token: 1 = trained on."""
    finish_reason: Any
    versions: list[VersionSpan]
    extra: dict[str, Any] = {}
    """Arrays of `RingConfig.extra_fields` by name: [num_tokens, *shape] per token, [*shape] per sample, [any number, *shape] per item."""

    def extend(self, token_ids: list[int], logprobs: list[float], mask: bytes, versions: list[VersionSpan]) -> None:
        """Add tokens behind those that are there; the spans count from the first one added."""
        base = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.loss_mask += mask
        for span in versions:
            last = self.versions[-1] if self.versions else None
            if last is not None and (last.version, last.old_kv) == (span.version, span.old_kv):
                self.versions[-1] = last._replace(end=base + span.end)
            else:
                self.versions.append(span._replace(start=base + span.start, end=base + span.end))

    def mask_all(self) -> None:
        """None of its tokens so far is trained on."""
        self.loss_mask[:] = bytes(len(self.loss_mask))

    def cut(self, n: int) -> None:
        """Keep the first n tokens."""
        del self.token_ids[n:], self.logprobs[n:], self.loss_mask[n:]
        self.versions = [span._replace(end=min(span.end, n)) for span in self.versions if span.start < n]


def _worst_group_bytes(sampling: SamplingConfig, prompt_tokens: int, extra: tuple[Field, ...]) -> int:
    from mprollout import _native

    counts = {
        "group": max(len(Meta._fields), len(Sampled._fields)),
        "prompt_token": prompt_tokens,
        "sample": sampling.group_size,
        "token": sampling.group_size * sampling.max_new_tokens,
        "span": sampling.group_size * SPANS_PER_SAMPLE,
    }
    return _native.group_bytes(
        [
            (sampling.group_size * field.max_items if field.per == "item" else counts[field.per]) * field.item_bytes
            for field in SCHEMA + extra
        ]
    )


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
