"""`RolloutWorker`: claims tickets, runs their samples, scores them, publishes the group. One process, one event loop.

    claim loop    produces running tickets  / waits for a free sample place, then a READY ticket / unblocked by a finished sample, the bell
    ticket task   produces one group        / waits for its samples                              / unblocked by engine and rewards
    sample task   produces one completion   / waits for a place, the engine, the reward          / unblocked by a sibling's end
    control       applies weights, stops    / waits for the keeper's socket

Invariants: nothing here ever waits for the trainer (`Producer.publish` cannot: its room was reserved at the claim). A ticket leaves this
process by exactly one of publish, end, give_back, or by its death (`recover` in the keeper). At most `max_running_samples` samples run: `Places` counts them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from typing import Any

import msgspec

from mprollout import _native, messages
from mprollout.config import EngineConfig, SamplingConfig
from mprollout.errors import ConfigError, MprolloutError, RewardError, SampleAborted
from mprollout.generator import Generator
from mprollout.ledger import Reason
from mprollout.ring import RolledSample, WorkerWord, encode_group
from mprollout.rollout import RolloutFunction, Session, single_turn

SAFETY_LOOK_S = 0.05
WATCH_S = 0.5


class EvaluationItem(msgspec.Struct, frozen=True):
    """One evaluated sample."""

    row: int
    sample: int
    token_ids: list[int]
    text: str
    reward: float
    versions: list[tuple[int, int, int]]


class EvaluationRequest(msgspec.Struct, frozen=True):
    """Rows to evaluate on one worker: (row number, encoded prompt)."""

    prompts: list[tuple[int, bytes]]
    sampling: SamplingConfig


class Places:
    """Sample places: at most `limit` held; waiters get them first come, first served."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()
        self._room = asyncio.Event()
        self._room.set()

    async def acquire(self) -> None:
        if self.held < self.limit and not self._waiters:
            self.held += 1
        else:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self.release()
                raise
        self._update()

    def release(self) -> None:
        while self._waiters and self._waiters[0].cancelled():
            self._waiters.popleft()
        if self._waiters:
            self._waiters.popleft().set_result(None)  # the place changes hands
        else:
            self.held -= 1
        self._update()

    def _update(self) -> None:
        if self.held < self.limit and not self._waiters:
            self._room.set()
        else:
            self._room.clear()

    async def wait_room(self) -> None:
        """Return when a place is free that no started ticket wants."""
        await self._room.wait()


