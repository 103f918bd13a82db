"""`SimulatedGenerator`: a `Generator` without a model. Every promise is tested with it, and capacity is planned with it.

    generate: draw length, tokens, logprobs, fault --> sleep until the next event --> settle --> Generation
              (one timer a request, no work a token; an update, an abort and a fault are such events)

Invariant: what a request yields depends on `(config.seed, request.seed)` alone, never on timing; timing decides only how
much of it is there at an abort and which version made which part. `_Run.settle`, the one place where progress is
counted, guarantees it: it moves forward a prefix of tokens that were drawn before the first sleep.
Imports neither torch nor sglang.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mprollout.generator import FinishReason, GenerateRequest, Generation, Generator, PauseMode, VersionSpan
from mprollout.weights import check_parameters

if TYPE_CHECKING:
    from mprollout.config import SimulatedConfig
    from mprollout.weights import StagedWeights

_FAULTS = ("exception", "abort", "swallow", "die")


class ByteTokenizer:
    """A byte is a token; ids from 256 up are special and decode to nothing."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of `text`."""
        return list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        """`<|role|>`, a line break, the content, a line break a message; the assistant's header last."""
        head = [{"role": "tools", "content": json.dumps(list(tools))}] if tools else []
        text = "".join(f"<|{message['role']}|>\n{message['content']}\n" for message in [*head, *messages])
        return self.encode(text + "<|assistant|>\n")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids below 256; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")


class _Run:
    """One request under way: what it will say, how far it is, which version said which part."""

    def __init__(self, config: SimulatedConfig, request: GenerateRequest, eos_id: int) -> None:
        rng = np.random.default_rng([config.seed, request.seed])
        sampling = request.sampling
        wanted = max(1, round(config.mean_tokens * math.exp(rng.normal(-(config.sigma**2) / 2, config.sigma))))
        n = request.max_new_tokens if sampling.ignore_eos else min(wanted, request.max_new_tokens)
        tokens = rng.integers(0, config.vocab_size - 1, n)
        tokens += tokens >= eos_id  # the EOS comes once, at the end
        self.finish_reason: FinishReason = (
            "stop" if wanted <= request.max_new_tokens and not sampling.ignore_eos else "length"
        )
        self.matched_stop: int | None = None
        if self.finish_reason == "stop":
            tokens[-1] = self.matched_stop = eos_id
        if sampling.stop_token_ids and not sampling.ignore_eos:
            hits = np.flatnonzero(np.isin(tokens, sampling.stop_token_ids))
            if len(hits):
                tokens = tokens[: hits[0] + 1]
                self.finish_reason, self.matched_stop = "stop", int(tokens[-1])
        self.token_ids: list[int] = tokens.tolist()
        self.logprobs: list[float] = (-rng.exponential(1.0, len(tokens))).tolist()

        bounds = np.cumsum([config.faults.get(fault, 0.0) for fault in _FAULTS])
        kind = int(np.searchsorted(bounds, rng.random(), side="right"))
        self.fault = _FAULTS[kind] if kind < len(_FAULTS) else None
        self.target = len(tokens) if self.fault is None else int(rng.integers(0, len(tokens) + 1))
        """Tokens after which the run ends: all of them, or those before its fault."""

        self.made = 0
        self.spans: list[VersionSpan] = []
        self.prefill_left_s = config.prefill_s
        self.aborted = False
        self.started = False
        self._tokens_per_s = config.tokens_per_s or math.inf
        self._decoded_s = 0.0
        self._since: float | None = None
        self._nudged: asyncio.Future[None] | None = None

    def settle(self) -> None:
        """Turn the time since the last call into prefill and tokens; the clock then stands until `advance`."""
        if self._since is None:
            return
        spent, self._since = asyncio.get_running_loop().time() - self._since, None
        prefilled = min(spent, self.prefill_left_s)
        self.prefill_left_s -= prefilled
        self._decoded_s += spent - prefilled
        if self.prefill_left_s <= 0:
            progress = self._decoded_s * self._tokens_per_s if self._decoded_s else 0.0
            self.made = self.target if math.isinf(self._tokens_per_s) else min(self.target, int(progress + 1e-6))

    def stamp(self, version: int) -> None:
        """Book the tokens since the last stamp on `version`."""
        at = self.spans[-1].end if self.spans else 0
        if self.made > at:
            self.spans.append(VersionSpan(version, at, self.made))

    def nudge(self) -> None:
        """Make `advance` return early."""
        if self._nudged is not None and not self._nudged.done():
            self._nudged.set_result(None)

    async def rest(self) -> None:
        """Stand still until somebody nudges."""
        self._nudged = asyncio.get_running_loop().create_future()
        await self._nudged

    async def advance(self) -> None:
        """Let time pass until the target is reached or somebody nudges."""
        self.started = True
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        left_s = self.prefill_left_s + max(0.0, self.target / self._tokens_per_s - self._decoded_s)
        self._nudged = loop.create_future()
        timer = loop.call_later(left_s, self.nudge)
        try:
            await self._nudged
        finally:
            timer.cancel()
            self.settle()

    def result(self, version: int, finish_reason: FinishReason) -> Generation:
        self.stamp(version)
        return Generation(
            token_ids=self.token_ids[: self.made],
            logprobs=self.logprobs[: self.made],
            finish_reason=finish_reason,
            versions=self.spans,
            matched_stop=self.matched_stop if finish_reason == "stop" else None,
        )


