"""The run's history in its folder, `RUN/history.jsonl`: what `mprollout report` draws.

    attendant's thread: a turn --look--> Row (totals so far)   --\\
    keeper's news, update_weights, evaluate, log --tell--> events --+--> lines, appended --read--> a `Life` for each engine that ran there

Invariants: a row holds totals and nothing since the last row, so any row may be left out: a file that grows beyond its bound loses half
of what it has most of, evenly over the run, and what is left is still the whole run. Lines are appended and never changed in place, so that a kill
cuts at most the last one, and `read` passes over it. A history that cannot be written ends with a warning, and the run goes on.
"""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from mprollout.config import EngineConfig, SGLangConfig
from mprollout.errors import ConfigError
from mprollout.evaluation import EvaluationResult
from mprollout.messages import WorkerState
from mprollout.stats import EngineStats

log = logging.getLogger("mprollout")

HISTORY = "history.jsonl"
EVERY_S = 0.1
"""Between two rows, at least."""
MAX_BYTES = 4 << 20
"""An hour or more of rows; to leave out half of them takes a tenth of a second then."""
_KEPT_OF_A_KIND = 1024
_TEXT = 400


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", omit_defaults=True):
    """One line of the file."""

    t: float = 0.0
    """Seconds since the engine's start."""


class Start(_Line, frozen=True, tag="start"):
    """An engine began, or a trainer attached: totals count from here."""

    at: float
    """Seconds since the epoch."""
    trainer_pid: int
    workers: int
    about: dict[str, str]
    """Model and settings, for a headline."""


class Row(_Line, frozen=True, tag="row"):
    """Totals and levels of this moment; see `EngineStats`."""

    policy_version: int
    updates: int
    taken: int
    live: int
    pending: int
    held: int
    running_samples: int
    tokens_generated: int
    tokens_delivered: int
    retried: int
    groups_masked: int
    groups_recycled: int
    outcomes: dict[str, int]
    lags: dict[int, int]
    lengths_issued: dict[int, int]
    lengths_delivered: dict[int, int]
    discarded: dict[str, int]
    reward_mean: float
    waited_s: dict[str, float]


class WorkerChange(_Line, frozen=True, tag="worker"):
    """The keeper told of a worker."""

    worker: int
    pid: int
    state: str
    """starting | ready | evaluating | asleep | restarting | lost"""
    exit_code: int | None = None
    error: str = ""


class Update(_Line, frozen=True, tag="update"):
    """A weight update ended."""

    seconds: float
    version: int
    """The policy's after it."""
    error: str = ""


class Evaluated(_Line, frozen=True, tag="evaluation"):
    """An evaluation ended."""

    seconds: float
    version: int
    reward_mean: float
    """Over all its samples."""


class Logged(_Line, frozen=True, tag="log"):
    """Numbers of the trainer's own (`RolloutEngine.log`)."""

    step: int
    metrics: dict[str, float]


class End(_Line, frozen=True, tag="end"):
    """The engine was closed, or detached from."""

    detached: bool = False


_T = TypeVar("_T", bound=_Line)
Line = Start | Row | WorkerChange | Update | Evaluated | Logged | End
_ROW = tuple(name for name in Row.__struct_fields__ if name != "t")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


