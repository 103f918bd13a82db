"""Checks native/model/ring.pml, and hints.pml where the switches say HINTS, with spin: every configuration without an error, every mutation with one.

    python native/model/check.py [--long] [NAME ...]

Needs spin and gcc; one process at a time, less than 3 GiB.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODEL, HINTS = Path(__file__).with_name("ring.pml"), Path(__file__).with_name("hints.pml")
MISSING = "spin is missing: apt install spin"

# name: switches
CONFIGURATIONS = {
    "preempted": "NT=3 ADMITTER",
    "death": "NT=2 DEATHS=1 ADMITTER",
    "recover-cut": "NT=2 D=1 DEATHS=1 CUTS=1",
    "two-deaths": "NT=2 D=1 DEATHS=2 COUNT",
    "entry-reused": "E=1 NT=3 DEATHS=1",
    "sleep": "SLEEP NT=2 NMAX=2",
    "sleep-death": "SLEEP NT=2 NMAX=2 D=1 DEATHS=1",
    "endings": "SLEEP ENDS=1 E=1 NT=2 D=1",
    "taker-death": "TDEATHS=2 NT=2 NMAX=2",
    "taker-death-asleep": "TDEATHS=1 NT=2 D=1 NMAX=2 SLEEP",
    "both-die": "TDEATHS=1 DEATHS=1 NT=2 D=1",
    "closed": "CLOSES=1 NT=3 D=1",
    "closed-elsewhere": "CLOSES=1 NT=3 D=1 OTHERPROC",
    "table": "TABLE SWEEPER NT=2 D=1",
    "retry": "RETRIES=1 GIVES=1 NT=2 D=1",
    "tickets": "TICKETS SLEEP NT=3 D=1",
    "tickets-death": "TICKETS NT=2 DEATHS=1 D=1",
    "full-ring": "E=3 NT=3",
    "full-ring-asleep": "SLEEP E=3 NT=3 NMAX=2 D=1",
    "one-cell": "C=1 E=1 NT=2 DEATHS=1 TDEATHS=1 D=1",
    "stopped": "STOPS=1 E=3 C=4 NT=3 NMAX=2",
    "wrapped-tags": "TM=2 SM=31 NT=5 D=1",
    "idle": "IDLE NT=1 D=1 E=1",
    "idle-lost": "IDLE NT=1 D=1 E=1 DEATHS=1 LOST",
    "hints-window": "HINTS NT=1",
    "hints-sweep": "HINTS BITS NT=2 GIVES=0",
}
LONG = {
    "hints-return": "HINTS NT=2",
    "hints-reuse": "HINTS NT=2 E=1",
    "hints-late": "HINTS NT=2 GIVES=0 LATE",
    "preempted-4": "NT=4 ADMITTER",
    "three-workers": "P=3 NT=3 D=1 DEATHS=1",
    "death-3": "NT=3 DEATHS=1 ADMITTER",
    "recover-cut-2": "NT=2 DEATHS=1 CUTS=1 ADMITTER",
    "two-workers-die": "NT=2 DEATHS=2 MORTALS=2 ADMITTER",
    "entry-reused-cut": "E=1 NT=3 DEATHS=1 CUTS=1 ADMITTER",
    "sleep-3": "SLEEP NT=3 NMAX=2",
    "sleep-death-2": "SLEEP NT=2 NMAX=2 DEATHS=1",
    "sleep-death-3": "SLEEP NT=3 NMAX=2 DEATHS=1 D=1",
    "endings-2": "SLEEP ENDS=1 NT=2 D=1",
    "endings-death": "SLEEP ENDS=1 E=1 NT=2 D=1 DEATHS=1",
    "taker-death-3": "TDEATHS=2 NT=3 NMAX=2",
    "taker-death-asleep-3": "TDEATHS=1 NT=3 NMAX=2 SLEEP",
    "both-die-2": "TDEATHS=1 DEATHS=1 NT=2",
    "both-die-asleep": "TDEATHS=1 DEATHS=1 NT=2 SLEEP NMAX=2",
    "closed-3": "CLOSES=1 NT=3",
    "closed-elsewhere-3": "CLOSES=1 NT=3 OTHERPROC",
    "table-3": "TABLE SWEEPER NT=3 D=1",
    "table-death": "TABLE SWEEPER NT=2 D=1 DEATHS=1",
    "retry-death": "RETRIES=1 GIVES=1 NT=2 D=1 DEATHS=1",
    "tickets-endings": "TICKETS SLEEP ENDS=1 NT=2 D=1",
    "tickets-deaths": "TICKETS SLEEP NT=2 DEATHS=1 TDEATHS=1",
    "one-cell-3": "C=1 E=1 NT=3 DEATHS=1 TDEATHS=1",
    "stopped-4": "STOPS=1 E=3 C=4 NT=4 NMAX=2",
    "wrapped-tags-6": "TM=2 SM=31 NT=6 D=1",
    "wrapped-tags-death": "TM=2 SM=31 NT=5 D=1 DEATHS=1",
    "wrapped-sequence": "C=1 E=2 TM=2 SM=3 NT=6 D=1",
    "idle-2": "IDLE NT=2 D=1",
    "idle-death": "IDLE NT=2 D=1 E=1 DEATHS=1",
    "four-cells": "C=4 E=3 NT=4 D=1",
}
# mutation, several joined by "+", small letters only tell apart: switches, the property that it breaks
MUTATIONS = {
    "TAKEN_AFTER_HEAD": ("NT=2 DEATHS=1", "recovery frees a taken group"),
    "TAKEN_AFTER_HEAD taker": ("NT=2 TDEATHS=1", "a taker's death loses the group in its hand"),
    "INDEX_ONLY": ("NT=2 DEATHS=1", "recovery frees a taken group"),
    "WORDS_ONLY": ("NT=2 DEATHS=1", "recovery frees a published group"),
    "WORDS_FIRST": ("NT=2 DEATHS=1", "recovery frees a group that is taken in between"),
    "INDEX_TO_TAIL": ("NT=2 DEATHS=1", "recovery overlooks the group beyond a tail that was not moved"),
    "NO_FREE": ("NT=3 D=1 DEATHS=1", "a published group counts as released"),
    "FREE_LATE": ("NT=3 D=1 DEATHS=1", "a late FREE overwrites TAKEN"),
    "DESCRIPTOR_LATE": ("NT=2 DEATHS=1", "the index names a descriptor that says nothing"),
    "PUBLISHING_LATE": ("NT=2 DEATHS=1", "a published ticket is not PUBLISHING yet: undeliverable, or re-issued"),
    "PAIR_NO_ENTRY": ("NT=2 DEATHS=1", "another entry's equal word proves a publication that never was: loss"),
    "PAIR_NO_WORD": ("E=1 NT=3 DEATHS=1", "a leased group proves its entry's next publication: loss"),
    "NO_GENERATION": ("E=1 NT=3", "a stale claim takes an entry's next ticket"),
    "CLAIM_STORE": ("NT=2", "two owners of one ticket"),
    "STALE_PUBLISHES": ("NT=2 RETRIES=1 D=1", "a stale attempt in the index"),
    "UNPROVEN": ("NT=2 DEATHS=1 D=1", "the recovered one lives and publishes: a stale attempt in the index"),
    "RELEASE_BEFORE_DONE": ("NT=2 DEATHS=1", "recovery re-issues a ticket that is being delivered: duplicate"),
    "CELL_STORE": ("NT=2", "a publication is overwritten"),
    "NO_HEAD_CHECK": ("E=3 NT=3", "a full ring is overwritten"),
    "FEWER_CELLS": ("E=3 NT=3", "the index can be full"),
    "NO_SECOND_LOAD": ("TM=2 SM=31 NT=6 D=1", "a lap late, an equal tag: FIFO has a hole"),
    "NO_SECOND_LOAD+NO_TAG_TEST": ("NT=4 D=1", "a late publisher writes over a filled cell"),
    "NO_SEQUENCE": ("TM=2 SM=31 NT=6 D=1", "tags wrap: a late CAS meets an equal word"),
    "even sequence": ("C=1 E=2 TM=2 SM=2 NT=6 D=1", "tag and sequence wrap together"),
    "NO_HELP": ("STOPS=1 E=3 C=4 NT=3 NMAX=2", "one stopped publisher stops all"),
    "WAKE_WINNER": (
        "SLEEP E=3 NT=3 NMAX=2",
        "who helped found the ring full, who lost says nothing: nobody wakes the taker",
    ),
    "NO_LOOK": ("SLEEP NT=2", "the taker sleeps beside a group"),
    "FIRE_NO_BUMP": ("SLEEP NT=2", "a wake between look and sleep is lost"),
    "SEEN_LATE": ("SLEEP TICKETS ENDS=1 NT=2 D=1", "an ending between look and arming is lost"),
    "BUMP_FIRST": (
        "SLEEP NT=2 NMAX=2 DEATHS=1",
        "the taker reads the bump, arms, is disarmed, sleeps, and no publish wakes it",
    ),
    "WAKE_IF_ARMED": ("SLEEP NT=2 DEATHS=1", "recovery does not pay the wake that the dead owed"),
    "BUMP_FIRST+WAKE_IF_ARMED": ("SLEEP TICKETS ENDS=1 NT=2 D=1", "the same without a death: an ending is lost"),
    "RECOVER_NO_WAKE": ("SLEEP NT=2 DEATHS=1", "the dead owed a wake"),
    "TARGET_FROM_PENDING": (
        "SLEEP TICKETS NT=2 D=1",
        "a group between look and wait moves the target: the taker sleeps beside it",
    ),
    "LOOK_BEFORE_IDLE": ("IDLE NT=1 D=1 E=1", "a worker sleeps beside a READY ticket"),
    "RECOVER_NO_BELLS": ("IDLE NT=1 D=1 E=1 DEATHS=1 LOST", "a worker sleeps beside a re-issued ticket"),
    "ADOPT_NO_HEAD": ("NT=2 TDEATHS=1", "TAKEN before head moved: taken twice"),
    "POSITION_AFTER_TAKEN": ("NT=3 TDEATHS=1", "the successor does not know what stands at head: taken twice"),
    "ADOPT_NO_POSITION": ("NT=3 TDEATHS=1 NMAX=2", "what is delivered again is out of order"),
    "NO_EPOCH": ("CLOSES=1 NT=3 D=1", "an old lease releases what its successor reads"),
    "NO_SHAKE": ("HINTS NT=2", "a ticket that came back lies before the window: its worker sleeps beside it"),
    "SEEN_ALWAYS": ("HINTS NT=2 GIVES=0 LATE", "a look at all that leaves one behind is the last"),
    "ADMITTED_FIRST": ("HINTS NT=2", "front passes a place that is not written yet"),
    "BITS_FIRST": ("HINTS BITS NT=2 GIVES=0", "a bit that is set between loses its summary: never swept"),
    "SUMMARY_FIRST": (
        "HINTS BITS NT=2 GIVES=0",
        "a summary that is cleared between says nothing of the bit: never swept",
    ),
    "ADOPT_STORE": ("CLOSES=1 NT=3 D=1 OTHERPROC", "the adoption takes back what was released and reused"),
}


@dataclass
class Result:
    errors: int
    states: int
    seconds: float
    megabytes: int
    what: str  # the first error, in spin's words
    trail: str  # the end of the steps that lead to it


def defines(switches: str, mutation: str = "") -> list[str]:
    """The -D flags; of a mutation's name the part in capitals counts."""
    mutations = re.match(r"[A-Z_+]*", mutation)
    assert mutations is not None
    return [f"-D{s}" for s in switches.split()] + [f"-DM_{m}" for m in mutations.group().split("+") if m]


