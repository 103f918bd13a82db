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
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import tyro

from mprollout import _native, messages, stats
from mprollout.door import knock
from mprollout.errors import ConfigError
from mprollout.ring import DELIVERED, ENDED_BY, LAGS, REWARD_MEANS, WAITED_NS, GlobalWord
from mprollout.waiting import CAUSES

ANSWER_TIMEOUT_S = 5.0


@dataclasses.dataclass(kw_only=True)
class TopArgs:
    """Watch a living run: workers, pending groups, tokens/s, lag, rewards, where the trainer waits, the oldest straggler.

    Example: `mprollout top runs/7`, or `mprollout top runs/7 --once --json` for one line of JSON. Ends with the run, or by Ctrl-C.
    `mprollout top runs/7 --prometheus 9400` serves the same numbers at http://127.0.0.1:9400/metrics; mprollout/grafana.json is a dashboard for them.

    Exit codes: 0 the run has ended, or was looked at once; 2 nobody keeps that run, or a setting is wrong; 130 Ctrl-C.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder (`EngineConfig.run_dir`)."""
    interval_s: float = 0.5
    """Seconds between two looks."""
    once: bool = False
    """One look, then exit."""
    json: bool = False
    """One line of JSON a look, for scripts."""
    prometheus: int | None = None
    """Serve the numbers at this port, for Prometheus; 0: any that is free. Without a terminal nothing else is shown."""
    address: str = "127.0.0.1"
    """Where `--prometheus` listens. Whoever reaches it can read the numbers."""


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
        """The numbers of this moment; keys are those of `EngineStats` where it has them. The last of `lags` stands for higher ones, too."""
        self.ask()
        assert self._segment is not None
        segment, words = self._segment, self._segment.global_words
        run: dict[str, Any] = {word.name.lower(): words[word] for word in GlobalWord}
        since_ns, recycled = run.pop("waiting_since_ns"), run.pop("tokens_discarded")
        reward_last, reward_mean = words[REWARD_MEANS.start : REWARD_MEANS.stop].cast("B").cast("d")
        workers = stats.worker_stats(segment, self._states)
        oldest = stats.straggler(segment)
        lost = stats.discarded(segment, recycled)
        return {
            "trainer_pid": self.trainer_pid,
            **run,
            "pending": segment.pending(),
            "tokens_generated": sum(worker.tokens_generated for worker in workers),
            "running_samples": sum(worker.running_samples for worker in workers),
            "retried": sum(worker.retried for worker in workers),
            "ended_by": stats.by_reason(words[ENDED_BY.start : ENDED_BY.stop].tolist()),
            "lags": {i: count for i, count in enumerate(words[LAGS.start : LAGS.stop]) if count},
            "lengths_issued": stats.lengths_issued(segment),
            "lengths_delivered": stats.by_length(words[DELIVERED.start : DELIVERED.stop].tolist()),
            "discarded": lost,
            "tokens_discarded": sum(lost.values()),
            "reward_last": reward_last,
            "reward_mean": reward_mean,
            "waited_s": dict(zip(CAUSES, (ns / 1e9 for ns in words[WAITED_NS.start : WAITED_NS.stop]), strict=True)),
            "waiting_s": stats.seconds_since(since_ns) if since_ns else 0.0,
            "waiting_for": stats.waiting_cause(workers, run["live"]) if since_ns else "",
            "straggler": None if oldest is None else msgspec.structs.asdict(oldest),
            "progress_s": stats.progress_s(segment),
            "workers": [msgspec.structs.asdict(worker) for worker in workers],
        }

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
    if args.prometheus is not None and not 0 <= args.prometheus <= 65535:
        raise ConfigError(f"--prometheus must be a port, 0 to 65535; got {args.prometheus}")
    if args.prometheus is not None and args.once:
        raise ConfigError("--once ends at once, and --prometheus serves until the run ends: choose one")
    from rich.console import Console
    from rich.live import Live

    view, console = RunView(args.run), Console()
    now = view.look()
    with contextlib.ExitStack() as stack:
        stack.callback(view.close)
        if not args.once:
            stack.enter_context(contextlib.suppress(RunEnded))  # it was seen: its end is this one's
        live = None
        if args.prometheus is not None:
            from mprollout.prometheus import serving

            url = stack.enter_context(serving(args.run, args.prometheus, args.address))
            print(f"serving {url}", file=sys.stderr, flush=True)
        if not args.json and not args.once and console.is_terminal:
            live = stack.enter_context(Live(_table(now, 0.0), console=console, auto_refresh=False))
        before = now
        while True:
            tokens_per_s = (now["tokens_generated"] - before["tokens_generated"]) / args.interval_s
            if live is not None:
                live.update(_table(now, tokens_per_s), refresh=True)
            elif args.json:
                print(json.dumps(now), flush=True)
            elif args.prometheus is None:
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
    waits = f"waits for {now['waiting_for']}, {now['waiting_s']:.1f} s" if now["waiting_s"] else "is not in get"
    head.add_row(trainer, waits, f"policy version {now['policy_version']}", f"{now['updates']} updates")
    head.add_row(
        f"{now['live']} live",
        f"{now['pending']} pending, {now['held']} held",
        f"{now['taken']} taken, {now['ended']} ended otherwise",
        f"{now['retried']} retried",
    )
    head.add_row(
        f"{tokens_per_s:,.0f} tokens/s",
        f"reward {now['reward_last']:.3f} (all: {now['reward_mean']:.3f})",
        f"{now['groups_masked']} masked, {now['groups_recycled']} recycled",
        f"{now['tokens_discarded']:,} tokens discarded",
    )
    lines = [
        ("ended otherwise", _counts(now["ended_by"])),
        ("groups by lag", _counts({f"{lag}{'+' * (lag == len(LAGS) - 1)}": n for lag, n in now["lags"].items()})),
        ("lengths issued", _counts(now["lengths_issued"])),
        ("delivered", _counts(now["lengths_delivered"])),
        ("the trainer waited for", _shares(now["waited_s"])),
    ]
    if (oldest := now["straggler"]) is not None:
        who = f"ticket {oldest['ticket']}, attempt {oldest['attempt']} on worker {oldest['worker']}"
        lines.append(("the oldest straggler", f"{who}, claimed {oldest['since_s']:.1f} s ago"))
    lines.append(("last progress", f"{now['progress_s']:.1f} s ago"))
    more = Table.grid(padding=(0, 2))
    for name, text in lines:
        if text:
            more.add_row(name, text)
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
    return Group(head, more, workers)


def _counts(counts: dict[Any, int]) -> str:
    return "  ".join(f"{name}: {count:,}" for name, count in counts.items())


def _shares(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values())
    return "  ".join(f"{cause} {s:.1f} s ({s / whole:.0%})" for cause, s in seconds.items() if s)
