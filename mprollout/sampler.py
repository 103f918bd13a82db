"""`Sampler`: makes and scores the samples of a prompt. Where a worker's time goes.

    make -> run_group -> run_one -> place -> rollout function (engine) -> reward -> Made      each sample by itself, its siblings beside it
    |       |            |                   '-- episode_timeout_s
    |       |            '-- sample_timeout_s, from its place on
    '-- group_timeout_s, the filter included; an evaluation begins at run_group

Invariant: a group comes back whole, every sample with its reward (or, with `on_sample_failure="shrink"`, at least two of them), or the
first failure is raised, with a note that names the sample, after all siblings have ended: `run_group`'s finally guarantees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from mprollout import _native, messages
from mprollout.config import EngineConfig, SamplingConfig
from mprollout.errors import DeadlineExceeded, MprolloutError, RewardError, SampleAborted, SampleFailed
from mprollout.ledger import FIRST_OWN_REASON, Reason
from mprollout.places import Place, Places
from mprollout.reward import FilterFailed, RewardInput, RewardRaised
from mprollout.reward_pool import RewardPool
from mprollout.ring import ISSUED, RolledSample, WorkerWord, length_bucket
from mprollout.rollout import RolloutFunction, Session

if TYPE_CHECKING:
    from mprollout.generator import Generator
    from mprollout.source import Prompt


T = TypeVar("T")
_NAMED = 8
"""Unfinished samples that an error names."""


class Attempt(msgspec.Struct):
    """One try at a ticket, or at a row of an evaluation."""

    name: str
    """`ticket.attempt`; its samples are called `ticket.attempt.index`."""
    seed: int
    evaluates: bool = False
    sampled: int = 0
    """Tokens sampled so far, kept or not. What a request that was cancelled midway had made is not known, so not among them."""


class Made(msgspec.Struct):
    """A finished completion, what its reward function sees, and what it said. Moments are of the event loop's clock, in seconds."""

    sample: RolledSample
    input: RewardInput
    started_s: float
    """When it had its place."""
    generated_s: float
    sampled: int
    """Tokens that the engine sampled for it."""
    reward: float = 0.0

    @property
    def took_s(self) -> float:
        """From its place to its last token."""
        return self.generated_s - self.started_s


_deadlines: dict[asyncio.Timeout, float] = {}
"""Those under way in this process; while they are stopped, with the seconds that each has left."""
_stopped = False


def stop_deadlines() -> None:
    """None passes until `run_deadlines`: the engine sleeps, which is no sample's fault. Idempotent."""
    global _stopped
    _stopped = True
    for scope in _deadlines:
        _stop(scope)


def run_deadlines() -> None:
    """They go on, each with what it had left."""
    global _stopped
    _stopped = False
    now = asyncio.get_running_loop().time()
    for scope, left_s in _deadlines.items():
        if scope.when() is None and not scope.expired():
            scope.reschedule(now + left_s)


def _stop(scope: asyncio.Timeout) -> None:
    when = scope.when()
    if when is not None and not scope.expired():
        _deadlines[scope] = when - asyncio.get_running_loop().time()
        scope.reschedule(None)


@contextlib.asynccontextmanager
async def deadline(setting: str, limit_s: float | None, what: str) -> AsyncIterator[None]:
    """Cancels the block when `FaultConfig.<setting>` is over; what it awaits is thereby aborted in the engine.

    Raises:
        DeadlineExceeded: it was over, whatever the block made of its cancellation; with the notes of what was cancelled.
    """
    if limit_s is None:
        yield
        return
    scope = asyncio.timeout(limit_s)
    try:
        async with scope:
            if limit_s is not None:
                _deadlines[scope] = limit_s
                if _stopped:
                    _stop(scope)
            yield
    except Exception as error:
        if not scope.expired() or isinstance(error, DeadlineExceeded):  # the second: an inner one, no later
            raise
        late = DeadlineExceeded(f"{what} (worker pid {os.getpid()}) exceeded {setting}={limit_s:g}")
        for note in getattr(error.__cause__, "__notes__", ()):  # of the cancellation
            late.add_note(note)
        raise late from (None if isinstance(error, TimeoutError) else error)
    finally:
        _deadlines.pop(scope, None)


