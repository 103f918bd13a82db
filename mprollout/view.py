"""`mprollout view RUN`: what was sampled, how it was scored, and by which policy versions: a recording in the terminal.

    RUN/record --read, a row group at a time--> samples --filter--> chosen --tokenizer--> text in the terminal, or a line of JSON each

Only what is shown is decoded, and only as many samples as are shown are held, however large the recording.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tyro

from mprollout import record
from mprollout.batch import Sample
from mprollout.errors import ConfigError
from mprollout.record import RecordedGroup

if TYPE_CHECKING:
    from rich.console import Console

    from mprollout.generator import Tokenizer


@dataclasses.dataclass(kw_only=True)
class ViewArgs:
    """Show the samples of a recorded run: prompt, text, reward, and the policy versions that sampled them.

    The run must have been recorded (`EngineConfig.record`); it may be running: what it has written so far is shown.

    Example: `mprollout view runs/7 --worst --limit 5`, or `mprollout view runs/7 --ticket 1812`. `mprollout view runs/7 --limit 0 --json` prints
    all of it, a line of JSON a sample.

    Exit codes: 0 shown; 2 no recording lies there, or none of its samples is meant.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder (`EngineConfig.run_dir`), or a recording."""
    ticket: int | None = None
    """Only the samples of this ticket."""
    best: bool = False
    """Those with the highest rewards, instead of the first."""
    worst: bool = False
    """Those with the lowest rewards."""
    limit: int = 8
    """Most samples shown; 0: all."""
    max_chars: int = 1000
    """Of a prompt, and of a text, on the terminal; 0: all. JSON has all."""
    json: bool = False
    """One line of JSON a sample, for scripts."""


class _One(NamedTuple):
    """A recorded sample."""

    group: RecordedGroup
    row: int
    prompt_ids: list[int]
    number: int
    sample: Sample

    def told(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """All there is to say, JSON-able."""
        group, sample = self.group, self.sample
        return {
            "ticket": group.ticket,
            "row": self.row,
            "sample": self.number,
            "reward": sample.reward,
            "finish_reason": sample.finish_reason,
            "tokens": len(sample.token_ids),
            "trained_tokens": int(sample.loss_mask.sum()),
            "masked": group.masked,
            "mean_logprob": float(sample.logprobs[sample.loss_mask == 1].mean()) if sample.loss_mask.any() else None,
            "versions": [list(span) for span in sample.versions],
            "policy_version": group.policy_version,
            "lag": group.lag,
            "batch": group.batch,
            "worker": group.worker,
            "attempt": group.attempt,
            "prompt": tokenizer.decode(self.prompt_ids),
            "text": tokenizer.decode(sample.token_ids.tolist()),
        }


def samples(recording: Path, ticket: int | None = None) -> Iterator[_One]:
    """All recorded samples, in the order taken.

    Raises:
        ConfigError: no recording lies there.
    """
    source = record.ReplaySource(recording)
    for recorded in record.read(recording):
        if ticket is None or recorded.ticket == ticket:
            group = source.group(recorded)
            for number, sample in enumerate(group.samples):
                yield _One(recorded, group.row, group.prompt_ids.tolist(), number, sample)


def chosen(found: Iterable[_One], best: bool, worst: bool, limit: int) -> Iterable[_One]:
    """The first, or those with the highest or lowest rewards, of equal ones the earlier; 0: all, which are streamed if they are not ranked."""
    if best or worst:
        ranked = heapq.nlargest if best else heapq.nsmallest
        return ranked(limit or sys.maxsize, found, key=lambda one: one.sample.reward)
    return itertools.islice(found, limit or None)


def run_view(args: ViewArgs) -> int:
    """The command; returns its exit code.

    Raises:
        ConfigError: no recording, or no such ticket in it.
    """
    from rich.console import Console

    from mprollout.tokenizer import tokenizer_of

    if args.best and args.worst:
        raise ConfigError("--best and --worst: give one of them")
    if args.limit < 0 or args.max_chars < 0:
        raise ConfigError(f"--limit and --max-chars must be >= 0; got {args.limit} and {args.max_chars}")
    recording = record.recording_of(args.run)
    about, groups = record.about(recording), record.count(recording)
    tokenizer, console = tokenizer_of(about.get("model", "")), Console(highlight=False)
    shown = 0
    for one in chosen(samples(recording, args.ticket), args.best, args.worst, args.limit):
        shown += 1
        if args.json:
            print(json.dumps(one.told(tokenizer)))
        else:
            _show(console, one.told(tokenizer), args.max_chars)
    if not shown:
        raise ConfigError(f"{recording}: none of its {groups:,} groups is of ticket {args.ticket}")
    if not args.json:
        console.rule(style="dim")
        of = about.get("model") or "the simulated generator"
        _say(console, f"{shown:,} samples of {recording}: {groups:,} groups of {of}", "bold")
    return 0


def _show(console: Console, told: dict[str, Any], max_chars: int) -> None:
    spans = " ".join(
        f"v{version}:{start}-{end}{' (old KV)' if old_kv else ''}" for version, start, end, old_kv in told["versions"]
    )
    head = f"ticket {told['ticket']}, sample {told['sample']}: reward {told['reward']:g}"
    rest = (
        f"{told['tokens']} tokens ({told['finish_reason']}), {spans or 'no versions'}, lag {told['lag']}"
        f"{', masked' if told['masked'] else ''}, row {told['row']}, worker {told['worker']}, attempt {told['attempt']}, taken by get {told['batch']}"
    )
    console.rule(style="dim")
    _say(console, head, "bold")
    _say(console, rest, "dim")
    _say(console, _printable(told["prompt"], max_chars), "cyan")
    _say(console, _printable(told["text"], max_chars))


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)


def _printable(text: str, max_chars: int) -> str:
    """What a model wrote must not steer the terminal."""
    cut = text[:max_chars] if max_chars else text
    shown = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in cut)
    return shown + (f" ... ({len(text) - len(cut):,} characters more)" if len(cut) < len(text) else "")
