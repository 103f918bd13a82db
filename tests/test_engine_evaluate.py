"""Evaluation: its own rows, settings and failures, beside training and without an effect on it."""

from __future__ import annotations

import math
import os
import signal
import threading
import time

import numpy as np
import pytest
import rewards
import torch
from engines import TWO_WORKERS, config, drain, until
from played import played

import mprollout as mp
from mprollout import messages
from mprollout.evaluation import like
from mprollout.source import PromptSource

pytestmark = pytest.mark.timeout(60)
SHORT = mp.SamplingConfig(group_size=2, max_new_tokens=4)


def test_an_evaluation_has_its_own_rows_settings_and_failures():
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=12, context_length=1000),
        "reward": mp.RewardConfig(rewards.judge_group, per="group"),
        "rollout": rewards.echo,
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=16),
    }
    with mp.RolloutEngine(config(rows=12, **changes)) as engine:
        # group rewards, and a group size of its own
        result = engine.evaluate([{"prompt": "one"}, {"prompt": "two"}], SHORT, timeout=20)
        assert result.rewards.tolist() == [[0, 1], [0, 1]]
        assert all("<|user|>\ntwo\n" in text for text in result.texts[1])

        # a source of its own, rendered by its own settings, each row once and in its order
        rows = mp.SourceConfig(
            rows=[{"ask": "three"}, {"ask": "four"}], prompt_field="ask", system_prompt="Be brief.", shuffle_seed=5
        )
        result = engine.evaluate(rows, SHORT, timeout=20)
        assert ["three" in result.texts[0][0], "four" in result.texts[1][0]] == [True, True]
        assert all("<|system|>\nBe brief.\n<|user|>" in text for row in result.texts for text in row)

        # rows of reasoning-gym bring their question
        gym = mp.SourceConfig(reasoning_gym="chain_sum", reasoning_gym_args={"size": 3, "seed": 1})
        asked = [PromptSource(gym).row(i)[2]["question"] for i in range(3)]
        result = engine.evaluate(gym, SHORT, timeout=20)
        assert [question in texts[1] for question, texts in zip(asked, result.texts, strict=True)] == [True] * 3

        # what fails is an error here that names its row, and no fault of training
        with pytest.raises(
            mp.EngineFault, match=r"row 1: the prompt has 9\d\d tokens, at most 996 fit beside max_new_tokens=4"
        ):
            engine.evaluate([{"prompt": "short"}, {"prompt": "x" * 975}, {"prompt": "x" * 2000}], SHORT, timeout=20)
        for _ in range(2 * engine.config.fault.max_consecutive_failures):
            with pytest.raises(mp.EngineFault, match="there is no judge for this row") as caught:
                engine.evaluate([{"prompt": "one", "judge": "absent"}], SHORT, timeout=20)
        assert caught.value.worker == 0 and "rewards.py" in caught.value.worker_traceback
        with pytest.raises(
            mp.ConfigError, match=r"evaluate\(sampling\): expected a SamplingConfig; got \{'group_size'"
        ):
            engine.evaluate([{"prompt": "one"}], {"group_size": 2})  # type: ignore[arg-type]
        assert sorted(drain(engine)) == list(range(12)) and engine.stats().outcomes == {"taken": 12}


def test_rows_of_a_worker_that_dies_are_dealt_again_when_it_is_back():
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=12, sigma=0.0, tokens_per_s=25),
        "reward": mp.RewardConfig("exact"),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=64),
        "gate": mp.GateConfig(max_live_groups=1),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        results: list[mp.EvaluationResult] = []
        rows = [{"prompt": str(i), "answer": ""} for i in range(5)]
        thread = threading.Thread(target=lambda: results.append(engine.evaluate(rows, timeout=30)))
        thread.start()
        until(lambda: engine.stats().workers[0].running_samples > 4, "the evaluation runs")
        os.kill(engine.stats().workers[0].pid, signal.SIGKILL)
        thread.join()
        assert results[0].rewards.shape == (5, 4) and engine.stats().workers[0].restarts == 1


def test_plain_rows_for_an_engine_over_reasoning_gym_are_questions():
    gym = mp.SourceConfig(reasoning_gym="chain_sum", reasoning_gym_args={"size": 3, "seed": 1})
    assert PromptSource(like(gym, [{"question": "1 + 1?"}])).row(0)[2] == {"question": "1 + 1?"}
    with pytest.raises(mp.SourceError, match="row 0: no field 'question'"):
        PromptSource(like(gym, [{"prompt": "1 + 1?"}]))


