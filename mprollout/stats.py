"""What `RolloutEngine.stats` returns: read from shared memory, without disturbing the run."""

from __future__ import annotations

import msgspec

from mprollout import _native
from mprollout.messages import WorkerState
from mprollout.ring import WorkerWord


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, now. Counts are of all its incarnations."""

    worker: int
    pid: int
    state: str
    """starting | syncing | ready | restarting | lost"""
    restarts: int
    running_samples: int
    peak_running_samples: int
    rewarding_samples: int
    tokens_generated: int
    samples_finished: int
    groups_published: int
    retried: int
    version: int
    start_s: float


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
    tokens_discarded: int
    """Sampled, and discarded with a group that was recycled."""
    waiting_for: str
    """What a `get` under way waits for: generation, reward, gate, workers; empty when none is."""
    workers: list[WorkerStats]


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
                groups_published=words[WorkerWord.GROUPS_PUBLISHED],
                retried=words[WorkerWord.ATTEMPTS_RETRIED],
                version=words[WorkerWord.VERSION],
                start_s=state.start_s if state else 0.0,
            )
        )
    return found


def describe_workers(segment: _native.Segment, states: dict[int, WorkerState]) -> str:
    """One clause a worker, for errors."""
    return "; ".join(
        f"worker {w.worker} (pid {w.pid}) {w.state}, {w.running_samples} samples running, {w.rewarding_samples} being scored"
        for w in worker_stats(segment, states)
    )


def waiting_cause(segment: _native.Segment, states: dict[int, WorkerState], live: int) -> str:
    """What a taker waits for when too little is pending."""
    workers = worker_stats(segment, states)
    if any(w.running_samples for w in workers):
        return "generation"
    if any(w.rewarding_samples for w in workers):
        return "reward"
    return "workers" if live else "gate"
