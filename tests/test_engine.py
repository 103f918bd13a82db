"""The whole path over the simulated generator: order, loss, limits, faults, deaths, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import rewards
from engines import TWO_WORKERS, config, descendants, drain, until, write_safetensors
from played import played

import mprollout as mp
from mprollout.ring import check_memory, memory_limit, plan

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


def test_an_aborted_sample_ends_its_attempt_and_the_prompt_comes_again(caplog):
    """slime#2402, slime#200, slime#2361: a group with an aborted sample is never readable; the reason names the sample."""
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=12, faults={"abort": 0.05}),
        "fault": mp.FaultConfig(max_attempts=20, retry_delay_s=0.001),
    }
    with caplog.at_level("INFO", "mprollout"), mp.RolloutEngine(config(**changes)) as engine:
        assert sorted(drain(engine)) == list(range(40))
        stats = engine.stats()
        assert stats.retried > 0 and stats.outcomes == {"taken": 40}
        until(lambda: caplog.text.count("aborted") >= stats.retried, "a note for each retry")
    assert "sample " in caplog.text and "aborted by the engine" in caplog.text


def test_all_workers_lost_reaches_get_with_pid_and_exit_code():
    """NeMo-RL#3488: kill -9 of all workers, restarts used up: get raises within 5 s."""
    changes = {
        "workers": mp.WorkerConfig(devices=["cpu", "cpu"], max_restarts=0),
        "generator": mp.SimulatedConfig(tokens_per_s=1.0),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        pids = [worker.pid for worker in engine.stats().workers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(mp.WorkersLost) as caught:
            engine.get(4, timeout=30)
        assert time.monotonic() - start < 5
        assert caught.value.pid in pids and caught.value.exit_code == -signal.SIGKILL


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


def test_a_prompt_that_always_fails_ends_failed_and_the_others_are_served():
    """NeMo-RL#3938: FAILED after r attempts with its error; its capacity is freed."""
    with mp.RolloutEngine(
        config(reward=mp.RewardConfig(rewards.broken_for_row_3), fault=mp.FaultConfig(retry_delay_s=0.01))
    ) as engine:
        assert sorted(drain(engine)) == [i for i in range(40) if i != 3]
        assert engine.stats().outcomes == {"taken": 39, "failed:reward": 1}
        assert "row 3 is poison" in engine._attendant.notes[3].error


def test_a_broken_reward_raises_its_own_traceback_in_get():
    """slime#2399, miles#1717: a permanently broken reward reaches get within 5 s."""
    with mp.RolloutEngine(config(reward=mp.RewardConfig(rewards.broken))) as engine:
        start = time.monotonic()
        with pytest.raises(mp.RewardFault, match="this reward is broken for good") as caught:
            engine.get(4, timeout=30)
        assert time.monotonic() - start < 5
        assert "ZeroDivisionError" in caught.value.worker_traceback and "rewards.py" in caught.value.worker_traceback


def test_a_nan_reward_is_an_error_with_the_sample_never_zero():
    with mp.RolloutEngine(
        config(reward=mp.RewardConfig(rewards.nan_for_row_3), fault=mp.FaultConfig(retry_delay_s=0.01))
    ) as engine:
        assert sorted(drain(engine)) == [i for i in range(40) if i != 3]
        assert "nan" in engine._attendant.notes[3].error and "sample 1" in engine._attendant.notes[3].error


def test_a_wrong_number_of_rewards_is_an_error():
    changes = {
        "reward": mp.RewardConfig(rewards.one_reward_too_many, per="group"),
        "fault": mp.FaultConfig(retry_delay_s=0.01),
    }
    with mp.RolloutEngine(config(**changes)) as engine, pytest.raises(mp.RewardFault, match="one reward a sample"):
        engine.get(4, timeout=30)


def test_group_rewards_score_all_samples_of_a_group_together():
    with (
        mp.RolloutEngine(config(reward=mp.RewardConfig(rewards.rank, per="group"))) as engine,
        engine.get(4, timeout=20) as batch,
    ):
        assert all(group.rewards.tolist() == [0, 1, 2, 3] for group in batch)


def test_a_killed_workers_tickets_come_again_and_none_twice():
    """slime#1615: kill -9 of 1 of 2 workers mid-run: its tickets once more, exactly n delivered, none twice."""
    slow = mp.SimulatedConfig(mean_tokens=12, tokens_per_s=300)
    with mp.RolloutEngine(config(rows=200, workers=TWO_WORKERS, generator=slow)) as engine:
        tickets = engine.get(8, timeout=20).tickets
        until(lambda: engine.stats().workers[0].running_samples > 0, "worker 0 runs samples")
        os.kill(engine.stats().workers[0].pid, signal.SIGKILL)
        tickets += drain(engine, 8)
        assert sorted(tickets) == list(range(200))
        assert engine.stats().workers[0].restarts == 1 and engine.stats().outcomes == {"taken": 200}


@pytest.mark.slow
def test_a_storm_of_worker_deaths_loses_and_doubles_nothing():
    rng = np.random.default_rng(5)
    workers = mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16, max_restarts=100)
    with mp.RolloutEngine(
        config(rows=400, workers=workers, generator=mp.SimulatedConfig(mean_tokens=12, tokens_per_s=400))
    ) as engine:
        tickets: list[int] = []
        for _ in range(6):
            tickets += engine.get(4, timeout=30).tickets
            victim = engine.stats().workers[int(rng.integers(2))]
            until(lambda: engine.stats().workers[victim.worker].state == "ready", "it works")  # noqa: B023
            os.kill(engine.stats().workers[victim.worker].pid, signal.SIGKILL)
            until(lambda: engine.stats().workers[victim.worker].restarts > victim.restarts, "it is started again")  # noqa: B023
        tickets += drain(engine)
        assert sorted(tickets) == list(range(400))
        assert engine.audit() == {"taken": 400}


def test_a_worker_killed_while_starting_is_started_again():
    """sglang#23627: a death in start-up leaves nothing and is retried."""
    engine = mp.RolloutEngine(config(workers=TWO_WORKERS, generator=mp.SimulatedConfig(start_s=0.8)))
    thread = threading.Thread(target=engine.start)
    thread.start()
    until(lambda: engine._attendant and len(engine._attendant.states) == 2, "both workers are starting")
    os.kill(engine._attendant.states[0].pid, signal.SIGKILL)
    thread.join(30)
    try:
        assert engine.stats().workers[0].restarts == 1
        assert sorted(drain(engine)) == list(range(40))
    finally:
        engine.close()


def test_the_keepers_death_is_a_typed_error_and_ends_the_workers():
    changes = {
        "workers": TWO_WORKERS,
        "reward": mp.RewardConfig(rewards.length),
        "generator": mp.SimulatedConfig(tokens_per_s=1.0),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        workers = [psutil.Process(worker.pid) for worker in engine.stats().workers]
        children = [child for worker in workers for child in worker.children(recursive=True)]
        assert len(workers + children) == 4  # a reward process each
        os.kill(engine._keeper.pid, signal.SIGKILL)
        with pytest.raises(mp.KeeperLost, match="exit code -9"):
            engine.get(4, timeout=30)
        _, alive = psutil.wait_procs(workers + children, timeout=10)
        assert alive == []


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import mprollout as mp, engines, rewards
def main():
    changes = {{"workers": engines.TWO_WORKERS, "reward": mp.RewardConfig(rewards.length)}}
    slow = mp.SimulatedConfig(start_s={start_s}, update_s={update_s}, tokens_per_s={tokens_per_s}, mean_tokens=12)
    with mp.RolloutEngine(engines.config(rows=100000, generator=slow, **changes)) as engine:
        print("started", flush=True)
        {body}
if __name__ == "__main__":
    main()
"""
BODIES = {
    "start": (60.0, 0.0, 0.0, "pass"),
    "get": (0.0, 0.0, 0.1, 'print("phase", flush=True); engine.get(4)'),
    "train": (0.0, 0.0, 100.0, 'print("phase", flush=True); import time; time.sleep(60)'),
    "update": (
        0.0,
        60.0,
        100.0,
        'print("phase", flush=True); engine.update_weights({weights!r})',
    ),
}


def run_phase(tmp_path: Path, phase: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A trainer in its own process that has reached `phase`, and all processes below it."""
    start_s, update_s, tokens_per_s, body = BODIES[phase]
    script, weights = tmp_path / "train.py", tmp_path / "weights"
    write_safetensors(weights)
    settings = {"start_s": start_s, "update_s": update_s, "tokens_per_s": tokens_per_s}
    body = body.format(weights=str(weights))
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), body=body, **settings))
    trainer = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    if phase == "start":
        until(
            lambda: len(descendants(trainer.pid, "mprollout.worker_process")) == 2,
            "two workers are starting",
        )
    else:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "started\n" and trainer.stdout.readline() == "phase\n"
    return trainer, descendants(trainer.pid)


