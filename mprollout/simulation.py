"""An hour of a run in seconds: the whole data path in one process, on a clock that jumps.

    source -> admission -> live table -> RolloutWorker x W over SimulatedGenerator -> ring -> taker -> a trainer that only sleeps

Everything is the code of a real run but the keeper, the processes and the time: `VirtualLoop` moves its clock to the next timer whenever
nothing else can happen. So limits, order, lag and waiting are those that the same settings would have, as far as the simulated lengths
and speeds are right. Deaths need processes: they are tested over a real engine, not here.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import os
import selectors
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from mprollout import _native, messages
from mprollout.admission import Admission, Bells
from mprollout.batch import Batch
from mprollout.config import EngineConfig, SimulatedConfig
from mprollout.errors import ConfigError, EngineFault
from mprollout.functions import is_async
from mprollout.gate import Gate
from mprollout.generator import GenerateRequest, Generation
from mprollout.ledger import Ledger
from mprollout.reward import RewardInput, resolve
from mprollout.ring import WorkerWord, plan, segment_arguments
from mprollout.rollout import load_rollout
from mprollout.simulated import SimulatedGenerator
from mprollout.source import PromptSource
from mprollout.stats import discarded
from mprollout.taker import Taker
from mprollout.updates import Updates
from mprollout.waiting import Waits
from mprollout.worker import RolloutWorker


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for a timer, goes to its moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise RuntimeError("the simulation stands still: nobody waits for a moment, and nothing can be read")
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everybody waits, and then at once.

    Example:
        >>> loop = VirtualLoop()
        >>> loop.run_until_complete(asyncio.sleep(3600))
        >>> loop.time()
        3600.0
        >>> loop.close()
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """At once and here: it takes no virtual time, and of two threads the faster one must not decide how the run goes on."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class TrainerModel(msgspec.Struct, frozen=True, kw_only=True):
    """What stands for the trainer."""

    groups_per_step: int
    step_s: float
    steps: int
    updates: bool = True
    """Push weights after each step."""


class SimulationReport(msgspec.Struct, kw_only=True):
    """What a simulated run did. Times in virtual seconds, lengths in tokens."""

    wall_s: float = 0.0
    trainer_wait_s: list[float] = []
    """In `get`, by step."""
    waited_s: dict[str, float] = {}
    """In `get` and in the update, by cause (`waiting.Waits`)."""
    busy_sample_s: float = 0.0
    """Samples generating, over time: divide by `wall_s` for the mean number of running samples."""
    tickets: list[int] = []
    """Taken, in order."""
    lags: list[int] = []
    """Of each group taken."""
    issued_lengths: list[int] = []
    """Of each completion that a worker finished, in the order of the ends."""
    delivered_lengths: list[int] = []
    most_live: int = 0
    most_running: list[int] = []
    """Of each worker."""
    outcomes: dict[str, int] = {}
    failures: list[str] = []
    """What was told of each failed attempt, in order."""
    discarded: dict[str, int] = {}
    """Tokens, by reason; see `EngineStats`."""

    @property
    def tokens_discarded(self) -> int:
        """Sampled and never delivered."""
        return sum(self.discarded.values())


async def costly_reward(sample: RewardInput, *, mean_s: float, sigma: float = 0.0, seed: int = 0) -> float:
    """A reward that takes its time: `RewardConfig(costly_reward, kwargs={"mean_s": 2.0})`; so many at once as `max_concurrency` says.

    Args:
        mean_s, sigma: mean seconds of one call, log-normal; sigma 0: each takes `mean_s`.
        seed: with ticket and index of a sample it decides how long it takes, and its reward in [0, 1).
    """
    rng = np.random.default_rng([seed, sample.prompt.ticket, sample.index])
    await asyncio.sleep(mean_s * math.exp(rng.normal(-(sigma**2) / 2, sigma)))
    return float(rng.random())


