"""What a bad prompt, a bad reward or a bad moment costs: its own sample or ticket, at worst a fault."""

from __future__ import annotations

import array
import asyncio
import time
from typing import Any

import pytest
import rewards
from engines import config, descendants, drain, until
from played import played

import mprollout as mp
from mprollout import _native, messages
from mprollout.ledger import Reason
from mprollout.sampler import Attempt, Sampler
from mprollout.simulated import SimulatedGenerator
from mprollout.source import Prompt

pytestmark = pytest.mark.timeout(60)


def test_a_poison_prompt_takes_no_other_with_it_and_costs_no_restart():
    """Its worker dies with it and its neighbours twice; then it runs alone, dies again, and it alone is given up."""
    changes = {
        "rollout": rewards.poisonous_row_0,
        "reward": mp.RewardConfig("exact"),
        "generator": mp.SimulatedConfig(
            mean_tokens=12, sigma=0.0, tokens_per_s=100
        ),  # its neighbours run for longer than it
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=16, max_restarts=2),
        "fault": mp.FaultConfig(max_deaths_per_ticket=2),
    }
    with mp.RolloutEngine(config(rows=12, **changes)) as engine:
        assert sorted(drain(engine)) == list(range(1, 12))
        assert engine.stats().outcomes == {"taken": 11, "failed:deaths": 1}
        assert engine.stats().workers[0].restarts == 3  # one more than max_restarts in a row


def test_two_short_outages_of_a_reward_cost_their_prompts_and_are_no_fault():
    """Five prompts in a row fail, twice: together more than max_consecutive_failures, but groups came between them."""
    changes = {
        "reward": mp.RewardConfig(rewards.down_twice),
        "sampling": mp.SamplingConfig(group_size=1),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=1),
        "gate": mp.GateConfig(max_live_groups=1),
        "fault": mp.FaultConfig(max_attempts=3, retry_delay_s=0.001, max_consecutive_failures=8),
    }
    with mp.RolloutEngine(config(rows=40, **changes)) as engine:
        assert drain(engine, 1) == [*range(5, 30), *range(35, 40)]
        assert engine.stats().outcomes == {"taken": 30, "failed:reward": 10}
        until(
            lambda: "the judge is down in call 55" in engine._attendant.notes[34].error, "the note of the last failure"
        )


LONG = "x" * 1000


def test_a_row_beyond_max_prompt_bytes_is_filtered_and_counted():
    source = mp.SourceConfig(rows=[{"prompt": "a", "field": LONG if i % 3 == 0 else ""} for i in range(9)], epochs=1)
    with played(source=source, ring=mp.RingConfig(max_prompt_bytes=256)) as on:
        on.publish(6)
        with on.engine.get(6, timeout=10) as batch:
            assert batch.tickets == [1, 2, 4, 5, 7, 8]
        assert on.engine.audit() == on.engine.stats().outcomes == {"taken": 6, "filtered:over_long": 3}
        with pytest.raises(mp.DataExhausted, match=r"0 groups are left; \{'filtered:over_long': 3\} ended otherwise"):
            on.engine.get(1)


def test_a_row_beyond_max_prompt_bytes_is_a_fault_that_names_it_when_long_rows_are_refused():
    source = mp.SourceConfig(rows=[{"prompt": "a"}, {"prompt": LONG}], over_long="refuse")
    with (
        pytest.raises(
            mp.EngineFault,
            match=r"the source cannot go on: SourceError: row 1: .* 256 bytes, got 10\d\d .*max_prompt_bytes",
        ),
        played(source=source, ring=mp.RingConfig(max_prompt_bytes=256)) as on,
    ):
        on.engine.get(2, timeout=10)


def test_a_whole_pass_of_over_long_prompts_is_a_fault_unless_the_data_ends_first():
    rows = [{"prompt": LONG} for _ in range(10)]
    ring = mp.RingConfig(max_prompt_bytes=256)
    text = (
        r"10 prompts in a row were filtered \(over_long\), a whole pass over the rows; the last: row 9: .* got 10\d\d"
    )
    with pytest.raises(mp.PromptsFailing, match=text), played(source=mp.SourceConfig(rows=rows), ring=ring) as on:
        on.engine.get(1, timeout=10)
    with (
        played(source=mp.SourceConfig(rows=rows, epochs=1), ring=ring) as on,
        pytest.raises(mp.DataExhausted, match="'filtered:over_long': 10"),
    ):
        on.engine.get(1, timeout=10)


def test_a_fault_is_raised_before_what_the_settings_forbid():
    with played() as on:
        with pytest.raises(mp.GateStarved, match="max_live_groups=6 is below n=7"):
            on.engine.get(7)
        on.keeper.tell(messages.Fault(kind="prompt", message="row 3 is too long"))
        until(lambda: on.engine._attendant.fault, "the fault is known")
        for call in (lambda: on.engine.get(7), lambda: on.engine.evaluate([]), lambda: on.engine.update_weights({})):
            with pytest.raises(mp.EngineFault, match="row 3 is too long"):
                call()


