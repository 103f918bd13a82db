"""What happens to groups over the lag: never made (strict), masked, or recycled."""

from __future__ import annotations

import engines
import numpy as np
import pytest
import torch
from engines import until

import mprollout as mp

pytestmark = pytest.mark.timeout(60)
WEIGHTS = {"w": torch.zeros(4)}


def lagging(policy: str, **gate: int) -> mp.EngineConfig:
    """One worker, 8 live groups, made at once: those that wait while the trainer updates grow old."""
    return engines.config(
        workers=mp.WorkerConfig(devices=["cpu"], max_running_samples=64),
        gate=mp.GateConfig(max_live_groups=8, max_lag=1, lag_policy=policy, **gate),
    )


def all_made(engine: mp.RolloutEngine) -> bool:
    stats = engine.stats()
    return stats.live == stats.pending + stats.held > 0


def test_a_group_over_the_lag_has_its_loss_masked() -> None:
    with mp.RolloutEngine(lagging("mask")) as engine:
        until(lambda: engine.stats().pending == 8, "8 groups of version 0")
        engine.update_weights(WEIGHTS)
        with engine.get(4, timeout=20) as batch:  # lag 1: within the bound
            assert [group.lag for group in batch] == [1] * 4
            assert all(group.field("loss_mask").all() for group in batch)
        engine.update_weights(WEIGHTS)
        with engine.get(4, timeout=20) as batch:  # lag 2
            assert [(group.lag, group.masked) for group in batch] == [(2, True)] * 4
            assert not batch.packed().loss_mask.any()
            assert not batch.padded().loss_mask.any()
            assert not any(sample.loss_mask.any() for group in batch for sample in group.samples)
            assert all(len(sample.loss_mask) == len(sample.token_ids) for group in batch for sample in group.samples)
        stats = engine.stats()
        assert (stats.groups_masked, stats.groups_recycled, stats.tokens_discarded) == (4, 0, 0)
        assert stats.lags == {1: 4, 2: 4}


def test_a_group_over_the_lag_is_recycled_and_comes_again_under_the_new_version() -> None:
    """slime#2278: rejected, its pristine prompt goes back once, counted; in the end every row is taken once."""
    with mp.RolloutEngine(lagging("recycle")) as engine:
        until(lambda: engine.stats().pending == 8, "8 groups of version 0")
        tickets = {row[0] for row in engine._attendant.segment.table()}  # type: ignore[union-attr]
        engine.update_weights(WEIGHTS)
        assert engine.update_weights(WEIGHTS) == 2
        with engine.get(8, timeout=20) as batch:
            assert set(batch.tickets) == tickets  # they come again before any other
            assert all((group.token_versions == 2).all() and group.lag == 0 and not group.masked for group in batch)
            lengths = np.concatenate([group.lengths for group in batch])
        stats = engine.stats()
        assert (stats.groups_recycled, stats.groups_masked) == (8, 0)
        assert stats.tokens_discarded == lengths.sum()  # the same seeds, so the same lengths
        assert sorted([*tickets, *engines.drain(engine)]) == list(range(40))
        assert engine.audit() == {"taken": 40}


def test_a_group_that_was_recycled_often_enough_is_delivered_masked() -> None:
    with mp.RolloutEngine(lagging("recycle", max_recycles=1)) as engine:
        until(lambda: engine.stats().pending == 8, "8 groups of version 0")
        engine.update_weights(WEIGHTS)
        engine.update_weights(WEIGHTS)
        with pytest.raises(mp.GetTimeout):
            engine.get(8, timeout=0)
        until(
            lambda: engine.stats().groups_recycled == engine.stats().live == 8, "they were sent back and admitted again"
        )
        state = engine.state_dict()
        assert set(state["recycled"].values()) == {1}
        until(lambda: all_made(engine), "all are made again")
        engine.update_weights(WEIGHTS)
        engine.update_weights(WEIGHTS)
        with engine.get(8, timeout=20) as batch:
            assert all(group.masked and group.lag == 2 for group in batch)
        assert engine.state_dict()["recycled"] == {}


@pytest.mark.parametrize("policy", ["mask", "recycle"])
def test_a_policy_needs_a_lag(policy: str) -> None:
    with pytest.raises(mp.ConfigError, match=f"lag_policy='{policy}' needs max_lag"):
        mp.GateConfig(lag_policy=policy)
