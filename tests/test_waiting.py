"""Where the trainer waits: known cases come out right, in virtual time; the causes add up to the wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from types import SimpleNamespace
from typing import Any

import engines
import pytest
from played import played

import mprollout as mp
from mprollout import messages
from mprollout.generator import VersionSpan
from mprollout.ring import RolledSample, encode_group
from mprollout.rollout import Session
from mprollout.schema import Meta
from mprollout.simulation import SimulationReport, TrainerModel, simulate
from mprollout.source import Prompt
from mprollout.taker import Taken
from mprollout.waiting import CAUSES, Waits

pytestmark = pytest.mark.timeout(60)


def run(steps: int = 1, groups: int = 2, step_s: float = 0.0, **changes: Any) -> SimulationReport:
    """Groups of four on one worker with room for all; synchronous (`max_lag=0`), so that every wait begins with the generation."""
    parts: dict[str, Any] = {
        "generator": mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=10),
        "sampling": mp.SamplingConfig(group_size=4, max_new_tokens=32),
        "reward": mp.RewardConfig("exact"),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=64),
        "gate": mp.GateConfig(groups_per_update=2, max_lag=0),
    }
    report = simulate(
        engines.config(rows=40, **(parts | changes)), TrainerModel(groups_per_step=groups, step_s=step_s, steps=steps)
    )
    assert set(report.waited_s) == set(CAUSES)
    in_get = sum(seconds for cause, seconds in report.waited_s.items() if cause != "weights")
    assert in_get == pytest.approx(sum(report.trainer_wait_s), abs=1e-6)
    return report


def causes(report: SimulationReport) -> dict[str, float]:
    return {cause: round(seconds, 3) for cause, seconds in report.waited_s.items() if seconds > 1e-6}


def seconds(name: str) -> float:
    """The last sample of row 1 takes 9 s, all others 1 s."""
    return 9.0 if name.startswith("1.") and name.endswith(".3") else 1.0


async def with_a_straggler(session: Session, prompt: Prompt) -> None:
    await asyncio.sleep(seconds(session._request_id))


async def slow_judge(sample: mp.RewardInput) -> float:
    await asyncio.sleep(2.5)
    return 1.0


async def equal_for_row_0(sample: mp.RewardInput) -> float:
    return 0.0 if sample.prompt.row == 0 else float(sample.index)


def test_generation_alone() -> None:
    assert causes(run(steps=3)) == {"generation": 3.0}


def test_a_straggler_is_what_it_takes_longer_than_its_siblings() -> None:
    assert causes(run(rollout=with_a_straggler)) == {"generation": 1.0, "straggler": 8.0}


def test_a_straggler_of_groups_of_one_is_behind_the_rest_of_its_batch() -> None:
    sampling = mp.SamplingConfig(group_size=1, max_new_tokens=32)
    assert causes(run(rollout=of_row_1_slow, sampling=sampling)) == {"generation": 1.0, "straggler": 8.0}


async def of_row_1_slow(session: Session, prompt: Prompt) -> None:
    await asyncio.sleep(9.0 if prompt.row == 1 else 1.0)


def test_what_more_workers_would_have_hidden_is_no_straggler() -> None:
    """One place: the long sample begins after 7 s. More workers would have begun it at once, and the wait been 9 s, 8 of them for it alone."""
    one_place = mp.WorkerConfig(devices=["cpu"], max_running_samples=1)
    assert causes(run(rollout=with_a_straggler, workers=one_place)) == {"generation": 8.0, "straggler": 8.0}


def test_of_a_straggler_that_began_late_and_was_waited_for_late_nothing_is_left() -> None:
    """The trainer comes when all but 6 s are over; without the 7 s that the sample stood in line there were no wait."""
    waits = Waits()
    waits.begin(10)
    waits.settle(16, taken(Meta(0, 0, 0, 0, 7, 16, 16, excess_ns=8, oldest_version=0)))
    waits.split({0: 0})
    assert waits.ns["generation"] == 6 == sum(waits.ns.values())


def taken(meta: Meta, size: int = 4) -> Taken:
    """A batch of one group, of ticket 0."""
    lengths, rewards = array("i", [1] * size).tobytes(), array("f", [1.0] * size).tobytes()
    return Taken(
        [SimpleNamespace(ticket=0)],
        [(array("q", meta).tobytes(), lengths, rewards, array("q", [0] * size).tobytes())],
        now=0,
    )


def test_rewards_are_what_is_waited_for_once_all_is_generated() -> None:
    assert causes(run(reward=mp.RewardConfig(slow_judge))) == {"generation": 1.0, "reward": 2.5}
    report = run(reward=mp.RewardConfig(slow_judge), rollout=with_a_straggler)
    assert causes(report) == {"generation": 1.0, "straggler": 8.0, "reward": 2.5}


def test_without_credit_the_wait_is_the_gates_until_a_ticket_is_admitted() -> None:
    """Of two groups one is rejected after 1 s; only then is there credit for its successor, which takes 1 s more."""
    report = run(reward=mp.RewardConfig(equal_for_row_0), filter=mp.FilterConfig(zero_spread=True))
    assert report.outcomes == {"taken": 2, "filtered:zero_spread": 1}
    assert causes(report) == {"gate": 1.0, "generation": 1.0}


def test_an_update_is_waited_for_as_long_as_it_stalls() -> None:
    generator = mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=10, update_s=0.75)
    assert causes(run(steps=3, generator=generator)) == {"generation": 3.0, "weights": 2.25}


def test_a_trainer_that_is_slower_than_its_workers_does_not_wait() -> None:
    gate = mp.GateConfig(groups_per_update=2, max_lag=2)
    report = run(steps=8, step_s=5.0, gate=gate)
    assert causes(report) == {"generation": 1.0}  # for the first batch


def test_the_parts_of_a_wait_are_disjoint_and_whole_wherever_it_is_cut() -> None:
    """Of one group's life from 10 to 70: whenever the trainer comes, the causes add up to its wait, and each is no longer than its phase."""
    meta = Meta(0, 0, 0, claimed_ns=20, started_ns=30, generated_ns=50, published_ns=60, excess_ns=12, oldest_version=0)
    phases = {"gate": 10, "workers": 5, "generation": 40, "straggler": 12, "reward": 20, "weights": 0}
    for start in range(70):
        for middle in range(start, 71, 7):
            waits = Waits()
            waits.on_workers(False, 12)
            waits.on_workers(True, 17)
            waits.begin(start)
            waits.leave(middle)  # it ran out of time
            waits.begin(middle)
            waits.settle(70, taken(meta))
            waits.split({0: 10})
            assert sum(waits.ns.values()) == 70 - start
            assert all(waits.ns[cause] <= most for cause, most in phases.items()), (start, waits.ns)
    assert waits.since_ns is None