def check(flags: list[str], optimize: str = "-O0") -> Result:
    """Run spin, gcc and the verifier. A small search ends sooner with -O0: gcc -O2 takes 5 s.

    Raises:
        RuntimeError: a tool failed, or the search was not complete.
    """
    with tempfile.TemporaryDirectory(prefix="mprollout-model-") as folder:
        model = HINTS if "-DHINTS" in flags else MODEL
        shutil.copy(model, folder)

        def run(*command: str, may_fail: bool = False) -> str:
            done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
            if not may_fail and (done.returncode != 0 or "Error:" in done.stdout):
                raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
            return done.stdout

        def number(pattern: str) -> float:
            found = re.search(pattern, out)
            if found is None:
                raise RuntimeError(f"{' '.join(flags)}: expected {pattern!r} in\n{out[:2000]}")
            return float(found.group(1))

        run("spin", "-a", *flags, model.name)
        run("gcc", optimize, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2800", "-o", "pan", "pan.c")
        start = time.monotonic()
        out = run("./pan", "-m100000", "-w24" if optimize == "-O2" else "-w22")
        seconds = time.monotonic() - start
        errors = int(number(r"errors: (\d+)"))
        if errors == 0 and ("Search not completed" in out or "search depth too small" in out):
            raise RuntimeError(f"{' '.join(flags)}: the search was not complete:\n{out[:2000]}")
        what = re.search(r"pan:1: (.*) \(at depth", out)
        return Result(
            errors=errors,
            states=int(number(r"([\d.e+]+) states, stored")),
            seconds=seconds,
            megabytes=round(number(r"([\d.]+)\s+total actual memory")),
            what=what.group(1) if what else "",
            trail=run("spin", "-t", "-p", *flags, model.name, may_fail=True)[-8000:] if errors else "",
        )


def main() -> int:
    """Returns the number of wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="the large configurations instead")
    parser.add_argument("names", nargs="*", help="only these configurations and mutations")
    arguments = parser.parse_args()
    if shutil.which("spin") is None:
        print(MISSING)
        return 1
    wrong = 0
    configurations = CONFIGURATIONS | LONG if arguments.names else LONG if arguments.long else CONFIGURATIONS
    for name, switches in configurations.items():
        if arguments.names and name not in arguments.names:
            continue
        r = check(defines(switches), "-O2" if name in LONG else "-O0")
        wrong += r.errors != 0
        print(
            f"{'WRONG' if r.errors else 'ok':6} {name:24}{r.states:>10,} states {r.seconds:5.1f} s {r.megabytes:5} MB  {switches}",
            flush=True,
        )
        if r.errors:
            print(r.trail, r.what, sep="\n")
    for name, (switches, breaks) in ({} if arguments.long else MUTATIONS).items():
        if arguments.names and name not in arguments.names:
            continue
        r = check(defines(switches, name))
        wrong += r.errors == 0
        print(
            f"{'caught' if r.errors else 'MISSED'} {name:24}{r.states:>10,} states {r.seconds:5.1f} s  {breaks} [{switches}: {r.what}]",
            flush=True,
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
