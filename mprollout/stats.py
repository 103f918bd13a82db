"""The run's numbers: how the trainer's side writes them for monitors, and how both read them. Nothing here disturbs the run.

    attendant --tell_monitors--> global words \
    workers ---------------------> their words -+-- engine_stats (EngineStats), monitor.RunView (mprollout top)
    live table (read only) --------------------/

Invariant: each word has one writer (`ring` names it), so a reader may find two words of different moments, never a torn one.
"""

from __future__ import annotations

import array
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from mprollout import _native
from mprollout.ledger import Reason
from mprollout.messages import WorkerState
from mprollout.ring import (
    DELIVERED,
    DISCARDED,
    ENDED_BY,
    ISSUED,
    LAGS,
    REWARD_MEANS,
    WAITED_NS,
    GlobalWord,
    WorkerWord,
)

if TYPE_CHECKING:
    from mprollout.attendant import Attendant
    from mprollout.taker import Taker
    from mprollout.waiting import Waits

REJECTED = "rejected"
"""Stands for a filter's own reasons, whose names a monitor does not know."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, now. Counts are of all its incarnations."""

    worker: int
    pid: int
    state: str
    """starting | syncing | ready | evaluating | asleep | restarting | lost"""
    restarts: int
    running_samples: int
    peak_running_samples: int
    rewarding_samples: int
    tokens_generated: int
    samples_finished: int
    evaluated_tokens: int
    """For evaluations; not among `tokens_generated`."""
    evaluated_samples: int
    groups_published: int
    retried: int
    version: int
    start_s: float
    update_s: tuple[float, float]
    """Beginning and end of its last weight update, on the clock of `time.monotonic`; the end is earlier while one is under way."""


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket that is being made."""

    ticket: int
    attempt: int
    worker: int
    since_s: float
    """Since its worker claimed it, all attempts together."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine, now. Counts are since its start; `outcomes` since the loaded state's beginning."""

    policy_version: int
    updates: int
    admitted: int
    taken: int
    live: int
    pending: int
    held: int
    """Ingested by the taker and waiting for their turn."""
    running_samples: int
    tokens_generated: int
    retried: int
    outcomes: dict[str, int]
    """Resolved tickets: `taken`, `filtered:<reason>`, `failed:<reason>`."""
    lags: dict[int, int]
    """Groups taken, by lag."""
    groups_masked: int
    groups_recycled: int
    lengths_issued: dict[int, int]
    """Training samples whose generation finished, by their length in tokens: `n` counts those of n to 2n - 1 (1: also the empty ones)."""
    lengths_delivered: dict[int, int]
    """The same of the groups taken."""
    tokens_delivered: int
    discarded: dict[str, int]
    """Tokens sampled and never delivered: `recycled` with their group, else by the reason for which their attempt failed or their group
    was rejected. What a request that was cancelled midway had made is not known, nor what a dead worker had."""
    reward_last: float
    """Mean reward of the samples in the last batch."""
    reward_mean: float
    """Of all samples taken."""
    waited_s: dict[str, float]
    """Seconds that the trainer waited, by cause (`waiting.Waits`), of all waits but the one under way."""
    waiting_s: float
    """Seconds that the `get` under way has waited; 0: none waits."""
    waiting_for: str
    """What a `get` under way waits for: generation, reward, gate, workers; empty when none is."""
    straggler: Straggler | None
    """Of the tickets being made, the one that was claimed first."""
    progress_s: float
    """Seconds since a worker last finished a sample or an update."""
    workers: list[WorkerStats]

    @property
    def tokens_discarded(self) -> int:
        """All that were sampled and never delivered."""
        return sum(self.discarded.values())


# -- writing --------------------------------------------------------------------------------------------------------------


