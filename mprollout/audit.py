"""`mprollout audit RUN`, and `RolloutEngine.audit`: the proof that every ticket is in one place.

    RUN/ledger --read--> Snapshot --+
    the segment's live table -------+--partition--> counts, or the tickets that are in two places or in none

The proof is a partition of the tickets [0, next): a ticket without an outcome holds one slot of the ledger, and if it was handed out it stands
in exactly one entry of the live table, unless it is parked in the trainer's process; no other ticket stands in a live entry. What is
left was taken, or ended with a reason. From outside it is taken from a moment at which nothing moved: ledger, table, ledger again.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import tyro

from mprollout import _native
from mprollout.errors import ConfigError
from mprollout.ledger_file import LEDGER, Kind, Snapshot, decode, read, runs
from mprollout.monitor import RunEnded, RunView

STABLE_TIMEOUT_S = 5.0
_PAUSE_S = 0.002
_NAMED = 20
_STATES = {
    getattr(_native, name): name.lower() for name in ("READY", "RUNNING", "PUBLISHING", "DONE", "FILTERED", "FAILED")
}
Row = tuple[int, int, int, int, int, int, int]
"""Of `Segment.table`."""


@dataclasses.dataclass(kw_only=True)
class AuditArgs:
    """Prove from outside that a run has lost no ticket and has none twice. The run lives, waits for a trainer, or is dead; it is not disturbed.

    Example: `mprollout audit runs/7`, or `mprollout audit runs/7 --json` for one JSON object.

    A living run: every ticket is counted in one place: ready, running, publishing (made, and not yet taken), parked (delivered, and not yet
    counted as taken), waiting (to be handed out again), taken, filtered or failed by reason. A run that waits for a trainer: the same, and what its
    trainer's death cut is named. A dead run: what its ledger, RUN/ledger, says; open is what it had under way. A resume trains what is
    unfinished (open, parked, waiting), and again what was taken since the checkpoint that it loads.

    Exit codes: 0 proven; 1 a broken partition (the tickets are named); 2 no such run, or none that could be read.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder (`EngineConfig.run_dir`)."""
    json: bool = False
    """One JSON object, for scripts."""


class Partition(msgspec.Struct, kw_only=True):
    """Where the tickets are."""

    tickets: dict[str, int]
    """By place. They add up to the ledger's `next` if nothing is broken."""
    broken: list[str]
    """One sentence a ticket that is in two places or in none."""
    cut: list[str]
    """What the death of the trainer cut: a ticket between table and ledger. A trainer that attaches settles it."""


class Audit(Partition, kw_only=True):
    """What `mprollout audit` says."""

    run: str
    state: str
    """living | orphaned | dead"""
    proven: bool
    next: int
    """Tickets handed out so far."""
    unfinished: list[list[int]]
    """Runs of tickets without an outcome, first and last."""
    trainer_pid: int
    source: str


def partition(ledger: Snapshot, table: Iterable[Row]) -> Partition:
    """Hold ledger and table, of one moment, against each other."""
    tickets = collections.Counter({"taken": ledger.taken, **ledger.ended})
    broken, cut = list(ledger.broken), []
    handed_out = {ticket for ticket, kind in ledger.unresolved.items() if kind is Kind.OPEN}
    seen: set[int] = set()
    for ticket, number, *_ in table:
        state, kind = _STATES[number], ledger.unresolved.get(ticket)
        if ticket in seen:
            broken.append(f"ticket {ticket} stands twice in the live table")
            continue
        seen.add(ticket)
        if kind is Kind.OPEN:
            tickets["parked" if state == "done" else state] += 1  # delivered, and not yet counted
        elif state == "done" or (kind is Kind.PARKED and state == "publishing"):
            pass  # it is or was delivered, to this trainer or the one before; the ledger has the rest
        elif ledger.turning and ticket == ledger.peek and state in ("ready", "running", "publishing"):
            cut.append(f"ticket {ticket} was admitted ({state}), and the trainer died before it was handed out")
        elif kind is not None:
            broken.append(f"ticket {ticket} is {state} in the live table and {kind.name.lower()} in the ledger")
        elif ticket < ledger.next:
            broken.append(f"ticket {ticket} is {state} in the live table, and has an outcome")
        else:
            broken.append(f"ticket {ticket} is {state} in the live table, and was never handed out")
    for ticket in sorted(handed_out - seen):
        if ledger.turning:
            cut.append(f"ticket {ticket} ended, and the trainer died before its reason was recorded")
            tickets["cut"] += 1
        else:
            broken.append(f"ticket {ticket} was handed out, has no outcome and stands nowhere in the live table")
    tickets.update(kind.name.lower() for kind in ledger.unresolved.values() if kind is not Kind.OPEN)
    return Partition(tickets={place: count for place, count in tickets.items() if count}, broken=broken, cut=cut)