class Sampler:
    """One a worker; used in its event loop."""

    def __init__(
        self,
        config: EngineConfig,
        generator: Generator,
        rollout: RolloutFunction,
        words: memoryview,
    ) -> None:
        self.generator = generator
        self.places = Places(config.workers.max_running_samples)
        self.updates_seen = 0
        """Weight updates begun: an abort that one of them caused is not the prompt's failure."""
        self._config, self._rollout, self._words = config, rollout, words
        self._rewards = RewardPool(config.reward, config.filter)

    def warm(self) -> None:
        """Start the reward processes early, beside the engine."""
        self._rewards.warm()

    def close(self) -> None:
        """Kill the reward processes; never waits for a running function."""
        self._rewards.close()

    async def make(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        attempt: Attempt,
        tell: Callable[[BaseException], None],
    ) -> tuple[list[Made], int | None]:
        """One attempt at a ticket: its samples, scored, and the reason code for which the filter rejects them (None: they are kept).

        Raises:
            Exception: the first failure; its note names the sample.
            DeadlineExceeded: `group_timeout_s` was over; names the samples that were not finished.
        """
        async with deadline("group_timeout_s", self._config.fault.group_timeout_s, f"attempt {attempt.name}"):
            made = await self.run_group(prompt, prompt_ids, sampling, attempt, tell=tell)
            return made, await self._rejection(made)

    async def run_group(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        attempt: Attempt,
        *,
        tell: Callable[[BaseException], None] | None = None,
    ) -> list[Made]:
        """All samples of one attempt, scored. One failure ends the siblings, unless the group may shrink: then `tell` hears of it.

        Args:
            sampling: the training settings, those of the row in place, or an evaluation's own.
            tell: whether and to whom a shrinking group tells of the samples it goes without; None: the group never shrinks.

        Raises:
            Exception: the first failure; its note names the sample.
        """
        shrink = tell is not None and self._config.fault.on_sample_failure == "shrink"
        places = [self.places.request(attempt.evaluates) for _ in range(sampling.group_size)]
        tasks = [
            asyncio.ensure_future(self.run_one(place, prompt, prompt_ids, sampling, attempt, i))
            for i, place in enumerate(places)
        ]
        try:
            done, _ = await asyncio.wait(
                tasks, return_when=asyncio.ALL_COMPLETED if shrink else asyncio.FIRST_EXCEPTION
            )
            failed = [(i, error) for i, task in enumerate(tasks) if task in done and (error := task.exception())]
            for i, error in failed:
                error.add_note(f"sample {i} of {len(tasks)}, attempt {attempt.name}")
            if failed and not (shrink and len(tasks) - len(failed) >= 2):
                raise failed[0][1]
            for _, error in failed:
                if tell is not None:
                    tell(error)
        except asyncio.CancelledError as cancelled:
            late = [f"{attempt.name}.{i}" for i, task in enumerate(tasks) if not task.done()]
            cancelled.add_note(f"unfinished: {', '.join(late[:_NAMED])} ({len(late)} of {len(tasks)} samples)")
            raise
        finally:
            for task, place in zip(tasks, places, strict=True):
                task.cancel()
                place.release()  # a task that was cancelled before it ran releases nothing itself
            await asyncio.gather(*tasks, return_exceptions=True)
        made = [task.result() for task in tasks if not task.exception()]
        await self.score_group(made)
        if sampling.on_truncation == "reward":
            for one in made:
                if one.sample.finish_reason == "length":
                    one.reward = sampling.truncation_reward
        return made

    async def _rejection(self, made: list[Made]) -> int | None:
        """Raises as `RewardPool.reject`."""
        settings = self._config.filter
        rewards = [one.reward for one in made]
        if settings.zero_spread and min(rewards) == max(rewards):
            return Reason.ZERO_SPREAD
        if settings.function is None:
            return None
        reason = await self._rewards.reject([one.input for one in made], rewards)
        return FIRST_OWN_REASON + settings.reasons.index(reason) if reason else None

    async def run_one(
        self,
        place: Place,
        prompt: Prompt,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        attempt: Attempt,
        index: int,
    ) -> Made:
        """One sample: generated while it holds its place, then scored (by a per-sample reward). Its deadline starts with the place."""
        name = f"{attempt.name}.{index}"
        try:
            await place.wait()
            async with deadline("sample_timeout_s", self._config.fault.sample_timeout_s, f"sample {name}"):
                try:
                    started_s = asyncio.get_running_loop().time()
                    session = await self._generate(prompt, prompt_ids, sampling, attempt, index)
                    generated_s = asyncio.get_running_loop().time()
                    place.release()
                    self._count_running()
                    scored = _reward_input(prompt, session, index)
                    made = Made(session.sample, scored, started_s, generated_s, session.sampled)
                    if self._config.reward.per == "sample":
                        made.reward = await self._counted(self._rewards.score_one(scored))
                    return made
                except asyncio.CancelledError as error:
                    if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                        raise
                    raise SampleFailed(f"sample {name}: the rollout function raised CancelledError") from error
                except (
                    SystemExit,
                    KeyboardInterrupt,
                ) as error:  # would end the event loop, and every neighbour with it
                    raise SampleFailed(f"sample {name}: the rollout function raised {type(error).__name__}") from error
        finally:
            place.release()
            self._count_running()

    async def score_group(self, made: list[Made]) -> None:
        """Fill in the rewards of a group that is scored at once; nothing to do for a per-sample reward."""
        if self._config.reward.per == "group":
            rewards = await self._counted(self._rewards.score([one.input for one in made]))
            for one, reward in zip(made, rewards, strict=True):
                one.reward = reward

    async def _generate(
        self, prompt: Prompt, prompt_ids: list[int], sampling: SamplingConfig, attempt: Attempt, index: int
    ) -> Session:
        words, name, seed = self._words, f"{attempt.name}.{index}", derive_seed(attempt.seed, index)
        if words[WorkerWord.RUNNING_SAMPLES] == 0:
            words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
        self._count_running()
        weights = self._config.weights
        resumes = weights.partial_rollout and not attempt.evaluates
        for restarts in itertools.count():
            session = Session(
                self.generator,
                sampling,
                prompt_ids,
                name,
                derive_seed(seed, restarts) if restarts else seed,
                updates=lambda: self.updates_seen,
                resumes=resumes,
                mask_off_policy=weights.mask_off_policy,
            )
            try:
                async with deadline("episode_timeout_s", self._config.fault.episode_timeout_s, f"episode {name}"):
                    await self._rollout(session, prompt)
                break
            except SampleAborted as aborted:
                if not aborted.by_update:
                    raise
            finally:
                attempt.sampled += session.sampled
        if sampling.on_truncation == "mask" and session.sample.finish_reason == "length":
            session.sample.mask_all()
        words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
        words[WorkerWord.EVALUATED_SAMPLES if attempt.evaluates else WorkerWord.SAMPLES_FINISHED] += 1
        words[WorkerWord.EVALUATED_TOKENS if attempt.evaluates else WorkerWord.TOKENS_GENERATED] += session.sampled
        if not attempt.evaluates:
            words[ISSUED[length_bucket(len(session.sample.token_ids))]] += 1
        return session

    def _count_running(self) -> None:
        words, held = self._words, self.places.held
        words[WorkerWord.RUNNING_SAMPLES] = held
        words[WorkerWord.PEAK_RUNNING_SAMPLES] = max(words[WorkerWord.PEAK_RUNNING_SAMPLES], held)

    async def _counted(self, scoring: Awaitable[T]) -> T:
        self._words[WorkerWord.REWARDING_SAMPLES] += 1
        try:
            return await scoring
        finally:
            self._words[WorkerWord.REWARDING_SAMPLES] -= 1


def _reward_input(prompt: Prompt, session: Session, index: int) -> RewardInput:
    sample = session.sample
    return RewardInput(
        prompt=prompt, text=session.text, token_ids=sample.token_ids, finish_reason=sample.finish_reason, index=index
    )


def derive_seed(base: int, *parts: int) -> int:
    """A 31-bit seed, distinct (up to hash collisions) for each tuple of numbers; stable across runs and machines."""
    digest = hashlib.blake2b(",".join(map(str, (base, *parts))).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def reason_of(error: BaseException) -> Reason:
    """The reason code of a failed attempt."""
    match error:
        case FilterFailed():
            return Reason.FILTER
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
