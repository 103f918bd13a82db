"""`Generator`: the one interface to an inference engine. Nothing else of the code may know which one runs.

    worker's loop --generate(request)--> Generator --> Generation      (one sample a call, many calls at once)
                  --update_weights-----> pause -> begin -> update -> end -> continue, running requests survive

Invariant: every token of a `Generation` has the logprob and the policy version under which it was sampled;
`Generation.__post_init__` refuses lengths that do not match.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from mprollout.config import WeightsConfig

if TYPE_CHECKING:
    from mprollout.config import SamplingConfig
    from mprollout.route import Route
    from mprollout.weights import StagedWeights

PauseMode = Literal["retract", "in_place", "abort"]
UpdatePhase = Literal["pause", "begin", "update", "end", "continue"]
UPDATE_PHASES: tuple[UpdatePhase, ...] = ("pause", "begin", "update", "end", "continue")
FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a completion were sampled under `version`."""

    version: int
    start: int
    end: int
    old_kv: bool = False
    """They rest on key-value entries of older weights (`pause="in_place"`): their logprobs are those of the distribution sampled from, which
    no single version's weights give again."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate."""

    request_id: str
    prompt_ids: list[int]
    max_new_tokens: int
    sampling: SamplingConfig
    seed: int
    """Distinct per ticket, attempt, sample and turn; engines that cannot be seeded per request ignore it."""
    resumed: int = 0
    """So many of the last prompt ids were sampled for this very completion, under the same seed, before an update aborted it."""


class Generation(msgspec.Struct, kw_only=True):
    """What came of a request. `finish_reason == "abort"` has the tokens made until then."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the distribution each token was sampled from (natural log)."""
    finish_reason: FinishReason
    versions: list[VersionSpan]
    """Run-length spans that cover [0, len(token_ids)) without gap or overlap; empty when there are no tokens."""
    matched_stop: int | str | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.logprobs) != n:
            raise ValueError(f"Generation: {n} token ids but {len(self.logprobs)} logprobs")
        at = 0
        for span in self.versions:
            if span.start != at or span.end <= at:
                raise ValueError(f"Generation: version spans {self.versions} do not cover [0, {n}) in order")
            at = span.end
        if at != n:
            raise ValueError(f"Generation: version spans cover {at} of {n} tokens")


class Tokenizer(Protocol):
    """What a worker needs of a tokenizer."""

    has_chat_template: bool

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Tokens of `text`; `continues`: in the middle of a sequence, so without what the tokenizer puts at its beginning."""

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        """Render with the chat template, the generation prompt added, and tokenize."""

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        """Text without special tokens, or with them."""


class Generator(abc.ABC):
    """An inference engine that one worker process owns. Made and used in the process's main thread and event loop."""

    tokenizer: Tokenizer
    context_length: int
    """Most tokens of prompt and completion together; known after `start`."""
    version: int
    """The policy version that new tokens are sampled under; 0 at start, unless `start` says otherwise."""
    weights: WeightsConfig = WeightsConfig()
    """How long each phase of an update may take."""

    on_phase: Callable[[UpdatePhase], None] | None = None
    """Called at the beginning of each."""

    @contextlib.asynccontextmanager
    async def phase(self, phase: UpdatePhase) -> AsyncIterator[None]:
        """A block that is one phase of an update.

        Raises:
            RuntimeError: it took longer than its setting in `WeightsConfig`; names both.
        """
        limit_s: float = getattr(self.weights, f"{phase}_timeout_s")
        if self.on_phase is not None:
            self.on_phase(phase)
        scope = asyncio.timeout(limit_s)
        try:
            async with scope:
                yield
        except asyncio.CancelledError as cancelled:
            cancelled.add_note(f"phase `{phase}`")
            raise
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RuntimeError(f"phase `{phase}` took more than WeightsConfig.{phase}_timeout_s={limit_s:g}") from error

    @abc.abstractmethod
    async def start(self) -> None:
        """Load the model and be ready to generate. Raises with a clear message when the model cannot be loaded."""

    @abc.abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion. Cancelling the call aborts the request. Never waits for anything but the engine."""

    @abc.abstractmethod
    async def abort(self, request_id: str | None = None) -> None:
        """End one request (None: all); their `generate` calls return what they have with finish_reason "abort"."""

    @abc.abstractmethod
    async def update_weights(
        self, weights: StagedWeights, version: int, pause: PauseMode, route: Route | None = None
    ) -> None:
        """Give the running engine new weights: pause -> begin -> update -> end -> continue; generation goes on afterwards in every case.

        While the engine sleeps, its weights wake for it and stay awake; generation goes on with `wake`.

        Args:
            weights: the staged copy, verified.
            route: where the same bytes come from faster; when it fails midway, the engine loads the staged copy instead.

        Raises:
            ValueError: a name is unknown, missing, or of another shape (checked before anything is touched).
            RuntimeError: the engine failed midway; its weights are undefined and the worker must be restarted.
        """

    @abc.abstractmethod
    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Release the engine's memory of these kinds; running requests are retracted, not lost."""

    @abc.abstractmethod
    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back and go on."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise when a process of the engine has died. Cheap; called every second while samples run."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the engine and its processes."""