def test_an_evaluation_waits_for_a_worker_and_ends_with_the_keeper():
    with played() as on:
        on.keeper.tell(messages.WorkerState(worker=0, pid=1, state="restarting"))
        until(lambda: on.engine.stats().workers[0].state == "restarting", "the worker's state is known")
        with pytest.raises(
            mp.GetTimeout, match=r"evaluate: 0 samples of 1 rows came within 0.05 s; worker 0 .* restarting"
        ):
            on.engine.evaluate([{"prompt": "one"}], timeout=0.05)
        on.keeper.far.socket.shutdown(2)
        for _ in range(2):
            with pytest.raises(mp.KeeperLost, match="exit code -9"):
                on.engine.evaluate([{"prompt": "one"}], timeout=20)


def test_evaluation_is_beside_the_ring():
    with mp.RolloutEngine(config(workers=TWO_WORKERS)) as engine:
        result = engine.evaluate(
            [{"prompt": f"held out {i}"} for i in range(7)],
            mp.SamplingConfig(group_size=3, max_new_tokens=8),
            timeout=20,
        )
        assert result.rewards.shape == (7, 3) and result.versions == [0]
        assert [[float(len(ids)) for ids in row] for row in result.token_ids] == result.rewards.tolist()
        assert result.lengths.tolist() == result.rewards.tolist()
        ended = {
            (length == 8, reason)
            for row, why in zip(result.lengths, result.finish_reasons, strict=True)
            for length, reason in zip(row, why, strict=True)
        }
        assert (False, "stop") in ended and (False, "length") not in ended
        assert sorted(drain(engine)) == list(range(40))


SECOND_LONG = {
    "generator": mp.SimulatedConfig(mean_tokens=12, sigma=0.0, tokens_per_s=12),
    "reward": mp.RewardConfig("exact"),
    "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=64),
}
"""Each sample takes a second."""
THREE_ROWS = [{"prompt": str(i), "answer": ""} for i in range(3)]


def push(engine: mp.RolloutEngine, timeout: float = 20) -> int:
    return engine.update_weights({"w": torch.zeros(4)}, timeout=timeout)


def test_an_evaluation_that_pins_its_version_keeps_it_and_updates_wait():
    """slime#2339: one version in all of it; an update of the same thread waits until it ends or for its own timeout, and nothing deadlocks."""
    with mp.RolloutEngine(config(rows=12, **SECOND_LONG)) as engine:
        evaluation = engine.submit_evaluation(THREE_ROWS, timeout=30, pinned=True)
        until(lambda: engine._updates._pins, "the version is pinned")
        with pytest.raises(mp.WeightUpdateFailed, match=r"version 0 pinned for longer than 0\.1 s; nothing was sent"):
            push(engine, timeout=0.1)
        assert push(engine) == 1
        assert evaluation.result(timeout=0.5).versions == [0] and engine.policy_version == 1
        pushed: list[int] = []
        evaluation = engine.submit_evaluation(THREE_ROWS[:1], timeout=20, pinned=True)
        evaluation.add_done_callback(lambda _: pushed.append(push(engine)))  # on its own thread, its pin gone
        assert evaluation.result(timeout=20).versions == [1]
        until(lambda: pushed == [2], "the callback has pushed")
        assert sorted(drain(engine)) == list(range(12)) and engine.stats().outcomes == {"taken": 12}
        assert engine.stats().workers[0].evaluated_samples == 16 and engine.stats().workers[0].samples_finished == 48
        evaluation = engine.submit_evaluation(THREE_ROWS)
    with pytest.raises(mp.EngineClosed):
        evaluation.result(timeout=5)


def test_an_evaluation_names_the_versions_of_the_updates_beside_it():
    """slime#2339: an evaluation names every version that sampled a token of it; nothing of it enters the ring; neither call waits for the other."""
    with mp.RolloutEngine(config(rows=12, **SECOND_LONG)) as engine:
        evaluation = engine.submit_evaluation(THREE_ROWS, timeout=30)
        while not evaluation.done():
            push(engine)
        result = evaluation.result()
        assert len(result.versions) >= 2 and result.version == result.versions[-1] <= engine.policy_version
        assert result.versions == sorted(set(result.versions))
        assert all(len(ids) == 12 for row in result.token_ids for ids in row)
        assert engine.evaluate(THREE_ROWS[:1], timeout=20).versions == [engine.policy_version]
        assert sorted(drain(engine)) == list(range(12)) and engine.stats().outcomes == {"taken": 12}


