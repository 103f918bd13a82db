"""The whole path over the simulated generator: exactly n in order, limits, the end of the data, resumption."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import rewards
from engines import TWO_WORKERS, config, drain, until
from played import played

import mprollout as mp

pytestmark = pytest.mark.timeout(90)


def test_import_is_light():
    code = "import sys, time; t = time.perf_counter(); import mprollout; d = time.perf_counter() - t; print(d, 'torch' in sys.modules, 'sglang' in sys.modules)"
    out = min(
        (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            for _ in range(3)
        ),
        key=lambda line: float(line.split()[0]),
    )
    seconds, torch, sglang = out.split()
    assert (torch, sglang) == ("False", "False") and float(seconds) < 0.3


def test_every_row_is_taken_once_and_the_payload_is_what_the_reward_saw():
    with mp.RolloutEngine(config(workers=TWO_WORKERS, reward=mp.RewardConfig(rewards.length))) as engine:
        tickets = []
        for _ in range(10):
            with engine.get(4, timeout=20) as batch:
                tickets += batch.tickets
                for group in batch:
                    assert len(group) == 4 and group.row == group.ticket
                    assert group.rewards.tolist() == group.lengths.tolist()
                    for sample in group.samples:
                        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.loss_mask)
                        assert (sample.logprobs <= 0).all() and sample.loss_mask.all()
                        assert sample.versions[0].start == 0 and sample.versions[-1].end == len(sample.token_ids)
                    del sample
        assert sorted(tickets) == list(range(40))
        assert engine.audit() == {"taken": 40}


def test_get_takes_exactly_n_and_leaves_the_surplus_in_order():
    """slime#2238: 10 ready, get(4) twice: the first 4, then the next 4; 2 stay; none is lost."""
    with mp.RolloutEngine(config(rows=10)) as engine:
        until(lambda: engine.stats().pending == 10, "10 groups pending")
        order = [row[0] for row in engine._attendant.segment.table()]
        with engine.get(4) as first, engine.get(4) as second:
            taken = first.tickets + second.tickets
        assert engine.stats().pending == 2
        with engine.get(2) as rest:
            taken += rest.tickets
        assert sorted(taken) == sorted(order) == list(range(10))


def test_running_samples_never_exceed_their_limit_and_live_counts_groups():
    """slime#2367: the limit of samples counts samples, the limit of groups counts groups."""
    changes = {
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=6),
        "generator": mp.SimulatedConfig(mean_tokens=12, tokens_per_s=500),
        "gate": mp.GateConfig(max_live_groups=9),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        most_live = 0
        for _ in range(10):
            most_live = max(most_live, engine.stats().live)
            engine.get(4, timeout=20).release()
        assert engine.stats().workers[0].peak_running_samples == 6
        assert 4 < most_live <= 9


def test_an_idle_trainer_never_sees_more_than_the_live_limit():
    """slime#1310: max_live_groups=3 and nobody takes: live <= 3 for ever."""
    with mp.RolloutEngine(config(gate=mp.GateConfig(max_live_groups=3))) as engine:
        until(lambda: engine.stats().pending == 3, "3 groups pending")
        for _ in range(50):
            stats = engine.stats()
            assert stats.live == 3 and stats.admitted == 3 and len(engine._attendant.segment.table()) == 3
        assert len(drain(engine, 3)) == 40


def test_exhausted_data_says_what_is_left_and_lets_it_be_drained():
    """NeMo-RL#2899: one epoch, more asked: DataExhausted within 1 s; the rest can be drained."""
    with played(rows=6) as on:
        on.publish(4)
        on.engine.get(4, timeout=20).release()
        start = time.monotonic()
        with pytest.raises(mp.DataExhausted, match="6 rows, epochs=1") as caught:
            on.engine.get(4)
        assert time.monotonic() - start < 1
        on.publish(2)
        assert len(on.engine.get(caught.value.available, timeout=20)) == 2


