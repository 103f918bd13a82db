"""`RolloutWorker`: claims tickets, has their samples made, publishes the group. One process, one event loop.

    claim loop    produces running tickets  / waits for a free sample place, then a READY ticket / unblocked by a finished sample, the bell
    ticket task   produces one group        / waits for its samples (`sampler`)                  / unblocked by engine and rewards
    control       applies weights, evaluates, sleeps, stops / waits for the keeper's socket              / unblocked by the kernel

Invariants: nothing here ever waits for the trainer (`Producer.publish` cannot: its room was reserved at the claim). A ticket leaves this
process by exactly one of publish, end, give_back, or by its death (`recover` in the keeper). `worker_process` starts and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from mprollout import _native, messages
from mprollout.config import EngineConfig, SamplingConfig
from mprollout.errors import ConfigError
from mprollout.evaluation import EvaluationItem, EvaluationRequest, run_share
from mprollout.generator import UPDATE_PHASES, UpdatePhase
from mprollout.ledger import Reason
from mprollout.ring import DISCARDED, SUSPECT_DEATHS, WorkerWord, encode_group
from mprollout.rollout import RolloutFunction
from mprollout.sampler import Attempt, Made, Sampler, derive_seed, reason_of, run_deadlines, stop_deadlines, text_of
from mprollout.schema import Meta, Sampled
from mprollout.source import Prompt, render
from mprollout.weights import StagedWeights

if TYPE_CHECKING:
    from mprollout.generator import Generator

SAFETY_LOOK_S = 0.25
WATCH_S = 0.5
_PUBLISHED_NS = Meta._fields.index("published_ns")


class RolloutWorker:
    """One worker's whole life after its memory is attached.

    Freed: the engine and the reward processes by the end of `run`; claims by each ticket's task; the process by the keeper.
    """

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        generator: Generator,
        rollout: RolloutFunction,
        segment: _native.Segment,
        channel: messages.Channel,
        bell: int,
        attendant_bell: int,
    ) -> None:
        self._index, self._config, self._channel = index, config, channel
        self._bell, self._attendant_bell = bell, attendant_bell
        self._words = segment.worker_words(index)
        self._producer = _native.Producer(segment, index)
        self._generator = generator
        generator.weights, generator.on_phase = config.weights, self._on_phase
        self._sampler = Sampler(config, generator, rollout, self._words)
        self._rung, self._go, self._stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Task[None]] = set()  # of these, the tickets
        self._claims: dict[int, _native.Claim] = {}
        self._claimed_ns: dict[int, int] = {}  # by ticket, the oldest first
        self._update_lock = asyncio.Lock()
        self._max_prompt_tokens = 0

    async def run(self) -> None:
        """Start the engine, serve until Stop. Raises what makes this worker useless."""
        started = time.monotonic()
        self._sampler.warm()
        await self._generator.start()
        self._bound_prompts()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._on_control)
        loop.add_reader(self._bell, self._on_bell)
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        start_s, context = time.monotonic() - started, self._generator.context_length
        self._send(messages.WorkerReady(worker=self._index, start_s=start_s, context_length=context))
        self._on_control()  # what came while the start blocked the loop
        self._spawn(self._watch())
        self._spawn(self._claim_loop())
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([stop, self._fatal], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self._fatal.done():
            self._fatal.result()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each ticket's task gives its claim back
        self._sampler.close()
        await self._generator.close()

    def _bound_prompts(self) -> None:
        context, new = self._generator.context_length, self._config.sampling.max_new_tokens
        self._max_prompt_tokens = min(self._config.source.max_prompt_tokens or context, context - new)
        if self._max_prompt_tokens < 1:
            raise ConfigError(
                f"SamplingConfig.max_new_tokens={new} leaves no room for a prompt: the model's context length is {context}"
            )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    # -- claiming ------------------------------------------------------------------------------------------------

    async def _claim_loop(self) -> None:
        places = self._sampler.places
        while True:
            await self._go.wait()
            await places.wait_room()
            claim = self._claim()
            if claim is None:
                places.offer()  # to an evaluation
                claim = await self._sleep_until_claim()
            self._claims[claim.ticket] = claim
            if claim.deaths < SUSPECT_DEATHS:
                self._running.add(self._spawn(self._run_ticket(claim)))
                await asyncio.sleep(0)  # its samples stand in line for their places before the next look
            else:  # alone, so that its next death is charged to no other
                while self._running:
                    await asyncio.wait(self._running)
                await self._spawn(self._run_ticket(claim))

    def _claim(self) -> _native.Claim | None:
        """None as long as there is no ticket, or the keeper says to hold."""
        return self._producer.claim() if self._go.is_set() else None

    async def _sleep_until_claim(self) -> _native.Claim:
        """Say idle, then look again (the admitter admits, then looks for idle workers: one of the two sees the other)."""
        try:
            while True:
                self._rung.clear()
                self._producer.set_idle(True)
                claim = self._claim()
                self._words[WorkerWord.STARVED_FOR_ROOM] = claim is None and self._producer.starved_for_room
                if claim is not None:
                    return claim
                look = asyncio.get_running_loop().call_later(SAFETY_LOOK_S, self._rung.set)
                try:
                    await self._rung.wait()
                finally:
                    look.cancel()
        finally:
            self._producer.set_idle(False)

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._rung.set()

    # -- one ticket ----------------------------------------------------------------------------------------------

    async def _run_ticket(self, claim: _native.Claim) -> None:
        self._words[WorkerWord.RUNNING_GROUPS] += 1
        self._claimed_ns[claim.ticket] = _now_ns()
        self._tell_oldest()
        try:
            await self._attempts(claim)
        except asyncio.CancelledError:
            self._producer.give_back(self._claims[claim.ticket])
            raise
        finally:
            del self._claims[claim.ticket], self._claimed_ns[claim.ticket]
            self._words[WorkerWord.RUNNING_GROUPS] -= 1
            self._tell_oldest()

    def _tell_oldest(self) -> None:
        oldest = next(iter(self._claimed_ns.items()), (0, 0))
        self._words[WorkerWord.OLDEST_TICKET], self._words[WorkerWord.OLDEST_CLAIM_NS] = oldest

    async def _attempts(self, claim: _native.Claim) -> None:
        fault = self._config.fault
        try:
            prompt = Prompt.decode(claim.prompt)
            prompt_ids = render(prompt, self._config.source, self._generator.tokenizer)
            sampling = self._config.sampling.of_row(prompt.sampling)
        except Exception as error:
            self._end(claim, _native.FAILED, Reason.PROMPT, error)
            return
        if len(prompt_ids) > self._max_prompt_tokens:
            self._end_over_long(claim, prompt, len(prompt_ids))
            return
        while True:
            seed = derive_seed(self._config.seed, claim.ticket, claim.attempt + 256 * claim.deaths)
            attempt = Attempt(f"{claim.ticket}.{claim.attempt}", seed)
            try:
                tell = functools.partial(self._note, claim, final=False)
                made, rejected = await self._sampler.make(prompt, prompt_ids, sampling, attempt, tell)
                if rejected is not None:
                    self._discard(attempt.sampled, rejected)
                    self._finish(claim, _native.FILTERED, rejected)
                    return
                if self._producer.publish(claim, self._encode(claim, prompt, prompt_ids, sampling, made)):
                    self._words[WorkerWord.GROUPS_PUBLISHED] += 1
                self._discard(attempt.sampled - sum(one.sampled for one in made), Reason.ABORT)
                return
            except Exception as error:
                reason = reason_of(error)
                self._discard(attempt.sampled, reason)
                last = claim.attempt + 1 >= fault.max_attempts or fault.on_sample_failure == "fail"
                if last or reason is Reason.TOO_LARGE:  # the same length would come again
                    self._end(claim, _native.FAILED, reason, error)
                    return
                self._note(claim, error, final=False)
                delay_s = fault.retry_delay_s * 2**claim.attempt
                again = self._producer.retry(claim)
                if again is None:
                    return
                claim = self._claims[again.ticket] = again
                self._words[WorkerWord.ATTEMPTS_RETRIED] += 1
                await asyncio.sleep(delay_s)

    def _encode(
        self,
        claim: _native.Claim,
        prompt: Prompt,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        made: list[Made],
    ) -> list[tuple[str, list[Any]]]:
        last = max(made, key=lambda one: one.generated_s)
        siblings_s = max((one.took_s for one in made if one is not last), default=0.0)
        meta = [
            *Meta(
                row=prompt.row,
                version=self._generator.version,
                deaths=claim.deaths,
                claimed_ns=self._claimed_ns[claim.ticket],
                started_ns=_ns(last.started_s),
                generated_ns=_ns(last.generated_s),
                published_ns=0,
                excess_ns=_ns(max(0.0, last.took_s - siblings_s)),
                oldest_version=min((span.version for one in made for span in one.sample.versions), default=-1),
            )
        ]
        samples, rewards = [one.sample for one in made], [one.reward for one in made]
        sampled = Sampled._make(getattr(sampling, name) for name in Sampled._fields)
        fields = encode_group(meta, prompt_ids, samples, rewards, self._config.ring.stored_fields, sampled)
        meta[_PUBLISHED_NS] = _now_ns()  # `publish` is the next call
        return fields

    def _discard(self, tokens: int, reason: int) -> None:
        self._words[DISCARDED[reason if reason < len(DISCARDED) else 0]] += tokens

    def _end_over_long(self, claim: _native.Claim, prompt: Prompt, tokens: int) -> None:
        text = (
            f"row {prompt.row}: the prompt has {tokens} tokens, at most {self._max_prompt_tokens} fit "
            f"(context {self._generator.context_length}, max_new_tokens {self._config.sampling.max_new_tokens})"
        )
        if self._config.source.over_long == "refuse":
            self._send(messages.Fault(kind="prompt", worker=self._index, message=text))
        self._end(claim, _native.FILTERED, Reason.OVER_LONG, ValueError(text))

    def _end(self, claim: _native.Claim, state: int, reason: Reason, error: BaseException) -> None:
        # The note goes before the word changes, so that the cause is never later than its effect.
        self._note(claim, error, final=True, reason=reason)
        self._finish(claim, state, reason)

    def _finish(self, claim: _native.Claim, state: int, reason: int) -> None:
        self._producer.end(claim, state, reason)
        os.eventfd_write(self._attendant_bell, 1)

    def _note(self, claim: _native.Claim, error: BaseException, final: bool, reason: Reason | None = None) -> None:
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        self._send(
            messages.Note(
                worker=self._index,
                ticket=claim.ticket,
                attempt=claim.attempt,
                reason=(reason or reason_of(error)).name.lower(),
                error=text[:2000],
                traceback=text_of(error),
                final=final,
            )
        )

    # -- control -------------------------------------------------------------------------------------------------

    def _send(self, message: messages.Message, fds: list[int] | None = None) -> None:
        with contextlib.suppress(OSError):  # the keeper is gone: PDEATHSIG is on its way
            self._channel.send(message, fds)
        if self._channel.wants_write:
            asyncio.get_running_loop().add_writer(self._channel.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.flush()
        if not self._channel.wants_write:
            asyncio.get_running_loop().remove_writer(self._channel.fileno())

    def _on_control(self) -> None:
        while True:
            try:
                received = self._channel.receive()
            except EOFError:
                self._stop.set()
                return
            if received is None:
                return
            message, fds = received
            match message:
                case messages.Go():
                    self._go.set()
                    self._rung.set()
                case messages.Hold():
                    self._go.clear()
                case messages.Sleep():
                    self._go.clear()
                    self._spawn(self._sleep(message))
                case messages.Stop():
                    self._stop.set()
                case messages.Update():
                    self._spawn(self._apply(message, fds[0]))
                case messages.Evaluate():
                    self._spawn(self._evaluate(message, fds[0]))
                case _:
                    raise AssertionError(f"worker got {message!r}")

    async def _apply(self, message: messages.Update, fd: int) -> None:
        error: BaseException | None = None
        limit_s, words = self._config.weights.timeout_s, self._words
        async with self._update_lock:
            words[WorkerWord.UPDATE_BEGAN_NS] = time.monotonic_ns()
            try:
                # Here first: the native part imports pieces of it on this thread when it first publishes, and two first imports at once break
                # each other.
                import numpy  # noqa: F401

                staged = await asyncio.to_thread(StagedWeights.open, fd)  # its checksum reads every byte
                try:
                    # Not before the file is read: what begins meanwhile is aborted, too.
                    self._sampler.updates_seen += 1
                    async with asyncio.timeout(limit_s):
                        await self._generator.update_weights(staged, message.version, message.pause, message.route)
                finally:
                    staged.close()
            except TimeoutError as late:
                where = ", ".join(getattr(late.__cause__, "__notes__", ["before its first phase"]))
                error = RuntimeError(f"{where}: the update took more than WeightsConfig.timeout_s={limit_s:g}")
            except Exception as caught:
                error = caught
            words[WorkerWord.UPDATE_PHASE] = 0
            words[WorkerWord.VERSION] = self._generator.version
            words[WorkerWord.PROGRESS_NS] = words[WorkerWord.UPDATE_ENDED_NS] = time.monotonic_ns()
        self._send(
            messages.Applied(
                worker=self._index,
                version=message.version,
                pid=os.getpid(),
                error=f"{type(error).__name__}: {error}" if error else "",
                traceback=text_of(error) if error else "",
                harmed=error is not None and not isinstance(error, ValueError),
            )
        )

    def _on_phase(self, phase: UpdatePhase) -> None:
        self._words[WorkerWord.UPDATE_PHASE] = 1 + UPDATE_PHASES.index(phase)

    async def _sleep(self, message: messages.Sleep) -> None:
        error: Exception | None = None
        async with self._update_lock:
            try:
                if message.asleep:
                    stop_deadlines()
                    await self._generator.sleep()
                else:
                    await self._generator.wake()
                    run_deadlines()
            except Exception as caught:
                error = caught
            self._words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
        self._send(
            messages.Slept(
                worker=self._index,
                asleep=message.asleep,
                error=f"{type(error).__name__}: {error}" if error else "",
                traceback=text_of(error) if error else "",
            )
        )

    async def _evaluate(self, message: messages.Evaluate, fd: int) -> None:
        request = msgspec.msgpack.decode(messages.read_blob(fd), type=EvaluationRequest)

        async def run_row(row: int, data: bytes) -> list[EvaluationItem]:
            prompt = Prompt.decode(data)
            ids = render(prompt, request.source, self._generator.tokenizer)
            room = self._generator.context_length - request.sampling.max_new_tokens
            if len(ids) > room:
                raise ValueError(
                    f"row {row}: the prompt has {len(ids)} tokens, at most {room} fit beside max_new_tokens={request.sampling.max_new_tokens}"
                )
            made = await self._sampler.run_group(
                prompt,
                ids,
                request.sampling,
                Attempt(f"eval{message.id}.{row}", derive_seed(self._config.seed, ~message.id, row), evaluates=True),
            )
            return [
                EvaluationItem(
                    row,
                    i,
                    one.sample.token_ids,
                    one.input.text,
                    one.reward,
                    one.sample.finish_reason,
                    [(span.version, span.start, span.end) for span in one.sample.versions],
                )
                for i, one in enumerate(made)
            ]

        try:
            items = await run_share(request, run_row)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._send(messages.Evaluated(id=message.id, worker=self._index, error=text, traceback=text_of(error)))
        else:
            result = messages.blob(msgspec.msgpack.encode(items))
            self._send(messages.Evaluated(id=message.id, worker=self._index), [result])
            os.close(result)

    async def _watch(self) -> None:
        """Heartbeat, and the engine's own processes: a dead one makes this worker useless."""
        while True:
            self._words[WorkerWord.HEARTBEAT_NS] = time.monotonic_ns()
            self._generator.check()
            await asyncio.sleep(WATCH_S)


def _now_ns() -> int:
    return _ns(asyncio.get_running_loop().time())


def _ns(moment_s: float) -> int:
    """Of the event loop's clock, which is CLOCK_MONOTONIC (in a simulation: virtual), in seconds."""
    return round(moment_s * 1e9)
