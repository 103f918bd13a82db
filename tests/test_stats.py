"""The statistics: words in shared memory with one meaning each; tokens and lengths add up."""

from __future__ import annotations

import collections
from typing import Any

import engines
import pytest
from played import played

import mprollout as mp
from mprollout import ring, stats
from mprollout.ledger import Reason
from mprollout.ring import GlobalWord, WorkerWord, length_bucket
from mprollout.simulation import SimulationReport, TrainerModel, simulate
from mprollout.waiting import CAUSES

pytestmark = pytest.mark.timeout(60)
WORDS = 64  # kStatWords of native/segment.h


def test_no_word_has_two_meanings_and_every_reason_has_one() -> None:
    worker = [*WorkerWord, *ring.ISSUED, *ring.DISCARDED]
    total = [*GlobalWord, *ring.LAGS, *ring.DELIVERED, *ring.ENDED_BY, *ring.WAITED_NS, *ring.REWARD_MEANS]
    for words in (worker, total):
        assert len(set(words)) == len(words) and max(words) < WORDS
    assert len(ring.ISSUED) == len(ring.DELIVERED)
    assert max(Reason) < len(ring.DISCARDED) == len(ring.ENDED_BY)
    assert len(ring.WAITED_NS) == len(CAUSES)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 7, 8, 1000, 131_071, 131_072, 10**9])
def test_a_length_counts_in_the_bucket_that_holds_it(tokens: int) -> None:
    (shortest,) = stats.by_length([int(i == length_bucket(tokens)) for i in range(len(ring.ISSUED))])
    assert shortest <= max(tokens, 1) and (max(tokens, 1) < 2 * shortest or shortest == 2**17)


def run(rows: int = 32, **changes: Any) -> SimulationReport:
    """All rows, taken to the last."""
    parts: dict[str, Any] = {
        "generator": mp.SimulatedConfig(mean_tokens=20, tokens_per_s=10),
        "sampling": mp.SamplingConfig(group_size=4, max_new_tokens=200),
        "reward": mp.RewardConfig("exact"),
        "workers": mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16),
        "gate": mp.GateConfig(groups_per_update=4, max_lag=1),
        "fault": mp.FaultConfig(max_attempts=20),
    }
    config = engines.config(rows=rows, **(parts | changes))
    return simulate(config, TrainerModel(groups_per_step=4, step_s=1.0, steps=rows // 4))


@pytest.mark.parametrize(
    ("faults", "limits", "lost_to"),
    [
        ({}, {}, set()),
        ({"abort": 0.05}, {}, {"abort"}),
        ({"exception": 0.05}, {}, {"generation"}),
        ({"swallow": 0.05}, {"group_timeout_s": 60.0}, {"timeout"}),
        ({"abort": 0.05}, {"on_sample_failure": "shrink"}, {"abort"}),
    ],
    ids=["none", "abort", "exception", "timeout", "shrink"],
)
def test_every_token_that_an_engine_returned_was_delivered_or_counted_as_discarded(
    faults: dict[str, float], limits: dict[str, Any], lost_to: set[str]
) -> None:
    generator = mp.SimulatedConfig(mean_tokens=20, tokens_per_s=10, faults=faults)
    report = run(generator=generator, fault=mp.FaultConfig(max_attempts=20, **limits))
    assert report.outcomes == {"taken": 32}
    assert set(report.discarded) == lost_to
    assert sum(report.issued_lengths) == sum(report.delivered_lengths) + report.tokens_discarded


def test_what_an_update_aborts_is_discarded_and_no_failure() -> None:
    report = run(weights=mp.WeightsConfig(pause="abort"))
    assert set(report.discarded) == {"abort"} and report.failures == []
    assert sum(report.issued_lengths) == sum(report.delivered_lengths) + report.tokens_discarded


def reject_row_2(samples: list[mp.RewardInput], rewards: list[float]) -> str | None:
    return "dull" if samples[0].prompt.row == 2 else None


def test_the_engine_counts_by_length_by_lag_and_by_reason_and_means_its_rewards() -> None:
    """Two tickets end by a filter's own reasons, one by its reward, five are taken."""
    with played(filter=mp.FilterConfig(function=reject_row_2, reasons=["dull", "odd"])) as on:
        for state, reason in ((5, 64), (5, 65), (6, Reason.REWARD)):
            on.producer.end(on.claim(), state, reason)
        on.publish(5)
        on.engine.get(5, timeout=10).release()
        seen = on.engine.stats()
        assert seen.lengths_delivered == {1: 5} and seen.tokens_delivered == 5
        assert seen.outcomes == {"taken": 5, "filtered:dull": 1, "filtered:odd": 1, "failed:reward": 1}
        assert (seen.reward_last, seen.reward_mean) == (1.0, 1.0)
        words = on.keeper.segment.global_words
        engines.until(lambda: words[GlobalWord.TAKEN] == 5, "the attendant has told")
        block = words[ring.ENDED_BY.start : ring.ENDED_BY.stop].tolist()
        assert stats.by_reason(block) == {"rejected": 2, "reward": 1}
        assert words[ring.LAGS.start : ring.LAGS.stop].tolist() == [5, 0, 0, 0, 0, 0, 0, 0, 0]


def test_the_oldest_straggler_is_named_while_the_table_says_that_it_runs() -> None:
    with played() as on:
        words = on.keeper.segment.worker_words(0)
        assert on.engine.stats().straggler is None
        claim = on.claim()
        words[WorkerWord.RUNNING_GROUPS], words[WorkerWord.OLDEST_TICKET] = 1, claim.ticket
        words[WorkerWord.OLDEST_CLAIM_NS] = 1
        claim = on.producer.retry(claim)
        assert claim is not None
        named = on.engine.stats().straggler
        assert named is not None and (named.ticket, named.attempt, named.worker) == (0, 1, 0) and named.since_s > 1
        on.producer.end(claim, 6, Reason.ABORT)
        assert on.engine.stats().straggler is None  # the words are late, the table is not


def test_workers_count_each_length_that_they_finish() -> None:
    with mp.RolloutEngine(
        engines.config(rows=8, sampling=mp.SamplingConfig(group_size=4, max_new_tokens=64))
    ) as engine:
        delivered: collections.Counter[int] = collections.Counter()
        rewards = []
        for _ in range(4):
            with engine.get(2, timeout=20) as batch:
                delivered.update(1 << length_bucket(int(n)) for group in batch for n in group.lengths)
                rewards += [float(group.rewards.mean()) for group in batch]
        seen = engine.stats()
        assert seen.lengths_issued == seen.lengths_delivered == dict(sorted(delivered.items()))
        assert seen.tokens_delivered == seen.tokens_generated
        assert seen.reward_last == pytest.approx(sum(rewards[-2:]) / 2)
        assert seen.reward_mean == pytest.approx(sum(rewards) / 8)
        assert seen.straggler is None and seen.tokens_discarded == 0
        assert sum(seen.waited_s.values()) > 0 and seen.waiting_s == 0.0
