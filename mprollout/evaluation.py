"""Evaluation beside training: rows go out in shares, one a worker; nothing of it enters the ring.

    trainer: evaluate --EvaluationRequest (memfd)--> keeper --> worker --run each sample--> list[EvaluationItem] (memfd) --> EvaluationResult

The samples stand in the same line for places as training samples and starve neither nor are starved. Invariant: a result has every
row and every sample, in order, or the evaluation raises; `gather` counts the shares, a worker answers a share whole or with its error.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from mprollout import messages
from mprollout.config import SamplingConfig
from mprollout.errors import EngineFault, GetTimeout, WorkersLost
from mprollout.stats import describe_workers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mprollout.attendant import Attendant
    from mprollout.source import PromptSource


class EvaluationItem(msgspec.Struct, frozen=True):
    """One evaluated sample."""

    row: int
    sample: int
    token_ids: list[int]
    text: str
    reward: float
    versions: list[tuple[int, int, int]]


class EvaluationRequest(msgspec.Struct, frozen=True):
    """One worker's share: (row number, encoded prompt)."""

    prompts: list[tuple[int, bytes]]
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
    request: EvaluationRequest, run_one: Callable[[int, bytes, int, SamplingConfig], Awaitable[EvaluationItem]]
) -> list[EvaluationItem]:
    """On the worker: all samples of a share at once; the first failure cancels the rest and is raised."""
    samples = range(request.sampling.group_size)
    tasks = [
        asyncio.ensure_future(run_one(row, data, i, request.sampling)) for row, data in request.prompts for i in samples
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def gather(
    attendant: Attendant, id_: int, prompts: PromptSource, sampling: SamplingConfig, timeout: float | None
) -> EvaluationResult:
    """On the trainer: deal the rows out to the ready workers and collect the answers. Blocks.

    Raises:
        WorkersLost: no worker is ready.
        EngineFault: a worker failed; carries its traceback.
        GetTimeout: not done within `timeout` seconds.
    """
    ready = [i for i, state in sorted(attendant.states.items()) if state.state == "ready"]
    if not ready:
        raise WorkersLost(f"evaluate: no worker is ready; {describe_workers(attendant.segment, attendant.states)}")
    shares = {worker: range(k, len(prompts), len(ready)) for k, worker in enumerate(ready) if k < len(prompts)}
    answers: dict[int, messages.Evaluated | list[EvaluationItem]] = {}
    attendant.evaluations[id_] = answers
    deadline = math.inf if timeout is None else time.monotonic() + timeout

    def check_time() -> None:
        if time.monotonic() > deadline:
            raise GetTimeout(f"evaluate: {len(answers)} of {len(shares)} workers answered within {timeout} s")

    try:
        for worker, share in shares.items():
            request = EvaluationRequest([(row, prompts.encode(row)) for row in share], sampling)
            fd = messages.blob(msgspec.msgpack.encode(request))
            attendant.keeper.channel.send(messages.Evaluate(id=id_, worker=worker), [fd])
            os.close(fd)
        attendant.wait_news(lambda: len(answers) == len(shares), check_time)
    finally:
        del attendant.evaluations[id_]
    items: list[EvaluationItem] = []
    for part in answers.values():
        if isinstance(part, messages.Evaluated):
            raise EngineFault(f"evaluate: {part.error}", worker=part.worker, worker_traceback=part.traceback)
        items.extend(part)
    return _in_rows(items, sampling.group_size)


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
