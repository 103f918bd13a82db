"""Whole runs in virtual time: what a real run of hours would do, in seconds."""

from __future__ import annotations

import asyncio
import collections
from typing import Any

import pytest

import mprollout as mp
from mprollout.gate import Gate
from mprollout.simulation import SimulationReport, TrainerModel, VirtualLoop, costly_reward, simulate

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:.*sample places.*")]
HEAVY = pytest.mark.slow
TAIL = [40] * 19 + [800]  # 5% of the answers are 20 times longer


def config(rows: int, **changes: Any) -> mp.EngineConfig:
    """3 workers of 512 sample places, groups of 8; 50 tokens/s a sample, 8,000 a worker."""
    parts: dict[str, Any] = {
        "source": mp.SourceConfig(rows=[{"prompt": f"q{i}", "answer": "x"} for i in range(rows)], epochs=1),
        "generator": mp.SimulatedConfig(mean_tokens=200, sigma=0.7, tokens_per_s=50, max_tokens_per_s=8000),
        "sampling": mp.SamplingConfig(group_size=8, max_new_tokens=2000),
        "reward": mp.RewardConfig("exact"),
        "workers": mp.WorkerConfig(devices=["cpu"] * 3, max_running_samples=512),
        "gate": mp.GateConfig(groups_per_update=8),
    }
    return mp.EngineConfig(**(parts | changes))


def test_virtual_time_jumps_to_the_next_moment() -> None:
    async def main() -> tuple[float, list[str]]:
        order: list[str] = []

        async def later(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            order.append(name)

        await asyncio.gather(later(7200, "b"), later(60, "a"), asyncio.to_thread(order.append, "thread"))
        return asyncio.get_running_loop().time(), order

    loop = VirtualLoop()
    try:
        assert loop.run_until_complete(main()) == (7200.0, ["thread", "a", "b"])
    finally:
        loop.close()


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [None, 4])
def test_the_configuration_of_the_original_fault(max_lag: int | None) -> None:
    """slime#2367: 3 workers x 512 samples, groups of 8, 8 groups a step, a slow trainer, 200 steps: every row once, limits held at every instant."""
    most = 384 if max_lag is None else 40

    def look(report: SimulationReport, gate: Gate) -> None:
        assert report.most_live <= most
        assert gate.admitted == gate.taken + gate.live + gate.ended

    gate = mp.GateConfig(groups_per_update=8, max_lag=max_lag)
    trainer = TrainerModel(groups_per_step=8, step_s=20.0, steps=200)
    report = simulate(config(1600, gate=gate), trainer, look=look)
    assert sorted(report.tickets) == list(range(1600))
    assert report.outcomes == {"taken": 1600}
    assert sorted(report.issued_lengths) == sorted(report.delivered_lengths)
    assert max(report.most_running) <= 512
    if max_lag is None:
        assert report.most_running == [512] * 3
        assert report.most_live == most
    else:
        assert report.tickets == list(range(1600))
        assert max(report.lags) <= max_lag
    assert sum(report.trainer_wait_s[10:]) < 0.02 * report.wall_s  # the trainer is the slow one, and never waits


@pytest.mark.parametrize("max_lag", [*(pytest.param(k, marks=HEAVY) for k in (0, 2, 3, 4)), 1])
def test_a_heavy_tail_is_neither_discarded_nor_late(max_lag: int) -> None:
    """prime-rl#2960, tinker-cookbook#822: lag <= K for every group, 0 tokens discarded, delivered lengths are the issued ones."""
    changes = {
        "generator": mp.SimulatedConfig(lengths=TAIL, tokens_per_s=50, max_tokens_per_s=4000),
        "workers": mp.WorkerConfig(devices=["cpu"] * 2, max_running_samples=128),
        "gate": mp.GateConfig(groups_per_update=8, max_lag=max_lag),
    }
    report = simulate(config(240, **changes), TrainerModel(groups_per_step=8, step_s=2.0, steps=30))
    assert report.tickets == list(range(240))
    assert max(report.lags) <= max_lag
    assert report.tokens_discarded == 0
    assert collections.Counter(report.issued_lengths) == collections.Counter(report.delivered_lengths)
    assert len(report.delivered_lengths) == 240 * 8


def test_a_reward_takes_its_time_and_waits_for_its_turn() -> None:
    """32 samples that are there after 1 s, 8 rewards of 3 s at once: 4 rounds of them."""
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=50, sigma=0.0, tokens_per_s=50),
        "reward": mp.RewardConfig(costly_reward, kwargs={"mean_s": 3.0}, max_concurrency=8),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=512),
        "gate": mp.GateConfig(groups_per_update=4, max_lag=0),
    }
    report = simulate(config(8, **changes), TrainerModel(groups_per_step=4, step_s=0.0, steps=1))
    assert report.trainer_wait_s == [pytest.approx(1.0 + 4 * 3.0)]
    assert report.waited_s["reward"] == pytest.approx(12.0)


def test_what_needs_processes_is_refused() -> None:
    with pytest.raises(mp.ConfigError, match="without the faults"):
        simulate(
            config(8, generator=mp.SimulatedConfig(faults={"die": 0.1})),
            TrainerModel(groups_per_step=8, step_s=0, steps=1),
        )
    with pytest.raises(mp.ConfigError, match="or an `async def`"):
        simulate(config(8, reward=mp.RewardConfig("math")), TrainerModel(groups_per_step=8, step_s=0, steps=1))


@pytest.mark.slow
def test_faults_and_retries_keep_the_account() -> None:
    changes = {
        "generator": mp.SimulatedConfig(
            mean_tokens=40,
            tokens_per_s=50,
            faults={"exception": 0.02, "abort": 0.02, "swallow": 0.01, "slow": 0.02, "short": 0.01},
        ),
        "fault": mp.FaultConfig(sample_timeout_s=30.0, max_attempts=10, max_consecutive_failures=100),
        "gate": mp.GateConfig(groups_per_update=8, max_lag=2),
    }
    report = simulate(config(160, **changes), TrainerModel(groups_per_step=8, step_s=1.0, steps=19))
    assert sorted(report.tickets) == report.tickets
    assert len(set(report.tickets)) == 152
    assert max(report.lags) <= 2
