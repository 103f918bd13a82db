"""The ledger against sets, cut between any two stores and at any line, and over data that no memory holds."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from engines import drain
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from played import Interrupter, played

import mprollout as mp
from mprollout import ledger_file
from mprollout.gate import Gate
from mprollout.ledger import Ledger
from mprollout.ledger_file import Kind, Owner, Snapshot, Word, decode, read
from mprollout.source import PromptSource

OUTCOMES = ["taken", "failed:reward", "filtered:zero_spread", "dropped:of a name that no config has"]


class LedgerMachine(RuleBasedStateMachine):
    """A `Ledger` against the sets that it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.unresolved: dict[int, Kind] = {}
        self.ended: dict[str, int] = {}
        self.next = 0
        self.adopted: set[int] = set()
        self.may_adopt = True
        self.folder = tempfile.TemporaryDirectory()
        self.path: Path | None = None

    def teardown(self) -> None:
        self.folder.cleanup()

    def of(self, *kinds: Kind) -> list[int]:
        return sorted(ticket for ticket, kind in self.unresolved.items() if kind in kinds)

    @rule(count=st.integers(1, 90))
    def hand_out(self, count: int) -> None:
        for _ in range(count):
            expected = min(self.of(Kind.WAITING), default=self.next)
            assert self.ledger.peek_ticket() == self.ledger.peek_ticket() == self.ledger.next_ticket() == expected
            self.unresolved[expected] = Kind.OPEN
            self.next = max(self.next, expected + 1)
        self.may_adopt = False

    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES), count=st.integers(1, 60))
    def resolve(self, data: st.DataObject, outcome: str, count: int) -> None:
        for _ in range(min(count, len(self.of(Kind.OPEN, Kind.PARKED)))):
            ticket = data.draw(st.sampled_from(self.of(Kind.OPEN, Kind.PARKED)))
            self.ledger.resolve(ticket, outcome)
            del self.unresolved[ticket]
            self.adopted.discard(ticket)
            self.ended[outcome] = self.ended.get(outcome, 0) + 1

    @precondition(lambda self: self.of(Kind.OPEN, Kind.PARKED))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.of(Kind.OPEN, Kind.PARKED)))
        self.ledger.park([ticket])
        self.unresolved[ticket] = Kind.PARKED

    @precondition(lambda self: self.of(Kind.OPEN, Kind.PARKED))
    @rule(data=st.data())
    def send_back(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.of(Kind.OPEN, Kind.PARKED)))
        self.ledger.send_back(ticket)
        self.unresolved[ticket] = Kind.WAITING
        self.adopted.discard(ticket)

    @rule(data=st.data())
    def resolve_what_may_not_be(self, data: st.DataObject) -> None:
        """Resolved already, waiting, never handed out."""
        ticket = data.draw(st.integers(0, self.next + 3))
        if self.unresolved.get(ticket) in (None, Kind.WAITING):
            with pytest.raises(
                AssertionError, match=f"ticket {ticket} .taken. is resolved twice or was never admitted"
            ):
                self.ledger.resolve(ticket, "taken")
            self.ledger.park([ticket]) if ticket not in self.unresolved else None  # nothing, whatever it was

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """Through a checkpoint: all that has no outcome waits, some of what was taken with it."""
        taken = [ticket for ticket in range(self.next) if ticket not in self.unresolved]
        without = data.draw(st.sets(st.sampled_from(taken), max_size=3)) if taken else set()
        if len(without) > self.ended.get("taken", 0):
            without = set()
        state = json.loads(json.dumps(self.ledger.state(without)))
        runs = state["unresolved"]
        assert sum(last - first + 1 for first, last in runs) == len(self.unresolved) + len(without)
        assert all(one[1] + 1 < other[0] for one, other in itertools.pairwise(runs))  # no two could be one
        self.ledger, self.path = Ledger.from_state(state), None
        self.unresolved = dict.fromkeys([*self.unresolved, *without], Kind.WAITING)
        if without:
            self.ended["taken"] -= len(without)
        self.adopted, self.may_adopt = set(), True

    @precondition(lambda self: self.may_adopt)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """A dead trainer had these live; some of them were delivered to it."""
        candidates = [*self.unresolved, *range(self.next, self.next + 30)]
        live = data.draw(st.sets(st.sampled_from(candidates), max_size=12))
        parked = data.draw(st.sets(st.sampled_from(sorted(live)), max_size=3)) if live else set()
        self.ledger.adopt(live, parked)
        after = max([self.next - 1, *live]) + 1
        for ticket in range(self.next, after):
            self.unresolved[ticket] = Kind.WAITING
        self.unresolved |= {ticket: Kind.PARKED if ticket in parked else Kind.OPEN for ticket in live}
        self.next, self.adopted, self.may_adopt = after, live, False

    @rule(live=st.integers(0, 40))
    def keep_in_a_file(self, live: int) -> None:
        self.path = Path(self.folder.name) / ledger_file.LEDGER
        self.ledger.keep_in(self.path, Owner(trainer_pid=7, source="rows"), live, ["too long"])
        assert self.path.stat().st_mode & 0o777 == 0o600 and len(list(self.path.parent.iterdir())) == 1

    @rule()
    def let_go(self) -> None:
        self.ledger.let_go()
        if self.path is not None:
            self.look(decode(read(self.path), "file"))  # as it was left
            self.path = None

    @invariant()
    def agrees(self) -> None:
        ledger = self.ledger
        assert ledger.next == self.next
        assert ledger.resolved == self.next - len(self.unresolved)
        assert ledger.taken == self.ended.get("taken", 0)
        assert ledger.counts == {name: count for name, count in self.ended.items() if count}
        assert ledger.watermark == min(self.unresolved, default=self.next)
        assert [t for t in range(self.next + 2) if not ledger.is_resolved(t)] == [
            *sorted(self.unresolved),
            self.next,
            self.next + 1,
        ]
        following = min(self.of(Kind.WAITING), default=self.next)
        assert ledger.ahead == sum(ticket > following for ticket in self.adopted)
        self.look(ledger.snapshot())
        if self.path is not None:
            self.look(decode(read(self.path), "file"))

    @invariant()
    def is_no_larger_than_what_is_live(self) -> None:
        # The heap and the free ones are lists of those; a dictionary grows by what is in it.
        assert len(self.ledger._slot) == len(self.unresolved)
        assert len(self.ledger._waiting) <= len(self.ledger._file.slots) + len(self.unresolved)

    def look(self, seen: Snapshot) -> None:
        assert (seen.next, seen.unresolved, seen.broken) == (self.next, self.unresolved, [])
        assert (seen.taken, seen.turning) == (self.ended.get("taken", 0), False)
        assert seen.ended == {name: count for name, count in self.ended.items() if count and name != "taken"}
        assert seen.peek == min(self.of(Kind.WAITING), default=self.next)


LedgerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
TestLedgerMachine = LedgerMachine.TestCase


# -- cut anywhere ----------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, tuple[Callable[[Ledger], Any], Callable[[Ledger], bool]]] = {
    "hand out": (Ledger.next_ticket, lambda ledger: ledger.next == 9),
    "hand out again": (Ledger.next_ticket, lambda ledger: ledger.snapshot().unresolved[3] is Kind.OPEN),
    "park": (lambda ledger: ledger.park([5]), lambda ledger: ledger.snapshot().unresolved[5] is Kind.PARKED),
    "send back": (lambda ledger: ledger.send_back(5), lambda ledger: ledger.snapshot().unresolved[5] is Kind.WAITING),
    "take": (lambda ledger: ledger.resolve(5, "taken"), lambda ledger: ledger.is_resolved(5)),
    "end": (lambda ledger: ledger.resolve(5, "failed:reward"), lambda ledger: ledger.is_resolved(5)),
}


def at_work(waiting: bool) -> Ledger:
    """8 tickets were handed out, two of them ended, one failed as `end` will; ticket 3 waits or does not."""
    ledger = Ledger()
    for _ in range(8):
        ledger.next_ticket()
    ledger.resolve(0, "taken")
    ledger.resolve(6, "failed:reward")
    if waiting:
        ledger.send_back(3)
    return ledger


class Recorder:
    """Words that remember what is stored into them."""

    def __init__(self, words: memoryview, at: int, stores: list[tuple[int, int]]) -> None:
        self._words, self._at, self._stores = words, at, stores

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, word: int) -> None:
        self._stores.append((self._at + index, word))
        self._words[index] = word


