"""Filters: rejected groups are counted by reason and replaced one for one; what a filter may say, and what happens when it fails."""

from __future__ import annotations

import engines
import pytest
import rewards

import mprollout as mp

pytestmark = pytest.mark.timeout(60)
ONE_WORKER = mp.WorkerConfig(devices=["cpu"], max_running_samples=16)


def test_each_rejection_is_counted_by_its_reason_and_admits_one_replacement() -> None:
    reject = mp.FilterConfig(function=rewards.by_row, reasons=["too_easy", "too_hard"], kwargs={"easy": 2})
    gate = mp.GateConfig(groups_per_update=5, max_lag=0)
    fault = mp.FaultConfig(retry_delay_s=0.01)
    with mp.RolloutEngine(engines.config(filter=reject, workers=ONE_WORKER, gate=gate, fault=fault)) as engine:
        with engine.get(5, timeout=20) as batch:
            assert batch.tickets == [2, 3, 4, 7, 8]  # a step is whole although four groups were rejected on its way
        stats = engine.stats()
        assert stats.admitted - stats.live == 5 + sum(stats.outcomes.values()) - 5
        engines.until(lambda: engine.stats().live == 0, "the gate is closed: no more than five for this step")
        assert engine.audit() == engine.stats().outcomes
    with mp.RolloutEngine(engines.config(filter=reject, workers=ONE_WORKER, fault=fault)) as engine:
        taken = engines.drain(engine)
        assert sorted(taken) == [i for i in range(40) if i % 5 > 1 and i != 13]
        assert engine.stats().outcomes == {
            "taken": 23,
            "filtered:too_easy": 8,
            "filtered:too_hard": 8,
            "failed:filter": 1,
        }
        assert "row 13 breaks the filter" in engine._attendant.notes[13].error  # type: ignore[union-attr]


def test_groups_without_spread_can_be_rejected() -> None:
    changes = {
        "filter": mp.FilterConfig(zero_spread=True),
        "reward": mp.RewardConfig(rewards.same),
        "workers": ONE_WORKER,
    }
    with mp.RolloutEngine(engines.config(**changes)) as engine:
        assert sorted(engines.drain(engine)) == list(range(0, 40, 2))
        assert engine.stats().outcomes == {"taken": 20, "filtered:zero_spread": 20}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"function": rewards.everything, "max_consecutive": 6},
            r"6 groups in a row were rejected .*max_consecutive=6",
        ),
        ({"function": rewards.unknown}, r"one of FilterConfig.reasons=\['rejected'\]; got 'because'"),
    ],
)
def test_a_filter_that_rejects_or_fails_for_ever_is_a_fault(settings: dict[str, object], message: str) -> None:
    source = mp.SourceConfig(rows=[{"prompt": "a"}, {"prompt": "b"}])
    changes = {"filter": mp.FilterConfig(**settings), "source": source, "workers": ONE_WORKER}
    with (
        mp.RolloutEngine(engines.config(**changes, fault=mp.FaultConfig(retry_delay_s=0.001))) as engine,
        pytest.raises(mp.PromptsFailing, match=message),
    ):
        engine.get(1, timeout=30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": rewards.later}, "expected a plain `def`"),
        ({"function": lambda samples, rewards: None}, "at the top level of a module"),
        ({"function": "no_such_module_at_all:f"}, "no module 'no_such_module_at_all'"),
        ({"function": rewards.by_row, "kwargs": {"hard": 1}}, "does not fit"),
        ({"function": "by_row"}, 'must be "module:function"'),
    ],
)
def test_what_cannot_be_a_filter_is_refused_when_the_engine_is_made(settings: dict[str, object], message: str) -> None:
    with pytest.raises(mp.ConfigError, match=message):
        mp.RolloutEngine(engines.config(filter=mp.FilterConfig(**settings)))


def test_reasons_are_distinct_names() -> None:
    with pytest.raises(mp.ConfigError, match=r"FilterConfig.reasons .* distinct names"):
        mp.FilterConfig(reasons=["a", "a"])
