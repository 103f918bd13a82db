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
from mprollout.errors import MprolloutError, RewardError, SampleAborted
from mprollout.ledger import Reason
from mprollout.places import Place, Places
from mprollout.reward import RewardInput, RewardPool, RewardRaised
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
    """One a worker; used in its event loop.

    Args:
        report_broken_reward: told once the reward has failed for prompt after prompt (message, traceback).
    """

    def __init__(
        self,
        config: EngineConfig,
        generator: Generator,
        rollout: RolloutFunction,
        words: memoryview,
        report_broken_reward: Callable[[str, str], None],
    ) -> None:
        self.generator = generator
        self.places = Places(config.workers.max_running_samples)
        self.updates_seen = 0
        """Weight updates begun: an abort that one of them caused is not the prompt's failure."""
        self._config, self._rollout, self._words = config, rollout, words
        self._rewards = RewardPool(config.reward)
        self._report_broken_reward = report_broken_reward
        self._reward_ever_ok = False
        self._reward_failing: set[int] = set()

    def warm(self) -> None:
        """Start the reward processes early, beside the engine."""
        self._rewards.warm()

    def close(self) -> None:
        """Kill the reward processes; never waits for a running function."""
        self._rewards.close()

    async def run_group(
        self, prompt: Prompt, prompt_ids: list[int], name: str, seed: int, tell: Callable[[BaseException], None]
    ) -> list[Made]:
        """All samples of one attempt. One failure ends the siblings, unless the group may shrink: then `tell` hears of it.

        Raises:
            Exception: the first failure; its note names the sample.
        """
        sampling = self._config.sampling
        shrink = self._config.fault.on_sample_failure == "shrink"
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
                tell(error)
        finally:
            for task, place in zip(tasks, places, strict=True):
                task.cancel()
                place.release()  # a task that was cancelled before it ran releases nothing itself
            await asyncio.gather(*tasks, return_exceptions=True)
        made = [task.result() for task in tasks if not task.exception()]
        if self._config.reward.per == "group":
            rewards = await self._scored(prompt.ticket, self._rewards.score([one.input for one in made]))
            for one, reward in zip(made, rewards, strict=True):
                one.reward = reward
        return made

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
                        made.reward = await self._scored(prompt.ticket, self._rewards.score_one(made.input))
                    return made
                except asyncio.CancelledError:
                    if deadline.expired():
                        raise TimeoutError(
                            f"sample {name} (worker pid {os.getpid()}) exceeded sample_timeout_s={limit_s}"
                        ) from None
                    raise
        finally:
            place.release()
            self._count_running()

    async def score_alone(self, made: Made) -> float:
        """The reward of a sample outside of any group, whatever the reward scores at once."""
        if self._config.reward.per == "group":
            made.reward = (await self._scored(made.input.prompt.ticket, self._rewards.score([made.input])))[0]
        return made.reward

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
        words[WorkerWord.TOKENS_GENERATED] += sum(session.sample.loss_mask)
        words[WorkerWord.PROGRESS_NS] = time.monotonic_ns()
        return session

    def _count_running(self) -> None:
        words, held = self._words, self.places.held
        words[WorkerWord.RUNNING_SAMPLES] = held
        words[WorkerWord.PEAK_RUNNING_SAMPLES] = max(words[WorkerWord.PEAK_RUNNING_SAMPLES], held)

    async def _scored(self, ticket: int, scoring: Awaitable[T]) -> T:
        self._words[WorkerWord.REWARDING_SAMPLES] += 1
        try:
            result = await scoring
        except Exception as error:
            self._count_reward_failure(ticket, error)
            raise
        finally:
            self._words[WorkerWord.REWARDING_SAMPLES] -= 1
        self._reward_ever_ok = True
        self._reward_failing.clear()
        return result

    def _count_reward_failure(self, ticket: int, error: Exception) -> None:
        """One bad prompt fails alone; a reward that fails prompt after prompt is broken for good."""
        self._reward_failing.add(ticket)
        limit = self._config.fault.max_consecutive_failures
        if len(self._reward_failing) >= (limit if self._reward_ever_ok else min(4, limit)):
            text = (
                f"the reward failed for {len(self._reward_failing)} prompts in a row: {type(error).__name__}: {error}"
            )
            self._report_broken_reward(text, text_of(error))


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
