"""`SimulatedGenerator`: a `Generator` without a model. Every promise is tested with it, and capacity is planned with it.

    generate: draw length, tokens, logprobs, fault --> wait for the prefill clock, then for the decode clock --> Generation
              (one timer a clock, no work a token; an update stops both clocks, an abort nudges its run)

Invariant: what a request yields depends on `(config.seed, request.seed)` alone, never on timing; timing decides only how
much of it is there at an abort and which version made which part. `_Run.made`, the one place where progress is
counted, guarantees it: it moves forward a prefix of tokens that were drawn before the first wait.
Imports neither torch nor sglang nor numpy.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import json
import logging
import math
import os
import random
import signal
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mprollout.generator import FinishReason, GenerateRequest, Generation, Generator, PauseMode, Tokenizer, VersionSpan
from mprollout.route import arrivals, leave
from mprollout.stops import first_stop
from mprollout.weights import check_parameters

if TYPE_CHECKING:
    from mprollout.config import SimulatedConfig
    from mprollout.route import Route
    from mprollout.weights import StagedWeights

FAULTS = ("exception", "abort", "swallow", "die", "hang", "slow", "short")
"""Raises, is aborted by the engine, never answers, kills its process, blocks the event loop; takes 20 times as long, misses a logprob."""
SLOWNESS = 20.0
_LOGPROBS = [math.log((i + 0.5) / 4096) for i in range(4096)]
"""Quantiles of -Exp(1): a draw from them costs a tenth of its logarithm."""


class ByteTokenizer:
    """A byte is a token; ids from 256 up are special and decode to nothing."""

    has_chat_template = True

    def encode(self, text: str, continues: bool = False) -> list[int]:
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

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        """Text of the ids below 256; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")


class _Clock:
    """Work that all who wait get done at the same speed. One timer, whatever their number: the next one due."""

    def __init__(self, speed: Callable[[int], float]) -> None:
        """`speed`: work a second for each of so many waiters; may be infinite."""
        self._speed = speed
        self._rate = self._since = self.done = 0.0
        """`done`: work of one that has waited for ever, at the last `settle`."""
        self._stopped, self._waiting = False, 0
        self._due: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, amount: float, nudged: asyncio.Future[bool]) -> float:
        """Until `amount` is done, or until somebody sets `nudged` to False; returns what was done."""
        self.settle()
        start = self.done
        heapq.heappush(self._due, (start + amount, next(self._order), nudged))
        self._waiting += 1
        self._arm()
        try:
            whole = await nudged
        finally:
            self.settle()
            self._waiting -= 1
            self._arm()
        return amount if whole else min(amount, self.done - start)

    def stop(self) -> None:
        """Nothing gets done until `go`."""
        self.settle()
        self._stopped = True
        self._arm()

    def go(self) -> None:
        self._stopped = False
        self._arm()

    def settle(self) -> None:
        """Bring `done` up to this moment."""
        now = asyncio.get_running_loop().time()
        if math.isfinite(self._rate):
            self.done += (now - self._since) * self._rate
        self._since = now

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][2].done():
            heapq.heappop(self._due)
        self._rate = 0.0 if self._stopped or not self._waiting else self._speed(self._waiting)
        if self._due and self._rate:
            left = max(0.0, self._due[0][0] - self.done) / self._rate
            self._timer = asyncio.get_running_loop().call_later(left, self._fire)

    def _fire(self) -> None:
        self.settle()
        while self._due and (self._due[0][0] <= self.done + 1e-6 or math.isinf(self._rate)):
            due = heapq.heappop(self._due)[2]
            if not due.done():
                due.set_result(True)
        self._arm()


def _between(points: Sequence[tuple[int, float]], x: int) -> float:
    """Linear between the points, which ascend; the last value beyond them."""
    i = bisect.bisect_left(points, (x, 0.0))
    if i == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[max(0, i - 1)], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1


def _speed(config: SimulatedConfig) -> Callable[[int], float]:
    """Tokens a second of each of so many samples that decode at once."""
    if config.speeds:
        return lambda running: _between([(0, 0.0), *config.speeds], running) / running
    each, all_together = config.tokens_per_s or math.inf, config.max_tokens_per_s or math.inf
    return lambda running: min(each, all_together / running)