@pytest.mark.parametrize("phase", BODIES)
def test_ctrl_c_ends_everything_within_5_s(tmp_path, phase):
    trainer, below = run_phase(tmp_path, phase)
    start = time.monotonic()
    trainer.send_signal(signal.SIGINT)
    _, stderr = trainer.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert trainer.returncode == -signal.SIGINT and "KeyboardInterrupt" in stderr
    assert psutil.wait_procs(below, timeout=1)[1] == []


@pytest.mark.parametrize("phase", BODIES)
def test_a_killed_trainer_leaves_no_process(tmp_path, phase):
    """sglang#23627, sglang#16756: kill -9 of the trainer, workers starting or at work: nothing is left after 10 s."""
    trainer, below = run_phase(tmp_path, phase)
    trainer.kill()
    trainer.communicate(timeout=30)
    assert psutil.wait_procs(below, timeout=10)[1] == []


def test_a_killed_keeper_and_trainer_leave_no_process(tmp_path):
    """vllm#54002: both at once: the workers end by themselves, and the next start cleans the folder."""
    trainer, below = run_phase(tmp_path, "train")
    keeper = descendants(trainer.pid, "mprollout.keeper")[0]
    for pid in (keeper.pid, trainer.pid):
        os.kill(pid, signal.SIGKILL)
    trainer.communicate(timeout=30)
    assert psutil.wait_procs(below, timeout=10)[1] == []
    mp.RolloutEngine(config()).__enter__().close()  # the autouse fixture sees that its folder is gone


