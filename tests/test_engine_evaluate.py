"""Evaluation: its own rows, settings and failures, beside training and without an effect on it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import rewards
import torch
from engines import TWO_WORKERS, config, drain, until
from played import played

import mprollout as mp
from mprollout import messages
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
    engine = mp.RolloutEngine(config(source=gym))
    assert PromptSource(engine._like_source([{"question": "1 + 1?"}])).row(0)[2] == {"question": "1 + 1?"}
    with pytest.raises(mp.SourceError, match="row 0: no field 'question'"):
        PromptSource(engine._like_source([{"prompt": "1 + 1?"}]))


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
        assert sorted(drain(engine)) == list(range(40))


SECOND_LONG = {
    "generator": mp.SimulatedConfig(mean_tokens=12, sigma=0.0, tokens_per_s=12),
    "reward": mp.RewardConfig("exact"),
    "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=64),
}
"""Each sample takes a second."""
THREE_ROWS = [{"prompt": str(i), "answer": ""} for i in range(3)]


@contextlib.contextmanager
def evaluating(engine: mp.RolloutEngine, results: list[mp.EvaluationResult], pinned: bool):
    """An evaluation on another thread; joined at the end."""
    thread = threading.Thread(target=lambda: results.append(engine.evaluate(THREE_ROWS, timeout=30, pinned=pinned)))
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


def test_an_evaluation_that_pins_its_version_keeps_it_and_updates_wait():
    """slime#2339: one version in all of it, an update waits until it ends or for its own timeout; nothing of it enters the ring."""
    with mp.RolloutEngine(config(rows=12, **SECOND_LONG)) as engine:
        results: list[mp.EvaluationResult] = []
        with evaluating(engine, results, pinned=True):
            until(lambda: engine._updates._pins, "the version is pinned")
            with pytest.raises(
                mp.WeightUpdateFailed, match=r"version 0 pinned for longer than 0\.1 s; nothing was sent"
            ):
                engine.update_weights({"w": torch.zeros(4)}, timeout=0.1)
            assert engine.update_weights({"w": torch.zeros(4)}, timeout=20) == 1
        assert results[0].versions == [0] and engine.policy_version == 1
        assert engine.evaluate(THREE_ROWS[:1], timeout=20, pinned=True).versions == [1]
        assert sorted(drain(engine)) == list(range(12)) and engine.stats().outcomes == {"taken": 12}


def test_an_evaluation_names_the_versions_of_the_updates_beside_it():
    """slime#2339: an evaluation names every version that sampled a token of it; nothing of it enters the ring; neither call waits for the other."""
    with mp.RolloutEngine(config(rows=12, **SECOND_LONG)) as engine:
        results: list[mp.EvaluationResult] = []
        with evaluating(engine, results, pinned=False) as thread:
            while thread.is_alive():
                engine.update_weights({"w": torch.zeros(4)})
        (result,) = results
        assert len(result.versions) >= 2 and result.version == result.versions[-1] <= engine.policy_version
        assert result.versions == sorted(set(result.versions))
        assert all(len(ids) == 12 for row in result.token_ids for ids in row)
        assert engine.evaluate(THREE_ROWS[:1], timeout=20).versions == [engine.policy_version]
        assert sorted(drain(engine)) == list(range(12)) and engine.stats().outcomes == {"taken": 12}