class SimulatedGenerator(Generator):
    """A `Generator` of seeded lengths, speeds and faults.

    `stop` strings, temperature and the truncating sampling settings change nothing here; `stop_token_ids` and `ignore_eos` do.

    Args:
        config: lengths in tokens, speeds in tokens per second, delays in seconds, faults as probabilities per sample.
        devices, max_running_samples, seed: as for `SGLangGenerator`; unused.

    Example:
        generator = SimulatedGenerator(SimulatedConfig(mean_tokens=32, tokens_per_s=500))
        await generator.start()
        generation = await generator.generate(request)
    """

    def __init__(
        self, config: SimulatedConfig, *, devices: Sequence[int | str] = (), max_running_samples: int = 0, seed: int = 0
    ) -> None:
        self.tokenizer = ByteTokenizer()
        self.context_length = config.context_length
        self.version = 0
        self.parameters: dict[str, tuple[int, ...]] | None = None
        """Names and shapes that every update must bring; recorded at the first one."""
        self.eos_token_id = min(256, config.vocab_size - 1)
        self._config = config
        self._runs: dict[str, _Run] = {}
        self._halted_by: set[str] = {"start"}
        self._updating = asyncio.Lock()

    async def start(self) -> None:
        await asyncio.sleep(self._config.start_s)
        if self._config.die_at_start:
            os.kill(os.getpid(), signal.SIGKILL)
        self._go_on("start")

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Generator.generate`.

        Raises:
            ValueError: the prompt and `max_new_tokens` exceed the context length, or the request's id is in use.
            RuntimeError: the simulated fault `exception`.
        """
        total = len(request.prompt_ids) + request.max_new_tokens
        if total > self.context_length:
            raise ValueError(
                f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens + {request.max_new_tokens} new tokens "
                f"= {total} exceed the context length {self.context_length}"
            )
        if request.request_id in self._runs:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        run = self._runs[request.request_id] = _Run(self._config, request, self.eos_token_id)
        try:
            await self._run_to_target(run)
            if run.fault == "swallow" and run.made == run.target:
                await asyncio.Event().wait()  # an answer that never comes, whatever is aborted
            if run.aborted:
                return run.result(self.version, "abort")
            if run.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if run.fault == "exception":
                raise RuntimeError(f"simulated fault: request {request.request_id} raised after {run.made} tokens")
            return run.result(self.version, "abort" if run.fault == "abort" else run.finish_reason)
        finally:
            del self._runs[request.request_id]

    async def abort(self, request_id: str | None = None) -> None:
        for key in list(self._runs) if request_id is None else [request_id]:
            if run := self._runs.get(key):
                run.settle()
                run.aborted = True
                run.nudge()

    async def update_weights(self, weights: StagedWeights, version: int, pause: PauseMode) -> None:
        async with self._updating:
            if self.parameters is None:
                self.parameters = dict(weights.shapes)
            check_parameters(weights.shapes, self.parameters)
            if pause == "abort":
                await self.abort()
            self._halt("update")
            try:
                await asyncio.sleep(self._config.update_s)
                for run in self._runs.values():
                    run.stamp(self.version)
                    if pause == "retract" and run.made:
                        run.prefill_left_s = self._config.prefill_s
                self.version = version
            finally:
                self._go_on("update")

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._halt(*tags)

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._go_on(*tags)

    def check(self) -> None:
        """The simulation has no processes that could die."""

    async def close(self) -> None:
        await self.abort()

    async def _run_to_target(self, run: _Run) -> None:
        while not run.aborted and not (run.made == run.target and run.prefill_left_s <= 0 and run.started):
            await (run.rest() if self._halted_by else run.advance())

    def _halt(self, *reasons: str) -> None:
        self._halted_by.update(reasons)
        for run in self._runs.values():
            run.settle()
            run.nudge()

    def _go_on(self, *reasons: str) -> None:
        self._halted_by.difference_update(reasons)
        if not self._halted_by:
            for run in self._runs.values():
                run.nudge()