def test_a_ring_beyond_the_cgroup_is_refused_with_size_limit_and_remedy(tmp_path):
    """dlrover#1046, pytorch#5040: a start-up error, never a SIGBUS; /dev/shm plays no part (memfd)."""
    group = tmp_path / "sys/fs/cgroup/job/step"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 8000000 kB\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("64000000\n")  # the parent's limit binds
    (group.parent / "memory.current").write_text("4000000\n")
    assert memory_limit(tmp_path)[0] == 60_000_000
    wide = plan(config(gate=mp.GateConfig(max_live_groups=1000)))
    with pytest.raises(
        mp.MemoryBudgetError, match=r"needs 70,000,000 bytes .* only 60,000,000 are left .*lower max_live_groups"
    ):
        check_memory(70_000_000, wide, tmp_path)


def test_a_ring_beyond_this_machine_is_refused_at_construction():
    with pytest.raises(mp.MemoryBudgetError, match="are left"):
        mp.RolloutEngine(config(gate=mp.GateConfig(max_live_groups=10_000), ring=mp.RingConfig(max_group_bytes=10**7)))


def test_a_forked_child_that_exits_leaves_the_ring():
    """cpython#82300, LMCache#4917."""
    with mp.RolloutEngine(config()) as engine:
        batch = engine.get(4, timeout=20)
        before = batch.rewards.copy()
        pid = os.fork()
        if pid == 0:
            batch.release()
            os._exit(0)
        os.waitpid(pid, 0)
        assert (batch.rewards == before).all()
        batch.release()
        assert len(drain(engine)) == 36


def test_a_group_beyond_its_extent_fails_with_both_sizes_and_the_ring_goes_on():
    """slime#2384."""
    with mp.RolloutEngine(
        config(
            ring=mp.RingConfig(max_group_bytes=4096),
            sampling=mp.SamplingConfig(group_size=4, max_new_tokens=400),
            generator=mp.SimulatedConfig(mean_tokens=60, sigma=1.0),
        )
    ) as engine:
        tickets = drain(engine, 1)
        outcomes = engine.stats().outcomes
        assert outcomes["taken"] == len(tickets) > 0 and outcomes["failed:too_large"] == 40 - len(tickets) > 0
        assert any("4,096" in note.error or "4096" in note.error for note in engine._attendant.notes.values())