def test_a_ticket_that_a_death_gave_back_is_waited_for_as_workers() -> None:
    waits = Waits()
    waits.begin(0)
    meta = Meta(0, 0, 1, claimed_ns=60, started_ns=60, generated_ns=90, published_ns=100, excess_ns=0, oldest_version=0)
    waits.settle(100, taken(meta))
    waits.split({0: 0})
    assert {cause: ns for cause, ns in waits.ns.items() if ns} == {"workers": 60, "generation": 30, "reward": 10}


def test_many_waits_without_groups_are_bounded_and_none_is_lost() -> None:
    waits = Waits()
    for i in range(1000):
        waits.begin(10 * i)
        waits.leave(10 * i + 4)
    assert sum(waits.ns.values()) + 4 * 64 == 4000


def test_an_engine_tells_what_its_get_waits_for_and_what_it_has_waited_for() -> None:
    """Whether the wait ended with groups, in time, or by an interrupt."""
    with played() as on:
        with contextlib.suppress(mp.GetTimeout):
            on.engine.get(1, timeout=0.05)
        stats = on.engine.stats()
        assert stats.waited_s == dict.fromkeys(CAUSES, 0.0) and stats.waiting_s == 0 and stats.waiting_for == ""
        on.publish(1)
        on.engine.get(1, timeout=10).release()
        assert 0.05 <= sum(on.engine.stats().waited_s.values()) < 5
        on.publish(1)
        before = on.engine.stats().waited_s
        on.engine.get(1, timeout=10).release()
        assert on.engine.stats().waited_s == before  # it was there: nobody waited


def test_the_time_without_a_ready_worker_is_waited_for_as_workers() -> None:
    """The keeper tells that the only worker restarts; a ticket that stood meanwhile is claimed once it is back."""
    with played() as on:

        def told(state: str) -> None:
            on.keeper.tell(messages.WorkerState(worker=0, pid=on.keeper.pid, state=state))
            states = on.engine._attendant.states  # type: ignore[union-attr]
            engines.until(lambda: on.engine.stats().workers[0].state == state, f"{state}, after {states}")

        told("restarting")
        with pytest.raises(mp.GetTimeout):
            on.engine.get(1, timeout=0.2)
        told("ready")
        claim, now = on.claim(), time.monotonic_ns()
        sample = RolledSample(
            token_ids=[1],
            logprobs=[-1.0],
            loss_mask=bytearray(b"\1"),
            finish_reason="stop",
            versions=[VersionSpan(0, 0, 1)],
        )
        meta = Meta(
            0, 0, 0, claimed_ns=now, started_ns=now, generated_ns=now, published_ns=now, excess_ns=0, oldest_version=0
        )
        assert on.producer.publish(claim, encode_group(meta, [5], [sample], [1.0]))
        on.engine.get(1, timeout=10).release()
        waited = on.engine.stats().waited_s
        assert waited["workers"] == pytest.approx(sum(waited.values())) and waited["workers"] >= 0.19
