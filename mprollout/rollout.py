"""The rollout function's seam: every sample is made by `async def rollout(session, prompt)`.

    rollout(session, prompt) --session.generate()--> Generator        tokens with logprobs, trained on
                             --session.append(ids)-> context          tokens from outside (tools, environments), not trained on

The built-in one is `single_turn`. Invariant: `token_ids`, `logprobs`, `loss_mask` grow together and version spans cover them;
`Session` is the only writer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from mprollout.errors import ConfigError, SampleAborted
from mprollout.functions import check_function, is_async, load_function
from mprollout.generator import GenerateRequest, Generation, Generator, VersionSpan
from mprollout.ring import RolledSample

if TYPE_CHECKING:
    from mprollout.config import SamplingConfig
    from mprollout.source import Prompt

RolloutFunction = Callable[["Session", "Prompt"], Awaitable[None]]


class Session:
    """One sample in the making: the conversation of a rollout function with the engine.

    Example:
        >>> async def two_turns(session, prompt):                              # doctest: +SKIP
        ...     await session.generate(max_new_tokens=64)
        ...     session.append(session.encode(" Check your answer: "))
        ...     await session.generate()
    """

    def __init__(
        self, generator: Generator, sampling: SamplingConfig, prompt_ids: list[int], request_id: str, seed: int
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampled = 0
        """Tokens that the engine sampled for it, those of an aborted turn included."""
        self.sample = RolledSample(
            token_ids=[], logprobs=[], loss_mask=bytearray(), finish_reason="length", versions=[]
        )
        self._generator, self._sampling = generator, sampling
        self._request_id, self._seed, self._turn = request_id, seed, 0

    @property
    def remaining_tokens(self) -> int:
        """What is left of `max_new_tokens` for generation, and of the context."""
        made = self.sample.loss_mask.count(1)
        context = self._generator.context_length - len(self.prompt_ids) - len(self.sample.token_ids)
        return min(self._sampling.max_new_tokens - made, context)

    @property
    def text(self) -> str:
        """The completion so far, decoded, without special tokens."""
        return self._generator.tokenizer.decode(self.sample.token_ids)

    def encode(self, text: str) -> list[int]:
        """Tokenize text as it is."""
        return self._generator.tokenizer.encode(text)

    async def generate(self, max_new_tokens: int | None = None) -> Generation:
        """Sample a continuation of everything so far and append it, trained on.

        Raises:
            SampleAborted: the engine ended the request before it was finished; names the request.
        """
        budget = self.remaining_tokens if max_new_tokens is None else min(max_new_tokens, self.remaining_tokens)
        if budget <= 0:
            self.sample.finish_reason = "length"
            return Generation(token_ids=[], logprobs=[], finish_reason="length", versions=[])
        request_id = f"{self._request_id}.{self._turn}"
        made = await self._generator.generate(
            GenerateRequest(
                request_id=request_id,
                prompt_ids=self.prompt_ids + self.sample.token_ids,
                max_new_tokens=budget,
                sampling=self._sampling,
                seed=self._seed + self._turn,
            )
        )
        self._turn += 1
        self.sampled += len(made.token_ids)
        if made.finish_reason == "abort":
            raise SampleAborted(f"sample {request_id}: aborted by the engine after {len(made.token_ids)} tokens")
        self._extend(made.token_ids, made.logprobs, 1, made.versions)
        self.sample.finish_reason = made.finish_reason
        return made

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the model did not sample: mask 0, logprob 0, the version of the moment."""
        if token_ids:
            self._extend(
                list(token_ids), [0.0] * len(token_ids), 0, [VersionSpan(self._generator.version, 0, len(token_ids))]
            )

    def _extend(self, token_ids: list[int], logprobs: list[float], mask: int, versions: list[VersionSpan]) -> None:
        base, sample = len(self.sample.token_ids), self.sample
        sample.token_ids.extend(token_ids)
        sample.logprobs.extend(logprobs)
        sample.loss_mask += bytes([mask]) * len(token_ids)
        for version, start, end in versions:
            last = sample.versions[-1] if sample.versions else None
            if last is not None and last.version == version:
                sample.versions[-1] = VersionSpan(version, last.start, base + end)
            else:
                sample.versions.append(VersionSpan(version, base + start, base + end))


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