class History:
    """Appends to a run's history. `tell` from any thread, the rest from one at a time.

    Args:
        folder: the run's; a history that is there goes on.

    Raises:
        ConfigError: no file can be written there.
    """

    def __init__(self, folder: Path, config: EngineConfig, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = folder / HISTORY, max_bytes
        self._began, self._due_s = time.monotonic(), 0.0
        self._told: collections.deque[Line] = collections.deque()
        self._last: bytes = b""
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(f"EngineConfig.run_dir: no history can be kept there: {error}") from error
        workers = len(config.workers.devices)
        self.tell(Start(at=time.time(), trainer_pid=os.getpid(), workers=workers, about=_about(config)))

    @property
    def now_s(self) -> float:
        """Since the engine's start."""
        return time.monotonic() - self._began

    def tell(self, line: Line) -> None:
        """To be written at the next turn. Does not block."""
        self._told.append(line)

    def on_worker(self, state: WorkerState) -> None:
        """The keeper told of a worker."""
        self.tell(
            WorkerChange(
                t=self.now_s,
                worker=state.worker,
                pid=state.pid,
                state=state.state,
                exit_code=state.exit_code,
                error=state.error[:_TEXT],
            )
        )

    def on_update(self, seconds: float, version: int, error: str) -> None:
        """An `update_weights` ended."""
        self.tell(Update(t=self.now_s, seconds=seconds, version=version, error=error[:_TEXT]))

    def on_evaluation(self, result: EvaluationResult) -> None:
        """An `evaluate` ended."""
        if result.rewards.size:
            mean = float(result.rewards.mean(dtype=float))
            self.tell(Evaluated(t=self.now_s, seconds=result.seconds, version=result.version, reward_mean=mean))

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """Finite numbers of the trainer's own."""
        self.tell(Logged(t=self.now_s, step=step, metrics=metrics))

    @property
    def due(self) -> bool:
        """Whether `look` would write a row."""
        return self._fd >= 0 and self.now_s >= self._due_s

    def look(self, stats: EngineStats) -> None:
        """A row of these totals, if they are others than those of the last row."""
        self._due_s = self.now_s + EVERY_S
        numbers = {name: getattr(stats, name) for name in _ROW}
        if (encoded := _encode(numbers)) != self._last:
            self._last = encoded
            self.tell(Row(t=self.now_s, **numbers))

    def write(self) -> None:
        """Append what was told: one system call, or none."""
        lines = []
        while self._told:
            lines.append(_encode(self._told.popleft()) + b"\n")
        if not lines or self._fd < 0:
            return
        try:
            self._append(b"".join(lines))
            if os.fstat(self._fd).st_size > self._max_bytes:
                self._thin()
        except OSError as error:
            log.warning("the history %s ends here: %s", self._path, error)
            self._close()

    def close(self, stats: EngineStats | None, detached: bool = False) -> None:
        """Write the last row and the end. Idempotent."""
        if self._fd >= 0:
            if stats is not None:
                self.look(stats)
            self.tell(End(t=self.now_s, detached=detached))
            self.write()
            self._close()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":  # a kill cut the last line
            os.write(fd, b"\n")
        return fd

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _thin(self) -> None:
        """Leave out half of the lines of each kind that there are many of, evenly over the run, till half of the bound is free."""
        lines, kept = list(_stamped(self._path.read_bytes())), _KEPT_OF_A_KIND
        while sum(len(line.text) for line in lines) > self._max_bytes // 2 and kept:
            counts = collections.Counter(line.kind for line in lines)
            for kind, count in counts.items():
                if count > kept:
                    lines = _halved(lines, kind, count // 2)
            kept //= 2
        beside = self._path.with_name(f".{HISTORY}")
        beside.write_bytes(b"".join(line.text + b"\n" for line in lines))
        os.replace(beside, self._path)
        self._close()
        self._fd = self._open()


class _Stamped(NamedTuple):
    kind: str
    """What lines it may stand in for. A start stands for itself; logged numbers for those of the same names."""
    at: float
    """Seconds since the epoch."""
    text: bytes


def _stamped(data: bytes) -> Iterator[_Stamped]:
    """The lines that are whole, from the first start on."""
    began: float | None = None
    for text in data.splitlines():
        try:
            line = _decode(text)
        except msgspec.MsgspecError:
            continue
        kind = type(line).__name__
        if isinstance(line, Start):
            began, kind = line.at, f"start {line.at}"
        elif isinstance(line, Logged):
            kind = f"log {sorted(line.metrics)}"
        if began is not None:
            yield _Stamped(kind, began + line.t, text)


def _halved(lines: Sequence[_Stamped], kind: str, count: int) -> list[_Stamped]:
    """Of so many equal spans of the run the last line of the kind stays: what is already thin does not get thinner."""
    times = [line.at for line in lines if line.kind == kind]
    step_s = max(times[-1] - times[0], 1e-9) / count
    left: list[_Stamped] = []
    before = None
    for line in reversed(lines):
        if line.kind == kind:
            span = (times[-1] - line.at) // step_s
            if span == before:
                continue
            before = span
        left.append(line)
    return left[::-1]


def _about(config: EngineConfig) -> dict[str, str]:
    generator, gate = config.generator, config.gate
    return {
        "model": generator.model if isinstance(generator, SGLangConfig) else "simulated",
        "group_size": str(config.sampling.group_size),
        "max_new_tokens": str(config.sampling.max_new_tokens),
        "groups_per_update": str(gate.groups_per_update),
        "max_lag": str(gate.max_lag),
        "max_running_samples": str(config.workers.max_running_samples),
    }


# -- reading --------------------------------------------------------------------------------------------------------------


class Life(msgspec.Struct):
    """The lines of one engine, from its start on, in the order of their times."""

    start: Start
    lines: list[Line] = []

    def of(self, kind: type[_T]) -> list[_T]:
        """Those of one kind."""
        return [line for line in self.lines if isinstance(line, kind)]


def read(run: Path) -> list[Life]:
    """The history of a run, alive or dead, an engine after the other. A line that a kill cut is passed over.

    Raises:
        ConfigError: the folder has none.
    """
    try:
        data = (run / HISTORY).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{run}: no history of a run lies there ({error.strerror}); an engine writes {HISTORY} into its EngineConfig.run_dir"
        ) from error
    lives: list[Life] = []
    for text in data.splitlines():
        try:
            line = _decode(text)
        except msgspec.MsgspecError:
            continue
        if isinstance(line, Start):
            lives.append(Life(line))
        elif lives:
            lives[-1].lines.append(line)
    for life in lives:
        life.lines.sort(key=lambda line: line.t)
    if not lives:
        raise ConfigError(f"{run / HISTORY}: expected lines of a run's history; got {data[:80]!r}")
    return lives
