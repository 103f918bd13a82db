"""`Sampler`: makes and scores the samples of a prompt. Where a worker's time goes.

    run_group / run_one -> place -> rollout function (engine) -> reward -> Made          each sample by itself, its siblings beside it

Invariant: a group comes back whole, every sample with its reward (or, with `on_sample_failure="shrink"`, at least two of them), or the
first failure is raised, with a note that names the sample, after all siblings have ended: `run_group`'s finally guarantees it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from mprollout import _native, messages
from mprollout.config import EngineConfig, SamplingConfig
from mprollout.errors import MprolloutError, RewardError, SampleAborted, SampleFailed
from mprollout.ledger import FIRST_OWN_REASON, Reason
from mprollout.places import Place, Places
from mprollout.reward import FilterFailed, RewardInput, RewardRaised
from mprollout.reward_pool import RewardPool
from mprollout.ring import RolledSample, WorkerWord
from mprollout.rollout import RolloutFunction, Session

if TYPE_CHECKING:
    from mprollout.generator import Generator
    from mprollout.source import Prompt


T = TypeVar("T")


class Made(msgspec.Struct):
    """A finished completion, what its reward function sees, and what it said."""

    sample: RolledSample
    input: RewardInput
    reward: float = 0.0


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

    async def run_group(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        name: str,
        seed: int,
        *,
        sampling: SamplingConfig | None = None,
        tell: Callable[[BaseException], None] | None = None,
    ) -> list[Made]:
        """All samples of one attempt, scored. One failure ends the siblings, unless the group may shrink: then `tell` hears of it.

        Args:
            sampling: the training settings, or an evaluation's own.
            tell: whether and to whom a shrinking group tells of the samples it goes without; None: the group never shrinks.

        Raises:
            Exception: the first failure; its note names the sample.
        """
        sampling = sampling or self._config.sampling
        shrink = tell is not None and self._config.fault.on_sample_failure == "shrink"
        places = [self.places.request() for _ in range(sampling.group_size)]
        tasks = [
            asyncio.ensure_future(
                self.run_one(place, prompt, prompt_ids, sampling, f"{name}.{i}", derive_seed(seed, i), i)
            )
            for i, place in enumerate(places)
        ]
        try:
            done, _ = await asyncio.wait(
                tasks, return_when=asyncio.ALL_COMPLETED if shrink else asyncio.FIRST_EXCEPTION
            )
            failed = [(i, error) for i, task in enumerate(tasks) if task in done and (error := task.exception())]
            for i, error in failed:
                error.add_note(f"sample {i} of {len(tasks)}, attempt {name}")
            if failed and not (shrink and len(tasks) - len(failed) >= 2):
                raise failed[0][1]
            for _, error in failed:
                if tell is not None:
                    tell(error)
        finally:
            for task, place in zip(tasks, places, strict=True):
                task.cancel()
                place.release()  # a task that was cancelled before it ran releases nothing itself
            await asyncio.gather(*tasks, return_exceptions=True)
        made = [task.result() for task in tasks if not task.exception()]
        await self.score_group(made)
        return made

    async def rejection(self, made: list[Made]) -> int | None:
        """The reason code for which the filter rejects a group; None: it is kept. Raises as `RewardPool.reject`."""
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
        name: str,
        seed: int,
        index: int,
    ) -> Made:
        """One sample: generated while it holds its place, then scored (by a per-sample reward). Its deadline starts with the place."""
        limit_s = self._config.fault.sample_timeout_s
        try:
            await place.wait()
            async with asyncio.timeout(limit_s) as deadline:
                try:
                    session = await self._generate(prompt, prompt_ids, sampling, name, seed)
                    place.release()
                    self._count_running()
                    made = Made(session.sample, _reward_input(prompt, session, index))
                    if self._config.reward.per == "sample":
                        made.reward = await self._counted(self._rewards.score_one(made.input))
                    return made
                except asyncio.CancelledError as error:
                    if deadline.expired():
                        raise TimeoutError(
                            f"sample {name} (worker pid {os.getpid()}) exceeded sample_timeout_s={limit_s}"
                        ) from None
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
        self, prompt: Prompt, prompt_ids: list[int], sampling: SamplingConfig, name: str, seed: int
    ) -> Session:
        words = self._words
        if words[WorkerWord.RUNNING_SAMPLES] == 0:
            words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
        self._count_running()
        while True:
            updates = self.updates_seen
            session = Session(self.generator, sampling, prompt_ids, name, seed)
            try:
                await self._rollout(session, prompt)
                break
            except SampleAborted:
                if updates == self.updates_seen:
                    raise
        words[WorkerWord.SAMPLES_FINISHED] += 1
        words[WorkerWord.TOKENS_GENERATED] += session.sample.loss_mask.count(1)
        words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
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