def simulate(
    config: EngineConfig,
    trainer: TrainerModel,
    taker: type[Taker] = Taker,
    look: Callable[[SimulationReport, Gate], None] | None = None,
) -> SimulationReport:
    """Run it; blocks for as long as the computing takes.

    Args:
        config: its generator must be a `SimulatedConfig`, its reward "exact" or an `async def` (sync ones run in processes, whose time is real).
        taker: another policy of what becomes of published groups.
        look: called after each step.

    Raises:
        ConfigError: as above, or a fault that kills or stops a process is among the generator's.
        EngineFault: as in a real run.
    """
    if not isinstance(config.generator, SimulatedConfig) or {"die", "hang"} & set(config.generator.faults):
        raise ConfigError("simulate: expected a SimulatedConfig without the faults `die` and `hang`")
    if (
        config.reward.function != "exact" and not is_async(resolve(config.reward))
    ) or config.filter.function is not None:
        raise ConfigError(
            'simulate: expected the reward "exact" or an `async def`, and no filter function: others run in processes'
        )
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_Simulation(config, trainer, taker, look).run())
    finally:
        loop.close()


class _Generator(SimulatedGenerator):
    def __init__(self, config: SimulatedConfig, report: SimulationReport) -> None:
        super().__init__(config)
        self._report = report

    async def generate(self, request: GenerateRequest) -> Generation:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            generation = await super().generate(request)
            self._report.issued_lengths.append(len(generation.token_ids))
            return generation
        finally:
            self._report.busy_sample_s += loop.time() - began


