"""The audit: what it proves of a run that lives, waits or is dead, and that it names each ticket that is in two places or in none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engines import config, descendants, until
from played import played

import mprollout as mp
from mprollout import _native
from mprollout.audit import Audit, Row, partition, prove
from mprollout.cli import main
from mprollout.folders import clean_stale_folders
from mprollout.ledger import Ledger
from mprollout.ledger_file import LEDGER, Kind, Owner, Word

pytestmark = pytest.mark.timeout(90)


def shown(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = main(["audit", str(run), *more])
    said = capsys.readouterr()
    return code, said.out + said.err


def adds_up(found: Audit) -> None:
    assert (found.proven, found.broken, found.cut) == (True, [], [])
    assert sum(found.tickets.values()) == found.next


def live(engine: mp.RolloutEngine) -> list[int]:
    return sorted(engine._ledger.snapshot().unresolved)


@contextlib.contextmanager
def stored(engine: mp.RolloutEngine, words: memoryview, index: int, word: int) -> Iterator[None]:
    """Nobody moves meanwhile."""
    assert engine._attendant is not None
    with engine._attendant.lock:
        before, words[index] = words[index], word
        try:
            yield
        finally:
            words[index] = before


def test_a_run_is_audited_alive_and_dead_and_a_tear_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = shown(tmp_path, capsys)
    assert code == 2 and "nobody keeps a run there" in text and "no run has left its ledger" in text
    gate = mp.GateConfig(max_live_groups=10)
    with mp.RolloutEngine(config(rows=60, gate=gate, run_dir=str(tmp_path))) as engine:
        for _ in range(6):
            adds_up(prove(tmp_path))  # on the move
            engine.get(4, timeout=20).release()
        until(lambda: engine.stats().pending == 10, "the gate is full")
        found = prove(tmp_path)
        adds_up(found)
        assert (found.state, found.trainer_pid, found.source) == ("living", os.getpid(), engine.source.fingerprint)
        assert found.tickets == engine.audit() == {"taken": 24, "publishing": 10}
        assert (tmp_path / LEDGER).stat().st_mode & 0o777 == 0o600

        ledger = engine._ledger
        ticket, free = live(engine)[0], ledger._free[0]
        with stored(engine, ledger._file.slots, ledger._slot[ticket], 0):
            torn = f"ticket {ticket} is publishing in the live table, and has an outcome"
            assert prove(tmp_path).broken == [torn]
            code, text = shown(tmp_path, capsys)
            assert code == 1 and f"BROKEN: {torn}" in text and "NOT proven" in text
        with stored(engine, ledger._file.slots, free, 0 << 2 | Kind.OPEN):
            code, text = shown(tmp_path, capsys, "--json")
            torn = "ticket 0 was handed out, has no outcome and stands nowhere in the live table"
            assert code == 1 and json.loads(text)["broken"] == [torn] and not json.loads(text)["proven"]
        with (
            stored(engine, ledger._file.header, Word.TURN, ledger._file.header[Word.TURN] + 1),
            pytest.raises(mp.ConfigError, match=r"no stable snapshot within 0\.1 s: the trainer .* middle of a turn"),
        ):
            prove(tmp_path, timeout_s=0.1)

        (tmp_path / LEDGER).rename(tmp_path / "kept")
        with pytest.raises(mp.ConfigError, match="the run has no ledger there"):
            prove(tmp_path, timeout_s=0.1)
        Ledger().keep_in(tmp_path / LEDGER, Owner(trainer_pid=1, keeper_pid=2), 4)
        with pytest.raises(mp.ConfigError, match="there is of keeper pid 2 and trainer pid 1; the run's are"):
            prove(tmp_path, timeout_s=0.1)
        (tmp_path / "kept").rename(tmp_path / LEDGER)

        engine.get(4, timeout=20).release()  # nobody was disturbed
        adds_up(prove(tmp_path))
        unfinished = live(engine)
    found = prove(tmp_path)
    adds_up(found)
    assert found.state == "dead" and found.tickets["taken"] == 28
    assert [t for first, last in found.unfinished for t in range(first, last + 1)][: len(unfinished)] == unfinished
    code, text = shown(tmp_path, capsys)
    assert code == 0 and "unfinished, to be trained by a resume: " in text and "every ticket is in one place" in text
    damage(tmp_path / LEDGER, Word.NEXT, 1)
    code, text = shown(tmp_path, capsys)
    assert code == 1 and "and none from 1 on was handed out" in text
    (tmp_path / LEDGER).write_bytes(b"a file of somebody else")
    code, text = shown(tmp_path, capsys)
    assert code == 2 and "expected a ledger with whole words" in text


def damage(path: Path, word: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    memoryview(data).cast("q")[word] = value
    path.write_bytes(data)


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["audit", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "mprollout audit runs/7 --json" in text and "Exit codes: 0 proven; 1 a broken partition" in text


def row(ticket: int, state: int) -> Row:
    return (ticket, state, 0, 0, 0, 0, 1)


def test_each_tear_is_named_and_nothing_that_is_whole() -> None:
    def ledger(turning: bool = False) -> Ledger:
        """0 and 3 open, 1 parked, 2 waiting, 4 taken, 5 failed."""
        made = Ledger()
        for _ in range(6):
            made.next_ticket()
        made.park([1])
        made.send_back(2)
        made.resolve(4, "taken")
        made.resolve(5, "failed:reward")
        made._file.header[Word.TURN] += turning
        return made

    whole = [row(0, _native.READY), row(3, _native.RUNNING)]
    for more in (
        [],
        [row(1, _native.DONE)],
        [row(1, _native.PUBLISHING)],
        [row(2, _native.DONE), row(4, _native.DONE)],
    ):
        found = partition(ledger().snapshot(), [*whole, *more])
        assert (found.broken, found.cut) == ([], [])
        assert found.tickets == {"taken": 1, "failed:reward": 1, "ready": 1, "running": 1, "parked": 1, "waiting": 1}
    delivered = partition(ledger().snapshot(), [whole[0], row(3, _native.DONE)])  # and not yet counted
    assert (delivered.broken, delivered.tickets["parked"]) == ([], 2)
    tears = [
        ([whole[0]], "ticket 3 was handed out, has no outcome and stands nowhere in the live table"),
        ([*whole, row(4, _native.PUBLISHING)], "ticket 4 is publishing in the live table, and has an outcome"),
        ([*whole, row(5, _native.FAILED)], "ticket 5 is failed in the live table, and has an outcome"),
        ([*whole, row(6, _native.READY)], "ticket 6 is ready in the live table, and was never handed out"),
        ([*whole, row(2, _native.RUNNING)], "ticket 2 is running in the live table and waiting in the ledger"),
        ([*whole, row(1, _native.RUNNING)], "ticket 1 is running in the live table and parked in the ledger"),
        ([*whole, row(3, _native.READY)], "ticket 3 stands twice in the live table"),
    ]
    for table, torn in tears:
        assert partition(ledger().snapshot(), table).broken == [torn]

    # killed within a turn: between the table and the ledger stands what the turn had under way, and nothing else
    found = partition(ledger(turning=True).snapshot(), [whole[0], row(2, _native.READY)])
    assert found.broken == [] and sum(found.tickets.values()) == 6
    assert found.cut == [
        "ticket 2 was admitted (ready), and the trainer died before it was handed out",
        "ticket 3 ended, and the trainer died before its reason was recorded",
    ]
    found = partition(ledger(turning=True).snapshot(), [*whole, row(6, _native.READY)])
    assert found.broken == ["ticket 6 is ready in the live table, and was never handed out"]  # 2 comes before it


def test_the_engine_says_of_itself_what_is_torn() -> None:
    with played() as on:
        until(lambda: on.engine.audit() == {"ready": 6}, "all are admitted")
        slots, slot = on.engine._ledger._file.slots, on.engine._ledger._slot[4]
        slots[slot] = 0
        with pytest.raises(AssertionError, match="audit: ticket 4 is ready in the live table, and has an outcome"):
            on.engine.audit()
        slots[slot] = 4 << 2 | Kind.OPEN
        assert on.engine.audit() == {"ready": 6}


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import msgspec
import mprollout as mp, engines, rewards
from mprollout.ledger import Ledger

resolve = Ledger.resolve

def killed(ledger, ticket, outcome):
    if outcome != "taken":  # swept from the table, and not yet recorded
        os.kill(os.getpid(), signal.SIGKILL)
    resolve(ledger, ticket, outcome)

if __name__ == "__main__":
    Ledger.resolve = killed
    changes = {{"reward": mp.RewardConfig(rewards.broken_for_row_3), "fault": mp.FaultConfig(max_attempts=1)}}
    with mp.RolloutEngine(msgspec.structs.replace(engines.attachable({run_dir!r}), **changes)) as engine:
        while True:
            engine.get(1).release()
"""