def meaning(seen: Snapshot) -> tuple[Any, ...]:
    return seen.next, seen.unresolved, seen.ended, seen.taken, seen.turning


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_between_any_two_stores_leaves_the_ledger_before_or_after(name: str) -> None:
    change, _ = OPERATIONS[name]
    ledger = at_work(waiting=name == "hand out again")
    if name == "hand out":
        ledger.peek_ticket()
    before, file, stores = bytes(ledger._file.bytes), ledger._file, []
    words = len(before) // 8
    starts = {"header": 0, "counts": words - len(file.slots) - len(file.counts), "slots": words - len(file.slots)}
    for part, at in starts.items():
        setattr(file, part, Recorder(getattr(file, part), at, stores))
    change(ledger)
    assert ledger._file is file, "it was written anew instead of being changed"
    after = meaning(decode(file.bytes, "after"))
    assert after != meaning(decode(before, "before"))
    replayed, met = bytearray(before), []
    for index, word in [(0, int.from_bytes(before[:8], "little")), *stores]:  # the empty prefix first
        memoryview(replayed).cast("q")[index] = word
        seen = decode(replayed, "prefix")
        assert seen.broken == []
        met.append(meaning(seen) == after)
        assert met[-1] or meaning(seen) == meaning(decode(before, "before"))
    assert met == sorted(met) and met[-1]  # once it is done it stays done
    assert bytes(replayed) == bytes(file.bytes)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_signal_at_any_line_leaves_a_ledger_in_which_it_can_be_done_again(name: str) -> None:
    change, is_done = OPERATIONS[name]
    whole = at_work(waiting=name == "hand out again")
    change(whole)
    for k in range(1, 100):
        ledger, interrupter = at_work(waiting=name == "hand out again"), Interrupter()
        try:
            interrupter.run(k, lambda: change(ledger))  # noqa: B023 (called at once)
        except KeyboardInterrupt:
            assert ledger.snapshot().broken == []
            if not is_done(ledger):
                change(ledger)
        assert meaning(ledger.snapshot()) == meaning(whole.snapshot()), f"cut at {interrupter.where}"
        assert (ledger.taken, ledger.counts, ledger.watermark) == (whole.taken, whole.counts, whole.watermark)
        for _ in range(300):  # no slot is lost, and none is given twice
            ledger.resolve(ledger.next_ticket(), "taken")
        assert len(ledger._file.slots) == len(whole._file.slots) and ledger.snapshot().broken == []
        assert set(ledger.snapshot().unresolved) == set(ledger._slot)
        if not interrupter.where:
            break
    assert k > 3  # lines


