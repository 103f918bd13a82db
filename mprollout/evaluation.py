"""Evaluation beside training: rows go out in shares, one a worker; nothing of it enters the ring.

    Evaluations.run (trainer) --EvaluationRequest (memfd)--> Shares (keeper) --> worker --run each sample--> list[EvaluationItem] (memfd)
                   EvaluationResult <-------------------------- Shares <-----------------------------------------'

How it stands to the updates beside it is the caller's choice: they go on, and the result names every version that sampled a token; or
they wait (`pinned=True`); or some workers are set aside for it, claim nothing, and no update reaches them (`pinned="share"`).
Its samples share the places of a worker with training (`places`): neither starves. Invariants: a result has every row and every sample,
in order, or the evaluation raises (`_gather` counts the shares, a worker answers a share whole or with its error); a pinned one is of one
version (`_run` looks, and does it again where a death or a refused update came between).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from mprollout import messages
from mprollout.config import EngineConfig, SamplingConfig, SourceConfig
from mprollout.errors import ConfigError, EngineFault, GetTimeout
from mprollout.generator import FinishReason
from mprollout.stats import describe_workers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mprollout.attendant import Attendant
    from mprollout.child import Worker
    from mprollout.history import History
    from mprollout.keeper import Keeper
    from mprollout.updates import Updates

Pin = Literal[False, True, "share"]


class EvaluationItem(msgspec.Struct, frozen=True):
    """One evaluated sample."""

    row: int
    sample: int
    token_ids: list[int]
    text: str
    reward: float
    finish_reason: FinishReason
    versions: list[tuple[int, int, int]]


class EvaluationRequest(msgspec.Struct, frozen=True):
    """One worker's share: (row number, encoded prompt), how to render and how to sample them."""

    prompts: list[tuple[int, bytes]]
    source: SourceConfig
    sampling: SamplingConfig


class EvaluationResult(msgspec.Struct, frozen=True):
    """What `RolloutEngine.evaluate` returns, rows in the order given."""

    rewards: npt.NDArray[np.float32]  # float32 [num_rows, group_size]
    lengths: npt.NDArray[np.int32]  # int32 [num_rows, group_size]; tokens of each completion
    finish_reasons: list[list[FinishReason]]
    texts: list[list[str]]
    token_ids: list[list[list[int]]]
    versions: list[int]
    """All policy versions that sampled a token of it, ascending: one, unless an update came between."""
    seconds: float
    """From the call to the result."""

    @property
    def version(self) -> int:
        """The newest of them."""
        return self.versions[-1] if self.versions else 0

    def pass_at(self, k: int, correct: float = 1.0) -> npt.NDArray[np.float64]:
        """The chance that at least one of k samples of a row is correct; its mean over the rows is pass@k.

        The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), section 2.1:
        with c of n samples correct, 1 - C(n - c, k) / C(n, k), as the product that stays within a float's range.

        Args:
            k: 1 to the group size.
            correct: the least reward of a correct sample.

        Returns:
            float64 [num_rows].

        Raises:
            ConfigError: k is out of range.
        """
        import numpy as np

        rows, n = self.rewards.shape
        if not 1 <= k <= n:
            raise ConfigError(f"pass_at(k): k must be 1 to {n}, the samples of a row; got {k!r}")
        found = (self.rewards >= correct).sum(axis=1)
        return np.array([1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)) for c in found], np.float64).reshape(rows)


# -- on the worker --------------------------------------------------------------------------------------------------------