def test_endless_epochs_iterate_again():
    """NeMo-RL#2899: re-iterates when told to."""
    source = mp.SourceConfig(
        rows=[{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], answer_field=None, shuffle_seed=1
    )
    with mp.RolloutEngine(config(source=source)) as engine:
        seen = {}
        for _ in range(10):
            with engine.get(3, timeout=20) as batch:
                seen |= {group.ticket: group.row for group in batch}
        assert (
            len(seen) == 30
            and max(seen) >= 29
            and all(row == engine.source.row(ticket)[0] for ticket, row in seen.items())
        )


def test_group_rewards_score_all_samples_of_a_group_together():
    with (
        mp.RolloutEngine(config(reward=mp.RewardConfig(rewards.rank, per="group"))) as engine,
        engine.get(4, timeout=20) as batch,
    ):
        assert all(group.rewards.tolist() == [0, 1, 2, 3] for group in batch)


def test_a_get_that_credit_can_never_meet_raises_at_once_with_the_numbers():
    with played(gate=mp.GateConfig(groups_per_update=4, max_lag=0)) as on:
        with pytest.raises(mp.GateStarved, match=r"get\(5\).*max_live_groups=4"):
            on.engine.get(5)
        on.publish(4)
        on.engine.get(4, timeout=20).release()
        with pytest.raises(mp.GateStarved, match="call update_weights first"):
            on.engine.get(4)


def test_a_get_that_only_a_release_could_meet_says_so():
    """ray#46055: all arenas leased, fewer than n pending: an error, not a hang."""
    with mp.RolloutEngine(config(rows=1000)) as engine:
        kept = []
        with pytest.raises(mp.RingStarved, match="taken groups were not released"):
            kept.extend(iter(lambda: engine.get(4, timeout=20), None))
        kept.pop(0).release()
        for batch in kept:
            batch.release()
        engine.get(4, timeout=20).release()


def test_a_timeout_names_what_each_worker_does_and_consumes_nothing():
    """vllm#46611."""
    slow = mp.SimulatedConfig(tokens_per_s=0.5)
    with mp.RolloutEngine(config(workers=TWO_WORKERS, generator=slow)) as engine:
        with pytest.raises(
            mp.GetTimeout, match=r"get\(4\): 0 groups .* worker 1 \(pid \d+\) ready, \d+ samples running"
        ):
            engine.get(4, timeout=0.2)
        assert engine.stats().taken == 0


def test_a_second_get_at_once_is_an_error():
    with played() as on:
        first = threading.Thread(target=lambda: on.engine.get(4, timeout=20).release())
        first.start()
        until(lambda: on.engine._in_get is not None, "the first get is under way")
        with pytest.raises(mp.ConcurrentGet):
            on.engine.get(4)
        on.publish(4)
        first.join()
        assert on.engine.stats().taken == 4


def test_a_state_resumes_with_every_ticket_exactly_once():
    with mp.RolloutEngine(config()) as engine:
        done = engine.get(4, timeout=20).tickets + engine.get(4, timeout=20).tickets
        state = engine.state_dict()
        assert state == engine.state_dict()
        lost = engine.get(4, timeout=20).tickets  # taken after the checkpoint: they come again
        engine.confirm(state)
    import torch

    engine = mp.RolloutEngine(config())
    engine.load_state_dict(state)
    with engine:
        engine.update_weights({"w": torch.zeros(2)})
        rest = drain(engine)
    assert sorted(done + rest) == list(range(40)) and set(lost) <= set(rest)


def test_a_run_that_only_generates_resumes_without_weights():
    with mp.RolloutEngine(config()) as engine:
        done = engine.get(6, timeout=20).tickets
        state = engine.state_dict()
    engine = mp.RolloutEngine(config())
    engine.load_state_dict(state, await_weights=False)
    with engine:
        assert sorted(done + drain(engine)) == list(range(40))
        assert engine.policy_version == 0


def test_a_state_of_other_data_is_refused():
    with played() as on:
        state = on.engine.state_dict()
    with pytest.raises(mp.ConfigError, match="made over source"):
        mp.RolloutEngine(config(rows=41)).load_state_dict(state)


def test_places_that_the_gate_cannot_fill_are_warned_about(caplog):
    mp.RolloutEngine(config(workers=TWO_WORKERS, gate=mp.GateConfig(groups_per_update=2, max_lag=1)))
    assert (
        "4 live groups of 4 samples cannot keep 2 workers x 16 sample places busy: 16 of 32 places stay empty"
        in caplog.text
    )


def test_a_step_that_can_never_be_had_at_once_is_warned_about(caplog):
    mp.RolloutEngine(config(gate=mp.GateConfig(groups_per_update=8, max_live_groups=4, max_lag=0)))
    assert (
        "max_live_groups=4 is below groups_per_update=8: a get of all that one update takes can never be met"
        in caplog.text
    )
