"""`mprollout top RUN`: a living run, seen from outside and not disturbed.

    RUN/keeper.sock --Observe--> workers' states, the segment (opened for reading only) --> numbers --> a live table, or JSON

Everything shown is read from shared memory that the run writes anyway; the keeper answers with one datagram a worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import time
from pathlib import Path
from typing import Any

import msgspec
import tyro

from mprollout import _native, messages
from mprollout.door import knock
from mprollout.errors import ConfigError
from mprollout.ring import GlobalWord, WorkerWord
from mprollout.stats import WorkerStats, worker_stats

ANSWER_TIMEOUT_S = 5.0


@dataclasses.dataclass(kw_only=True)
class TopArgs:
    """Watch a living run: workers, pending groups, tokens/s, lag, what the trainer waits for.

    Example: `mprollout top runs/7`. Ends with the run, or by Ctrl-C. Exit code 2 when nobody keeps that run.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder (`EngineConfig.run_dir`)."""
    interval_s: float = 0.5
    """Seconds between two looks."""
    once: bool = False
    """One look, then exit."""
    json: bool = False
    """One line of JSON a look, for scripts."""


class RunEnded(ConfigError):
    """Nobody keeps that run, or no longer."""


class RunView:
    """A run's shared memory, mapped for reading.

    Raises:
        RunEnded: nobody keeps that run; names the folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self.trainer_pid = self.keeper_pid = 0
        """The trainer's is 0 while there is none."""
        self._states: dict[int, messages.WorkerState] = {}
        self._segment: _native.Segment | None = None
        self.look()

    def look(self) -> dict[str, Any]:
        """The numbers of this moment; keys are those of `EngineStats` where it has them."""
        self.ask()
        assert self._segment is not None
        words = self._segment.global_words
        run: dict[str, Any] = {word.name.lower(): words[word] for word in GlobalWord}
        since = run.pop("waiting_since_ns")
        run["waiting_s"] = max(0, time.monotonic_ns() - since) / 1e9 if since else 0.0
        workers = worker_stats(self._segment, self._states)
        oldest = max(workers, key=self._stuck_s, default=None)
        return {
            "trainer_pid": self.trainer_pid,
            **run,
            "pending": self._segment.pending(),
            "tokens_generated": sum(worker.tokens_generated for worker in workers),
            "running_samples": sum(worker.running_samples for worker in workers),
            "slowest_worker": None if oldest is None else oldest.worker,
            "slowest_worker_since_s": 0.0 if oldest is None else self._stuck_s(oldest),
            "workers": [msgspec.structs.asdict(worker) for worker in workers],
        }

    def _stuck_s(self, worker: WorkerStats) -> float:
        assert self._segment is not None
        progress = self._segment.worker_words(worker.worker)[WorkerWord.PROGRESS_NS]
        return max(0, time.monotonic_ns() - progress) / 1e9 if worker.running_samples else 0.0

    def table(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """The live table of this moment, as `Segment.table` has it."""
        assert self._segment is not None
        return self._segment.table()

    def ask(self) -> None:
        """Ask the keeper who is there."""
        try:
            channel = knock(self._run)
        except OSError as error:
            raise RunEnded(f"{self._run}: nobody keeps a run there ({error})") from error
        try:
            self.keeper_pid = channel.peer()[0]
            channel.send(messages.Observe())
            with selectors.DefaultSelector() as selector:
                selector.register(channel, selectors.EVENT_READ)
                while True:
                    if not selector.select(ANSWER_TIMEOUT_S):
                        raise ConfigError(f"{self._run}: the keeper did not answer within {ANSWER_TIMEOUT_S} s")
                    received = channel.receive()
                    if received is None:
                        continue
                    message, fds = received
                    if isinstance(message, messages.WorkerState):
                        self._states[message.worker] = message
                    elif isinstance(message, messages.Observed):
                        self.trainer_pid = message.trainer_pid
                        if self._segment is None:
                            self._segment = _native.Segment.attach(fds[0], read_only=True)
                        os.close(fds[0])
                        return
        except EOFError as error:
            raise RunEnded(f"{self._run}: the run has ended") from error
        finally:
            channel.close()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()


def run_top(args: TopArgs) -> None:
    """Show it until it ends."""
    from rich.console import Console
    from rich.live import Live

    view, console = RunView(args.run), Console()
    now = view.look()
    with contextlib.ExitStack() as stack:
        stack.callback(view.close)
        if not args.once:
            stack.enter_context(contextlib.suppress(RunEnded))  # it was seen: its end is this one's
        live = None
        if not args.json and not args.once and console.is_terminal:
            live = stack.enter_context(Live(_table(now, 0.0), console=console, auto_refresh=False))
        before = now
        while True:
            tokens_per_s = (now["tokens_generated"] - before["tokens_generated"]) / args.interval_s
            if live is not None:
                live.update(_table(now, tokens_per_s), refresh=True)
            elif args.json:
                print(json.dumps(now), flush=True)
            else:
                console.print(_table(now, tokens_per_s))
            if args.once:
                return
            time.sleep(args.interval_s)
            before, now = now, view.look()


def _table(now: dict[str, Any], tokens_per_s: float) -> Any:
    from rich.console import Group
    from rich.table import Table

    head = Table.grid(padding=(0, 2))
    trainer = f"trainer pid {now['trainer_pid']}" if now["trainer_pid"] else "no trainer: waiting for one that attaches"
    waits = f"waits in get for {now['waiting_s']:.1f} s" if now["waiting_s"] else "is not in get"
    head.add_row(trainer, waits, f"policy version {now['policy_version']}", f"{now['updates']} updates")
    head.add_row(
        f"{now['live']} live",
        f"{now['pending']} pending, {now['held']} held",
        f"{now['taken']} taken",
        f"{now['ended']} ended otherwise",
    )
    head.add_row(
        f"highest lag {now['highest_lag']}",
        f"{now['groups_masked']} masked, {now['groups_recycled']} recycled",
        f"{now['tokens_discarded']:,} tokens discarded",
        f"{tokens_per_s:,.0f} tokens/s",
    )
    if now["slowest_worker_since_s"] > 1:
        head.add_row(f"worker {now['slowest_worker']}: no sample finished for {now['slowest_worker_since_s']:.0f} s")
    workers = Table(
        "worker", "pid", "state", "running", "scored now", "published", "retried", "restarts", "version", "tokens"
    )
    for worker in now["workers"]:
        keys = (
            "worker",
            "pid",
            "state",
            "running_samples",
            "rewarding_samples",
            "groups_published",
            "retried",
            "restarts",
            "version",
        )
        workers.add_row(*(str(worker[key]) for key in keys), f"{worker['tokens_generated']:,}")
    return Group(head, workers)
