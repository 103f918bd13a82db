"""Settings of a row's own, stops, the end of thinking, truncation, seeds: what they make of a sample."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import mprollout as mp
from mprollout.generator import FinishReason, GenerateRequest, Generation, VersionSpan
from mprollout.rollout import Session
from mprollout.simulated import ByteTokenizer, SimulatedGenerator
from mprollout.simulation import TrainerModel, simulate
from mprollout.source import Prompt, PromptSource
from mprollout.stops import first_stop, tokens_before
from mprollout.taker import Taker
from mprollout.worker_process import make_generator

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*sample places.*")]

# -- one turn after another, scripted --------------------------------------------------------------------------------------


class Scripted:
    """Answers each request with the next text of the script: (text, finish reason, what matched); remembers the requests."""

    context_length = 1000
    version = 3
    tokenizer = ByteTokenizer()

    def __init__(self, *script: tuple[str, FinishReason, int | str | None]) -> None:
        self.script, self.requests = list(script), list[GenerateRequest]()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        text, reason, matched = self.script.pop(0)
        ids = self.tokenizer.encode(text)
        assert len(ids) <= request.max_new_tokens
        return Generation(
            token_ids=ids,
            logprobs=[-float(i) for i in range(1, len(ids) + 1)],
            finish_reason=reason,
            versions=[VersionSpan(3, 0, len(ids))] if ids else [],
            matched_stop=matched,
        )


def turn(*script: tuple[str, FinishReason, int | str | None], **sampling: Any) -> tuple[Session, Generation, Scripted]:
    """What one turn makes of the script."""
    engine = Scripted(*script)
    session = Session(engine, mp.SamplingConfig(**{"max_new_tokens": 40} | sampling), [1, 2, 3], "5.0.1", seed=9)  # type: ignore[arg-type]
    return session, asyncio.run(session.generate()), engine


@pytest.mark.parametrize(
    ("text", "matched", "settings", "trimmed"),
    [
        ("So 42.\nQ:", "\nQ:", {"stop": ["\nQ:"]}, "So 42."),
        ("größer€", "€", {"stop": ["€"]}, "größer"),  # a character of three tokens
        ("abc!", ord("!"), {"stop_token_ids": [ord("!")]}, "abc"),
        ("abc!", ord("!"), {}, "abc!"),  # an EOS of the model stays
        ("##", "#", {"stop": ["#"]}, "#"),
    ],
)
def test_what_matched_a_stop_stays_or_goes_with_all_that_belongs_to_it(
    text: str, matched: int | str, settings: dict[str, Any], trimmed: str
) -> None:
    for trim, want in ((False, text), (True, trimmed)):
        session, made, _ = turn((text, "stop", matched), **settings, no_stop_trim=not trim)
        n = len(want.encode())
        assert session.text == want and made.token_ids == session.sample.token_ids
        assert session.sample.logprobs == [-float(i) for i in range(1, n + 1)]
        assert session.sample.loss_mask == b"\1" * n and session.sample.versions == [VersionSpan(3, 0, n)]
        assert session.sample.finish_reason == "stop" and made.matched_stop == matched
        assert session.remaining_tokens == 40 - n


def test_a_stop_string_is_found_where_it_ends_and_where_it_begins() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("one STOP two STOP")
    assert first_stop(tokenizer, ids, ["STOP", "TOP t"], 0, len(ids)) == (8, "STOP")
    assert first_stop(tokenizer, ids, ["STOP"], 8, 12) == (9, "STOP")  # it lies in what stands before
    assert first_stop(tokenizer, ids, ["three"], 0, len(ids)) is None
    assert tokens_before(tokenizer, ids, "STOP") == 13
    assert tokens_before(tokenizer, ids, "four") == len(ids)


def test_thinking_that_is_too_long_is_ended_with_tokens_that_are_not_trained_on() -> None:
    session, made, engine = turn(
        ("I wonder", "length", None), ("42", "stop", 256), max_thinking_tokens=8, end_of_thinking="</t>\n"
    )
    assert session.text == "I wonder</t>\n42"
    assert bytes(session.sample.loss_mask) == b"\1" * 8 + b"\0" * 5 + b"\1" * 2
    assert made.logprobs == [-1, -2, -3, -4, -5, -6, -7, -8, 0, 0, 0, 0, 0, -1, -2]
    first, second = engine.requests
    assert first.max_new_tokens == 8 and second.max_new_tokens == 40 - 8 - 5
    assert second.prompt_ids == [1, 2, 3, *b"I wonder</t>\n"] and second.seed != first.seed
    assert session.remaining_tokens == 40 - 15  # what was put there counts: the ring has room for max_new_tokens


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([("hm</t>42", "stop", 256)], "hm</t>42"),  # done before
        ([("hm</t>43", "length", None), (".", "stop", 256)], "hm</t>43."),  # ended by itself, and went on
        ([("thinking", "length", None), ("", "stop", 256)], "thinking</t>\n"),
    ],
)
def test_thinking_that_ends_by_itself_is_left_alone(script: Any, text: str) -> None:
    session, _, engine = turn(*script, max_thinking_tokens=8, end_of_thinking="</t>\n")
    assert session.text == text and not engine.script and session.sample.finish_reason == "stop"


def test_a_budget_that_the_thinking_uses_up_leaves_no_answer_and_never_more_tokens() -> None:
    session, _, engine = turn(
        ("thinking", "length", None), max_thinking_tokens=8, end_of_thinking="</t>\n", max_new_tokens=11
    )
    assert session.text == "thinking</t" and session.sample.finish_reason == "length" and len(engine.requests) == 1
    session, _, _ = turn(("thinking", "length", None), max_thinking_tokens=8, max_new_tokens=8)
    assert session.text == "thinking"


# -- whole runs in virtual time --------------------------------------------------------------------------------------------

taken: dict[int, dict[str, Any]] = {}
"""Copies of what was taken in this test, by row."""


class Keeper(Taker):
    """Keeps a copy of what is taken."""

    def book(self, n: int) -> Any:
        batch, told = super().book(n)
        for group in batch:
            names = ("lengths", "rewards", "loss_mask", "finish_reasons")
            taken[group.row] = {name: group.field(name).copy() for name in names} | {"sampled": group.sampled}
        return batch, told


async def one(sample: mp.RewardInput) -> float:
    return 1.0


async def ones(samples: list[mp.RewardInput]) -> list[float]:
    return [1.0] * len(samples)


def run(rows: list[dict[str, Any]], sampling: mp.SamplingConfig, take: int, **changes: Any) -> Any:
    """Take so many groups, one a step."""
    taken.clear()
    parts = {
        "generator": mp.SimulatedConfig(mean_tokens=20, sigma=0.7, tokens_per_s=50),
        "reward": mp.RewardConfig(one),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=16),
        "gate": mp.GateConfig(max_live_groups=8),
    }
    config = mp.EngineConfig(source=mp.SourceConfig(rows=rows, epochs=1), sampling=sampling, **parts | changes)
    return simulate(config, TrainerModel(groups_per_step=1, step_s=0.1, steps=take, updates=False), taker=Keeper)


def test_each_row_is_sampled_by_its_own_settings_and_a_wrong_one_fails_alone() -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"q{i}"} for i in range(6)]
    rows[1]["sampling"] = {"max_new_tokens": 3, "temperature": 0.5, "ignore_eos": True}
    rows[2]["sampling"] = {"max_new_tokens": 65}
    rows[3]["sampling"] = {"top_k": 40, "top_p": 0.9, "max_new_tokens": None}  # as a Parquet file has it
    rows[4]["sampling"] = {"top_p": 0.9}
    report = run(rows, mp.SamplingConfig(group_size=4, max_new_tokens=64, temperature=0.7), take=4)
    assert report.outcomes == {"taken": 4, "failed:prompt": 2} and sorted(taken) == [0, 1, 3, 5]
    assert taken[1]["lengths"].tolist() == [3] * 4 and taken[0]["lengths"].max() > 3
    of_row = {row: (group["sampled"].temperature, group["sampled"].top_k) for row, group in taken.items()}
    assert of_row == {0: (0.7, -1), 1: (0.5, -1), 3: (0.7, 40), 5: (0.7, -1)}


def test_a_row_whose_settings_are_no_mapping_is_named() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "sampling": [1]}]
    with pytest.raises(
        mp.SourceError, match=r"row 1: field 'sampling' .*expected a mapping of sampling settings; got \[1\]"
    ):
        PromptSource(mp.SourceConfig(rows=rows)).encode(1)
    other = PromptSource(mp.SourceConfig(rows=rows, sampling_field=None))
    assert Prompt.decode(other.encode(1)).fields == {"sampling": [1]}


@pytest.mark.parametrize("per", ["sample", "group"])
@pytest.mark.parametrize("on_truncation", ["keep", "mask", "reward"])
def test_a_truncated_sample_is_kept_masked_or_gets_its_own_reward(on_truncation: Any, per: Any) -> None:
    sampling = mp.SamplingConfig(group_size=8, max_new_tokens=24, on_truncation=on_truncation, truncation_reward=-0.5)
    rows = [{"prompt": f"q{i}"} for i in range(8)]
    run(rows, sampling, take=8, reward=mp.RewardConfig(one if per == "sample" else ones, per=per))
    cut = kept = 0
    for group in taken.values():
        masks = np.split(group["loss_mask"], np.cumsum(group["lengths"])[:-1])
        for reason, mask, reward_ in zip(group["finish_reasons"], masks, group["rewards"], strict=True):
            truncated = reason == 1  # "length"
            cut, kept = cut + truncated, kept + (not truncated)
            assert mask.all() if not (truncated and on_truncation == "mask") else not mask.any()
            assert reward_ == (-0.5 if truncated and on_truncation == "reward" else 1.0)
    assert cut > 8 and kept > 8


def test_seeds_differ_by_worker_ticket_sample_and_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request of a run with failing attempts has a seed of its own; so has every worker's engine."""
    seeds: list[int] = []
    generate = SimulatedGenerator.generate

    async def listening(self: SimulatedGenerator, request: GenerateRequest) -> Generation:
        seeds.append(request.seed)
        return await generate(self, request)

    monkeypatch.setattr(SimulatedGenerator, "generate", listening)
    report = run(
        [{"prompt": f"q{i}"} for i in range(40)],
        mp.SamplingConfig(group_size=8, max_new_tokens=64),
        take=20,
        generator=mp.SimulatedConfig(mean_tokens=20, tokens_per_s=50, faults={"exception": 0.05}),
    )
    assert report.outcomes["taken"] == 20 and len(seeds) > 28 * 8
    assert len(set(seeds)) == len(seeds)
    config = mp.EngineConfig(
        source=mp.SourceConfig(path="-"),
        generator=mp.SGLangConfig(model="/m"),
        reward=mp.RewardConfig("exact"),
        workers=mp.WorkerConfig(devices=["cpu"] * 16),
    )
    assert len({make_generator(config, worker)._seed for worker in range(16)}) == 16  # type: ignore[attr-defined]
