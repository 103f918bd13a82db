"""`RolloutEngine`: the front door. It owns the path from the source to the batch.

    PromptSource -> Ledger -> [keeper: memory, workers] -> ring -> Batch -> trainer

    get (main thread)    produces a Batch          / waits for n deliverable groups / unblocked by a publish, an ending, a fault
    attendant thread     produces admitted tickets / waits for credit, keeper news  / unblocked by its bell (take, ending, release), the keeper's socket

Invariants: one lock guards gate and ledger; a ticket is marked taken under it in the same step that delivers it, so `state_dict` is
exact at any moment. `get` consumes nothing unless it returns: what was ingested and not delivered stays held by the native consumer.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

import mprollout
from mprollout import _native, messages
from mprollout.batch import Batch, Group
from mprollout.config import EngineConfig, SamplingConfig, SourceConfig
from mprollout.errors import (
    ConcurrentGet,
    ConfigError,
    DataExhausted,
    EngineClosed,
    EngineFault,
    GetTimeout,
    KeeperLost,
    MainGuardMissing,
    MprolloutError,
    PromptsFailing,
    RewardFault,
    RingStarved,
    SourceError,
    WeightUpdateFailed,
    WorkersLost,
    WorkerStartError,
)
from mprollout.gate import Gate
from mprollout.ledger import Ledger, Reason
from mprollout.ring import WorkerWord, check_memory, plan, segment_arguments, segment_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger("mprollout")

SAFETY_LOOK_S = 0.05
CLOSE_TIMEOUT_S = 5.0
STARVED_S = 0.5
NOTES_KEPT = 64


class WorkerStats(msgspec.Struct, frozen=True):
    """One worker, now."""

    worker: int
    pid: int
    state: str
    restarts: int
    running_samples: int
    peak_running_samples: int
    rewarding_samples: int
    tokens_generated: int
    samples_finished: int
    groups_published: int
    version: int
    start_s: float


class EngineStats(msgspec.Struct, frozen=True):
    """The engine, now. Counts are cumulative since the start, or since the loaded state."""

    policy_version: int
    updates: int
    admitted: int
    taken: int
    live: int
    pending: int
    held: int
    running_samples: int
    tokens_generated: int
    retried: int
    outcomes: dict[str, int]
    waiting_for: str
    workers: list[WorkerStats]


class EvaluationResult(msgspec.Struct, frozen=True):
    """What `evaluate` returns, rows in the order given."""

    rewards: npt.NDArray[np.float32]  # float32 [num_rows, group_size]
    texts: list[list[str]]
    token_ids: list[list[list[int]]]
    versions: list[int]
    """All policy versions that sampled a token of it, ascending: one, unless an update came between."""

    @property
    def version(self) -> int:
        return self.versions[-1] if self.versions else 0


class RolloutEngine:
    """Generates and scores groups in worker processes; the trainer takes exactly n at a time.

    Args:
        config: what to run; see `EngineConfig`.

    Starting (`start`, or `with`) blocks until every worker is ready and raises what kept one from it. `close` ends every process
    and frees the memory; batches still held stay readable until their views die.

    Example:
        >>> with RolloutEngine(config) as engine:                              # doctest: +SKIP
        ...     with engine.get(8) as batch:
        ...         train(batch.packed())
        ...     engine.update_weights(model.state_dict())
    """

    def __init__(self, config: EngineConfig) -> None:
        if mprollout._importing_main is not None:
            raise MainGuardMissing(
                f"{mprollout._importing_main} makes a RolloutEngine while a worker imports it (workers import the script to find its "
                'functions); put the code that starts it under `if __name__ == "__main__":`'
            )
        from mprollout.reward import check
        from mprollout.source import PromptSource

        check(config.reward)
        self.config = config
        self.source = PromptSource(config.source)
        self.plan = plan(config)
        self._segment_arguments = segment_arguments(self.plan)
        check_memory(segment_bytes(self.plan), self.plan)
        self._gate = Gate(config.gate, self.plan.max_live_groups)
        self._ledger = Ledger()
        self._confirmed: dict[str, Any] | None = None
        self.policy_version = 0
        self._minted = 0
        self._updates_at = {0: 0}
        """Completed updates when a version was minted: what a token of that version counts from."""
        self._lock = threading.Lock()
        self._getting = threading.Lock()
        self._fault: EngineFault | None = None
        self._notes: collections.OrderedDict[int, messages.Note] = collections.OrderedDict()
        self._failed_in_a_row: list[messages.Note | None] = []
        self._parked: Batch | None = None
        self._batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._update_done: messages.UpdateDone | None = None
        self._evaluations: dict[int, dict[int, messages.Evaluated | list[Any]]] = {}
        self._next_evaluation = 0
        self._news = threading.Condition()
        self._states: dict[int, messages.WorkerState] = {}
        self._waiting_for = ""
        self._starved_since = math.inf
        self._started = self._closed = False
        self._keeper: subprocess.Popen[bytes] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the keeper, the workers and the attendant; return when every worker is ready.

        Raises:
            WorkerStartError: a worker cannot start; carries its traceback.
            MemoryBudgetError: the memory does not fit.
            KeeperLost: the keeper ended during the start.
        """
        if self._started:
            raise EngineClosed("the engine was started before; make a new one")
        self._started = True
        try:
            self._start_keeper()
            self._attendant = threading.Thread(target=self._attend, name="mprollout-attendant", daemon=True)
            self._attendant.start()
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _start_keeper(self) -> None:
        from mprollout.keeper import KeeperRecord

        record = KeeperRecord(
            segment=self._segment_arguments,
            workers=self.config.workers,
            fault=self.config.fault,
            worker_record=self._worker_record(),
            log_dir=str(Path(self.config.run_dir).resolve() / "logs") if self.config.run_dir else None,
        )
        self._channel, theirs = messages.Channel.pair()
        root = str(Path(__file__).resolve().parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "mprollout.keeper", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches the trainer alone, which then ends the keeper in order
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self._keeper_pidfd = os.pidfd_open(self._keeper.pid)
        blob = messages.blob(pickle.dumps(record))
        self._channel.send(messages.Boot(), [blob])
        os.close(blob)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            if not selector.select(30.0):
                raise KeeperLost("the keeper did not answer within 30 s", pid=self._keeper.pid)
        try:
            received = self._channel.receive()
        except EOFError:
            received = None
        if received is None or not isinstance(received[0], messages.Booted):
            why = received[0].message if received and isinstance(received[0], messages.Fault) else "its stderr says why"
            raise KeeperLost(f"the keeper ended while starting: {why}", pid=self._keeper.pid, exit_code=self._keeper.wait(5))
        self._temp_dir = received[0].run_dir
        segment_fd, self._bell, *self._worker_bells = received[1]
        self._segment = _native.Segment.attach(segment_fd)
        os.close(segment_fd)
        self._admitter = _native.Admitter(self._segment)
        self._consumer = _native.Consumer(self._segment, self._bell)

    def _worker_record(self) -> bytes:
        """(main path, sys.path, config): the config by pickle, since it may name the user's functions."""
        source = msgspec.structs.replace(self.config.source, path="-", rows=None, reasoning_gym=None)  # rows travel one by one
        try:
            pickled = pickle.dumps(msgspec.structs.replace(self.config, source=source))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"the config cannot be sent to the workers: {error}; give functions of a module's top level, or 'module:function'"
            ) from error
        main = sys.modules.get("__main__")
        path = getattr(main, "__file__", None)
        needs_main = any(
            getattr(function, "__module__", None) == "__main__" for function in (self.config.reward.function, self.config.rollout)
        )
        if needs_main and path is None:
            raise ConfigError(
                "a reward or rollout function is defined in an interactive session; put it into a module that workers can import"
            )
        return pickle.dumps((os.path.abspath(path) if needs_main and path else None, sys.path, pickled))

    def _wait_ready(self) -> None:
        count = len(self.config.workers.devices)
        told: set[int] = set()
        with self._news:
            while True:
                self._raise_fault()
                ready = {i for i, state in self._states.items() if state.state == "ready"}
                for i in sorted(ready - told):
                    told.add(i)
                    log.info("worker %d ready after %.1f s (%d of %d)", i, self._states[i].start_s, len(told), count)
                if len(ready) + sum(state.state == "lost" for state in self._states.values()) == count and ready:
                    return
                self._news.wait(SAFETY_LOOK_S)

    def close(self) -> None:
        """End all processes and free the memory. Blocks at most about 5 s. Idempotent; safe in any state."""
        if self._closed:
            return
        self._closed = True
        keeper = self._keeper
        if keeper is None:
            return
        with contextlib.suppress(OSError):
            self._channel.send(messages.Stop())
        try:
            keeper.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill_everything()
        except BaseException:  # a second Ctrl-C: no more patience
            self._kill_everything()
            raise
        finally:
            self._let_go()

    def _kill_everything(self) -> None:
        """The keeper does not end: SIGKILL to it ends the workers (PDEATHSIG), and their groups are ended from here too."""
        assert self._keeper is not None
        self._keeper.kill()
        self._keeper.wait()
        self._end_orphans()

    def _end_orphans(self) -> None:
        """After the keeper's death: end the workers' process groups that still stand, and its temporary folder."""
        for index in range(self._segment.workers if hasattr(self, "_segment") else 0):
            pid = self._segment.worker_words(index)[WorkerWord.PID]
            with contextlib.suppress(OSError):
                if pid > 0 and b"mprollout.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.killpg(pid, signal.SIGKILL)
        if hasattr(self, "_temp_dir"):
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _let_go(self) -> None:
        if hasattr(self, "_attendant") and self._attendant is not threading.current_thread():
            with contextlib.suppress(OSError):
                os.eventfd_write(self._bell, 1)
            self._attendant.join(CLOSE_TIMEOUT_S)
        self._channel.close()
        os.close(self._keeper_pidfd)
        if hasattr(self, "_consumer"):
            self._consumer.close()
            self._segment.close()
            for fd in self._worker_bells:
                os.close(fd)
            # The consumer's leases may ring this bell when their last view dies; they hold a duplicate.
            os.close(self._bell)

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
            DataExhausted: the source has ended and fewer than n are left; `get(error.available)` drains them.
            EngineFault: a permanent fault (all workers lost, a broken reward, the keeper's death).
            ConcurrentGet: another thread is in `get`.
        """
        if not (type(n) is int and n >= 1):
            raise ConfigError(f"get(n): n must be an integer >= 1; got {n!r}")
        self._check_open()
        if not self._getting.acquire(blocking=False):
            raise ConcurrentGet(f"get({n}): another get is under way; there is one taker at a time")
        try:
            return self._get(n, timeout)
        finally:
            self._waiting_for = ""
            self._getting.release()

    def _get(self, n: int, timeout: float | None) -> Batch:
        if self._parked is not None and len(self._parked) == n:
            batch, self._parked = self._parked, None
            return batch
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            seen = self._consumer.news()
            with self._lock:
                leases = self._deliverable(n)
                if len(leases) == n:
                    batch = self._deliver(leases)
                    break
                self._check_meetable(n)
            self._raise_fault()
            self._check_room(n)
            left = SAFETY_LOOK_S if deadline is None else min(SAFETY_LOOK_S, deadline - time.monotonic())
            if left <= 0:
                raise GetTimeout(self._describe_wait(n, len(leases), timeout))
            self._waiting_for = self._describe_cause()
            wanted = 1 if self._in_ticket_order else n - len(leases)
            self._consumer.wait(self._segment.pending() + 1 if self._in_ticket_order else wanted, seen, left)
        self._ring_attendant()
        return batch

    @property
    def _in_ticket_order(self) -> bool:
        return self.config.gate.max_lag is not None

    def _deliverable(self, n: int) -> list[_native.Lease]:
        """Up to n groups that may be delivered now, in order; they stay held until `_deliver`."""
        if not self._in_ticket_order:
            held = self._consumer.held()
            if len(held) + self._segment.pending() >= n:
                while len(held) < n and (lease := self._consumer.take()) is not None:
                    held.append(lease)
            return held[:n]
        while self._consumer.take() is not None:
            pass
        by_ticket = {lease.ticket: lease for lease in self._consumer.held()}
        leases: list[_native.Lease] = []
        ticket = self._ledger.watermark
        while len(leases) < n:
            if (lease := by_ticket.get(ticket)) is not None:
                leases.append(lease)
            elif not self._ledger.is_resolved(ticket):  # ended tickets are skipped; a live one is waited for
                break
            ticket += 1
        return leases

    def _deliver(self, leases: list[_native.Lease]) -> Batch:
        """The one step that consumes: under the lock, native delivery and bookkeeping together."""
        groups = [Group(lease) for lease in leases]
        for group in groups:
            versions = group.field("span_versions")
            oldest = int(versions.min()) if len(versions) else self.policy_version
            group.lag = self._gate.updates - self._updates_at.get(oldest, 0)
        batch = Batch(groups)
        self._batches.add(batch)
        self._parked = batch  # an interrupt between here and the caller's hands: the next get returns it
        self._consumer.deliver(leases)
        for lease in leases:
            self._ledger.resolve(lease.ticket, "taken")
        self._gate.taken += len(leases)
        self._failed_in_a_row.clear()
        self._parked = None
        return batch

    def _check_meetable(self, n: int) -> None:
        unadmitted = self._unadmitted()
        if unadmitted is not None and self._gate.live + unadmitted < n:
            available = self._gate.live + unadmitted
            failures = {k: v for k, v in self._ledger.counts.items() if k != "taken"}
            note = next(reversed(self._notes.values()), None) if failures else None
            raise DataExhausted(
                f"get({n}): the source has ended ({len(self.source)} rows, epochs={self.config.source.epochs}); {available} groups are left"
                + (f"; {failures} ended otherwise" if failures else "")
                + (f"; the last failure: {note.error}" if note else ""),
                available=available,
            )
        self._gate.check_get(n, unadmitted)

    def _check_room(self, n: int) -> None:
        """Every ready worker lacks room and runs nothing: only a release can help, and this thread is the one that would release."""
        words = [self._segment.worker_words(i) for i, state in self._states.items() if state.state == "ready"]
        if not words or not all(w[WorkerWord.STARVED_FOR_ROOM] and not w[WorkerWord.RUNNING_GROUPS] for w in words):
            self._starved_since = math.inf
            return
        self._starved_since = min(self._starved_since, time.monotonic())
        if time.monotonic() - self._starved_since > STARVED_S:  # a release just now reaches the workers within milliseconds
            self._starved_since = math.inf
            with self._lock:
                if len(self._deliverable(n)) == n:
                    return
            leased = sum(len(batch) for batch in self._batches if not batch.released)
            raise RingStarved(
                f"get({n}): no worker has room for another group (arenas of {self.plan.arena_bytes:,} bytes, up to {self.plan.max_group_bytes:,} a group) "
                f"and {leased} taken groups were not released: use `with engine.get(n) as batch:`, or raise RingConfig.arena_bytes"
            )

    def _unadmitted(self) -> int | None:
        """Tickets that the source still has to give; None: endless."""
        last = self.source.last_ticket
        return None if last is None else max(0, last - self._ledger.resolved - self._gate.live)

    # -- weights -------------------------------------------------------------------------------------------------

    def update_weights(self, source: Any, timeout: float | None = None) -> int:
        """Push new weights into the running workers; generation goes on. Blocks until all have them. One copy, in shared memory.

        Args:
            source: a `state_dict`, an iterable of (name, tensor), or a checkpoint folder.
            timeout: seconds; None: `WeightsConfig.timeout_s` plus 30.

        Returns:
            The new policy version.

        Raises:
            WeightUpdateFailed: a worker did not apply them; the version did not advance and its number is never used again.
            ConfigError: the lag bound does not allow an update now.
            ValueError: the source is no set of tensors.
        """
        from mprollout.weights import stage

        self._check_open()
        self._raise_fault()
        with self._lock:
            self._gate.check_update()
        staged = stage(source)
        self._minted += 1
        version = self._minted
        self._updates_at[version] = self._gate.updates + (0 if self._gate.awaits_weights else 1)
        self._update_done = None
        try:
            self._channel.send(messages.Update(version=version, pause=self.config.weights.pause), [staged.fd])
        finally:
            staged.close()
        limit = timeout if timeout is not None else self.config.weights.timeout_s + 30
        deadline = time.monotonic() + limit
        with self._news:
            while not (done := self._done_of(version)):
                self._raise_fault()
                if time.monotonic() > deadline:
                    raise WeightUpdateFailed(f"update {version}: not applied by all workers within {limit:.0f} s; {self._describe_workers()}")
                self._news.wait(SAFETY_LOOK_S)
        if done.failures:
            first = done.failures[0]
            raise WeightUpdateFailed(
                f"update {version}: {len(done.failures)} of {len(self.config.workers.devices)} workers did not apply it; the policy version "
                f"stays {self.policy_version}: {first.error}",
                worker=first.worker,
                worker_traceback=first.traceback,
            )
        with self._lock:
            self.policy_version = version
            self._gate.updated()
        self._ring_attendant()
        return version

    def _done_of(self, version: int) -> messages.UpdateDone | None:
        done = self._update_done
        return done if done is not None and done.version == version else None

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, rows: Sequence[Any] | SourceConfig, sampling: SamplingConfig | None = None, timeout: float | None = None) -> EvaluationResult:
        """Generate and score rows outside the training path: nothing of it enters the ring. Blocks; training samples go on beside it.

        Args:
            rows: rows like those of the source, or a source of their own (one epoch of it, in its order).
            sampling: defaults to the engine's own.
            timeout: seconds; None waits for ever.

        Raises:
            EngineFault: a worker failed; carries its traceback.
            GetTimeout: not done in time.
        """
        import numpy as np

        from mprollout.source import PromptSource
        from mprollout.worker import EvaluationItem, EvaluationRequest

        self._check_open()
        sampling = sampling or self.config.sampling
        if not isinstance(rows, SourceConfig):
            rows = msgspec.structs.replace(self.config.source, rows=list(rows), path=None, reasoning_gym=None)
        prompts = PromptSource(msgspec.structs.replace(rows, epochs=1, shuffle_seed=None))
        ready = [i for i, state in sorted(self._states.items()) if state.state == "ready"]
        if not ready:
            raise WorkersLost(f"evaluate: no worker is ready; {self._describe_workers()}")
        self._next_evaluation += 1
        id_ = self._next_evaluation
        with self._news:
            self._evaluations[id_] = {}
        shares = {w: list(range(len(prompts)))[k :: len(ready)] for k, w in enumerate(ready)}
        shares = {w: share for w, share in shares.items() if share}
        for worker, share in shares.items():
            request = EvaluationRequest([(row, prompts.encode(row)) for row in share], sampling)
            fd = messages.blob(msgspec.msgpack.encode(request))
            self._channel.send(messages.Evaluate(id=id_, worker=worker), [fd])
            os.close(fd)
        deadline = None if timeout is None else time.monotonic() + timeout
        items: list[EvaluationItem] = []
        try:
            with self._news:
                while len(self._evaluations[id_]) < len(shares):
                    self._raise_fault()
                    if deadline is not None and time.monotonic() > deadline:
                        raise GetTimeout(f"evaluate: {len(self._evaluations[id_])} of {len(shares)} workers answered within {timeout} s")
                    self._news.wait(SAFETY_LOOK_S)
                for part in self._evaluations[id_].values():
                    if isinstance(part, messages.Evaluated):
                        raise EngineFault(f"evaluate: {part.error}", worker=part.worker, worker_traceback=part.traceback)
                    items.extend(part)
        finally:
            with self._news:
                del self._evaluations[id_]
        items.sort(key=lambda item: (item.row, item.sample))
        size = sampling.group_size
        grid = [items[i : i + size] for i in range(0, len(items), size)]
        return EvaluationResult(
            rewards=np.array([[item.reward for item in row] for row in grid], np.float32).reshape(len(grid), size),
            texts=[[item.text for item in row] for row in grid],
            token_ids=[[item.token_ids for item in row] for row in grid],
            versions=sorted({span[0] for item in items for span in item.versions}),
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: JSON-able and pure (nothing changes). Groups taken are done, all others come again."""
        with self._lock:
            return {
                "ledger": self._ledger.state(),
                "source": self.source.fingerprint,
                "minted": self._minted,
                "policy_version": self.policy_version,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, before `start`. The gate then waits for the first `update_weights` (the checkpoint's weights).

        Raises:
            ConfigError: started already, another format, or a state of other data.
        """
        if self._started:
            raise ConfigError("load_state_dict comes before start(): a running engine has admitted tickets already")
        if state.get("source") != self.source.fingerprint:
            raise ConfigError(
                f"state: made over source {state.get('source')!r}, this engine has {self.source.fingerprint!r}; "
                "the same rows, order seed and row count are needed"
            )
        self._ledger = Ledger.from_state(state["ledger"])
        self._gate = Gate(msgspec.structs.replace(self.config.gate, await_weights=True), self.plan.max_live_groups)
        self._minted = int(state["minted"])  # version numbers are never used twice
        self._updates_at = {self._minted: 0, 0: 0}

    def confirm(self, state: dict[str, Any]) -> None:
        """Say that a saved checkpoint contains `state`: groups it holds as taken will never be asked for again."""
        self._confirmed = state

    # -- looking in ----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Numbers of this moment; does not disturb the run."""
        self._check_open()
        with self._lock:
            gate, outcomes = self._gate, dict(self._ledger.counts)
            held = len(self._consumer.held())
        workers = []
        retried = 0
        for i in range(self._segment.workers):
            words = self._segment.worker_words(i)
            state = self._states.get(i)
            retried += words[WorkerWord.ATTEMPTS_RETRIED]
            workers.append(
                WorkerStats(
                    worker=i,
                    pid=words[WorkerWord.PID],
                    state=state.state if state else "starting",
                    restarts=words[WorkerWord.RESTARTS],
                    running_samples=words[WorkerWord.RUNNING_SAMPLES],
                    peak_running_samples=words[WorkerWord.PEAK_RUNNING_SAMPLES],
                    rewarding_samples=words[WorkerWord.REWARDING_SAMPLES],
                    tokens_generated=words[WorkerWord.TOKENS_GENERATED],
                    samples_finished=words[WorkerWord.SAMPLES_FINISHED],
                    groups_published=words[WorkerWord.GROUPS_PUBLISHED],
                    version=words[WorkerWord.VERSION],
                    start_s=state.start_s if state else 0.0,
                )
            )
        return EngineStats(
            policy_version=self.policy_version,
            updates=gate.updates,
            admitted=gate.admitted,
            taken=gate.taken,
            live=gate.live,
            pending=self._segment.pending(),
            held=held,
            running_samples=sum(w.running_samples for w in workers),
            tokens_generated=sum(w.tokens_generated for w in workers),
            retried=retried,
            outcomes=outcomes,
            waiting_for=self._waiting_for,
            workers=workers,
        )

    def audit(self) -> dict[str, int]:
        """Prove that the tickets are partitioned: live in the table, or resolved, and nothing else. Returns the count of each state.

        Raises:
            AssertionError: a ticket is in two states or in none; names it.
        """
        names = {
            getattr(_native, name): name.lower() for name in ("READY", "RUNNING", "PUBLISHING", "DONE", "FILTERED", "FAILED")
        }
        with self._lock:
            table = self._segment.table()
            live = {row[0]: names[row[1]] for row in table}
            if len(live) != len(table):
                raise AssertionError(f"audit: a ticket stands twice in the live table: {sorted(row[0] for row in table)}")
            # A delivered group's entry waits for the sweep: its ticket is resolved already.
            counts = collections.Counter(state for ticket, state in live.items() if not self._ledger.is_resolved(ticket))
            for ticket in range(self._ledger.watermark, self._ledger.admitted_below):
                resolved, state = self._ledger.is_resolved(ticket), live.get(ticket)
                if resolved and state not in (None, "done"):
                    raise AssertionError(f"audit: ticket {ticket} is resolved and {state}")
                if not resolved and state is None:
                    raise AssertionError(f"audit: ticket {ticket} is neither live nor resolved")
            return {**counts, **self._ledger.counts}

    # -- attendant -----------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._channel, selectors.EVENT_READ)
                selector.register(self._bell, selectors.EVENT_READ)
                selector.register(self._keeper_pidfd, selectors.EVENT_READ)
                while not self._closed:
                    self._sweep_and_admit()
                    for key, _ in selector.select(SAFETY_LOOK_S):
                        if key.fileobj == self._bell:
                            with contextlib.suppress(BlockingIOError):
                                os.eventfd_read(self._bell)
                        elif key.fileobj is self._channel or key.fileobj == self._keeper_pidfd:
                            self._hear_keeper()
                            if self._fault is not None and isinstance(self._fault, KeeperLost):
                                return
                    if self._channel.wants_write:
                        with contextlib.suppress(OSError):
                            self._channel.flush()
        except Exception as error:
            if not self._closed:
                log.exception("the attendant thread failed")
                self._set_fault(EngineFault(f"the attendant thread failed: {type(error).__name__}: {error}"))

    def _sweep_and_admit(self) -> None:
        """Collect what ended, spend the credit, ring whoever sleeps while a ticket is READY."""
        with self._lock:
            ended = self._admitter.sweep()
            news = False
            for ticket, state, reason, _attempt, _deaths in ended:
                if state == _native.DONE:
                    continue  # counted when it was delivered
                news = True
                name = Reason(reason).name.lower()
                self._ledger.resolve(ticket, f"{'filtered' if state == _native.FILTERED else 'failed'}:{name}")
                self._gate.ended += 1
                note = self._notes.get(ticket)
                if state == _native.FAILED:
                    self._count_failure(name, note)
            try:
                while not self._closed and self._fault is None and self._gate.credit > 0 and self._unadmitted() != 0:
                    ticket = self._ledger.peek_ticket()
                    last = self.source.last_ticket
                    if last is not None and ticket >= last:
                        break
                    if not self._admitter.admit(ticket, self.source.encode(ticket)):
                        break
                    self._ledger.next_ticket()
                    self._gate.admitted += 1
            except (SourceError, ConfigError, _native.GroupTooLarge) as error:
                self._set_fault(EngineFault(f"{type(error).__name__}: {error}"))
        if news:
            self._segment.wake_taker()
        idle = self._segment.idle_workers()
        while idle:
            lowest = idle & -idle
            os.eventfd_write(self._worker_bells[lowest.bit_length() - 1], 1)
            idle ^= lowest

    def _count_failure(self, reason: str, note: messages.Note | None) -> None:
        if self._consumer.held() or self._segment.pending():
            self._failed_in_a_row.clear()
        self._failed_in_a_row.append(note)
        limit = self.config.fault.max_consecutive_failures
        if len(self._failed_in_a_row) >= limit:
            kind = RewardFault if reason == "reward" else PromptsFailing
            self._set_fault(
                kind(
                    f"{limit} prompts in a row ended FAILED and nothing was published between them; the last: {note.error if note else reason}",
                    worker=note.worker if note else None,
                    pid=self._states[note.worker].pid if note else None,
                    worker_traceback=note.traceback if note else "",
                )
            )

    def _hear_keeper(self) -> None:
        while True:
            try:
                received = self._channel.receive()
            except (EOFError, OSError):
                if not self._closed:
                    self._on_keeper_death()
                return
            if received is None:
                return
            message, fds = received
            with self._news:
                self._on_message(message, fds)
                self._news.notify_all()
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _on_message(self, message: messages.Message, fds: list[int]) -> None:
        from mprollout.worker import EvaluationItem

        match message:
            case messages.WorkerState():
                self._states[message.worker] = message
                self._judge_worker(message)
            case messages.UpdateDone():
                self._update_done = message
            case messages.Evaluated():
                if message.id in self._evaluations:
                    part: Any = message
                    if not message.error:
                        part = msgspec.msgpack.decode(messages.read_blob(fds.pop()), type=list[EvaluationItem])
                    self._evaluations[message.id][message.worker] = part
            case messages.Note():
                log.log(logging.WARNING if message.final else logging.INFO, "ticket %d attempt %d: %s", message.ticket, message.attempt, message.error)
                self._notes[message.ticket] = message
                while len(self._notes) > NOTES_KEPT:
                    self._notes.popitem(last=False)
            case messages.Fault():
                kind = {"reward": RewardFault, "keeper": KeeperLost}.get(message.kind, EngineFault)
                state = self._states.get(message.worker)
                self._set_fault(
                    kind(message.message, worker=message.worker, pid=state.pid if state else None, worker_traceback=message.traceback)
                )
            case _:
                raise AssertionError(f"trainer got {message!r}")

    def _judge_worker(self, message: messages.WorkerState) -> None:
        if message.state in ("restarting", "lost"):
            log.warning("worker %d (pid %d): %s; %s", message.worker, message.pid, message.error, message.state)
        if message.permanent:
            self._set_fault(
                WorkerStartError(
                    f"worker {message.worker} (pid {message.pid}) cannot start: {message.error}",
                    worker=message.worker,
                    pid=message.pid,
                    exit_code=message.exit_code,
                    worker_traceback=message.traceback,
                )
            )
        elif len(self._states) == self._segment.workers and all(s.state == "lost" for s in self._states.values()):
            self._set_fault(
                WorkersLost(
                    f"all {self._segment.workers} workers are lost and their restarts (max_restarts={self.config.workers.max_restarts}) are used up; "
                    f"the last, worker {message.worker} (pid {message.pid}), {message.error} (exit code {message.exit_code})",
                    worker=message.worker,
                    pid=message.pid,
                    exit_code=message.exit_code,
                    worker_traceback=message.traceback,
                )
            )

    def _on_keeper_death(self) -> None:
        assert self._keeper is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(CLOSE_TIMEOUT_S)
        self._end_orphans()
        if self._fault is None or not isinstance(self._fault, KeeperLost):
            code = self._keeper.returncode
            self._set_fault(
                KeeperLost(f"the keeper (pid {self._keeper.pid}) died with exit code {code}; its workers ended with it", pid=self._keeper.pid, exit_code=code)
            )

    def _set_fault(self, fault: EngineFault) -> None:
        if self._fault is None:
            self._fault = fault
        with self._news:
            self._news.notify_all()
        self._segment.wake_taker()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    # -- small things --------------------------------------------------------------------------------------------

    def _ring_attendant(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _check_open(self) -> None:
        if self._closed or not self._started:
            raise EngineClosed("the engine is closed" if self._closed else "the engine is not started: use `with engine:` or start()")

    def _describe_workers(self) -> str:
        parts = []
        for i in range(self._segment.workers):
            words, state = self._segment.worker_words(i), self._states.get(i)
            parts.append(
                f"worker {i} (pid {words[WorkerWord.PID]}) {state.state if state else 'starting'}, {words[WorkerWord.RUNNING_SAMPLES]} samples running"
            )
        return "; ".join(parts)

    def _describe_cause(self) -> str:
        running = sum(self._segment.worker_words(i)[WorkerWord.RUNNING_SAMPLES] for i in range(self._segment.workers))
        rewarding = sum(self._segment.worker_words(i)[WorkerWord.REWARDING_SAMPLES] for i in range(self._segment.workers))
        if running:
            return "generation"
        if rewarding:
            return "reward"
        return "gate" if self._gate.live else "workers"

    def _describe_wait(self, n: int, have: int, timeout: float | None) -> str:
        gate = self._gate
        return (
            f"get({n}): {have} groups deliverable after {timeout} s; {gate.live} live, {self._segment.pending()} pending, "
            f"credit {gate.credit}, next in order: ticket {self._ledger.watermark}; {self._describe_workers()}"
        )


__all__ = ["EngineStats", "EvaluationResult", "MprolloutError", "RolloutEngine", "WorkerStats"]