def tell_monitors(attendant: Attendant, taker: Taker, waits: Waits) -> None:
    """Write the global words. The attendant's thread alone calls it, under the engine's lock."""
    gate, ledger = attendant.admission.gate, attendant.admission.ledger
    numbers = {
        GlobalWord.POLICY_VERSION: taker.policy_version,
        GlobalWord.UPDATES: gate.updates,
        GlobalWord.ADMITTED: gate.admitted,
        GlobalWord.TAKEN: gate.taken,
        GlobalWord.ENDED: gate.ended,
        GlobalWord.LIVE: gate.live,
        GlobalWord.HELD: taker.consumer.held_count,
        GlobalWord.HIGHEST_LAG: max(taker.lags, default=0),
        GlobalWord.GROUPS_MASKED: taker.groups_masked,
        GlobalWord.GROUPS_RECYCLED: taker.groups_recycled,
        GlobalWord.TOKENS_DISCARDED: taker.tokens_discarded,
        GlobalWord.WAITING_SINCE_NS: waits.since_ns or 0,
        GlobalWord.TOKENS_DELIVERED: taker.tokens_delivered,
    }
    words = attendant.segment.global_words
    for word, number in numbers.items():
        words[word] = number
    lags = [0] * len(LAGS)
    for lag, count in taker.lags.items():
        lags[min(lag, len(LAGS) - 1)] += count
    ended = [0] * len(ENDED_BY)
    for outcome, count in ledger.counts.items():
        if outcome != "taken":
            ended[_code(outcome.partition(":")[2])] += count
    means = struct.unpack("=2q", struct.pack("=2d", taker.reward_last, _mean_reward(taker)))
    for block, values in (
        (LAGS, lags),
        (DELIVERED, taker.lengths.tolist()),
        (ENDED_BY, ended),
        (WAITED_NS, waits.ns.values()),
        (REWARD_MEANS, means),
    ):
        words[block.start : block.stop] = memoryview(array.array("q", values))


def _code(reason: str) -> int:
    return Reason[reason.upper()] if reason.upper() in Reason.__members__ else 0


def _mean_reward(taker: Taker) -> float:
    return taker.reward_sum / max(1, taker.samples_taken)


# -- reading --------------------------------------------------------------------------------------------------------------


def engine_stats(attendant: Attendant, taker: Taker, waits: Waits) -> EngineStats:
    """What `RolloutEngine.stats` returns; under the engine's lock."""
    segment, gate = attendant.segment, attendant.admission.gate
    taker.count()
    waits.split(attendant.admission.admitted_ns)
    workers = worker_stats(segment, attendant.states)
    since_ns = waits.since_ns
    return EngineStats(
        policy_version=taker.policy_version,
        updates=gate.updates,
        admitted=gate.admitted,
        taken=gate.taken,
        live=gate.live,
        pending=segment.pending(),
        held=taker.consumer.held_count,
        running_samples=sum(w.running_samples for w in workers),
        tokens_generated=sum(w.tokens_generated for w in workers),
        retried=sum(w.retried for w in workers),
        outcomes=dict(attendant.admission.ledger.counts),
        lags=dict(taker.lags),
        groups_masked=taker.groups_masked,
        groups_recycled=taker.groups_recycled,
        lengths_issued=lengths_issued(segment),
        lengths_delivered=by_length(taker.lengths.tolist()),
        tokens_delivered=taker.tokens_delivered,
        discarded=discarded(segment, taker.tokens_discarded),
        reward_last=taker.reward_last,
        reward_mean=_mean_reward(taker),
        waited_s={cause: ns / 1e9 for cause, ns in waits.ns.items()},
        waiting_s=seconds_since(since_ns) if since_ns is not None else 0.0,
        waiting_for=waiting_cause(workers, gate.live) if since_ns is not None else "",
        straggler=straggler(segment),
        progress_s=progress_s(segment),
        workers=workers,
    )