def test_a_kill_while_it_is_written_anew_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ledger = tmp_path / "ledger", at_work(waiting=True)
    ledger.keep_in(path, Owner(), 8)
    before = read(path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            ledger.resolve(5, "dropped:of a new name")
    assert read(path) == before
    ledger.resolve(5, "dropped:of a new name")
    assert decode(read(path), "file").ended == {"failed:reward": 1, "dropped:of a new name": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["ledger"]


def test_a_full_disk_is_an_error_at_the_start_and_no_bus_error_later(tmp_path: Path) -> None:
    with pytest.raises(mp.ConfigError, match="the ledger cannot be kept there"):
        at_work(False).keep_in(tmp_path / "no such folder" / "ledger", Owner(), 8)
    with pytest.raises(mp.ConfigError, match="the ledger cannot be kept there"):
        at_work(False).keep_in(tmp_path / "ledger", Owner(), 1 << 56)
    assert list(tmp_path.iterdir()) == []


# -- what is no ledger -----------------------------------------------------------------------------------------------


def test_what_is_no_ledger_is_refused_and_named(tmp_path: Path) -> None:
    path, ledger = tmp_path / "ledger", at_work(waiting=True)
    with pytest.raises(FileNotFoundError):
        read(path)
    ledger.keep_in(path, Owner(source="rows"), 8)
    whole = read(path)
    assert decode(whole, "file").owner == Owner(source="rows")
    text_at = 8 * 8
    changes: dict[str, bytes] = {
        "whole words": whole[:20],
        "its magic word": b"#!/bin/sh\n" * 32,
        "sizes that add up": whole[:-8],
        "its text": whole[:text_at] + b"\xff" + whole[text_at + 1 :],
        "format 1": whole[:8] + (2).to_bytes(8, "little") + whole[16:],
    }
    for what, data in changes.items():
        with pytest.raises(mp.ConfigError, match=f"the file: expected a ledger with {what}.*; got "):
            decode(data, "the file")
    for word in (Word.TEXT_WORDS, Word.OUTCOMES, Word.SLOTS):
        for value in (-1, 1 << 40, (1 << 63) - 1):
            data = bytearray(whole)
            memoryview(data).cast("q")[word] = value
            with pytest.raises(mp.ConfigError, match="expected a ledger with"):
                decode(data, "the file")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        read(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(mp.ConfigError, match="expected a file of uid"):
        read(tmp_path / "fifo")


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_ledger_with_any_word_changed_is_read_or_refused(data: st.DataObject) -> None:
    damaged = bytearray(at_work(waiting=True)._file.bytes)
    words = memoryview(damaged).cast("q")
    for _ in range(data.draw(st.integers(1, 3))):
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(st.integers(-(1 << 63), (1 << 63) - 1))
    try:
        seen = decode(damaged, "file")
    except mp.ConfigError:
        return
    assert seen.broken or seen.taken >= 0


def test_a_word_that_nobody_stored_is_named() -> None:
    def forged(slot: int, word: int) -> list[str]:
        ledger = at_work(waiting=True)
        ledger._file.slots[slot] = word
        return ledger.snapshot().broken

    free = at_work(waiting=True)._free[0]
    assert forged(free, 5 << 2 | Kind.OPEN)[0].startswith("ticket 5 stands in two slots")
    assert forged(free, 99 << 2 | Kind.OPEN)[0].startswith(f"ticket 99 stands in slot {free}, and none from 8 on")
    assert forged(free, 8 << 2 | Kind.WAITING)[0].startswith("ticket 8 stands in")
    assert forged(free, 7 << 2)[0] == f"slot {free} holds 0x1c, which is no ticket's"
    assert forged(free, ledger_file.ending(17, 0))[0] == f"slot {free} holds outcome 17; there are 1"
    ledger = at_work(waiting=True)
    ledger._file.counts[0] = 3
    assert ledger.snapshot().broken == ["of 8 tickets 6 have no outcome and 3 ended: more than there are"]


def test_the_state_of_another_format_is_refused() -> None:
    with pytest.raises(mp.ConfigError, match=r"expected a ledger state of format 2, got .*format 1"):
        Ledger.from_state({"format": 1, "watermark": 3, "resolved_above": [], "ended": {}})


# -- data that no memory holds ---------------------------------------------------------------------------------------


class Rows:
    """10^8 rows, made when they are asked for."""

    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"prompt": f"question {index}", "answer": "x"}


@pytest.mark.parametrize("shuffle_seed", [None, 1])
def test_a_source_of_a_hundred_million_rows_costs_no_memory(shuffle_seed: int | None) -> None:
    tracemalloc.start()
    try:
        source = PromptSource(mp.SourceConfig(rows=Rows(), epochs=3, shuffle_seed=shuffle_seed))
        rows = [source.row(ticket)[:2] for ticket in (0, 1, 10**8 - 1, 10**8, 2 * 10**8 + 12345, 3 * 10**8 - 1)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000
    assert len(source) == 10**8 and source.last_ticket == 3 * 10**8
    assert [epoch for _, epoch in rows] == [0, 0, 0, 1, 2, 2]
    assert all(0 <= row < 10**8 for row, _ in rows)
    with pytest.raises(IndexError):
        source.row(3 * 10**8)


def test_a_straggler_behind_a_hundred_million_tickets_costs_no_memory(tmp_path: Path) -> None:
    """Ticket 5 stays while the others of two epochs of 10^8 rows pass it; then it ends, and the watermark is at the front at once."""
    source = PromptSource(mp.SourceConfig(rows=Rows(), epochs=3, shuffle_seed=1))
    live, steps, start = 64, 6000, 10**8 - 3000
    gate = Gate(mp.GateConfig(groups_per_update=8), max_live_groups=live)
    state = {"format": 2, "next": start, "unresolved": [[5, 5]], "ended": {"failed:reward": 12}}
    ledger = Ledger.from_state(state)
    path = tmp_path / "ledger"
    ledger.keep_in(path, Owner(), live)
    size, epochs = path.stat().st_size, set()
    under_way: list[int] = []

    def admit() -> None:
        while gate.credit:
            under_way.append(ledger.next_ticket())
            gate.admitted += 1
            epochs.add(source.row(under_way[-1])[1])

    admit()
    assert under_way[0] == 5  # it was not finished, so it comes first; and it stays
    tracemalloc.start()
    try:
        for step in range(steps):
            ticket = under_way.pop(1 + step * 7 % (live - 1))
            ledger.park([ticket])
            ledger.resolve(ticket, "taken")
            gate.taken += 1
            admit()
            assert ledger.watermark == 5
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000, "it grew with what was resolved"
    assert epochs == {0, 1}
    assert ledger.next == start + steps + live - 1
    assert (ledger.resolved, ledger.taken) == (start + steps - 1, start + steps - 13)
    assert len(ledger._slot) == live and len(ledger._file.slots) <= 4 * live and path.stat().st_size == size
    state = ledger.state()
    assert len(json.dumps(state)) < 30 * live and state["unresolved"][0] == [5, 5]
    assert Ledger.from_state(state).peek_ticket() == 5
    ledger.resolve(5, "taken")
    assert ledger.watermark == min(under_way[1:])


def test_a_row_is_under_way_in_two_epochs_at_once_and_trains_once_in_each() -> None:
    rows = [{"prompt": f"question {i}"} for i in range(3)]
    with played(source=mp.SourceConfig(rows=rows, epochs=2), gate=mp.GateConfig(max_live_groups=6)) as on:
        straggler = on.claim()
        assert straggler.ticket == 0
        on.publish(5)  # all of them: row 0 of the second epoch, too
        with on.engine.get(5, timeout=10) as batch:
            assert batch.tickets == [1, 2, 3, 4, 5]
        assert on.engine.audit() == {"taken": 5, "running": 1}
        assert on.engine.state_dict()["ledger"]["unresolved"] == [[0, 0]]
        assert on.producer.give_back(straggler)
        on.publish(1)
        assert drain(on.engine) == [0]
        assert on.engine.audit() == {"taken": 6}