@pytest.mark.slow
def test_what_a_kill_cuts_within_a_turn_is_named_while_the_keeper_waits_and_when_all_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), run_dir=str(tmp_path)))
    with subprocess.Popen([sys.executable, str(script)], start_new_session=True) as trainer:
        try:
            until(lambda: len(descendants(trainer.pid)) >= 3, "keeper and workers")
            below = descendants(trainer.pid)
            assert trainer.wait(timeout=40) == -signal.SIGKILL
        finally:
            trainer.kill()
    (keeper,) = [process for process in below if "mprollout.keeper" in " ".join(process.cmdline())]
    try:
        until(lambda: prove(tmp_path).state == "orphaned", "the keeper has noticed")
        orphaned, in_words = prove(tmp_path), shown(tmp_path, capsys)
    finally:
        keeper.kill()
        assert psutil.wait_procs(below, timeout=10)[1] == []
        clean_stale_folders()  # as the next start does
    assert orphaned.state == "orphaned" and orphaned.proven
    assert orphaned.cut == ["ticket 3 ended, and the trainer died before its reason was recorded"]
    assert sum(orphaned.tickets.values()) == orphaned.next and orphaned.tickets["cut"] == 1
    code, text = in_words
    assert code == 0 and "it waits for one that attaches" in text and "cut: ticket 3 ended" in text
    found = prove(tmp_path)
    assert found.state == "dead" and found.proven and len(found.cut) == 1
    assert sum(found.tickets.values()) == found.next
    assert any(first <= 3 <= last for first, last in found.unfinished)