def test_a_step_completes_although_a_group_failed_for_good():
    """max_lag=0, groups of 8 a step, one group FAILED: the step still has 8 (its credit came back)."""
    changes = {
        "reward": mp.RewardConfig(rewards.broken_for_row_3),
        "fault": mp.FaultConfig(retry_delay_s=0.01),
        "gate": mp.GateConfig(groups_per_update=8, max_lag=0),
    }
    with mp.RolloutEngine(config(**changes)) as engine, engine.get(8, timeout=20) as batch:
        assert batch.tickets == [0, 1, 2, 4, 5, 6, 7, 8]


def test_with_a_lag_bound_groups_come_in_ticket_order_and_lag_is_bounded():
    """prime-rl#2960, prime-rl#1901: lag <= K for every group, nothing discarded."""
    import torch

    for max_lag in (0, 2):
        changes = {
            "workers": TWO_WORKERS,
            "gate": mp.GateConfig(groups_per_update=4, max_lag=max_lag),
            "generator": mp.SimulatedConfig(mean_tokens=20, sigma=1.0, tokens_per_s=3000),
        }
        with mp.RolloutEngine(config(**changes)) as engine:
            tickets, lags = [], []
            for version in range(1, 10):
                with engine.get(4, timeout=20) as batch:
                    tickets += batch.tickets
                    lags += [group.lag for group in batch]
                    assert all((group.token_versions >= version - 1 - max_lag).all() for group in batch)
                assert engine.update_weights({"w": torch.full((4,), float(version))}) == version
            assert tickets == list(range(36)) and 0 <= max(lags) <= max_lag
            assert engine.stats().outcomes == {"taken": 36}


def test_a_get_that_credit_can_never_meet_raises_at_once_with_the_numbers():
    with played(gate=mp.GateConfig(groups_per_update=4, max_lag=0)) as on:
        with pytest.raises(mp.GateStarved, match=r"get\(5\).*max_live_groups=4"):
            on.engine.get(5)
        on.publish(4)
        on.engine.get(4, timeout=20).release()
        with pytest.raises(mp.GateStarved, match="call update_weights first"):
            on.engine.get(4)


def test_an_update_without_its_groups_is_refused_under_a_lag_bound():
    import torch

    gate = mp.GateConfig(groups_per_update=4, max_lag=1)
    with played(gate=gate) as on, pytest.raises(mp.ConfigError, match="update_weights refused"):
        on.engine.update_weights({"w": torch.zeros(1)})


def test_the_gate_can_wait_for_the_first_weights():
    import torch

    with mp.RolloutEngine(config(gate=mp.GateConfig(groups_per_update=4, max_lag=0, await_weights=True))) as engine:
        with pytest.raises(mp.GateStarved, match="waits for the first update_weights"):
            engine.get(4)
        assert engine.update_weights({"w": torch.zeros(1)}) == 1
        with engine.get(4, timeout=20) as batch:
            assert all((group.token_versions == 1).all() and group.lag == 0 for group in batch)


def test_a_failed_update_does_not_advance_the_version():
    """slime#2279: and its number is never used again."""
    import torch

    with mp.RolloutEngine(config()) as engine:
        assert engine.update_weights({"w": torch.zeros(4)}) == 1
        with pytest.raises(mp.WeightUpdateFailed, match="stays 1"):
            engine.update_weights({"other": torch.zeros(4)})
        assert engine.policy_version == 1
        assert engine.update_weights({"w": torch.ones(4)}) == 3
        assert len(drain(engine)) == 40


def test_a_restarted_worker_has_the_current_weights_before_it_claims():
    import torch

    workers = mp.WorkerConfig(devices=["cpu"], max_running_samples=16)
    with mp.RolloutEngine(
        config(rows=100, workers=workers, generator=mp.SimulatedConfig(mean_tokens=12, tokens_per_s=500))
    ) as engine:
        engine.get(4, timeout=20).release()
        engine.update_weights({"w": torch.zeros(4)})
        os.kill(engine.stats().workers[0].pid, signal.SIGKILL)
        until(
            lambda: engine.stats().workers[0].restarts == 1 and engine.stats().workers[0].state == "ready", "restarted"
        )
        for taken in range(12):
            with engine.get(4, timeout=20) as batch:
                assert taken < 4 or all((group.token_versions == 1).all() for group in batch)


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


