"""The session: what a rollout function may do, and what the trainer then sees."""

import asyncio

import pytest

from mprollout.config import SamplingConfig
from mprollout.errors import SampleAborted
from mprollout.generator import Generation, VersionSpan
from mprollout.rollout import Session


class Scripted:
    """Answers each request with the next scripted generation; records the requests."""

    context_length = 20
    version = 3

    def __init__(self, *made):
        self.made, self.requests = list(made), []

    async def generate(self, request):
        self.requests.append(request)
        return self.made.pop(0)


def made(ids, reason="stop", version=3):
    return Generation(
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        finish_reason=reason,
        versions=[VersionSpan(version, 0, len(ids))] if ids else [],
    )


def session(engine, **sampling):
    return Session(engine, SamplingConfig(**{"max_new_tokens": 8} | sampling), [1, 2, 3], "5.0.1", seed=9)


def test_two_turns_keep_tokens_masks_and_versions_aligned():
    engine = Scripted(made([10, 11]), made([14], version=4))
    talk = session(engine)

    async def turns():
        await talk.generate(max_new_tokens=4)
        talk.append([12, 13])
        await talk.generate()

    asyncio.run(turns())
    assert talk.sample.token_ids == [10, 11, 12, 13, 14]
    assert list(talk.sample.loss_mask) == [1, 1, 0, 0, 1] and talk.sample.logprobs == [-1, -1, 0, 0, -1]
    assert talk.sample.versions == [VersionSpan(3, 0, 4), VersionSpan(4, 4, 5)]
    first, second = engine.requests
    assert (first.request_id, first.max_new_tokens, first.seed) == ("5.0.1.0", 4, 9)
    assert (second.prompt_ids, second.max_new_tokens, second.seed) == ([1, 2, 3, 10, 11, 12, 13], 6, 10)


def test_the_budget_ends_by_the_tokens_sampled_and_by_the_context():
    talk = session(Scripted(), max_new_tokens=4)
    talk.append(list(range(15)))
    assert talk.remaining_tokens == 2  # 20 - 3 - 15
    talk.append([1, 2])
    assert asyncio.run(talk.generate()).token_ids == [] and talk.sample.finish_reason == "length"


def test_an_abort_names_the_sample():
    talk = session(Scripted(made([1, 2], "abort")))
    with pytest.raises(SampleAborted, match=r"sample 5\.0\.1\.0: aborted by the engine after 2 tokens"):
        asyncio.run(talk.generate())
    assert talk.sample.token_ids == []


def test_a_generation_whose_lengths_differ_is_refused():
    with pytest.raises(ValueError, match="2 token ids but 1 logprobs"):
        Generation(token_ids=[1, 2], logprobs=[0.0], finish_reason="stop", versions=[VersionSpan(0, 0, 2)])
    with pytest.raises(ValueError, match="cover 1 of 2"):
        Generation(token_ids=[1, 2], logprobs=[0.0, 0.0], finish_reason="stop", versions=[VersionSpan(0, 0, 1)])