class _Run:
    """One request under way: what it will say, how far it is, which version said which part."""

    def __init__(
        self, config: SimulatedConfig, request: GenerateRequest, eos_id: int, tokenizer: Tokenizer, decode: _Clock
    ) -> None:
        rng = random.Random(f"{config.seed}/{request.seed}")  # not numpy's: its import costs more than a worker's start
        sampling = request.sampling
        if config.lengths:
            wanted = max(1, rng.choice(config.lengths))
        else:
            wanted = max(1, round(config.mean_tokens * math.exp(rng.gauss(-(config.sigma**2) / 2, config.sigma))))
        most = request.resumed + request.max_new_tokens
        n = most if sampling.ignore_eos else min(wanted, most)
        last = config.vocab_size - 1
        words = array("I", rng.randbytes(4 * n))
        # the EOS comes once, at the end
        tokens = [last if (token := word % last) == eos_id else token for word in words]
        self.finish_reason: FinishReason = "stop" if wanted <= most and not sampling.ignore_eos else "length"
        self.matched_stop: int | str | None = None
        if self.finish_reason == "stop":
            tokens[-1] = self.matched_stop = eos_id
        if sampling.stop_token_ids and not sampling.ignore_eos:
            hit = next((at for at, token in enumerate(tokens) if token in sampling.stop_token_ids), None)
            if hit is not None:
                del tokens[hit + 1 :]
                self.finish_reason, self.matched_stop = "stop", tokens[-1]
        if sampling.stop and (found := first_stop(tokenizer, tokens, sampling.stop, 0, len(tokens))) is not None:
            del tokens[found[0] :]
            self.finish_reason, self.matched_stop = "stop", found[1]
        logprobs = [_LOGPROBS[word >> 4] for word in array("H", rng.randbytes(2 * len(tokens)))]
        self.token_ids: list[int] = tokens[request.resumed :]
        self.logprobs: list[float] = logprobs[request.resumed :]

        self.fault: str | None = None
        if config.faults:
            bounds = list(itertools.accumulate(config.faults.get(fault, 0.0) for fault in FAULTS))
            kind = bisect.bisect_right(bounds, rng.random())
            self.fault = FAULTS[kind] if kind < len(FAULTS) else None
        ends_early = self.fault in ("exception", "abort", "swallow", "die", "hang")
        self.target = rng.randint(0, len(self.token_ids)) if ends_early else len(self.token_ids)
        """Tokens after which the run ends: all of them, or those before its fault."""

        self.spans: list[VersionSpan] = []
        self.old_kv = False
        """An update in place came since its prefix was computed."""
        self.prefill_left_s = config.prefill_s
        self.aborted = self.finished = False
        self._work_per_token = SLOWNESS if self.fault == "slow" else 1.0
        self._decode, self._decoded = decode, 0.0
        self._decoding_since: float | None = None
        self._nudged: asyncio.Future[bool] | None = None

    @property
    def made(self) -> int:
        """Tokens so far."""
        if self.finished:
            return self.target
        decoded = self._decoded
        if self._decoding_since is not None:
            self._decode.settle()
            decoded += self._decode.done - self._decoding_since
        return min(self.target, int(decoded / self._work_per_token + 1e-6))

    def stamp(self, version: int) -> None:
        """Book the tokens since the last stamp on `version`."""
        at = self.spans[-1].end if self.spans else 0
        if self.made > at:
            self.spans.append(VersionSpan(version, at, self.made, self.old_kv))

    def nudge(self) -> None:
        """Make `advance` return early."""
        if self._nudged is not None and not self._nudged.done():
            self._nudged.set_result(False)

    async def advance(self, prefill: _Clock) -> None:
        """Prefill, or decode to the target, or less if somebody nudges."""
        self._nudged = asyncio.get_running_loop().create_future()
        if self.prefill_left_s > 0:
            self.prefill_left_s -= await prefill.wait(self.prefill_left_s, self._nudged)
            return
        self._decode.settle()
        self._decoding_since = self._decode.done
        left = self.target * self._work_per_token - self._decoded
        try:
            did = await self._decode.wait(left, self._nudged)
        finally:
            self._decoding_since = None
        self._decoded += did
        self.finished = did >= left

    def result(self, version: int, finish_reason: FinishReason) -> Generation:
        self.stamp(version)
        made = self.made
        return Generation(
            token_ids=self.token_ids[:made],
            logprobs=self.logprobs[: made - (self.fault == "short")],
            finish_reason=finish_reason,
            versions=self.spans,
            matched_stop=self.matched_stop if finish_reason == "stop" else None,
        )


