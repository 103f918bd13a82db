"""Evaluation beside training: rows go out in shares, one a worker; nothing of it enters the ring.

    trainer: evaluate --EvaluationRequest (memfd)--> keeper --> worker --run each sample--> list[EvaluationItem] (memfd) --> EvaluationResult

The samples stand in the same line for places as training samples and starve neither nor are starved. Invariant: a result has every
row and every sample, in order, or the evaluation raises; `gather` counts the shares, a worker answers a share whole or with its error.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import time
from collections.abc import Awaitable, Callable, Sized
from typing import TYPE_CHECKING

import msgspec

from mprollout import messages
from mprollout.config import SamplingConfig, SourceConfig
from mprollout.errors import EngineFault, GetTimeout
from mprollout.source import PromptSource
from mprollout.stats import describe_workers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mprollout.attendant import Attendant


class EvaluationItem(msgspec.Struct, frozen=True):
    """One evaluated sample."""

    row: int
    sample: int
    token_ids: list[int]
    text: str
    reward: float
    versions: list[tuple[int, int, int]]


class EvaluationRequest(msgspec.Struct, frozen=True):
    """One worker's share: (row number, encoded prompt), how to render and how to sample them."""

    prompts: list[tuple[int, bytes]]
    source: SourceConfig
    sampling: SamplingConfig


class EvaluationResult(msgspec.Struct, frozen=True):
    """What `RolloutEngine.evaluate` returns, rows in the order given."""

    rewards: npt.NDArray[np.float32]  # float32 [num_rows, group_size]
    texts: list[list[str]]
    token_ids: list[list[list[int]]]
    versions: list[int]
    """All policy versions that sampled a token of it, ascending: one, unless an update came between."""

    @property
    def version(self) -> int:
        """The newest of them."""
        return self.versions[-1] if self.versions else 0


async def run_share(
    request: EvaluationRequest, run_row: Callable[[int, bytes], Awaitable[list[EvaluationItem]]]
) -> list[EvaluationItem]:
    """On the worker: all rows of a share at once; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(run_row(row, data)) for row, data in request.prompts]
    try:
        return [item for items in await asyncio.gather(*tasks) for item in items]
    finally:
        for task in tasks:
            task.cancel()


def gather(
    attendant: Attendant, id_: int, source: SourceConfig, sampling: SamplingConfig, timeout: float | None
) -> EvaluationResult:
    """On the trainer: deal the rows out to the ready workers and collect the answers. Blocks. A share whose worker died is dealt again.

    Raises:
        EngineFault: a worker failed; carries its traceback.
        GetTimeout: not done within `timeout` seconds.
    """
    prompts = PromptSource(source)
    render = msgspec.structs.replace(source, path="-", rows=None, reasoning_gym=None)
    answers: dict[int, messages.Evaluated | list[EvaluationItem]] = {}
    attendant.evaluations[id_] = answers
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    items: list[EvaluationItem] = []

    def check_time() -> None:
        if time.monotonic() > deadline:
            raise GetTimeout(
                f"evaluate: {len(items)} samples of {len(prompts)} rows came within {timeout} s; {describe_workers(attendant.segment, attendant.states)}"
            )

    def ready() -> list[int]:
        return [i for i, state in sorted(attendant.states.items()) if state.state == "ready"]

    try:
        rows = list(range(len(prompts)))
        while rows:
            attendant.wait_news(ready, check_time)
            workers = ready()
            shares = {worker: rows[k :: len(workers)] for k, worker in enumerate(workers) if k < len(rows)}
            answers.clear()
            for worker, share in shares.items():
                request = EvaluationRequest([(row, prompts.encode(row)) for row in share], render, sampling)
                fd = messages.blob(msgspec.msgpack.encode(request))
                attendant.send(messages.Evaluate(id=id_, worker=worker), [fd])
                os.close(fd)
            attendant.wait_news(functools.partial(_all_in, answers, shares), check_time)
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
    return _in_rows(items, sampling.group_size)


def _all_in(answers: Sized, shares: Sized) -> bool:
    return len(answers) == len(shares)


def _in_rows(items: list[EvaluationItem], size: int) -> EvaluationResult:
    import numpy as np

    items.sort(key=lambda item: (item.row, item.sample))
    grid = [items[i : i + size] for i in range(0, len(items), size)]
    return EvaluationResult(
        rewards=np.array([[item.reward for item in row] for row in grid], np.float32).reshape(len(grid), size),
        texts=[[item.text for item in row] for row in grid],
        token_ids=[[item.token_ids for item in row] for row in grid],
        versions=sorted({span[0] for item in items for span in item.versions}),
    )