class RolloutWorker:
    """One worker's whole life after its memory is attached.

    Freed: the generator and the reward pool by `close`; claims by `give_back`; the process itself by the keeper.
    """

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        segment: _native.Segment,
        channel: messages.Channel,
        bell: int,
        attendant_bell: int,
    ) -> None:
        from mprollout.reward import RewardPool

        self.index, self.config, self.segment, self.channel = index, config, segment, channel
        self._bell, self._attendant_bell = bell, attendant_bell
        self._words = segment.worker_words(index)
        self._producer = _native.Producer(segment, index)
        self._generator = make_generator(config, index)
        self._rewards = RewardPool(config.reward)
        self._rollout: RolloutFunction = load_function(config.rollout) if config.rollout else single_turn
        self._places = Places(config.workers.max_running_samples)
        self._rung = asyncio.Event()
        self._go = asyncio.Event()
        self._stop = asyncio.Event()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._claims: dict[int, _native.Claim] = {}
        self._update_lock = asyncio.Lock()
        self._updates_seen = 0
        self._reward_ok = False
        self._reward_failing: set[int] = set()
        self._max_prompt_tokens = 0

    async def run(self) -> None:
        """Start the engine, serve until Stop. Raises what makes this worker useless."""
        started = time.monotonic()
        self._rewards.warm()
        await self._generator.start()
        context = self._generator.context_length
        self._max_prompt_tokens = min(
            self.config.source.max_prompt_tokens or context, context - self.config.sampling.max_new_tokens
        )
        if self._max_prompt_tokens < 1:
            raise ConfigError(
                f"SamplingConfig.max_new_tokens={self.config.sampling.max_new_tokens} leaves no room for a prompt: "
                f"the model's context length is {context}"
            )
        loop = asyncio.get_running_loop()
        loop.add_reader(self.channel.fileno(), self._on_control)
        loop.add_reader(self._bell, self._on_bell)
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        self._send(
            messages.WorkerReady(
                worker=self.index, start_s=time.monotonic() - started, context_length=self._generator.context_length
            )
        )
        self._on_control()  # what came while the start blocked the loop
        self._spawn(self._watch())
        self._spawn(self._claim_loop())
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([stop, self._fatal], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self._fatal.done():
            self._fatal.result()
        await self._close()

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # each ticket's task gives its claim back
        self._rewards.close()
        await self._generator.close()

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    # -- claiming ------------------------------------------------------------------------------------------------

    async def _claim_loop(self) -> None:
        await self._go.wait()
        while True:
            await self._places.wait_room()
            claim = self._producer.claim()
            if claim is None:
                claim = await self._sleep_until_claim()
            self._claims[claim.ticket] = claim
            self._spawn(self._run_ticket(claim))
            await asyncio.sleep(0)  # its samples take their places before the next look

    async def _sleep_until_claim(self) -> _native.Claim:
        """Say idle, then look again (the admitter admits, then looks for idle workers: one of the two sees the other)."""
        try:
            while True:
                self._rung.clear()
                self._producer.set_idle(True)
                claim = self._producer.claim()
                self._words[WorkerWord.STARVED_FOR_ROOM] = claim is None and self._producer.starved_for_room
                if claim is not None:
                    return claim
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SAFETY_LOOK_S):
                        await self._rung.wait()
        finally:
            self._producer.set_idle(False)

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._rung.set()

    # -- one ticket ----------------------------------------------------------------------------------------------

    async def _run_ticket(self, claim: _native.Claim) -> None:
        self._words[WorkerWord.RUNNING_GROUPS] += 1
        try:
            await self._attempts(claim)
        except asyncio.CancelledError:
            self._producer.give_back(self._claims[claim.ticket])
            raise
        finally:
            del self._claims[claim.ticket]
            self._words[WorkerWord.RUNNING_GROUPS] -= 1

    async def _attempts(self, claim: _native.Claim) -> None:
        from mprollout.source import Prompt, render

        claimed_ns = time.monotonic_ns()
        try:
            prompt = Prompt.decode(claim.prompt)
            prompt_ids = render(prompt, self.config.source, self._generator.tokenizer)
        except Exception as error:
            self._end(claim, _native.FAILED, Reason.PROMPT, error)
            return
        if len(prompt_ids) > self._max_prompt_tokens:
            self._over_long(claim, prompt, len(prompt_ids))
            return
        while True:
            try:
                samples, rewards = await self._run_group(claim, prompt, prompt_ids)
                meta = [prompt.row, self._generator.version, claimed_ns, time.monotonic_ns()]
                if self._producer.publish(claim, encode_group(meta, prompt_ids, samples, rewards)):
                    self._words[WorkerWord.GROUPS_PUBLISHED] += 1
                return
            except Exception as error:
                reason = reason_of(error)
                last = claim.attempt + 1 >= self.config.fault.max_attempts
                if last or reason is Reason.TOO_LARGE or self.config.fault.on_sample_failure == "fail":
                    self._end(claim, _native.FAILED, reason, error)
                    return
                self._note(claim, reason, error, final=False)
                delay_s = self.config.fault.retry_delay_s * 2**claim.attempt
                again = self._producer.retry(claim)
                if again is None:
                    return
                claim = self._claims[again.ticket] = again
                self._words[WorkerWord.ATTEMPTS_RETRIED] += 1
                await asyncio.sleep(delay_s)

    async def _run_group(
        self, claim: _native.Claim, prompt: Any, prompt_ids: list[int]
    ) -> tuple[list[RolledSample], list[float]]:
        """All samples of one attempt, with their rewards. One failure ends the siblings, unless the group may shrink."""
        size = self.config.sampling.group_size
        tasks = [
            asyncio.ensure_future(
                self._run_sample(
                    prompt,
                    prompt_ids,
                    self.config.sampling,
                    f"{claim.ticket}.{claim.attempt}.{i}",
                    derive_seed(self.config.seed, claim.ticket, claim.attempt + 256 * claim.deaths, i),
                    i,
                )
            )
            for i in range(size)
        ]
        shrink = self.config.fault.on_sample_failure == "shrink"
        try:
            done, _ = await asyncio.wait(
                tasks, return_when=asyncio.ALL_COMPLETED if shrink else asyncio.FIRST_EXCEPTION
            )
            failed = {i: task.exception() for i, task in enumerate(tasks) if task in done and task.exception()}
            kept = [i for i in range(size) if i not in failed]
            if failed and not (shrink and len(kept) >= 2):
                index, error = next(iter(failed.items()))
                assert error is not None
                error.add_note(
                    f"sample {index} of {size}, ticket {claim.ticket}, attempt {claim.attempt}, worker {self.index}"
                )
                raise error
            for error in failed.values():
                assert error is not None
                self._note(claim, reason_of(error), error, final=False)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finished = [tasks[i].result() for i in kept]
        if self.config.reward.per == "group":
            rewards = await self._score_group(claim.ticket, [made for made, _ in finished])
        else:
            rewards = [reward for _, reward in finished]
        return [made.sample for made, _ in finished], rewards

    async def _run_sample(
        self, prompt: Any, prompt_ids: list[int], sampling: SamplingConfig, name: str, seed: int, index: int
    ) -> tuple[_Made, float]:
        async with asyncio.timeout(self.config.fault.sample_timeout_s) as deadline:
            try:
                session = await self._generate(prompt, prompt_ids, sampling, name, seed)
                made = _Made(session.sample, self._reward_input(prompt, session, index))
                if self.config.reward.per == "group":
                    return made, 0.0
                return made, await self._score(prompt.ticket, made)
            except asyncio.CancelledError:
                if deadline.expired():
                    raise TimeoutError(
                        f"sample {name} on worker {self.index} (pid {os.getpid()}) exceeded sample_timeout_s={self.config.fault.sample_timeout_s}"
                    ) from None
                raise

    async def _generate(
        self, prompt: Any, prompt_ids: list[int], sampling: SamplingConfig, name: str, seed: int
    ) -> Session:
        await self._places.acquire()
        words = self._words
        if words[WorkerWord.RUNNING_SAMPLES] == 0:
            words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
        words[WorkerWord.RUNNING_SAMPLES] = self._places.held
        words[WorkerWord.PEAK_RUNNING_SAMPLES] = max(words[WorkerWord.PEAK_RUNNING_SAMPLES], self._places.held)
        try:
            while True:
                updates = self._updates_seen
                session = Session(self._generator, sampling, prompt_ids, name, seed)
                try:
                    await self._rollout(session, prompt)
                    break
                except SampleAborted:
                    # Our own update with pause="abort" ended it: not the prompt's failure, so it starts again, pristine.
                    if updates == self._updates_seen:
                        raise
            words[WorkerWord.SAMPLES_FINISHED] += 1
            words[WorkerWord.TOKENS_GENERATED] += sum(session.sample.loss_mask)
            words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
            return session
        finally:
            self._places.release()
            words[WorkerWord.RUNNING_SAMPLES] = self._places.held

    # -- rewards -------------------------------------------------------------------------------------------------

    def _reward_input(self, prompt: Any, session: Session, index: int) -> Any:
        from mprollout.reward import RewardInput

        return RewardInput(
            prompt=prompt,
            text=session.text,
            token_ids=session.sample.token_ids,
            finish_reason=session.sample.finish_reason,
            index=index,
        )

    async def _score(self, ticket: int, made: _Made) -> float:
        return (await self._scored(ticket, self._rewards.score_one(made.input)))[0]

    async def _score_group(self, ticket: int, made: list[_Made]) -> list[float]:
        return await self._scored(ticket, self._rewards.score([one.input for one in made]))

    async def _scored(self, ticket: int, scoring: Any) -> list[float]:
        self._words[WorkerWord.REWARDING_SAMPLES] += 1
        try:
            result = await scoring
        except Exception as error:
            if self._stop.is_set():
                raise
            # One bad prompt fails alone; a reward that fails prompt after prompt is broken for good.
            self._reward_failing.add(ticket)
            limit = self.config.fault.max_consecutive_failures
            if len(self._reward_failing) >= (limit if self._reward_ok else min(4, limit)):
                self._send(
                    messages.Fault(
                        kind="reward",
                        worker=self.index,
                        message=f"the reward failed for {len(self._reward_failing)} prompts in a row: {type(error).__name__}: {error}",
                        traceback=text_of(error),
                    )
                )
            raise
        finally:
            self._words[WorkerWord.REWARDING_SAMPLES] -= 1
        self._reward_ok = True
        self._reward_failing.clear()
        return result if isinstance(result, list) else [result]

    # -- endings -------------------------------------------------------------------------------------------------

    def _over_long(self, claim: _native.Claim, prompt: Any, tokens: int) -> None:
        text = (
            f"row {prompt.row}: the prompt has {tokens} tokens, at most {self._max_prompt_tokens} fit "
            f"(context {self._generator.context_length}, max_new_tokens {self.config.sampling.max_new_tokens})"
        )
        if self.config.source.over_long == "refuse":
            self._send(messages.Fault(kind="prompt", worker=self.index, message=text))
        self._end(claim, _native.FILTERED, Reason.OVER_LONG, ValueError(text))

    def _end(self, claim: _native.Claim, state: int, reason: Reason, error: BaseException) -> None:
        self._note(
            claim, reason, error, final=True
        )  # before the word changes, so that the cause is never later than its effect
        self._producer.end(claim, state, reason)
        os.eventfd_write(self._attendant_bell, 1)

    def _note(self, claim: _native.Claim, reason: Reason, error: BaseException, final: bool) -> None:
        self._send(
            messages.Note(
                worker=self.index,
                ticket=claim.ticket,
                attempt=claim.attempt,
                reason=reason.name.lower(),
                error="; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])[:2000],
                traceback=text_of(error),
                final=final,
            )
        )

    # -- control -------------------------------------------------------------------------------------------------

    def _send(self, message: messages.Message, fds: list[int] | None = None) -> None:
        with contextlib.suppress(OSError):  # the keeper is gone: PDEATHSIG is on its way
            self.channel.send(message, fds)
        if self.channel.wants_write:
            loop = asyncio.get_running_loop()
            loop.add_writer(self.channel.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.flush()
        if not self.channel.wants_write:
            asyncio.get_running_loop().remove_writer(self.channel.fileno())

    def _on_control(self) -> None:
        while True:
            try:
                received = self.channel.receive()
            except EOFError:
                self._stop.set()
                return
            if received is None:
                return
            message, fds = received
            match message:
                case messages.Go():
                    self._go.set()
                case messages.Stop():
                    self._stop.set()
                case messages.Update():
                    self._spawn(self._apply(message, fds[0]))
                case messages.Evaluate():
                    self._spawn(self._evaluate(message, fds[0]))
                case _:
                    raise AssertionError(f"worker got {message!r}")

    async def _apply(self, message: messages.Update, fd: int) -> None:
        from mprollout.weights import StagedWeights

        error: BaseException | None = None
        async with self._update_lock:
            self._updates_seen += 1
            try:
                staged = await asyncio.to_thread(StagedWeights.open, fd)  # its checksum reads every byte
                try:
                    async with asyncio.timeout(self.config.weights.timeout_s):
                        await self._generator.update_weights(staged, message.version, message.pause)  # type: ignore[arg-type]
                finally:
                    staged.close()
            except Exception as caught:
                error = caught
            self._words[WorkerWord.VERSION] = self._generator.version
            self._words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
        self._send(
            messages.Applied(
                worker=self.index,
                version=message.version,
                error=f"{type(error).__name__}: {error}" if error else "",
                traceback=text_of(error) if error else "",
                harmed=error is not None and not isinstance(error, ValueError),
            )
        )

    async def _evaluate(self, message: messages.Evaluate, fd: int) -> None:
        from mprollout.source import Prompt, render

        request = msgspec.msgpack.decode(messages.read_blob(fd), type=EvaluationRequest)

        async def one(row: int, data: bytes, i: int) -> EvaluationItem:
            prompt = Prompt.decode(data)
            ids = render(prompt, self.config.source, self._generator.tokenizer)
            name, seed = f"eval{message.id}.{row}.{i}", derive_seed(self.config.seed, ~message.id, row, i)
            made, reward = await self._run_sample(prompt, ids, request.sampling, name, seed, i)
            if self.config.reward.per == "group":
                reward = (await self._score_group(prompt.ticket, [made]))[0]
            sample = made.sample
            return EvaluationItem(
                row,
                i,
                sample.token_ids,
                made.input.text,
                reward,
                [(s.version, s.start, s.end) for s in sample.versions],
            )

        samples = range(request.sampling.group_size)
        tasks = [asyncio.ensure_future(one(row, data, i)) for row, data in request.prompts for i in samples]
        try:
            items = await asyncio.gather(*tasks)
        except Exception as error:
            for task in tasks:
                task.cancel()
            self._send(
                messages.Evaluated(
                    id=message.id, worker=self.index, error=f"{type(error).__name__}: {error}", traceback=text_of(error)
                )
            )
            return
        result = messages.blob(msgspec.msgpack.encode(items))
        self._send(messages.Evaluated(id=message.id, worker=self.index), [result])
        os.close(result)

    async def _watch(self) -> None:
        """Heartbeat, and the engine's own processes: a dead one makes this worker useless."""
        while True:
            self._words[WorkerWord.HEARTBEAT_NS] = time.monotonic_ns()
            self._generator.check()
            await asyncio.sleep(WATCH_S)


class _Made(msgspec.Struct):
    """A finished completion and what its reward function sees."""

    sample: RolledSample
    input: Any


def reason_of(error: BaseException) -> Reason:
    """The reason code of a failed attempt."""
    from mprollout.reward import RewardRaised

    match error:
        case RewardError() | RewardRaised():
            return Reason.REWARD
        case TimeoutError():
            return Reason.TIMEOUT
        case SampleAborted():
            return Reason.ABORT
        case _native.GroupTooLarge():
            return Reason.TOO_LARGE
        case MprolloutError() | ValueError():
            return Reason.ROLLOUT
    return Reason.GENERATION


def text_of(error: BaseException) -> str:
    """The traceback as text: the user's own where the reward pool carries one."""
    own = getattr(error, "traceback_text", "")
    return messages.clip(own or "".join(traceback.format_exception(error)))


def derive_seed(base: int, *parts: int) -> int:
    """A 31-bit seed, distinct (up to hash collisions) for each tuple of numbers; stable across runs and machines."""
    digest = hashlib.blake2b(",".join(map(str, (base, *parts))).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def load_function(spec: Any) -> Any:
    """A function given as "module:function", or itself."""
    import importlib

    if callable(spec):
        return spec
    module, _, name = str(spec).partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"rollout: expected a function or 'module:function', got {spec!r}: {error}") from error


def make_generator(config: EngineConfig, index: int) -> Generator:
    """The generator that the config names; the only place that knows which ones there are."""
    from mprollout.config import SimulatedConfig

    if isinstance(config.generator, SimulatedConfig):
        from mprollout.simulated import SimulatedGenerator

        return SimulatedGenerator(config.generator)
    from mprollout.sglang_generator import SGLangGenerator

    devices = config.workers.devices[index]
    return SGLangGenerator(
        config.generator,
        devices=devices if isinstance(devices, list) else [devices],
        max_running_samples=config.workers.max_running_samples,
        seed=derive_seed(config.seed, index),
    )


def import_main(path: str) -> None:
    """Make the user's script importable as `__main__`, as multiprocessing's spawn does, so that its functions unpickle."""
    import multiprocessing.spawn

    import mprollout

    mprollout._importing_main = path
    try:
        multiprocessing.spawn._fixup_main_from_path(path)  # type: ignore[attr-defined]
    finally:
        mprollout._importing_main = None


def main() -> None:
    fd, keeper_pid, index = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _native.die_with_parent(keeper_pid)
    from mprollout.orphans import patch_spawn

    patch_spawn()
    sock = socket.socket(fileno=fd)
    channel = messages.Channel(sock)
    sock.setblocking(True)
    received = channel.receive()
    sock.setblocking(False)
    assert received is not None and isinstance(received[0], messages.Boot)
    record_fd, segment_fd, bell, attendant_bell = received[1]
    try:
        segment = _native.Segment.attach(segment_fd)
        os.close(segment_fd)
        data = messages.read_blob(record_fd)
        main_path, sys.path[:], pickled = pickle.loads(data)
        if main_path:
            import_main(main_path)
        config: EngineConfig = pickle.loads(pickled)

        async def life() -> None:
            await RolloutWorker(index, config, segment, channel, bell, attendant_bell).run()

        asyncio.run(life())
    except BaseException as error:
        permanent = isinstance(error, (ValueError, ImportError, AttributeError, OSError, MprolloutError, SyntaxError))
        with contextlib.suppress(OSError):
            channel.socket.setblocking(True)
            channel.send(
                messages.WorkerFailed(
                    worker=index,
                    error=f"{type(error).__name__}: {error}",
                    traceback=text_of(error),
                    permanent=permanent,
                )
            )
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(
            1
        )  # SGLang's threads and atexit hooks must not keep a failed worker alive; the keeper ends its process group
    os._exit(0)


if __name__ == "__main__":
    main()