class SimulatedGenerator(Generator):
    """A `Generator` of seeded lengths, speeds and faults.

    Temperature, penalties and the truncating sampling settings change nothing here; `stop`, `stop_token_ids` and `ignore_eos` do.

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
        self._decode = _Clock(_speed(config))  # work: tokens
        self._prefill = _Clock(lambda running: 1.0)  # work: seconds
        self._updating = asyncio.Lock()

    async def start(self) -> None:
        self._halt("start")
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
        run = self._runs[request.request_id] = _Run(
            self._config, request, self.eos_token_id, self.tokenizer, self._decode
        )
        try:
            while not run.aborted and not run.finished:
                await run.advance(self._prefill)
            if run.fault == "swallow" and run.finished:
                await asyncio.Event().wait()  # an answer that never comes, whatever is aborted
            if run.aborted:
                return run.result(self.version, "abort")
            if run.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if run.fault == "hang":
                threading.Event().wait()  # the event loop stands still: what a library that takes the GIL and keeps it does
            if run.fault == "exception":
                raise RuntimeError(f"simulated fault: request {request.request_id} raised after {run.made} tokens")
            return run.result(self.version, "abort" if run.fault == "abort" else run.finish_reason)
        finally:
            del self._runs[request.request_id]

    async def abort(self, request_id: str | None = None) -> None:
        for key in list(self._runs) if request_id is None else [request_id]:
            if run := self._runs.get(key):
                run.aborted = True
                run.nudge()

    async def update_weights(
        self, weights: StagedWeights, version: int, pause: PauseMode, route: Route | None = None
    ) -> None:
        async with self._updating:
            if self.parameters is None:
                self.parameters = dict(weights.shapes)
            check_parameters(weights.shapes, self.parameters)
            async with self.phase("pause"):
                if pause == "abort":
                    await self.abort()
                self._halt("update")
            try:
                async with self.phase("update"):
                    await asyncio.sleep(self._config.update_s)
                    if route is not None:
                        await asyncio.to_thread(self._receive, weights, route)
                for run in self._runs.values():
                    run.stamp(self.version)
                    run.old_kv = pause == "in_place"
                if pause == "retract":
                    self._retract()
                self.version = version
            finally:
                async with self.phase("continue"):
                    self._go_on("update", "weights")

    def _receive(self, weights: StagedWeights, route: Route) -> None:
        """What SGLang's schedulers do (`loading`), the model apart: a simulated engine needs no more of the weights than that they came."""
        import torch

        try:
            for _ in arrivals(route, route.rank, weights, torch.device("cpu")):
                pass
        except Exception:
            logging.getLogger("mprollout").warning(
                "the way over %s broke: the staged copy counts", route.group, exc_info=True
            )
            leave(route.group)

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._halt(*tags)
        self._retract()

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._go_on(*tags)

    def check(self) -> None:
        """The simulation has no processes that could die."""

    async def close(self) -> None:
        await self.abort()

    def _retract(self) -> None:
        for run in self._runs.values():
            if run.made and not run.finished:
                run.prefill_left_s = self._config.prefill_s
                run.nudge()

    def _halt(self, *reasons: str) -> None:
        self._halted_by.update(reasons)
        self._prefill.stop()
        self._decode.stop()

    def _go_on(self, *reasons: str) -> None:
        self._halted_by.difference_update(reasons)
        if not self._halted_by:
            self._prefill.go()
            self._decode.go()
