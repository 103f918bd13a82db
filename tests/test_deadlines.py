"""An episode, a sample, an attempt that takes too long: named, aborted, tried again, given up; nobody else waits for it. In virtual time."""

from __future__ import annotations

import array
import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import engines
import pytest

import mprollout as mp
from mprollout.ledger import Reason
from mprollout.ring import ISSUED, WorkerWord
from mprollout.rollout import Session, single_turn
from mprollout.sampler import Attempt, Sampler, reason_of
from mprollout.simulated import SimulatedGenerator
from mprollout.simulation import SimulationReport, TrainerModel, VirtualLoop, simulate
from mprollout.source import Prompt

pytestmark = pytest.mark.timeout(60)
PID = f"(worker pid {os.getpid()})"
STEADY = mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=10)  # a sample takes 1 s


def run(rows: int = 24, steps: int = 5, groups: int = 4, **changes: Any) -> SimulationReport:
    parts: dict[str, Any] = {
        "generator": STEADY,
        "sampling": mp.SamplingConfig(group_size=4, max_new_tokens=32),
        "reward": mp.RewardConfig("exact"),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=64),
        "gate": mp.GateConfig(groups_per_update=4, max_lag=1),
    }
    config = engines.config(rows=rows, **(parts | changes))
    return simulate(config, TrainerModel(groups_per_step=groups, step_s=0.1, steps=steps))


async def row_3_never_ends(session: Session, prompt: Prompt) -> None:
    await session.generate()
    if prompt.row == 3:
        await asyncio.sleep(1e6)


async def slow_judge_of_row_3(sample: mp.RewardInput) -> float:
    await asyncio.sleep(1e6 if sample.prompt.row == 3 and sample.index == 2 else 0.1)
    return 1.0


async def slow_group_judge(samples: list[mp.RewardInput]) -> list[float]:
    await asyncio.sleep(1e6 if samples[0].prompt.row == 3 else 0.1)
    return [1.0] * len(samples)


@pytest.mark.parametrize(
    ("limit", "where"),
    [
        ({"episode_timeout_s": 5.0}, f"episode 3.0.0 {PID} exceeded episode_timeout_s=5"),
        ({"sample_timeout_s": 5.0}, f"sample 3.0.0 {PID} exceeded sample_timeout_s=5"),
        (
            {"group_timeout_s": 5.0},
            f"attempt 3.0 {PID} exceeded group_timeout_s=5; unfinished: 3.0.0, 3.0.1, 3.0.2, 3.0.3 (4 of 4",
        ),
    ],
    ids=["episode", "sample", "group"],
)
def test_a_ticket_at_the_head_that_never_ends_is_given_up_and_the_rest_goes_on(
    limit: dict[str, float], where: str
) -> None:
    """NeMo-RL#3938: strictly in order, it would block all behind it: tried twice, FAILED, skipped; nothing else is late or lost."""
    fault = mp.FaultConfig(**limit, max_attempts=2, retry_delay_s=1.0)
    report = run(rollout=row_3_never_ends, fault=fault)
    assert report.tickets == [ticket for ticket in range(21) if ticket != 3]
    assert report.outcomes == {"taken": 20, "failed:timeout": 1}
    assert [
        error.split(": ", 1)[1].startswith(where.replace("3.0", f"3.{i}")) for i, error in enumerate(report.failures)
    ] == [True] * 2
    # two attempts of 5 s and the pause between them, once; then steps of 0.1 s and at most a generation
    assert 11.0 <= report.trainer_wait_s[0] < 11.5
    assert sum(report.trainer_wait_s[1:]) < 5


def test_swallowed_completions_are_missed_by_any_deadline_and_tried_again() -> None:
    """SkyRL#1173, verl#7155."""
    for limit in ("episode_timeout_s", "sample_timeout_s", "group_timeout_s"):
        generator = mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=10, faults={"swallow": 0.02})
        report = run(generator=generator, fault=mp.FaultConfig(**{limit: 5.0}, max_attempts=10))
        assert report.tickets == list(range(20))
        assert report.failures and all(f"exceeded {limit}=5" in error for error in report.failures)


def test_what_is_slow_and_within_the_deadline_is_not_touched() -> None:
    generator = mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=10, faults={"slow": 0.1})  # 20 s
    limits = mp.FaultConfig(episode_timeout_s=20.1, sample_timeout_s=20.1, group_timeout_s=20.1, max_attempts=1)
    assert run(generator=generator, fault=limits).failures == []


