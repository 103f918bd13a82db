"""The rollout function's seam: every sample is made by `async def rollout(session, prompt)`.

    rollout(session, prompt) --session.generate()--> Generator        tokens with logprobs, trained on
                             --session.append(ids)-> context          tokens from outside (tools, environments), not trained on

A turn (one `generate`) is one request, or several: an update that aborts it (`partial_rollout`) and the end of its thinking begin another.

The built-in one is `single_turn`. Invariants: `token_ids`, `logprobs`, `loss_mask` grow together and version spans cover them
(`RolledSample.extend`; `Session` is the only writer); all turns together never have more than `max_new_tokens` tokens, those put there to
end the thinking included (`Session._ask` asks for what is left).
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from mprollout.errors import ConfigError, SampleAborted
from mprollout.functions import check_function, is_async, load_function
from mprollout.generator import GenerateRequest, Generation, Generator, VersionSpan
from mprollout.ring import RolledSample
from mprollout.stops import first_stop, tokens_before, window

if TYPE_CHECKING:
    from mprollout.config import SamplingConfig
    from mprollout.source import Prompt

RolloutFunction = Callable[["Session", "Prompt"], Awaitable[None]]


class _Turn(RolledSample, kw_only=True):
    """A turn in the making."""

    matched_stop: int | str | None = None


class Session:
    """One sample in the making: the conversation of a rollout function with the engine.

    Example:
        >>> async def two_turns(session, prompt):                              # doctest: +SKIP
        ...     await session.generate(max_new_tokens=64)
        ...     session.append(session.encode(" Check your answer: "))
        ...     await session.generate()
    """

    def __init__(
        self,
        generator: Generator,
        sampling: SamplingConfig,
        prompt_ids: list[int],
        request_id: str,
        seed: int,
        *,
        updates: Callable[[], int] = lambda: 0,
        resumes: bool = False,
        mask_off_policy: bool = False,
    ) -> None:
        """`updates`: weight updates begun so far; what one of them aborts goes on from its tokens if `resumes`."""
        self.prompt_ids = prompt_ids
        self.sampled = 0
        """Tokens that the engine sampled for it, those of an aborted turn included."""
        self.sample = RolledSample(
            token_ids=[], logprobs=[], loss_mask=bytearray(), finish_reason="length", versions=[]
        )
        self._generator, self._sampling = generator, sampling
        self._request_id, self._seed, self._turn, self._made = request_id, seed, 0, 0
        self._updates, self._resumes, self._mask_off_policy = updates, resumes, mask_off_policy

    @property
    def remaining_tokens(self) -> int:
        """What is left of `max_new_tokens` for generation, and of the context."""
        context = self._generator.context_length - len(self.prompt_ids) - len(self.sample.token_ids)
        return min(self._sampling.max_new_tokens - self._made, context)

    @property
    def text(self) -> str:
        """The completion so far, decoded, without special tokens."""
        return self._generator.tokenizer.decode(self.sample.token_ids)

    def encode(self, text: str) -> list[int]:
        """Tokenize text as it is, for the middle of a conversation."""
        return self._generator.tokenizer.encode(text, continues=True)

    async def generate(self, max_new_tokens: int | None = None) -> Generation:
        """Sample a continuation of everything so far and append it, trained on.

        Returns:
            What was appended; tokens put there to end its thinking have the logprob 0.

        Raises:
            SampleAborted: the engine ended the request before it was finished; names the request.
        """
        budget = self.remaining_tokens if max_new_tokens is None else min(max_new_tokens, self.remaining_tokens)
        thinking = self._sampling.max_thinking_tokens or budget
        turn = _Turn(token_ids=[], logprobs=[], loss_mask=bytearray(), finish_reason="length", versions=[])
        await self._ask(turn, min(thinking, budget))
        if thinking < budget and turn.finish_reason == "length":
            self._end_thinking(turn, budget)
            await self._ask(turn, budget)
        if not self._sampling.no_stop_trim:
            self._trim(turn)
        self._made += len(turn.token_ids)
        self.sample.extend(turn.token_ids, turn.logprobs, bytes(turn.loss_mask), turn.versions)
        self.sample.finish_reason = turn.finish_reason
        return Generation(
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            finish_reason=turn.finish_reason,
            versions=turn.versions,
            matched_stop=turn.matched_stop,
        )

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the model did not sample: mask 0, logprob 0, the version of the moment."""
        if token_ids:
            self._put(self.sample, list(token_ids))

    def _put(self, where: RolledSample, token_ids: list[int]) -> None:
        n = len(token_ids)
        where.extend(token_ids, [0.0] * n, bytes(n), [VersionSpan(self._generator.version, 0, n)])

    async def _ask(self, turn: _Turn, until: int) -> None:
        """Have the engine continue the turn until it has so many tokens, or ends; across updates that abort it, if it resumes."""
        began, number = len(turn.token_ids), self._turn
        self._turn += 1
        for part in itertools.count():
            at, updates = len(turn.token_ids), self._updates()
            if at >= until:
                turn.finish_reason = "length"
                return
            request_id = f"{self._request_id}.{number}" + (f"+{part}" if part else "")
            made = await self._generator.generate(
                GenerateRequest(
                    request_id=request_id,
                    prompt_ids=self.prompt_ids + self.sample.token_ids + turn.token_ids,
                    max_new_tokens=until - at,
                    sampling=self._sampling,
                    seed=self._seed + number,
                    resumed=at - began,
                )
            )
            self.sampled += len(made.token_ids)
            aborted = made.finish_reason == "abort"
            by_update = updates != self._updates()
            if aborted and not (by_update and self._resumes):
                raise SampleAborted(
                    f"sample {request_id}: aborted by the engine after {len(made.token_ids)} tokens", by_update
                )
            turn.extend(made.token_ids, made.logprobs, b"\1" * len(made.token_ids), made.versions)
            turn.finish_reason, turn.matched_stop = made.finish_reason, made.matched_stop
            self._stop_across(turn, at)
            if turn.finish_reason != "abort":
                return
            if self._mask_off_policy:
                self.sample.mask_all()
                turn.mask_all()

    def _stop_across(self, turn: _Turn, at: int) -> None:
        """End the turn at a stop string that began before its token `at`, where a request ended, and was finished behind it."""
        stops, n = self._sampling.stop, len(turn.token_ids)
        if not at or not stops:
            return
        found = first_stop(self._generator.tokenizer, turn.token_ids, stops, at, min(n, at + window(stops)))
        if found is not None:
            turn.cut(found[0])
            turn.finish_reason, turn.matched_stop = "stop", found[1]

    def _end_thinking(self, turn: _Turn, budget: int) -> None:
        """Put the end of thinking behind a turn that has thought for as long as it may, unless it is there."""
        tokenizer, end = self._generator.tokenizer, self._sampling.end_of_thinking
        if end.strip() not in tokenizer.decode(turn.token_ids, special=True):
            self._put(turn, tokenizer.encode(end, continues=True)[: budget - len(turn.token_ids)])

    def _trim(self, turn: _Turn) -> None:
        """Take away what matched a stop string or one of the settings' own stop tokens."""
        if isinstance(turn.matched_stop, str):
            turn.cut(tokens_before(self._generator.tokenizer, turn.token_ids, turn.matched_stop))
        elif turn.matched_stop in self._sampling.stop_token_ids:
            turn.cut(len(turn.token_ids) - 1)


async def single_turn(session: Session, prompt: Prompt) -> None:
    """One completion of the prompt: the built-in rollout function."""
    await session.generate()


def check_rollout(spec: Any) -> None:
    """Refuse in the trainer what cannot be a rollout function; None is the single turn.

    Raises:
        ConfigError: as `check_function`, or it is no `async def`.
    """
    if spec is not None:
        check_function("EngineConfig.rollout", spec, ("session", "prompt"))
        if callable(spec):
            _require_async(spec, spec)


def load_rollout(spec: Any) -> RolloutFunction:
    """The rollout function, in the worker. Raises as `check_rollout`, and what the user's module raises."""
    if spec is None:
        return single_turn
    function = load_function("EngineConfig.rollout", spec, ("session", "prompt"))
    _require_async(spec, function)
    return function


def _require_async(spec: Any, function: Callable[..., Any]) -> None:
    if not is_async(function):
        raise ConfigError(f"EngineConfig.rollout: expected `async def rollout(session, prompt)`, got {spec!r}")
