"""`RolloutEngine`: the front door. It owns the path from the source to the batch.

    PromptSource -> Ledger -> [keeper: memory, workers] -> ring -> Batch -> trainer

    get (main thread)       produces a Batch          / waits for n deliverable groups / unblocked by a publish, an ending, a fault
    attendant (its thread)  produces READY tickets    / waits for credit, keeper news  / unblocked by its bell, the keeper's socket

Invariants: one lock guards gate and ledger; a ticket is marked taken under it in the same step that delivers it, so `state_dict` is
exact at any moment. `get` consumes nothing unless it returns: what was ingested and not delivered stays held by the native consumer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import mprollout
from mprollout import _native, checkpoint, messages, pinned
from mprollout.attendant import Attendant, StartProgress, log
from mprollout.batch import Batch
from mprollout.config import EngineConfig, SamplingConfig, SourceConfig
from mprollout.errors import (
    ConcurrentGet,
    ConfigError,
    EngineAsleep,
    EngineClosed,
    MainGuardMissing,
    MprolloutError,
)
from mprollout.evaluation import EvaluationResult, Evaluations, Pin
from mprollout.filter import check_filter
from mprollout.gate import Gate
from mprollout.history import History
from mprollout.keeper_process import KeeperProcess
from mprollout.ledger import Ledger
from mprollout.ledger_file import LEDGER, Owner
from mprollout.loggers import Logger, engine_numbers, numbers, open_loggers
from mprollout.record import Recorder, recorder
from mprollout.reward import check
from mprollout.ring import check_memory, doubts, plan, segment_bytes
from mprollout.rollout import check_rollout
from mprollout.sleeping import Sleeping
from mprollout.source import PromptSource
from mprollout.stats import EngineStats, engine_stats
from mprollout.taker import Taker
from mprollout.updates import Updates
from mprollout.waiting import Waiting, Waits


class RolloutEngine:
    """Generates and scores groups in worker processes; the trainer takes exactly n at a time.

    Args:
        config: what to run; see `EngineConfig`. What can be checked without starting anything is checked here.

    Starting (`start`, or `with`) blocks until every worker is ready and raises what kept one from it. `close` ends every process
    and frees the memory; batches still held stay readable until their views die.

    Raises:
        ConfigError, SourceError, MemoryBudgetError: a setting, the data or the memory is not usable; with the numbers.
        MainGuardMissing: the script lacks `if __name__ == "__main__":`.

    Example:
        >>> with RolloutEngine(config) as engine:                              # doctest: +SKIP
        ...     with engine.get(8) as batch:
        ...         train(batch.packed())
        ...     engine.update_weights(model.state_dict())
    """

    def __init__(self, config: EngineConfig, *, _attached: KeeperProcess | None = None) -> None:
        if mprollout._inside:
            raise MainGuardMissing(
                f"a RolloutEngine is made inside {mprollout._inside}: such processes import the user's modules to find the reward and "
                'rollout functions; put the code that starts an engine under `if __name__ == "__main__":`'
            )
        check(config.reward)
        check_filter(config.filter)
        check_rollout(config.rollout)
        self.config = config
        self.source = PromptSource(config.source)
        self.plan = plan(config)
        if _attached is None:
            check_memory(segment_bytes(self.plan), self.plan)
        for doubt in doubts(config, self.plan):
            log.warning(doubt)
        self._gate = Gate(config.gate, self.plan.max_live_groups, self.plan.spare)
        self._ledger = Ledger()
        self._updates = Updates(config, self._gate)
        self._in_get: int | None = None  # thread; one that finds itself here was interrupted in the one before
        self._pid = os.getpid()
        self._evaluations: Evaluations | None = None
        self._sleeping = Sleeping()
        self._waits = Waits()
        self._waiting: Waiting | None = None
        self._started = self._closed = False
        self._keeper: KeeperProcess | None = _attached
        self._attendant: Attendant | None = None
        self._taker: Taker | None = None
        self._recycled: dict[int, int] = {}
        self._recorder: Recorder | None = None
        self.loggers: list[Logger] = []
        """Those of the config, from the start on, and your own: `log` hands its numbers to each, `close` closes them."""
        self._history: History | None = None
        self._unpin: Callable[[], None] | None = None

    @property
    def policy_version(self) -> int:
        """The last version that all workers applied."""
        return self._updates.version

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self.config.orphan_timeout_s and kind is not None and issubclass(kind, Exception):
            self.detach()
        else:
            self.close()

    def start(self, progress: bool = True) -> None:
        """Start the keeper, the workers and the attendant; return when every worker is ready.

        Args:
            progress: show it on stderr where that is a terminal; the logger `mprollout` tells in any case.

        Raises:
            WorkerStartError: a worker cannot start; carries its traceback.
            KeeperLost: the keeper ended during the start.
        """
        if self._started or self._closed:
            raise EngineClosed("the engine was started or closed before; make a new one")
        self._started = True
        try:
            self._recorder = recorder(self.config)
            self.loggers += open_loggers(self.config)
            attached = self._keeper is not None
            self._keeper = self._keeper or KeeperProcess.start(self.config, self.plan)
            consumer = _native.Consumer(self._keeper.segment, self._keeper.bell)
            self._taker = Taker(
                consumer, self.config, self.plan.extra_fields, self._ledger, self._gate, self._updates, self._recycled
            )
            if attached:
                self._taker.adopt(self._keeper.segment)
            self._keep_ledger()
            if self.config.run_dir is not None:
                self._history = History(Path(self.config.run_dir), self.config)
            self._attendant = attendant = Attendant(
                self._keeper,
                self.source,
                self._gate,
                self._ledger,
                self.config,
                self._taker,
                self._waits,
                self._history,
            )
            self._waiting = Waiting(self.config, self.plan, attendant, self._taker, self._waits, self._sleeping)
            self._evaluations = Evaluations(self.config, attendant, self._updates, self._history)
            with StartProgress(attendant, progress) as shown:
                attendant.wait_news(shown.settled, shown.show)
        except BaseException:
            self.close()
            raise

    def _keep_ledger(self) -> None:
        assert self._keeper is not None
        if self.config.run_dir is not None:
            source = self.source.fingerprint.encode(errors="replace").decode()  # a file's name may be no text
            owner = Owner(trainer_pid=self._pid, keeper_pid=self._keeper.pid, source=source)
            path = Path(self.config.run_dir).resolve() / LEDGER
            self._ledger.keep_in(path, owner, self.plan.entries + self.plan.descriptors, self.config.filter.reasons)

    @classmethod
    def attach(cls, run_dir: str | os.PathLike[str], state: dict[str, Any], rows: Any = None) -> Self:
        """Take the place of a trainer that died: its workers live, run and keep what they made (`EngineConfig.orphan_timeout_s`).

        Groups that the dead trainer had taken, not released, and that `state` does not hold as taken are delivered again first. Nothing
        is admitted before the first `update_weights`, which gives the workers the checkpoint's weights under a fresh version.

        Args:
            run_dir: the run's `EngineConfig.run_dir`; its config comes from there.
            state: what `state_dict` returned, from the checkpoint that was loaded.
            rows: the source's rows, where they were given as a Python object.

        Returns:
            An engine to be started (`with`, or `start`).

        Raises:
            ConfigError: nobody keeps the run any more, its trainer lives, or the state is older than one that was confirmed.
            KeeperLost: the keeper ended meanwhile.
        """
        keeper, config = KeeperProcess.attach(os.fspath(run_dir))
        try:
            engine = cls(checkpoint.with_rows(config, rows), _attached=keeper)
            engine.load_state_dict(state)
        except BaseException:
            keeper.detach()
            raise
        return engine

    def close(self) -> None:
        """End all processes and free the memory. Blocks at most about 5 s. Idempotent; safe in any state."""
        self._leave(KeeperProcess.close)

    def detach(self) -> None:
        """Leave the run as it is, for a trainer that attaches within `orphan_timeout_s`; an exception that ends a `with` block does.

        Groups taken and not in the state that it loads come again. Batches still held stay readable. Idempotent.
        """
        self._leave(KeeperProcess.detach)

    def _leave(self, how: Callable[[KeeperProcess], None]) -> None:
        if self._closed or os.getpid() != self._pid:  # a forked child owns none of it
            return
        self._closed = True
        if self._attendant is not None:
            self._attendant.stop()
        if self._evaluations is not None:
            self._evaluations.join()
        if self._history is not None:
            seen = self._attendant is not None and self._taker is not None
            self._history.close(self._stats() if seen else None, detached=how is KeeperProcess.detach)
        self._updates.close()
        if self._unpin is not None:
            self._unpin()
        if self._taker is not None:
            self._taker.count()
            self._taker.consumer.close()
        self._ledger.let_go()
        if self._keeper is not None:
            how(self._keeper)
        if self._recorder is not None and self._taker is not None:
            self._recorder.close(self._taker.parked)
        for logger in self.loggers:
            logger.close()

    # -- taking --------------------------------------------------------------------------------------------------

    def get(self, n: int, timeout: float | None = None) -> Batch:
        """Take exactly n groups, in order, as views; or raise having consumed none. Blocks; Ctrl-C gets through.

        Order: publish order, or ticket order when `max_lag` is set.

        Args:
            n: groups, >= 1.
            timeout: seconds; None waits for ever.

        Raises:
            GetTimeout: fewer than n came in time; names what each worker does.
            GateStarved: the settings can never give n now; with the numbers.
            RingStarved: batches that were not released hold the memory that is needed.
            DataExhausted: the source has ended and fewer than n are left; `get(error.available)` drains them.
            EngineFault: a permanent fault (all workers lost, a broken reward, the keeper's death).
            ConcurrentGet: another thread is in `get`.
        """
        if not (type(n) is int and n >= 1):
            raise ConfigError(f"get(n): n must be an integer >= 1; got {n!r}")
        if timeout is not None and not (type(timeout) in (int, float) and timeout >= 0):
            raise ConfigError(f"get(timeout): expected seconds >= 0 or None; got {timeout!r}")
        attendant, taker = self._running()
        waiting = self._waiting
        assert waiting is not None
        with attendant.lock:
            me = threading.get_ident()
            if self._in_get not in (None, me):
                raise ConcurrentGet(f"get({n}): another get is under way; there is one taker at a time")
            self._in_get = me
        try:
            waiting.fill(n, timeout, self._running)
            with attendant.lock:
                batch, taken = taker.book(n)
                self._waits.settle(time.monotonic_ns(), taken)
            if self._recorder is not None:
                self._recorder.add(batch, self.policy_version)
            attendant.ring()
        except RuntimeError as error:
            if self._closed and not isinstance(error, MprolloutError):
                raise EngineClosed(f"get({n}): the engine was closed by another thread") from error
            raise
        finally:
            self._waits.leave(time.monotonic_ns())
            self._in_get = None
        taker.hand_over(n)  # nothing below can be interrupted: from here on the caller has them
        return batch

    # -- weights -------------------------------------------------------------------------------------------------

    def update_weights(self, source: Any, timeout: float | None = None) -> int:
        """Push new weights into the running workers; generation goes on. Blocks until all have them. One copy, in shared memory.

        The first one after `attach` waits, under a strict lag bound, for what the dead trainer had admitted beyond this one's gate.

        Args:
            source: a `state_dict`, an iterable of (name, tensor), or a checkpoint folder.
            timeout: seconds; None: `WeightsConfig.timeout_s` plus 30; with `rolling`, the first once for each worker.

        Returns:
            The new policy version.

        Raises:
            WeightUpdateFailed: a worker did not apply them (named, with its pid and the phase), or a pinned evaluation took too long; the
                version did not advance and its number is never used again.
            GetTimeout: what the first one waits for did not end in time; nothing was sent.
            ConfigError: the lag bound does not allow an update now.
            MemoryBudgetError: the copy does not fit into the memory that is left.
            ValueError: the source is no set of tensors; names the one that is none.
        """
        attendant, taker = self._running()
        began, failure = time.monotonic_ns(), ""
        try:
            return self._updates.push(source, timeout, attendant, taker)
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            took = time.monotonic_ns() - began
            self._waits.ns["weights"] += took
            if self._history is not None:
                self._history.on_update(took / 1e9, self.policy_version, failure)
            attendant.ring()

    # -- a trainer on the same GPUs ------------------------------------------------------------------------------

    def sleep(self, timeout: float | None = None) -> None:
        """Release the workers' GPU memory, weights and KV cache, for a training step on the same GPUs. Blocks until all have; needs `placement="colocated"`.

        Samples that run are retracted, not lost: they go on with `wake` (those of `FaultConfig`'s deadlines do not run meanwhile), and
        evaluations likewise. While they sleep, `get` gives what is finished and raises `EngineAsleep` where that is too little;
        `update_weights` takes back the memory of the weights alone, so that afterwards only the KV cache is missing until `wake`; a worker that dies
        is started again by `wake`, not before. Idempotent. Waits for an update under way.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            ConfigError: the workers' GPUs are their own (`placement="split"`).
            EngineFault: a worker could not; it has ended, and is started again with `wake`. All others sleep.
            GetTimeout: not all did in time; `wake`, or `sleep` again.
        """
        self._change_sleep(True, timeout)

    def wake(self, timeout: float | None = None) -> None:
        """Give the GPUs back to the workers: generation goes on, with the newest weights. Blocks until all living workers have. Idempotent.

        Args, Raises: as `sleep`.
        """
        self._change_sleep(False, timeout)

    def _change_sleep(self, asleep: bool, timeout: float | None) -> None:
        attendant, _ = self._running()
        if self.config.workers.placement != "colocated":
            raise ConfigError(
                f'{"sleep" if asleep else "wake"}: needs WorkerConfig.placement="colocated"; got {self.config.workers.placement!r}'
            )
        with self._updates.alone("sleep" if asleep else "wake", timeout):
            self._sleeping.change(asleep, timeout, attendant)
        attendant.ring()

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(
        self,
        rows: Sequence[Any] | SourceConfig,
        sampling: SamplingConfig | None = None,
        timeout: float | None = None,
        pinned: Pin = False,
        workers: int = 1,
    ) -> EvaluationResult:
        """Generate and score rows outside the training path: nothing of it enters the ring. Blocks; training samples go on beside it.

        Args:
            rows: rows like those of the source, or a source of their own (one epoch of it, in its order).
            sampling: defaults to the engine's own.
            timeout: seconds; None waits for ever.
            pinned: False: updates go on, and the result names every version that sampled a token. True: every token is of one policy
                version, and updates wait until it ends, at most for their own timeout. `"share"`: of one version, too, and updates go on:
                `workers` of them serve the evaluation alone; they apply no update and claim no training ticket until it ends, then catch up.
            workers: how many are set aside for `"share"`; one at least must be left.

        Raises:
            EngineFault: a worker failed; carries its traceback.
            GetTimeout: not done in time.
            EngineAsleep: the workers sleep.
            ConfigError: too few workers live for `"share"`.
        """
        return self._evaluating().run(rows, sampling, timeout, pinned, workers)

    def submit_evaluation(
        self,
        rows: Sequence[Any] | SourceConfig,
        sampling: SamplingConfig | None = None,
        timeout: float | None = None,
        pinned: Pin = False,
        workers: int = 1,
    ) -> Future[EvaluationResult]:
        """`evaluate` as a future, which has its result or raises its error. Does not block; any number may be under way.

        The thread that waits for it may `get` and `update_weights` meanwhile: the evaluation needs nothing of it. An update that has to wait
        for a pinned one gives up at its own timeout. Its callbacks run on the evaluation's thread, when its pin or its workers are free again.
        `close` ends it with `EngineClosed`.

        Args, Raises: as `evaluate`; what is wrong with the arguments is raised here.
        """
        return self._evaluating().submit(rows, sampling, timeout, pinned, workers)

    def _evaluating(self) -> Evaluations:
        attendant, _ = self._running()
        attendant.raise_fault()
        if self._sleeping.asleep:
            raise EngineAsleep("evaluate: the workers sleep: call wake() first")
        assert self._evaluations is not None
        return self._evaluations

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: JSON-able and pure (nothing changes). Groups taken are done, all others come again."""
        attendant, taker = self._running()
        with attendant.lock:
            taker.count()
            return checkpoint.save(self._ledger, taker, self._updates, self.source)

    def load_state_dict(self, state: dict[str, Any], await_weights: bool = True) -> None:
        """Go on from a state, before `start`.

        Args:
            state: what `state_dict` returned, from the checkpoint that was loaded.
            await_weights: the gate waits for the first `update_weights` (the checkpoint's weights). False: the policy is the model on
                disk, as in a run that only generates.

        Raises:
            ConfigError: started already, another format, or a state of other data.
        """
        if self._started:
            raise ConfigError("load_state_dict comes before start(): a running engine has admitted tickets already")
        restored = checkpoint.restore(
            state, self.config, self.plan, self.source, self._keeper, await_weights or self.config.gate.await_weights
        )
        self._ledger, self._gate, self._updates, self._recycled = restored

    def confirm(self, state: dict[str, Any]) -> None:
        """Say that a saved checkpoint contains `state`: `attach` refuses an older one from now on."""
        attendant, _ = self._running()
        attendant.send(messages.Confirmed(resolved=checkpoint.resolved_tickets(state)))

    # -- a GPU trainer -------------------------------------------------------------------------------------------

    def register_pinned(self) -> bool:
        """Register the ring's memory with CUDA, once, until `close`: `torch.from_numpy(view).to(device, non_blocking=True)` is then asynchronous.

        Release a batch only after its copies are done (`torch.cuda.synchronize`, an event). False, with a line in the log: no CUDA here.
        """
        self._running()
        assert self._keeper is not None
        self._unpin = self._unpin or pinned.register(self._keeper.segment)
        return self._unpin is not None

    # -- looking in ----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Numbers of this moment; does not disturb the run."""
        attendant, _ = self._running()
        with attendant.lock:
            return self._stats()

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Keep numbers of the trainer's own (loss, held-out accuracy) in the run's history, for `mprollout report`; the loggers get
        them with the engine's. Blocks no longer than the loggers do.

        Args:
            step: the trainer's; ascends.
            metrics: by name; what is no finite number is left out. `accuracy` is drawn as the held-out accuracy.
        """
        self._running()
        own = numbers(metrics)
        if self._history is not None:
            self._history.on_log(step, own)
        if self.loggers:
            every = {**own, **engine_numbers(self.stats())}
            for logger in self.loggers:
                logger.log(step, every)

    def audit(self) -> dict[str, int]:
        """Prove that the tickets are partitioned: each is live in the table or resolved, and none is both. Returns the count of each state.

        Raises:
            AssertionError: a ticket is in two states or in none; names it.
        """
        from mprollout import audit  # here, for a light import of the package

        attendant, taker = self._running()
        with attendant.lock:
            taker.count()
            return audit.check(self._ledger.snapshot(), attendant.segment.table())

    def _stats(self) -> EngineStats:
        assert self._attendant is not None and self._taker is not None
        return engine_stats(self._attendant, self._taker, self._waits)

    def _running(self) -> tuple[Attendant, Taker]:
        if os.getpid() != self._pid:
            raise EngineClosed("the engine belongs to the process that made it; a forked child has none")
        if self._closed or self._attendant is None or self._taker is None:
            raise EngineClosed(
                "the engine is closed" if self._closed else "the engine is not started: use `with engine:` or start()"
            )
        return self._attendant, self._taker