def test_a_slow_reward_costs_its_sample_and_is_no_episode() -> None:
    """slime#1361: the group is tried again, then given up; the batch completes. The episode's deadline is not the reward's."""
    fault = mp.FaultConfig(episode_timeout_s=2.0, sample_timeout_s=5.0, max_attempts=2)
    report = run(reward=mp.RewardConfig(slow_judge_of_row_3, timeout_s=1e6), fault=fault)
    assert report.outcomes == {"taken": 20, "failed:timeout": 1}
    assert all("exceeded sample_timeout_s=5; sample 2 of 4, attempt 3." in error for error in report.failures)


def test_the_groups_deadline_covers_a_group_reward() -> None:
    judge = mp.RewardConfig(slow_group_judge, per="group", timeout_s=1e6)
    fault = mp.FaultConfig(sample_timeout_s=4.0, group_timeout_s=5.0, max_attempts=1)
    report = run(reward=judge, fault=fault)
    assert report.outcomes == {"taken": 20, "failed:timeout": 1}
    assert report.failures == [f"DeadlineExceeded: attempt 3.0 {PID} exceeded group_timeout_s=5"]


def test_a_group_that_may_shrink_goes_without_what_is_late() -> None:
    fault = mp.FaultConfig(episode_timeout_s=5.0, on_sample_failure="shrink")
    generator = mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=10, faults={"swallow": 0.05})
    report = run(generator=generator, fault=fault)
    assert report.tickets == list(range(20))
    attempts = [error.rpartition("attempt ")[2] for error in report.failures]
    late = [attempt for attempt in attempts if float(attempt) < 20]  # further ones were under way at the end
    assert 0 < len(late) == 80 - len(report.delivered_lengths)


async def two_turns_and_a_fault(session: Session, prompt: Prompt) -> None:
    await session.generate()
    try:
        await session.generate()
    except asyncio.CancelledError:
        raise ValueError("my own clean-up failed") from None


def in_virtual_time(
    scenario: Callable[[Sampler, SimulatedGenerator, memoryview], Awaitable[None]], rollout: Any, **fault: Any
) -> None:
    """A sampler of groups of four over an engine whose turns take a second."""
    words = memoryview(array.array("q", [0] * 64))
    settings = engines.config(fault=mp.FaultConfig(**fault), reward=mp.RewardConfig("exact"))

    async def main() -> None:
        generator = SimulatedGenerator(mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=10))
        await generator.start()
        sampler = Sampler(settings, generator, rollout, words)
        try:
            await scenario(sampler, generator, words)
        finally:
            sampler.close()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


PROMPT = Prompt(ticket=0, row=0, epoch=0, prompt="?", answer="x")
SAMPLING = mp.SamplingConfig(group_size=4, max_new_tokens=32)


@pytest.mark.parametrize("limit", ["episode_timeout_s", "sample_timeout_s", "group_timeout_s"])
def test_what_is_late_is_aborted_in_the_engine_and_gives_its_place_back(limit: str) -> None:
    """Whatever the rollout function makes of its cancellation."""

    async def scenario(sampler: Sampler, generator: SimulatedGenerator, words: memoryview) -> None:
        attempt = Attempt("0.0", 7)
        with pytest.raises(mp.DeadlineExceeded, match=f"exceeded {limit}=1.5") as caught:
            await sampler.make(PROMPT, [1, 2], SAMPLING, attempt, lambda _: None)
        assert reason_of(caught.value) is Reason.TIMEOUT
        assert asyncio.get_running_loop().time() == pytest.approx(1.5)
        assert not generator._runs
        assert sampler.places.held == words[WorkerWord.RUNNING_SAMPLES] == 0
        assert attempt.sampled == 4 * 10  # the first turns; of the second ones nobody knows
        assert sum(words[i] for i in ISSUED) == 0

    in_virtual_time(scenario, two_turns_and_a_fault, **{limit: 1.5})


def test_a_stop_is_no_deadline() -> None:
    async def scenario(sampler: Sampler, generator: SimulatedGenerator, words: memoryview) -> None:
        task = asyncio.ensure_future(sampler.make(PROMPT, [1, 2], SAMPLING, Attempt("0.0", 7), lambda _: None))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not generator._runs and sampler.places.held == 0

    in_virtual_time(scenario, single_turn, episode_timeout_s=5.0, sample_timeout_s=5.0, group_timeout_s=5.0)


def test_a_deadline_longer_than_the_one_around_it_is_refused_with_the_numbers() -> None:
    for inner, outer in (
        ("episode_timeout_s", "sample_timeout_s"),
        ("sample_timeout_s", "group_timeout_s"),
        ("episode_timeout_s", "group_timeout_s"),
    ):
        with pytest.raises(mp.ConfigError, match=f"{inner}=61 must be at most {outer}=60, which covers it"):
            mp.FaultConfig(**{inner: 61, outer: 60})
    mp.FaultConfig(episode_timeout_s=1, sample_timeout_s=1, group_timeout_s=1)