async def run_share(
    request: EvaluationRequest, run_row: Callable[[int, bytes], Awaitable[list[EvaluationItem]]]
) -> list[EvaluationItem]:
    """All rows of a share at once; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(run_row(row, data)) for row, data in request.prompts]
    try:
        return [item for items in await asyncio.gather(*tasks) for item in items]
    finally:
        for task in tasks:
            task.cancel()


# -- in the keeper --------------------------------------------------------------------------------------------------------


class Shares:
    """The keeper's end: which worker has rows of which evaluation, and which is set aside for one. Runs on the keeper's only thread."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._out: set[tuple[int, int]] = set()

    def forward(self, message: messages.Evaluate, fd: int) -> None:
        """Give a worker its share. Owns the descriptor."""
        worker = self._keeper.workers[message.worker]
        if worker.state == "ready" and not worker.asleep:
            self._out.add((message.id, worker.index))
            worker.send(message, [fd])
        else:
            self._keeper.tell(messages.Evaluated(id=message.id, worker=worker.index, absent=True))
        os.close(fd)

    def on_evaluated(self, message: messages.Evaluated, fds: list[int]) -> None:
        """A worker's answer; nobody wants it any more where its trainer is gone."""
        if (message.id, message.worker) in self._out:
            self._out.discard((message.id, message.worker))
            self._keeper.tell(message, fds)

    def on_death(self, worker: Worker) -> None:
        """What it had is to be dealt again."""
        for id_, index in [share for share in self._out if share[1] == worker.index]:
            self._out.discard((id_, index))
            self._keeper.tell(messages.Evaluated(id=id_, worker=index, absent=True))

    def set_aside(self, message: messages.SetAside) -> None:
        """Of the workers that may claim, the last ones; one at least goes on."""
        free = [worker for worker in self._keeper.workers if worker.state == "ready" and worker.may_claim]
        chosen = free[len(free) - max(0, min(message.count, len(free) - 1)) :]
        for worker in chosen:
            worker.evaluation = message.id
            worker.send(messages.Hold())
            self._keeper.tell_state(worker)
        self._keeper.tell(messages.Aside(id=message.id, workers=[worker.index for worker in chosen]))

    def let_back(self, id_: int) -> None:
        """The evaluation is over: its workers catch up, then claim again."""
        for worker in self._keeper.workers:
            if worker.evaluation == id_:
                worker.evaluation = 0
                if worker.state == "ready":
                    self._keeper.weights.bring_up_to_date(worker)

    def abandon(self) -> None:
        """The trainer is gone, and its evaluations with it."""
        self._out.clear()
        for id_ in {worker.evaluation for worker in self._keeper.workers} - {0}:
            self.let_back(id_)


# -- on the trainer -------------------------------------------------------------------------------------------------------


def like(own: SourceConfig, rows: Sequence[Any]) -> SourceConfig:
    """A source of plain rows, in the engine's own form; over reasoning-gym a row is a question."""
    field = "question" if own.reasoning_gym is not None and own.prompt_field == "prompt" else own.prompt_field
    return msgspec.structs.replace(own, rows=list(rows), path=None, reasoning_gym=None, prompt_field=field)


class _AllGone(Exception):
    """Every worker that was set aside has died."""


