"""Where the numbers of a run go besides its folder: TensorBoard, Weights & Biases, trackio, or a logger of your own.

    RolloutEngine.log(step, metrics) --> with the engine's own numbers, `engine/...` --> each Logger

The packages are optional: one is imported when it is asked for by its name in `EngineConfig.loggers`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from mprollout.config import LOGGERS, EngineConfig
from mprollout.errors import ConfigError
from mprollout.stats import EngineStats


class Logger(Protocol):
    """Takes numbers. Used by the thread that calls `RolloutEngine.log`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep finite numbers by name; `/` in a name makes a section. Steps ascend."""

    def close(self) -> None:
        """Write what is buffered; blocks for it. Called once."""


class TensorBoard:
    """Event files in `RUN/tensorboard`; neither TensorFlow nor torch is loaded."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Tracked:
    """A run of Weights & Biases, or of trackio, which has the same interface.

    Args:
        run: what `init` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def open_loggers(config: EngineConfig) -> list[Logger]:
    """Those that a config names.

    Raises:
        ConfigError: a package is not installed, or cannot begin a run; says what to do.
    """
    opened: list[Logger] = []
    with contextlib.ExitStack() as stack:
        for name in config.loggers:
            opened.append(_open(name, config))
            stack.callback(opened[-1].close)
        stack.pop_all()
    return opened


def _open(name: str, config: EngineConfig) -> Logger:
    folder = Path(config.run_dir or ".").resolve()
    project, run = os.environ.get("WANDB_PROJECT", "mprollout"), folder.name if config.run_dir else None
    settings = msgspec.to_builtins(_shown(config))

    def wandb() -> Logger:
        import wandb

        return Tracked(wandb.init(project=project, name=run, dir=str(folder), config=settings))

    def trackio() -> Logger:
        import trackio

        return Tracked(trackio.init(project=project, name=run, config=settings))

    openers: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard"),
        "wandb": wandb,
        "trackio": trackio,
    }
    assert openers.keys() == set(LOGGERS)
    try:
        return openers[name]()
    except ImportError as error:
        raise ConfigError(f"EngineConfig.loggers: {name!r} is not installed ({error}): pip install {name}") from error
    except Exception as error:  # whatever such a service raises: no key, no network
        raise ConfigError(
            f"EngineConfig.loggers: {name!r} cannot begin a run: {type(error).__name__}: {error}"
        ) from error


def _shown(config: EngineConfig) -> dict[str, Any]:
    """The settings that say what a run is; no data and no functions."""
    return {part: getattr(config, part) for part in ("generator", "sampling", "gate", "fault", "weights", "seed")}


def numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers among them, which a JSON line and every logger can hold."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def engine_numbers(stats: EngineStats) -> dict[str, float]:
    """The engine's, as `engine/pending`, `engine/waited_s/gate`."""
    return numbers(dict(_flat("engine", msgspec.structs.asdict(stats))))


def _flat(prefix: str, values: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}/{name}", value)
        else:
            yield f"{prefix}/{name}", value
