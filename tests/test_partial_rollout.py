"""What an update with `pause="abort"` ends: it goes on from its tokens (`partial_rollout`), or begins anew from its prompt alone."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import engines
import msgspec
import pytest

import mprollout as mp
from mprollout.batch import Sample
from mprollout.generator import GenerateRequest, Generation, VersionSpan
from mprollout.rollout import RolloutFunction, Session, single_turn
from mprollout.sampler import Attempt, Made, Sampler
from mprollout.simulated import SimulatedGenerator
from mprollout.simulation import TrainerModel, VirtualLoop, simulate
from mprollout.source import Prompt
from mprollout.taker import Taker

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*sample places.*")]
WEIGHTS: Any = SimpleNamespace(names=["w"], shapes={"w": (2,)})
PROMPT = Prompt(ticket=0, row=0, epoch=0, prompt="?", answer="x")
PROMPT_IDS = [1, 2, 3]

# -- whole runs in virtual time --------------------------------------------------------------------------------------------

taken: dict[int, list[Sample]] = {}
"""Copies of what was taken in this test, by ticket."""


class Keeper(Taker):
    """Keeps a copy of what is taken."""

    def book(self, n: int) -> Any:
        batch, told = super().book(n)
        for group in batch:
            taken[group.ticket] = [
                s._replace(token_ids=s.token_ids.copy(), logprobs=s.logprobs.copy(), loss_mask=s.loss_mask.copy())
                for s in group.samples
            ]
        return batch, told


async def two_turns(session: Session, prompt: Prompt) -> None:
    """A question of the environment's, of three tokens, between the turns."""
    await session.generate(max_new_tokens=40)
    session.append([7, 7, 7])
    await session.generate()


def samples_of_a_run(weights: mp.WeightsConfig, updates: bool, rollout: Any = None) -> dict[int, list[Sample]]:
    """64 groups of 4 in virtual time, an update every 4 groups; samples stand in line for places, so some begin at any time."""
    taken.clear()
    config = mp.EngineConfig(
        source=mp.SourceConfig(rows=[{"prompt": f"q{i}", "answer": "x"} for i in range(64)], epochs=1),
        generator=mp.SimulatedConfig(mean_tokens=60, sigma=0.5, tokens_per_s=20),
        sampling=mp.SamplingConfig(group_size=4, max_new_tokens=90),
        reward=mp.RewardConfig("exact"),
        workers=mp.WorkerConfig(devices=["cpu"] * 2, max_running_samples=8),
        gate=mp.GateConfig(max_live_groups=24),
        fault=mp.FaultConfig(max_attempts=1),  # an abort of ours is no failure of the prompt's
        weights=weights,
        rollout=rollout,
    )
    report = simulate(config, TrainerModel(groups_per_step=4, step_s=1.0, steps=16, updates=updates), taker=Keeper)
    assert report.outcomes == {"taken": 64}
    return dict(taken)


@pytest.mark.parametrize("rollout", [None, two_turns])
def test_a_resumed_sample_is_token_for_token_what_it_had_been_without_the_updates(rollout: Any) -> None:
    """Never more than `max_new_tokens` in all; logprobs, masks and finish reasons too; each part keeps the version that sampled it."""
    resumed = samples_of_a_run(mp.WeightsConfig(pause="abort", partial_rollout=True), updates=True, rollout=rollout)
    undisturbed = samples_of_a_run(mp.WeightsConfig(), updates=False, rollout=rollout)
    mixed = most = 0
    for ticket, samples in resumed.items():
        for got, want in zip(samples, undisturbed[ticket], strict=True):
            assert got.token_ids.tolist() == want.token_ids.tolist()
            assert got.logprobs.tolist() == want.logprobs.tolist()
            assert got.loss_mask.tolist() == want.loss_mask.tolist()
            assert got.finish_reason == want.finish_reason
            ascending = [span.version for span in got.versions]
            assert ascending == sorted(set(ascending)) and got.versions[-1].end == len(got.token_ids)
            mixed += len(got.versions) > 1
            most = max(most, int(got.loss_mask.sum()))
    assert mixed > 50 and most == 90


def test_off_policy_tokens_of_a_resumed_sample_can_be_masked() -> None:
    weights = mp.WeightsConfig(pause="abort", partial_rollout=True, mask_off_policy=True)
    mixed = 0
    for samples in samples_of_a_run(weights, updates=True, rollout=two_turns).values():
        for sample in samples:
            last = sample.versions[-1]
            assert not sample.loss_mask[: last.start].any()
            own = sample.token_ids[last.start :] != 7  # those of the environment are not trained on anyhow
            assert sample.loss_mask[last.start :][own].all()
            mixed += len(sample.versions) > 1
    assert mixed > 50


@pytest.mark.parametrize("partial", [False, True])
def test_what_begins_while_the_new_weights_are_read_is_aborted_as_nobodys_failure(
    monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    """Reading takes most of a step here, so that many samples begin meanwhile; a failure would end its ticket."""

    async def slowly(function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0.7)
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", slowly)
    weights = mp.WeightsConfig(pause="abort", partial_rollout=partial)
    groups = samples_of_a_run(weights, updates=True).values()
    assert any(len(sample.versions) > 1 for samples in groups for sample in samples) == partial


# -- one sample in virtual time --------------------------------------------------------------------------------------------


class Listening(SimulatedGenerator):
    """Remembers what it was asked; 10 tokens/s."""

    def __init__(self, **config: Any) -> None:
        super().__init__(mp.SimulatedConfig(**{"mean_tokens": 30, "sigma": 0.0, "tokens_per_s": 10} | config))
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        if request.resumed:  # as a real engine, which looks for stop strings among the tokens of one request
            request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, stop=[]))
        return await super().generate(request)