class _Simulation:
    def __init__(
        self,
        config: EngineConfig,
        trainer: TrainerModel,
        taker: type[Taker],
        look: Callable[[SimulationReport, Gate], None] | None,
    ) -> None:
        self._config, self._trainer, self._look = config, trainer, look
        self.report = SimulationReport()
        sizes = plan(config)
        self._segment = _native.Segment.create(**segment_arguments(sizes))
        self._bell, self._attendant_bell = _eventfd(), _eventfd()
        self._segment.taker_bell = self._bell
        self._gate, self._ledger = Gate(config.gate, sizes.max_live_groups, sizes.spare), Ledger()
        self._updates = Updates(config, self._gate)
        consumer = _native.Consumer(self._segment, self._attendant_bell)
        self._taker = taker(consumer, config, sizes.extra_fields, self._ledger, self._gate, self._updates)
        notes: collections.OrderedDict[int, messages.Note] = collections.OrderedDict()
        self._admission = Admission(
            self._segment,
            config,
            PromptSource(config.source),
            self._gate,
            self._ledger,
            notes,
            self._on_failing,
            _now_ns,
        )
        self._waits = Waits()
        self._fault: EngineFault | None = None
        self._news = asyncio.Event()
        self._bells = [_eventfd() for _ in config.workers.devices]
        self._ringer = Bells(self._segment, self._bells)
        self._channels: list[messages.Channel] = []  # this side's ends
        self._theirs: list[messages.Channel] = []
        self._applied = 0

    def _on_failing(self, kind: type[EngineFault], text: str, _: messages.Note | None) -> None:
        self._fault = self._fault or kind(text)
        self._news.set()

    async def run(self) -> SimulationReport:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._bell, self._on_bell)
        loop.add_reader(self._attendant_bell, self._on_attendant_bell)
        workers = [asyncio.ensure_future(self._worker(index).run()) for index in range(len(self._bells))]
        try:
            training = asyncio.ensure_future(self._train())
            done, _ = await asyncio.wait([training, *workers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            self.report.wall_s = loop.time()
        finally:
            for channel in self._channels:
                channel.send(messages.Stop())
            training.cancel()
            await asyncio.gather(training, *workers, return_exceptions=True)
            self._close()
        self.report.outcomes = dict(self._ledger.counts)
        self.report.waited_s = {cause: ns / 1e9 for cause, ns in self._waits.ns.items()}
        return self.report

    def _close(self) -> None:
        loop = asyncio.get_running_loop()
        for channel in self._channels:
            loop.remove_reader(channel.fileno())
            channel.close()
        for channel in self._theirs:
            channel.close()
        for fd in (self._bell, self._attendant_bell):
            loop.remove_reader(fd)
        for fd in (self._bell, self._attendant_bell, *self._bells):
            os.close(fd)
        self.report.most_running = [
            self._segment.worker_words(index)[WorkerWord.PEAK_RUNNING_SAMPLES] for index in range(len(self._bells))
        ]
        self.report.discarded = discarded(self._segment, self._taker.tokens_discarded)
        self._taker.consumer.close()
        self._segment.close()

    def _worker(self, index: int) -> RolloutWorker:
        ours, theirs = messages.Channel.pair()
        self._channels.append(ours)
        self._theirs.append(messages.Channel(theirs))
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_message, ours)
        assert isinstance(self._config.generator, SimulatedConfig)
        return RolloutWorker(
            index,
            self._config,
            _Generator(self._config.generator, self.report),
            load_rollout(self._config.rollout),
            self._segment,
            self._theirs[index],
            self._bells[index],
            self._attendant_bell,
        )

    def _on_message(self, channel: messages.Channel) -> None:
        while True:
            try:
                received = channel.receive()
            except EOFError:
                asyncio.get_running_loop().remove_reader(channel.fileno())
                return
            if received is None:
                return
            match received[0]:
                case messages.WorkerReady():
                    channel.send(messages.Go())
                case messages.Applied() as applied:
                    assert not applied.error, applied.error
                    self._applied += 1
                    self._news.set()
                case messages.Note() as note:
                    self._admission.notes[note.ticket] = note
                    self.report.failures.append(note.error)
                case messages.Fault() as fault:
                    self._on_failing(EngineFault, fault.message, None)

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):  # `Consumer.arm` empties it, too
            os.eventfd_read(self._bell)
        self._news.set()

    def _on_attendant_bell(self) -> None:
        os.eventfd_read(self._attendant_bell)
        self._turn()

    def _turn(self) -> None:
        """What the attendant's thread does in a real run."""
        self._taker.recycle()
        self._taker.count()
        if self._admission.turn():
            self._segment.wake_taker()
        self.report.most_live = max(self.report.most_live, self._gate.live)
        self._ringer.ring_idle()

    async def _train(self) -> None:
        import torch

        from mprollout.staging import stage

        loop, trainer = asyncio.get_running_loop(), self._trainer
        self._turn()
        with stage({"w": torch.zeros(1)}) as staged:
            for _ in range(trainer.steps):
                began = loop.time()
                batch = await self._get(trainer.groups_per_step)
                self.report.trainer_wait_s.append(loop.time() - began)
                self.report.tickets += batch.tickets
                self.report.lags += [group.lag for group in batch]
                self.report.delivered_lengths += [int(n) for group in batch for n in group.lengths]
                batch.release()
                self._turn()
                await asyncio.sleep(trainer.step_s)
                if trainer.updates:
                    began_ns = _now_ns()
                    await self._push(staged.fd)
                    self._waits.ns["weights"] += _now_ns() - began_ns
                if self._look is not None:
                    self._look(self.report, self._gate)

    async def _get(self, n: int) -> Batch:
        taker = self._taker
        taker.resume()
        while True:
            seen = taker.consumer.news()
            self._news.clear()
            if (missing := taker.park(n)) == 0:
                break
            self._waits.begin(_now_ns())
            if taker.to_recycle:
                self._turn()
                continue
            if self._fault is not None:
                raise self._fault
            self._gate.check_get(n, self._admission.unadmitted())
            if taker.consumer.arm(taker.wanted(missing), seen):
                await self._news.wait()
            taker.consumer.disarm()
        batch, taken = taker.book(n)
        self._waits.settle(_now_ns(), taken)
        self._waits.split(self._admission.admitted_ns)
        taker.hand_over(n)
        return batch

    async def _push(self, fd: int) -> None:
        self._gate.check_update()
        version, self._applied = self._updates.mint(), 0
        for sent, channel in enumerate(self._channels, 1):
            channel.send(messages.Update(version=version, pause=self._config.weights.pause), [fd])
            while self._applied < sent and (self._config.weights.rolling or sent == len(self._channels)):
                self._news.clear()
                await self._news.wait()
        self._updates.complete(version)
        self._turn()


def _now_ns() -> int:
    return round(asyncio.get_running_loop().time() * 1e9)


def _eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