def test_a_share_of_the_workers_keeps_its_version_while_updates_go_on_and_catches_up_before_it_claims():
    """slime#2339: the worker set aside claims nothing and applies nothing until the evaluation ends; updates complete without it."""
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=40),
        "reward": mp.RewardConfig("exact"),
        "workers": TWO_WORKERS,
        "gate": mp.GateConfig(groups_per_update=2, max_lag=2),
    }
    with mp.RolloutEngine(config(rows=400, **changes)) as engine:

        def state() -> list[str]:
            return [worker.state for worker in engine.stats().workers]

        lags: list[int] = []
        claims: list[tuple[int, int, int]] = []

        def step() -> None:
            with engine.get(2, timeout=20) as batch:
                lags.extend(group.lag for group in batch)
                claims.extend((group.worker, group.meta.claimed_ns, int(group.token_versions.min())) for group in batch)
            push(engine)

        step()
        rows = [{"prompt": str(i), "answer": ""} for i in range(20)]
        evaluation = engine.submit_evaluation(rows, timeout=30, pinned="share")
        until(lambda: state() == ["ready", "evaluating"], "worker 1 is set aside")
        aside_ns = time.monotonic_ns()
        with pytest.raises(mp.ConfigError, match=r"workers=2\): 2 workers live, and one at least must be left"):
            engine.evaluate(rows, pinned="share", workers=2)
        while not evaluation.done():
            last_ns = time.monotonic_ns()
            step()
        result = evaluation.result()
        assert result.versions == [1] and result.rewards.shape == (20, 4) and engine.policy_version >= 4
        assert {worker for worker, claimed_ns, _ in claims if aside_ns < claimed_ns < last_ns} == {0}
        until(lambda: state() == ["ready", "ready"], "worker 1 is back")
        back_ns, version = time.monotonic_ns(), engine.policy_version
        while not any(worker == 1 and claimed_ns > back_ns for worker, claimed_ns, _ in claims):
            step()
        assert all(oldest >= version for worker, claimed_ns, oldest in claims if worker == 1 and claimed_ns > back_ns)
        assert 0 <= max(lags) <= 2


def test_a_share_whose_workers_die_is_evaluated_again_with_one_version():
    with mp.RolloutEngine(config(rows=12, **SECOND_LONG | {"workers": TWO_WORKERS})) as engine:
        evaluation = engine.submit_evaluation(THREE_ROWS, timeout=30, pinned="share")
        until(lambda: engine.stats().workers[1].state == "evaluating", "worker 1 is set aside")
        os.kill(engine.stats().workers[1].pid, signal.SIGKILL)
        push(engine)
        result = evaluation.result(timeout=30)
        assert result.versions == [1] and result.rewards.shape == (3, 4)
        until(lambda: [w.state for w in engine.stats().workers] == ["ready", "ready"], "all are back")
        assert sorted(drain(engine)) == list(range(12))


def test_evaluation_and_training_share_the_places_and_neither_starves():
    """Both would fill all 16 places: each gets half, whoever came first, as long as the other wants the rest."""
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=100),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=16),
        "gate": mp.GateConfig(max_live_groups=40),
    }
    with mp.RolloutEngine(config(rows=4000, **changes)) as engine:
        until(lambda: engine.stats().running_samples == 16, "training has all places")
        before = engine.stats().workers[0].samples_finished
        evaluation = engine.submit_evaluation([{"prompt": str(i)} for i in range(40)], timeout=30)
        while not evaluation.done():
            engine.get(1, timeout=20).release()
        trained = engine.stats().workers[0].samples_finished - before
        assert evaluation.result().lengths.sum() == 1600
        assert 0.7 * 160 <= trained <= 1.4 * 160


def test_pass_at_k_is_the_unbiased_estimator():
    """Chen et al. 2021: 1 - C(n - c, k) / C(n, k)."""
    rewards = np.array([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0.5, 0, 0], [1, 1, 1, 1, 1]], np.float32)
    result = mp.EvaluationResult(
        rewards=rewards,
        lengths=np.zeros((4, 5), np.int32),
        finish_reasons=[],
        texts=[],
        token_ids=[],
        versions=[],
        seconds=0.0,
    )
    for k in range(1, 6):
        for correct, found in ((1.0, [0, 1, 2, 5]), (0.5, [0, 1, 3, 5])):
            want = [1 - math.comb(5 - c, k) / math.comb(5, k) for c in found]
            np.testing.assert_allclose(result.pass_at(k, correct), want, atol=1e-12)
    for k in (0, 6):
        with pytest.raises(mp.ConfigError, match=f"k must be 1 to 5, the samples of a row; got {k}"):
            result.pass_at(k)
