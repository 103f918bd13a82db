"""Public reports about a whole run, in virtual time: what one bad sample, one bad prompt or one update may cost."""

from __future__ import annotations

import asyncio
import collections
from typing import Any

import pytest

import mprollout as mp
from mprollout.batch import Batch
from mprollout.rollout import Session
from mprollout.simulation import TrainerModel, simulate
from mprollout.source import Prompt
from mprollout.taker import Taken, Taker

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*sample places.*")]
STEPS = TrainerModel(groups_per_step=8, step_s=0.5, steps=4)
calls: collections.Counter[tuple[int, int]] = collections.Counter()
"""Of a reward function in this test, by row and sample."""
groups: dict[int, list[set[int]]] = {}
"""Policy versions of each sample, by ticket."""


class Recorder(Taker):
    """Writes down what is taken."""

    def book(self, n: int) -> tuple[Batch, Taken]:
        batch, taken = super().book(n)
        for group in batch:
            groups[group.ticket] = [{span.version for span in sample.versions} for sample in group.samples]
        return batch, taken


@pytest.fixture(autouse=True)
def fresh() -> None:
    calls.clear()
    groups.clear()


def config(rows: int, **changes: Any) -> mp.EngineConfig:
    """Two workers, groups of 8, at most one step ahead."""
    parts: dict[str, Any] = {
        "source": mp.SourceConfig(rows=[{"prompt": f"q{i}", "answer": "x"} for i in range(rows)], epochs=1),
        "generator": mp.SimulatedConfig(mean_tokens=20, tokens_per_s=50),
        "sampling": mp.SamplingConfig(group_size=8, max_new_tokens=100),
        "reward": mp.RewardConfig("exact"),
        "workers": mp.WorkerConfig(devices=["cpu"] * 2, max_running_samples=64),
        "gate": mp.GateConfig(groups_per_update=8, max_lag=1),
    }
    return mp.EngineConfig(**(parts | changes))


async def raises_once(sample: mp.RewardInput) -> float:
    """For sample 5 of row 2, the first time."""
    key = sample.prompt.row, sample.index
    calls[key] += 1
    if key == (2, 5) and calls[key] == 1:
        raise ConnectionError("the judge is away")
    return float(sample.index)


@pytest.mark.parametrize("policy", ["retry", "shrink", "fail"])
def test_one_failed_sample_of_eight_costs_what_its_policy_says(policy: Any) -> None:
    """TRL#7176: the group again, the group without it, or the group; never the worker, never another group."""
    fault = mp.FaultConfig(on_sample_failure=policy)
    report = simulate(config(33, reward=mp.RewardConfig(raises_once), fault=fault), STEPS, taker=Recorder)
    sizes = {ticket: len(samples) for ticket, samples in groups.items()}
    whole = dict.fromkeys(range(33), 8)
    if policy == "fail":
        del whole[2]
        assert sizes == whole
        assert report.outcomes == {"taken": 32, "failed:reward": 1}
        return
    del whole[32]
    assert sizes == whole | {2: 7 if policy == "shrink" else 8}
    assert report.outcomes == {"taken": 32}
    assert calls[2, 5] == (1 if policy == "shrink" else 2)


async def late(sample: mp.RewardInput, times: int) -> float:
    """For sample 1 of row 2, so many times."""
    key = sample.prompt.row, sample.index
    calls[key] += 1
    if key == (2, 1) and calls[key] <= times:
        await asyncio.sleep(1000)
    return float(sample.index)


@pytest.mark.parametrize("times", [1, 2])
def test_one_sample_over_the_reward_deadline_costs_its_own_group_alone(times: int) -> None:
    """slime#1361: tried again, or failed in the end; the batch completes as soon as that is known."""
    reward = mp.RewardConfig(late, kwargs={"times": times}, timeout_s=5)
    report = simulate(config(33, reward=reward, fault=mp.FaultConfig(max_attempts=2)), STEPS)
    if times == 1:
        assert report.tickets == list(range(32))
        assert report.outcomes == {"taken": 32}
    else:
        assert report.tickets == [0, 1, *range(3, 33)]
        assert report.outcomes == {"taken": 32, "failed:timeout": 1}
    assert 5 * times < report.trainer_wait_s[0] < 5 * times + 10
    assert all(count == 1 for (row, _), count in calls.items() if row != 2)


async def good_but_for_two_rows(sample: mp.RewardInput) -> float:
    """All samples of row 3 are equal; row 5 cannot be judged."""
    if sample.prompt.row == 5:
        raise LookupError("row 5 is poison")
    return 0.0 if sample.prompt.row == 3 else float(sample.index)


def test_a_synchronous_step_completes_although_one_group_is_filtered_and_one_fails() -> None:
    """max_lag=0, 8 groups a step, one filtered and one failed for good in the first: each step has 8, of the current weights."""
    changes = {
        "gate": mp.GateConfig(groups_per_update=8, max_lag=0),
        "reward": mp.RewardConfig(good_but_for_two_rows),
        "filter": mp.FilterConfig(zero_spread=True),
    }
    report = simulate(config(34, **changes), STEPS, taker=Recorder)
    assert report.tickets == [0, 1, 2, 4, *range(6, 34)]
    assert report.outcomes == {"taken": 32, "filtered:zero_spread": 1, "failed:reward": 1}
    assert report.lags == [0] * 32
    assert [groups[ticket] for ticket in report.tickets] == [[{i // 8}] * 8 for i in range(32)]


@pytest.mark.parametrize("pause", ["abort", "retract"])
def test_an_aborted_prompt_starts_again_with_its_own_tokens_alone(pause: Any) -> None:
    """slime#2092: no sample holds a token of an aborted try, so each has one policy version; without the abort many have two."""
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=60, sigma=0.3, tokens_per_s=20),
        "gate": mp.GateConfig(max_live_groups=24),
        "weights": mp.WeightsConfig(pause=pause),
        "fault": mp.FaultConfig(max_attempts=1),  # an abort of ours is no failure of the prompt's
    }
    report = simulate(config(64, **changes), TrainerModel(groups_per_step=4, step_s=1.0, steps=16), taker=Recorder)
    assert report.outcomes == {"taken": 64}
    mixed = sum(len(versions) > 1 for samples in groups.values() for versions in samples)
    assert mixed == 0 if pause == "abort" else mixed > 50
    assert len({version for samples in groups.values() for versions in samples for version in versions}) > 3


async def one_straggler(session: Session, prompt: Prompt) -> None:
    """Sample 0 is 20 times as long as its 7 siblings."""
    await session.generate(max_new_tokens=400 if session._request_id.endswith(".0") else 20)


def test_with_a_straggler_in_every_group_the_running_samples_stay_at_the_cap() -> None:
    """A place that a short sample frees is filled at once, by a sample of another group: nobody waits for the straggler of its own."""
    changes = {
        "sampling": mp.SamplingConfig(group_size=8, max_new_tokens=400, ignore_eos=True),
        "generator": mp.SimulatedConfig(tokens_per_s=50),
        "workers": mp.WorkerConfig(devices=["cpu"] * 2, max_running_samples=32),
        "gate": mp.GateConfig(max_live_groups=160),
        "rollout": one_straggler,
    }
    report = simulate(config(1000, **changes), TrainerModel(groups_per_step=8, step_s=0.1, steps=50, updates=False))
    assert collections.Counter(report.delivered_lengths) == {20: 400 * 7, 400: 400}
    assert report.most_running == [32, 32]
    assert report.busy_sample_s > 0.99 * 64 * report.wall_s