class Evaluations:
    """The trainer's end: any number at once, each on its caller's thread or on one of its own."""

    def __init__(
        self, config: EngineConfig, attendant: Attendant, updates: Updates, history: History | None = None
    ) -> None:
        self._config, self._attendant, self._updates, self._history = config, attendant, updates, history
        self._ids = itertools.count(1)
        self._threads: set[threading.Thread] = set()

    def submit(
        self,
        rows: Sequence[Any] | SourceConfig,
        sampling: SamplingConfig | None,
        timeout: float | None,
        pinned: Pin,
        workers: int,
    ) -> Future[EvaluationResult]:
        """See `RolloutEngine.submit_evaluation`."""
        work = *self._prepare(rows, sampling), timeout, pinned, workers
        future: Future[EvaluationResult] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: it has begun

        def evaluate() -> None:
            try:
                result = self._run(*work)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=evaluate, name="mprollout-evaluation", daemon=True)
        self._threads.add(thread)
        thread.start()
        return future

    def join(self) -> None:
        """Wait until the threads have ended, which they do once the attendant has stopped."""
        for thread in tuple(self._threads):
            if thread is not threading.current_thread():  # a callback of the future closes the engine
                thread.join()

    def run(
        self,
        rows: Sequence[Any] | SourceConfig,
        sampling: SamplingConfig | None,
        timeout: float | None,
        pinned: Pin,
        workers: int,
    ) -> EvaluationResult:
        """See `RolloutEngine.evaluate`. Blocks."""
        return self._run(*self._prepare(rows, sampling), timeout, pinned, workers)

    def _prepare(
        self, rows: Sequence[Any] | SourceConfig, sampling: SamplingConfig | None
    ) -> tuple[SourceConfig, SamplingConfig]:
        sampling = self._config.sampling if sampling is None else sampling
        if not isinstance(sampling, SamplingConfig):
            raise ConfigError(f"evaluate(sampling): expected a SamplingConfig; got {sampling!r:.200}")
        source = rows if isinstance(rows, SourceConfig) else like(self._config.source, rows)
        return msgspec.structs.replace(source, epochs=1, shuffle_seed=None), sampling

    def _run(
        self, source: SourceConfig, sampling: SamplingConfig, timeout: float | None, pinned: Pin, workers: int
    ) -> EvaluationResult:
        from mprollout.source import PromptSource

        prompts, began = PromptSource(source), time.monotonic()
        render = msgspec.structs.replace(source, path="-", rows=None, reasoning_gym=None)
        waits = self._updates.pinned(timeout, self._attendant) if pinned is True else contextlib.nullcontext()
        items: list[EvaluationItem] = []

        def check_time() -> None:
            if timeout is not None and time.monotonic() > began + timeout:
                raise GetTimeout(
                    f"evaluate: {len(items)} samples of {len(prompts)} rows came within {timeout} s; "
                    f"{describe_workers(self._attendant.segment, self._attendant.states)}"
                )

        def request(rows: list[int]) -> bytes:
            return msgspec.msgpack.encode(
                EvaluationRequest([(row, prompts.encode(row)) for row in rows], render, sampling)
            )

        with waits:
            while True:
                items.clear()
                id_ = next(self._ids)
                aside = self._set_aside(id_, workers, timeout, check_time) if pinned == "share" else None
                with contextlib.suppress(_AllGone), aside or contextlib.nullcontext(self._ready) as serving:
                    self._gather(id_, len(prompts), request, items, serving, check_time)
                    versions = sorted({span[0] for item in items for span in item.versions})
                    if not pinned or len(versions) <= 1:
                        result = _in_rows(items, sampling.group_size, versions, time.monotonic() - began)
                        if self._history is not None:
                            self._history.on_evaluation(result)
                        return result
                # A worker died, or some that had applied a refused update were on their way back: once more, and all are of one version.

    def _gather(
        self,
        id_: int,
        count: int,
        request: Callable[[list[int]], bytes],
        items: list[EvaluationItem],
        serving: Callable[[], list[int]],
        check_time: Callable[[], None],
    ) -> None:
        attendant = self._attendant
        answers: dict[int, messages.Evaluated | list[EvaluationItem]] = {}
        attendant.evaluations[id_] = answers
        try:
            rows = list(range(count))
            while rows:
                attendant.wait_news(serving, check_time)
                workers = serving()
                shares = {worker: rows[k :: len(workers)] for k, worker in enumerate(workers) if k < len(rows)}
                answers.clear()
                for worker, share in shares.items():
                    fd = messages.blob(request(share))
                    attendant.send(messages.Evaluate(id=id_, worker=worker), [fd])
                    os.close(fd)
                wanted = len(shares)
                attendant.wait_news(lambda wanted=wanted: len(answers) == wanted, check_time)  # type: ignore[misc]
                rows = []
                for worker, part in answers.items():
                    if not isinstance(part, messages.Evaluated):
                        items.extend(part)
                    elif part.absent:
                        rows.extend(shares[worker])
                    else:
                        raise EngineFault(f"evaluate: {part.error}", worker=worker, worker_traceback=part.traceback)
        finally:
            del attendant.evaluations[id_]

    def _ready(self) -> list[int]:
        return [i for i, state in sorted(self._attendant.states.items()) if state.state == "ready"]

    @contextlib.contextmanager
    def _set_aside(
        self, id_: int, count: int, timeout: float | None, check_time: Callable[[], None]
    ) -> Iterator[Callable[[], list[int]]]:
        """While this is open, so many workers serve the evaluation alone; yields a function that says which of them live.

        Raises:
            ConfigError: too few workers live for one to be left for training.
        """
        attendant = self._attendant

        def enough() -> bool:
            living = sum(state.state != "lost" for state in attendant.states.values())
            if living <= count:
                raise ConfigError(
                    f'evaluate(pinned="share", workers={count}): {living} workers live, and one at least must be left for training'
                )
            return len(self._ready()) > count

        def serving() -> list[int]:
            alive = [i for i in chosen if attendant.states[i].state in ("evaluating", "asleep")]
            if not alive:
                raise _AllGone
            return [i for i in alive if attendant.states[i].state == "evaluating"]

        attendant.wait_news(enough, check_time)
        before = attendant.states
        try:
            with self._updates.alone("evaluate", timeout):  # so that all of them have the same version
                attendant.aside[id_] = None
                attendant.send(messages.SetAside(id=id_, count=count))
                attendant.wait_news(lambda: attendant.aside[id_] is not None, check_time)
            chosen = attendant.aside[id_] or []
            if not chosen:  # of those that are ready here some went back from a refused update just now
                attendant.wait_news(lambda: attendant.states is not before, check_time)
            yield serving
        finally:
            attendant.aside.pop(id_, None)
            attendant.send(messages.LetBack(id=id_))


def _in_rows(items: list[EvaluationItem], size: int, versions: list[int], seconds: float) -> EvaluationResult:
    import numpy as np

    items.sort(key=lambda item: (item.row, item.sample))
    grid = [items[i : i + size] for i in range(0, len(items), size)]
    shape = (len(grid), size)
    return EvaluationResult(
        rewards=np.array([item.reward for item in items], np.float32).reshape(shape),
        lengths=np.array([len(item.token_ids) for item in items], np.int32).reshape(shape),
        finish_reasons=[[item.finish_reason for item in row] for row in grid],
        texts=[[item.text for item in row] for row in grid],
        token_ids=[[item.token_ids for item in row] for row in grid],
        versions=versions,
        seconds=seconds,
    )