def check(ledger: Snapshot, table: Iterable[Row]) -> dict[str, int]:
    """The count of each place.

    Raises:
        AssertionError: a ticket is in two places or in none; names it.
    """
    found = partition(ledger, table)
    if found.broken:
        raise AssertionError("audit: " + "; ".join(found.broken[:_NAMED]))
    return found.tickets


def prove(run: Path, timeout_s: float = STABLE_TIMEOUT_S) -> Audit:
    """Audit a run from outside. Blocks until there is a stable snapshot.

    Raises:
        RunEnded: there is no such run.
        ConfigError: its ledger is none, or of another run, or never stood still for `timeout_s`; says which.
    """
    try:
        view = RunView(run)
    except RunEnded as ended:
        return _dead(run, str(ended))
    try:
        return _living(run, view, timeout_s)
    except RunEnded as ended:
        return _dead(run, str(ended))
    finally:
        view.close()


def _living(run: Path, view: RunView, timeout_s: float) -> Audit:
    def look() -> tuple[Snapshot, list[Row]] | str:
        """A moment at which nothing moved; or why there was none."""
        view.ask()
        try:
            before = read(run / LEDGER)
            table = view.table()
            after = read(run / LEDGER)
        except FileNotFoundError:
            return "the run has no ledger there (it is starting, or it was removed)"
        ledger = decode(after, str(run / LEDGER))
        owner, trainer = ledger.owner, view.trainer_pid
        if owner.keeper_pid != view.keeper_pid or trainer not in (0, owner.trainer_pid):
            return (
                f"the ledger there is of keeper pid {owner.keeper_pid} and trainer pid {owner.trainer_pid}; "
                f"the run's are {view.keeper_pid} and {trainer or 'none'}"
            )
        view.ask()
        if before != after or view.trainer_pid != trainer:
            return "tickets moved between two looks, each time"
        if ledger.turning and trainer:
            return f"the trainer (pid {trainer}) stands still in the middle of a turn: it is stopped, or something holds its GIL"
        return ledger, table

    deadline = time.monotonic() + timeout_s
    while isinstance(found := look(), str):
        if time.monotonic() > deadline:
            raise ConfigError(f"{run}: no stable snapshot within {timeout_s} s: {found}")
        time.sleep(_PAUSE_S)  # the run's own pace decides; nothing could tell
    ledger, table = found
    return _audit(run, "living" if view.trainer_pid else "orphaned", ledger, partition(ledger, table))


def _dead(run: Path, why: str) -> Audit:
    path = run / LEDGER
    try:
        ledger = decode(read(path), str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunEnded(f"{why}; and no run has left its ledger there ({error})") from error
    tickets = collections.Counter({"taken": ledger.taken, **ledger.ended})
    tickets.update(kind.name.lower() for kind in ledger.unresolved.values())
    cut = ["its trainer was killed in the middle of a turn: what had just ended may stand among the unfinished"]
    found = Partition(
        tickets={place: count for place, count in tickets.items() if count},
        broken=ledger.broken,
        cut=cut if ledger.turning else [],
    )
    return _audit(run, "dead", ledger, found)


def _audit(run: Path, state: str, ledger: Snapshot, found: Partition) -> Audit:
    return Audit(
        run=str(run),
        state=state,
        proven=not found.broken,
        next=ledger.next,
        tickets=found.tickets,
        broken=found.broken,
        cut=found.cut,
        unfinished=runs(ledger.unresolved),
        trainer_pid=ledger.owner.trainer_pid,
        source=ledger.owner.source,
    )


def run_audit(args: AuditArgs) -> int:
    """Say it; returns the exit code."""
    found = prove(args.run)
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        _show(found)
    return 0 if found.proven else 1


def _show(found: Audit) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    names = {
        "living": f"living, trainer pid {found.trainer_pid}",
        "orphaned": f"its trainer (pid {found.trainer_pid}) died; it waits for one that attaches",
        "dead": f"dead; its trainer was pid {found.trainer_pid}",
    }
    say(f"{found.run}: {names[found.state]}", "bold")
    table = Table("place")
    table.add_column("tickets", justify="right")
    for place, count in found.tickets.items():
        table.add_row(escape(place), f"{count:,}")
    table.add_section()
    table.add_row("handed out", f"{found.next:,}")
    console.print(table)
    if found.unfinished and found.state == "dead":
        shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in found.unfinished]
        rest = f" and {len(shown) - _NAMED} runs more" if len(shown) > _NAMED else ""
        say(f"unfinished, to be trained by a resume: {', '.join(shown[:_NAMED])}{rest}")
    for text in found.cut[:_NAMED]:
        say(f"cut: {text}", "yellow")
    for text in found.broken[:_NAMED]:
        say(f"BROKEN: {text}", "bold red")
    if len(found.broken) > _NAMED:
        say(f"BROKEN: {len(found.broken) - _NAMED} more (--json has all)", "bold red")
    say("proven: every ticket is in one place" if found.proven else "NOT proven")
