"""What happens to groups over the lag: never made (strict), masked, or recycled."""

from __future__ import annotations

import threading

import engines
import numpy as np
import pytest
import torch
from engines import until
from played import played

import mprollout as mp
from mprollout import _native
from mprollout.gate import Gate
from mprollout.generator import VersionSpan
from mprollout.ledger import Ledger
from mprollout.ring import RolledSample, encode_group
from mprollout.schema import Meta
from mprollout.taker import Taker
from mprollout.updates import Updates

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


def test_what_a_dead_trainer_left_over_the_strict_bound_is_made_again_in_its_turn() -> None:
    """Published for a trainer that died, and by its turn older than K: never delivered, and nothing overtakes it."""
    gate = mp.GateConfig(groups_per_update=2, max_lag=1)
    with played(gate=gate) as on:
        updates, tickets = on.engine._updates, []
        updates._completed_at |= {
            0: -2,
            7: 0,
        }  # 0: two updates before the checkpoint that was loaded; 7: its own weights
        with on.engine._attendant.lock:
            on.engine._ledger.adopt({0, 1})  # as `attach` does
        on.publish(1, version=0)
        on.publish(1, version=7)
        taker = threading.Thread(target=lambda: tickets.extend(on.engine.get(2, timeout=20).tickets))
        taker.start()
        until(lambda: on.engine.stats().groups_recycled == 1, "the first is over the lag")
        on.publish(1, version=7)  # `claim` asserts that it is there to be claimed again
        taker.join()
        assert tickets == [0, 1]
        stats = on.engine.stats()
        assert stats.lags == {0: 2} and stats.discarded == {"recycled": 1}
        assert on.engine.audit()["taken"] == 2


def test_dead_trainers_groups_make_room_for_a_batch_before_them() -> None:
    """Found by the storm: six live tickets in six entries, all behind the ten that the checkpoint wants first."""
    config = engines.config(gate=mp.GateConfig(groups_per_update=2, max_lag=1))
    segment = _native.Segment.create(
        workers=1, entries=6, cells=8, descriptors=16, arena_bytes=65536, max_group_bytes=4096, max_prompt_bytes=64, schema=b""
    )  # fmt: skip
    admitter, producer = _native.Admitter(segment), _native.Producer(segment, 0)
    sample = RolledSample(
        token_ids=[1], logprobs=[0.0], loss_mask=bytearray(1), finish_reason="stop", versions=[VersionSpan(0, 0, 1)]
    )
    for ticket in range(10, 16):
        assert admitter.admit(ticket, b"")
        meta = Meta(*[0] * len(Meta._fields))
        assert producer.publish(producer.claim(), encode_group(meta, [1], [sample], [0.0]))
    ledger, gate = Ledger(), Gate(config.gate, max_live_groups=4, spare=2)
    taker = Taker(_native.Consumer(segment), config, (), ledger, gate, Updates(config, gate))
    taker.adopt(segment)
    gate.ahead = ledger.ahead
    assert (gate.live, gate.credit, ledger.peek_ticket()) == (6, 0, 0)
    assert taker.park(2) == 2
    taker.recycle()
    gate.ahead = ledger.ahead
    assert (gate.live, gate.credit, ledger.peek_ticket()) == (4, 2, 0)
    assert ledger.watermark == 0 and taker.groups_recycled == 2 and taker.recycled == {14: 1, 15: 1}
    assert taker.park(2) == 2 and taker.to_recycle == []  # there is room now
    taker.consumer.close()
    segment.close()


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