def test_a_fault_of_many_failures_carries_a_traceback_although_the_last_note_is_late():
    """slime#2399: a note comes by way of the keeper, and its ticket's end by itself."""
    with played(fault=mp.FaultConfig(max_consecutive_failures=3)) as on:
        note = {"worker": 0, "attempt": 0, "traceback": "the traceback", "final": True}
        on.keeper.tell(messages.Note(ticket=0, reason="reward", error="RewardRaised: no judge", **note))
        on.keeper.tell(messages.Note(ticket=9, reason="abort", error="aborted", **note))
        until(lambda: len(on.engine._attendant.notes) == 2, "the notes are known")
        for _ in range(3):
            on.producer.end(on.claim(), _native.FAILED, Reason.REWARD)
        with pytest.raises(mp.RewardFault, match=r"3 prompts in a row .* the last: RewardRaised: no judge") as caught:
            on.engine.get(1, timeout=10)
        assert caught.value.worker_traceback == "the traceback"


def test_groups_in_hand_are_delivered_although_a_fault_is_known():
    with played() as on:
        on.publish(2)
        on.keeper.tell(messages.Fault(kind="prompt", message="row 3 is too long"))
        until(lambda: on.engine._attendant.fault, "the fault is known")
        assert on.engine.get(2, timeout=10).tickets == [0, 1]


RAISED: dict[str, type[BaseException]] = {
    "cancelled": asyncio.CancelledError,
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
    "error": OSError,
}


async def judge(sample: mp.RewardInput, what: str) -> float:
    if sample.index == 1:
        raise RAISED[what]("no answer")
    return float(sample.index)


async def judge_group(samples: list[mp.RewardInput], what: str) -> list[float]:
    raise RAISED[what]("no answer")


async def run_group(reward: mp.RewardConfig, rollout: Any, on_sample_failure: str) -> tuple[list[float], list[str]]:
    """The rewards of a group of four, and what was told of the samples that it goes without."""
    fault = mp.FaultConfig(on_sample_failure=on_sample_failure)  # type: ignore[arg-type]
    settings = config(reward=reward, fault=fault)
    generator = SimulatedGenerator(mp.SimulatedConfig(mean_tokens=4))
    await generator.start()
    sampler = Sampler(settings, generator, rollout, memoryview(array.array("q", [0] * 64)))
    told: list[BaseException] = []
    try:
        made = await sampler.run_group(
            Prompt(ticket=0, row=0, epoch=0, prompt="?"), [1, 2], settings.sampling, Attempt("0.0", 7), tell=told.append
        )
        assert sampler.places.held == 0
        return [one.reward for one in made], [f"{error} {error.__notes__}" for error in told]
    finally:
        sampler.close()


@pytest.mark.parametrize("what", RAISED)
@pytest.mark.parametrize("where", ["reward", "rollout"])
def test_whatever_an_async_function_raises_fails_its_own_sample_alone(where, what):
    """TRL#7176: also what would end an event loop, or pass for a cancellation of ours."""

    async def rollout(session: Any, prompt: Prompt) -> None:
        await session.generate()
        if where == "rollout" and session._request_id.endswith(".1"):
            raise RAISED[what]("no answer")

    reward = mp.RewardConfig(judge, kwargs={"what": what if where == "reward" else ""})
    if where == "rollout":
        reward = mp.RewardConfig(rewards.async_index)
    made, told = asyncio.run(run_group(reward, rollout, "shrink"))
    assert made == [0.0, 2.0, 3.0]
    assert len(told) == 1 and "sample 1 of 4" in told[0]
    with pytest.raises(Exception, match="no answer" if what == "error" else RAISED[what].__name__):
        asyncio.run(run_group(reward, rollout, "retry"))


@pytest.mark.parametrize("what", RAISED)
def test_whatever_an_async_group_reward_raises_is_an_ordinary_error_of_its_group(what):
    from mprollout.rollout import single_turn

    reward = mp.RewardConfig(judge_group, per="group", kwargs={"what": what})
    with pytest.raises(Exception, match="no answer" if what == "error" else RAISED[what].__name__):
        asyncio.run(run_group(reward, single_turn, "retry"))


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


def test_a_prompt_that_always_fails_ends_failed_and_the_others_are_served():
    """NeMo-RL#3938: FAILED after r attempts with its error; its capacity is freed."""
    with mp.RolloutEngine(
        config(reward=mp.RewardConfig(rewards.broken_for_row_3), fault=mp.FaultConfig(retry_delay_s=0.01))
    ) as engine:
        assert sorted(drain(engine)) == [i for i in range(40) if i != 3]
        assert engine.stats().outcomes == {"taken": 39, "failed:reward": 1}
        assert "row 3 is poison" in engine._attendant.notes[3].error


def test_a_pathological_expression_costs_its_own_prompt_and_the_pool_is_full_again():
    """AReaL#1426, verl#5839: the verifier of row 3 never returns; each call of it is killed at the timeout, and all others are served."""
    reward = mp.RewardConfig(rewards.pathological_for_row_3, workers=2, timeout_s=0.5)
    fault = mp.FaultConfig(max_attempts=2, retry_delay_s=0)
    with mp.RolloutEngine(config(reward=reward, fault=fault)) as engine:
        assert sorted(drain(engine)) == [ticket for ticket in range(40) if ticket != 3]
        stats = engine.stats()
        assert stats.outcomes == {"taken": 39, "failed:timeout": 1} and stats.workers[0].restarts == 0

        def pool() -> int:
            return len(descendants(stats.workers[0].pid, "mprollout.reward_process"))

        until(lambda: pool() == 2, "both reward processes live")


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
