"""What happens now: a live panel on a terminal, plain lines elsewhere.

The panel is drawn by rich's own thread, four times a second, from `engine.stats()`: it moves while the trainer waits in `get`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from mprollout.errors import MprolloutError

if TYPE_CHECKING:
    from mprollout.engine import RolloutEngine
    from mprollout.stats import EngineStats

PLAIN_LINE_EVERY = 10


class Timer:
    """Seconds that a `Display.doing` block took."""

    seconds = 0.0


class Display:
    """Shows one run; a context manager.

    Example:
        >>> with Display("sort", 250) as display:                           # doctest: +SKIP
        ...     display.watch(engine)
        ...     with display.doing("waits for groups") as timer:
        ...         batch = engine.get(16)
        ...     display.step({"step": 1, "reward": 0.3}, timer.seconds)
    """

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._title, self._steps = title, steps
        self._engine: RolloutEngine | None = None
        self._stats: EngineStats | None = None
        self._looking = threading.Lock()
        self._doing, self._since = "prepares", time.monotonic()
        self._last: dict[str, Any] = {"step": 0}
        self._accuracies: list[float] = []
        live = self._console.is_terminal
        self._live = (
            Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)
            if live
            else None
        )

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.watch(None)
        if self._live:
            self._live.stop()

    def say(self, message: str) -> None:
        """A line that stays."""
        self._console.print(message, markup=False, soft_wrap=True)

    def watch(self, engine: RolloutEngine | None) -> None:
        """Show this engine's workers from now on. None before it is closed: no look at it is under way after the return."""
        with self._looking:
            self._engine = engine

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[Timer]:
        """Say what the trainer does in the block, and time it."""
        timer = Timer()
        before, self._doing, self._since = self._doing, what, time.monotonic()
        try:
            yield timer
        finally:
            timer.seconds = time.monotonic() - self._since
            self._doing, self._since = before, time.monotonic()

    def step(self, metrics: dict[str, Any]) -> None:
        """A step is done."""
        self._last = metrics
        if metrics.get("accuracy") is not None:
            self._accuracies.append(metrics["accuracy"])
        due = metrics["step"] % PLAIN_LINE_EVERY == 0 or self._steps <= 3 * PLAIN_LINE_EVERY
        if self._live is None and (due or metrics.get("accuracy") is not None):
            self.say(self._line())

    def _line(self) -> str:
        last = self._last
        parts = [f"step {last['step']}/{self._steps}"]
        for name, form in (
            ("reward", "reward {:.3f}"),
            ("lag_max", "lag {}"),
            ("pending", "pending {}"),
            ("tokens_per_s", "{:.0f} tokens/s"),
        ):
            if last.get(name) is not None:
                parts.append(form.format(last[name]))
        if self._accuracies:
            parts.insert(1, f"held-out {self._accuracies[-1]:.3f} (began at {self._accuracies[0]:.3f})")
        return " · ".join(parts)

    def _render(self) -> RenderableType:
        with self._looking:
            if self._engine is not None:
                # not yet started: what was seen last stays
                with contextlib.suppress(MprolloutError, AttributeError):
                    self._stats = self._engine.stats()
        doing = f"trainer {self._doing} ({time.monotonic() - self._since:.0f} s)"
        if self._stats is not None and self._doing.startswith("waits") and self._stats.waiting_for:
            doing += f": {self._stats.waiting_for}"
        body = Table.grid(expand=True)
        body.add_row(ProgressBar(total=self._steps, completed=self._last["step"]))
        body.add_row(self._line())
        body.add_row(doing)
        if self._stats is not None:
            body.add_row(self._workers(self._stats))
        return Panel(body, title=f"mprollout demo: {self._title}", title_align="left")

    def _workers(self, stats: EngineStats) -> Table:
        table = Table(
            "worker", "pid", "state", "running", "tokens", "version", "restarts", box=None, header_style="dim"
        )
        for w in stats.workers:
            table.add_row(
                *map(str, (w.worker, w.pid, w.state, w.running_samples, w.tokens_generated, w.version, w.restarts))
            )
        return table