def test_a_state_of_other_data_is_refused():
    with played() as on:
        state = on.engine.state_dict()
    with pytest.raises(mp.ConfigError, match="made over source"):
        mp.RolloutEngine(config(rows=41)).load_state_dict(state)


def test_evaluation_is_beside_the_ring():
    with mp.RolloutEngine(config(workers=TWO_WORKERS)) as engine:
        result = engine.evaluate(
            [{"prompt": f"held out {i}"} for i in range(7)],
            mp.SamplingConfig(group_size=3, max_new_tokens=8),
            timeout=20,
        )
        assert result.rewards.shape == (7, 3) and result.versions == [0]
        assert [[float(len(ids)) for ids in row] for row in result.token_ids] == result.rewards.tolist()
        assert sorted(drain(engine)) == list(range(40))


def test_over_long_prompts_are_filtered_counted_and_replaced():
    source = mp.SourceConfig(
        rows=[{"prompt": "x" * (900 if i % 4 == 0 else 5)} for i in range(20)], epochs=1, max_prompt_tokens=500
    )
    with mp.RolloutEngine(config(source=source)) as engine:
        assert len(drain(engine)) == 15
        assert engine.stats().outcomes == {"taken": 15, "filtered:over_long": 5}


def test_a_refused_over_long_prompt_is_a_fault_that_names_the_row():
    source = mp.SourceConfig(rows=[{"prompt": "x" * 900}], max_prompt_tokens=500, over_long="refuse")
    with (
        pytest.raises(mp.EngineFault, match=r"row 0: the prompt has .* at most 500 fit"),
        mp.RolloutEngine(config(source=source)) as engine,
    ):
        engine.get(1, timeout=20)


def test_a_script_without_the_main_guard_gets_a_clear_error(tmp_path):
    script = tmp_path / "naked.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
            import mprollout as mp, engines
            def reward(sample: mp.RewardInput) -> float:
                return 1.0
            with mp.RolloutEngine(engines.config(reward=mp.RewardConfig(reward))) as engine:
                engine.get(4, timeout=20)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'if __name__ == "__main__":' in done.stderr and "WorkerStartError" in done.stderr


def test_a_reward_defined_in_the_script_works(tmp_path):
    script = tmp_path / "guarded.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
            import mprollout as mp, engines
            def reward(sample: mp.RewardInput) -> float:
                return 42.0
            def main():
                with mp.RolloutEngine(engines.config(reward=mp.RewardConfig(reward))) as engine:
                    print(engine.get(4, timeout=20).rewards.mean())
            if __name__ == "__main__":
                main()
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "42.0\n"


def test_a_config_survives_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        """
        seed = 7
        [source]
        path = "prompts.jsonl"
        [generator]
        backend = "simulated"
        mean_tokens = 9.0
        [reward]
        function = "exact"
        [gate]
        groups_per_update = 8
        max_lag = 1
        """
    )
    loaded = mp.EngineConfig.from_toml(path)
    assert loaded.seed == 7 and isinstance(loaded.generator, mp.SimulatedConfig) and loaded.gate.max_lag == 1
    path.write_text(path.read_text().replace("max_lag", "max_lagg"))
    with pytest.raises(mp.ConfigError, match=r"unknown field `max_lagg`.*gate"):
        mp.EngineConfig.from_toml(path)


def test_the_engines_share_of_the_trainer_process_is_small():
    """The trainer's own memory, Python included and the ring apart, stays under 150 MB."""
    code = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        import psutil, mprollout as mp, engines
        if __name__ == "__main__":
            with mp.RolloutEngine(engines.config()) as engine:
                engines.drain(engine)
                print(psutil.Process().memory_full_info().uss - engine._keeper.segment.size_bytes)
        """
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(out) < 150e6


def test_places_that_the_gate_cannot_fill_are_warned_about(caplog):
    mp.RolloutEngine(config(workers=TWO_WORKERS, gate=mp.GateConfig(groups_per_update=2, max_lag=1)))
    assert (
        "4 live groups of 4 samples cannot keep 2 workers x 16 sample places busy: 16 of 32 places stay empty"
        in caplog.text
    )