def one_sample(
    scenario: Callable[[Sampler, Listening, Callable[[bool], Awaitable[Made]]], Awaitable[Any]],
    partial: bool,
    rollout: RolloutFunction = single_turn,
    sampling: mp.SamplingConfig | None = None,
    **generator: Any,
) -> Any:
    """Calls `scenario` with a function that makes one sample (of an evaluation, if so) through the worker's sampler."""
    weights = mp.WeightsConfig(pause="abort", partial_rollout=partial)
    settings = engines.config(reward=mp.RewardConfig("exact"), weights=weights)
    sampling = sampling or mp.SamplingConfig(group_size=1, max_new_tokens=32)

    async def main() -> Any:
        engine = Listening(**generator)
        await engine.start()
        sampler = Sampler(settings, engine, rollout, memoryview(array.array("q", [0] * 64)))

        async def make(evaluates: bool) -> Made:
            attempt = Attempt("0.0", 7, evaluates=evaluates)
            (made,) = await sampler.run_group(PROMPT, PROMPT_IDS, sampling, attempt)
            return made

        try:
            return await asyncio.ensure_future(scenario(sampler, engine, make))
        finally:
            sampler.close()

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def abort_after_two_tokens(evaluates: bool = False) -> Any:
    async def scenario(
        sampler: Sampler, engine: Listening, make: Callable[[bool], Awaitable[Made]]
    ) -> tuple[Made, Listening]:
        making = asyncio.ensure_future(make(evaluates))
        await asyncio.sleep(0.25)
        sampler.updates_seen += 1
        await engine.update_weights(WEIGHTS, 8, "abort")
        return await making, engine

    return scenario


def test_an_aborted_sample_goes_on_with_what_is_left_of_its_budget() -> None:
    made, engine = one_sample(abort_after_two_tokens(), partial=True)
    first, second = engine.requests
    assert (first.prompt_ids, first.max_new_tokens, first.resumed) == (PROMPT_IDS, 32, 0)
    assert (second.prompt_ids, second.max_new_tokens, second.resumed) == (PROMPT_IDS + made.sample.token_ids[:2], 30, 2)
    assert second.request_id != first.request_id and second.seed == first.seed
    assert made.sample.versions == [VersionSpan(0, 0, 2), VersionSpan(8, 2, 30)]
    assert made.sample.loss_mask == b"\1" * 30 and made.sampled == 30


@pytest.mark.parametrize(("partial", "evaluates"), [(False, False), (True, True)])
def test_otherwise_it_begins_anew_from_its_prompt_alone(partial: bool, evaluates: bool) -> None:
    """slime#2092: one policy version, no token of the first try, which had two; the same for a sample of an evaluation."""
    made, engine = one_sample(abort_after_two_tokens(evaluates), partial=partial)
    first, second = engine.requests
    assert (second.prompt_ids, second.max_new_tokens, second.resumed) == (PROMPT_IDS, 32, 0)
    assert second.seed != first.seed
    assert made.sample.versions == [VersionSpan(8, 0, 30)]
    undisturbed = one_sample(lambda _, __, make: make(False), partial=partial)
    assert not set(made.sample.token_ids[:2]) & set(undisturbed.sample.token_ids[:2])


@pytest.mark.parametrize("partial", [False, True])
def test_an_abort_that_is_no_updates_fails_the_sample_though_an_update_came_before(partial: bool) -> None:
    """The update came in its first turn, which lived through it; in the second turn the engine gives the request up."""

    async def second_turn_aborted(sampler: Sampler, engine: Listening, make: Callable[[bool], Awaitable[Made]]) -> None:
        making = asyncio.ensure_future(make(False))
        await asyncio.sleep(0.25)
        sampler.updates_seen += 1
        await engine.update_weights(WEIGHTS, 8, "retract")
        await asyncio.sleep(2.1)  # the first turn has ended after 2 s in all
        await engine.abort()
        with pytest.raises(mp.SampleAborted, match=r"sample 0\.0\.0\.1: aborted by the engine after 3 tokens"):
            await making

    sampling = mp.SamplingConfig(group_size=1, max_new_tokens=80)
    one_sample(second_turn_aborted, partial, two_turns, sampling, mean_tokens=20)


def test_a_stop_string_across_the_abort_ends_the_sample() -> None:
    """The engine sees the second request's tokens alone; here the stop string is tokens 2 to 4 of the whole, and the abort comes after 3."""
    whole = one_sample(lambda _, __, make: make(False), partial=True, vocab_size=128).sample
    stop = bytes(whole.token_ids[1:4]).decode()

    async def scenario(sampler: Sampler, engine: Listening, make: Callable[[bool], Awaitable[Made]]) -> Made:
        making = asyncio.ensure_future(make(False))
        await asyncio.sleep(0.35)
        sampler.updates_seen += 1
        await engine.update_weights(WEIGHTS, 8, "abort")
        return await making

    for trim, kept in ((False, 4), (True, 1)):
        sampling = mp.SamplingConfig(group_size=1, max_new_tokens=32, stop=[stop], no_stop_trim=not trim)
        made = one_sample(scenario, True, sampling=sampling, vocab_size=128)
        assert made.sample.token_ids == whole.token_ids[:kept] and made.sample.finish_reason == "stop"
        assert made.sample.logprobs == whole.logprobs[:kept] and len(made.sample.loss_mask) == kept
        assert [span.version for span in made.sample.versions] == ([0] if trim else [0, 8])