def worker_stats(segment: _native.Segment, states: dict[int, WorkerState]) -> list[WorkerStats]:
    """One entry a worker."""
    found = []
    for index in range(segment.workers):
        words, state = segment.worker_words(index), states.get(index)
        found.append(
            WorkerStats(
                worker=index,
                pid=words[WorkerWord.PID],
                state=state.state if state else "starting",
                restarts=words[WorkerWord.RESTARTS],
                running_samples=words[WorkerWord.RUNNING_SAMPLES],
                peak_running_samples=words[WorkerWord.PEAK_RUNNING_SAMPLES],
                rewarding_samples=words[WorkerWord.REWARDING_SAMPLES],
                tokens_generated=words[WorkerWord.TOKENS_GENERATED],
                samples_finished=words[WorkerWord.SAMPLES_FINISHED],
                evaluated_tokens=words[WorkerWord.EVALUATED_TOKENS],
                evaluated_samples=words[WorkerWord.EVALUATED_SAMPLES],
                groups_published=words[WorkerWord.GROUPS_PUBLISHED],
                retried=words[WorkerWord.ATTEMPTS_RETRIED],
                version=words[WorkerWord.VERSION],
                start_s=state.start_s if state else 0.0,
                update_s=(words[WorkerWord.UPDATE_BEGAN_NS] / 1e9, words[WorkerWord.UPDATE_ENDED_NS] / 1e9),
            )
        )
    return found


def describe_workers(segment: _native.Segment, states: dict[int, WorkerState]) -> str:
    """One clause a worker, for errors."""
    return "; ".join(
        f"worker {w.worker} (pid {w.pid}) {w.state}, {w.running_samples} samples running, {w.rewarding_samples} being scored"
        for w in worker_stats(segment, states)
    )


def waiting_cause(workers: Sequence[WorkerStats], live: int) -> str:
    """What a taker seems to wait for, as long as its last group is not known (`waiting.Waits` knows it afterwards)."""
    if any(w.running_samples for w in workers):
        return "generation"
    if any(w.rewarding_samples for w in workers):
        return "reward"
    return "workers" if live else "gate"


def seconds_since(moment_ns: int) -> float:
    """Of CLOCK_MONOTONIC."""
    return max(0, time.monotonic_ns() - moment_ns) / 1e9


def progress_s(segment: _native.Segment) -> float:
    """Seconds since a worker last finished a sample or an update."""
    return seconds_since(max(segment.worker_words(i)[WorkerWord.PROGRESS_NS] for i in range(segment.workers)))


def straggler(segment: _native.Segment) -> Straggler | None:
    """The running ticket that was claimed first. The workers name theirs, the live table proves which of them still run."""
    claimed = []
    for index in range(segment.workers):
        words = segment.worker_words(index)
        if words[WorkerWord.RUNNING_GROUPS]:
            claimed.append((words[WorkerWord.OLDEST_CLAIM_NS], words[WorkerWord.OLDEST_TICKET], index))
    running = {(row[0], row[4]): row[2] for row in segment.table() if row[1] == _native.RUNNING} if claimed else {}
    for since_ns, ticket, worker in sorted(claimed):
        if (attempt := running.get((ticket, worker))) is not None:
            return Straggler(ticket=ticket, attempt=attempt, worker=worker, since_s=seconds_since(since_ns))
    return None


def by_length(counts: Sequence[int]) -> dict[int, int]:
    """Counts by `length_bucket`, as counts by the shortest length of each bucket; those of 0 left out."""
    return {1 << i: count for i, count in enumerate(counts) if count}


def by_reason(counts: Sequence[int]) -> dict[str, int]:
    """Counts by reason code, as counts by name; those of 0 left out."""
    return {Reason(i).name.lower() if i else REJECTED: count for i, count in enumerate(counts) if count}


def _sums(segment: _native.Segment, block: range) -> list[int]:
    each = [segment.worker_words(i)[block.start : block.stop].tolist() for i in range(segment.workers)]
    return [sum(counts) for counts in zip(*each, strict=True)]


def lengths_issued(segment: _native.Segment) -> dict[int, int]:
    """See `EngineStats`."""
    return by_length(_sums(segment, ISSUED))


def discarded(segment: _native.Segment, recycled: int) -> dict[str, int]:
    """See `EngineStats`; `recycled`: tokens of recycled groups."""
    return {**({"recycled": recycled} if recycled else {}), **by_reason(_sums(segment, DISCARDED))}
