"""`LedgerFile`: the words of a ledger, in a file of the run folder or in memory alone, and what somebody from outside reads in them.

    int64 words:  header (8) | text (JSON: whose it is, the names of the outcomes) | counts, one an outcome | slots, one an unresolved ticket

A slot is 0 (empty), `ticket << 2 | Kind`, or negative: an outcome that is being counted. Invariant: a kill between any two stores leaves
a file that reads as the ledger before the change under way or after it. Every store is one aligned word (8 bytes, one move), and their order is

    hand out t == next        slot = t OPEN;  next = t + 1                        a slot at `next` counts for nothing yet
    hand out again, park,     slot = t <its kind>                                 one store
      send back
    take                      slot = 0                                            one store: taken is what is left, next - unresolved - ended
    end with outcome k        slot = ENDING(k, n);  count[k] = n + 1;  slot = 0   n: the count before. From the first store on, k was met n + 1 times,
                                                                                  whichever of the others came: max(count[k], n + 1)

`decode` is that reading. What is larger than a word (room, a new name) is written as a new file, which takes the old one's name. The kernel
keeps what was stored whoever is killed; a machine that loses power may lose it (a checkpoint is what survives that). The trainer is the
one writer; readers copy, since a file that is cut under a mapping is a SIGBUS.
"""

from __future__ import annotations

import enum
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from mprollout.errors import ConfigError

LEDGER = "ledger"
"""Its name in the run folder."""
FORMAT = 1
MOST_OUTCOMES = 4096
_MAGIC = int.from_bytes(b"mprledgr", sys.byteorder)


class Word:
    """The header. (No enum: as an index it costs several times a plain int.)"""

    MAGIC = 0
    FORMAT = 1
    TEXT_WORDS = 2
    OUTCOMES = 3
    SLOTS = 4
    NEXT = 5
    """No ticket at or above it was handed out."""
    TURN = 6
    """Odd while the live table is ahead of the ledger (`Ledger.turn`)."""


_HEADER_WORDS = 8


class Kind(enum.IntEnum):
    """Where a ticket without an outcome is."""

    OPEN = 1
    """Handed out: it stands in the live table."""
    PARKED = 2
    """Delivered to the trainer's process, not yet taken: its entry is, or is about to be, DONE or swept."""
    WAITING = 3
    """To be handed out again."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose ledger it is."""

    trainer_pid: int = 0
    keeper_pid: int = 0
    source: str = ""
    """`PromptSource.fingerprint`."""


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    owner: Owner
    outcomes: list[str]


def ending(outcome: int, before: int) -> int:
    """The word of a slot whose ticket meets an outcome that was met so many times before."""
    return -1 - (before * MOST_OUTCOMES + outcome)


def unpack_ending(word: int) -> tuple[int, int]:
    """`ending`'s arguments."""
    before, outcome = divmod(-1 - word, MOST_OUTCOMES)
    return outcome, before


class LedgerFile:
    """Made whole at once, then changed a word at a time by `Ledger`. `header`, `counts` and `slots` are memoryviews of int64.

    Args:
        path: None: in memory. Else a file of mode 0600; `rewritten` gives it its name once it is whole.

    Raises:
        OSError: it cannot be written, the disk is full.
    """

    def __init__(self, outcomes: Sequence[str], slots: int, owner: Owner = Owner(), path: Path | None = None) -> None:  # noqa: B008 (frozen)
        assert len(outcomes) <= MOST_OUTCOMES, len(outcomes)
        self.outcomes, self.owner, self.path = list(outcomes), owner, path
        text = msgspec.json.encode(_Text(owner=owner, outcomes=self.outcomes))
        text += b" " * (-len(text) % 8)
        counts = _HEADER_WORDS + len(text) // 8
        first_slot = counts + len(outcomes)
        size = 8 * (first_slot + slots)
        self.bytes = memoryview(bytearray(size) if path is None else _map(_fresh(path), size))
        words = self.bytes.cast("q")
        self.header, self.counts, self.slots = words[:_HEADER_WORDS], words[counts:first_slot], words[first_slot:]
        self.bytes[8 * _HEADER_WORDS : 8 * counts] = text
        self.header[Word.FORMAT], self.header[Word.TEXT_WORDS] = FORMAT, len(text) // 8
        self.header[Word.OUTCOMES], self.header[Word.SLOTS] = len(outcomes), slots
        self.header[Word.MAGIC] = _MAGIC

    def rewritten(self, outcomes: Sequence[str], slots: int, owner: Owner, path: Path | None) -> LedgerFile:
        """The same ledger with more names (behind those it has), more slots, or elsewhere; slots and names keep their numbers."""
        new = LedgerFile(outcomes, slots, owner, path)
        new.header[Word.NEXT], new.header[Word.TURN] = self.header[Word.NEXT], self.header[Word.TURN]
        new.counts[: len(self.counts)] = self.counts
        new.slots[: len(self.slots)] = self.slots
        if path is not None:
            os.replace(_fresh(path), path)
        return new


def _fresh(path: Path) -> Path:
    """Where a new one is written."""
    return path.with_name(f"{path.name}.new")


def _map(path: Path, size: int) -> mmap.mmap:
    path.unlink(missing_ok=True)  # of a trainer that was killed while it wrote
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # what a full disk lacks is an error here, not a SIGBUS at a store
        return mmap.mmap(fd, size)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(fd)


class Snapshot(msgspec.Struct, kw_only=True):
    """A ledger at one moment."""

    owner: Owner
    next: int
    turning: bool
    """The table was ahead of it."""
    unresolved: dict[int, Kind]
    """All below `next`."""
    ended: dict[str, int]
    """Tickets by outcome, `taken` left out."""
    broken: list[str] = []
    """What no order of stores leaves; each names its ticket or slot."""

    @property
    def taken(self) -> int:
        """Whatever is left."""
        return self.next - len(self.unresolved) - sum(self.ended.values())

    @property
    def peek(self) -> int:
        """The ticket that is handed out next."""
        return min((t for t, kind in self.unresolved.items() if kind is Kind.WAITING), default=self.next)


def runs(tickets: Iterable[int]) -> list[list[int]]:
    """Neighbours together, [first, last], in order."""
    found: list[list[int]] = []
    for ticket in sorted(tickets):
        if found and found[-1][1] == ticket - 1:
            found[-1][1] = ticket
        else:
            found.append([ticket, ticket])
    return found


def read(path: Path) -> bytes:
    """The bytes of a ledger in a run folder. Copies.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it is no file of this user's.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(
                f"{path}: expected a file of uid {os.getuid()}; got one of uid {found.st_uid}, mode {stat.filemode(found.st_mode)}"
            )
        return file.read()


def decode(data: bytes | memoryview, where: str) -> Snapshot:
    """What the bytes say.

    Raises:
        ConfigError: they are no ledger, or one of another format; names `where`.
    """

    def expect(true: bool, what: str, got: object) -> None:
        if not true:
            raise ConfigError(f"{where}: expected a ledger with {what}; got {got!r}")

    expect(
        len(data) >= 8 * _HEADER_WORDS and len(data) % 8 == 0,
        "whole words, the header's at least",
        f"{len(data)} bytes",
    )
    words = memoryview(data).cast("B").cast("q")
    header = words[:_HEADER_WORDS]
    expect(header[Word.MAGIC] == _MAGIC, "its magic word", bytes(data[:8]))
    expect(header[Word.FORMAT] == FORMAT, f"format {FORMAT}", header[Word.FORMAT])
    sizes = [header[Word.TEXT_WORDS], header[Word.OUTCOMES], header[Word.SLOTS]]
    expect(min(sizes) >= 0 and _HEADER_WORDS + sum(sizes) == len(words), "sizes that add up", (sizes, len(words)))
    counts_at, slots_at = _HEADER_WORDS + sizes[0], _HEADER_WORDS + sizes[0] + sizes[1]
    raw = bytes(data[8 * _HEADER_WORDS : 8 * counts_at])
    try:
        text = msgspec.json.decode(raw, type=_Text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: expected a ledger with its text; got {raw!r:.80} ({error})") from error
    expect(len(text.outcomes) == sizes[1], f"{sizes[1]} names of outcomes", len(text.outcomes))
    counts, broken = list(words[counts_at:slots_at]), []
    after = header[Word.NEXT]
    unresolved: dict[int, Kind] = {}
    for slot, word in enumerate(words[slots_at:]):
        ticket, kind = divmod(word, 4)
        if word == 0:
            continue
        if word < 0:
            outcome, before = unpack_ending(word)
            if outcome < len(counts):
                counts[outcome] = max(counts[outcome], before + 1)
            else:
                broken.append(f"slot {slot} holds outcome {outcome}; there are {len(counts)}")
        elif kind == 0:
            broken.append(f"slot {slot} holds {word:#x}, which is no ticket's")
        elif ticket >= after:
            if ticket > after or kind != Kind.OPEN:
                broken.append(f"ticket {ticket} stands in slot {slot}, and none from {after} on was handed out")
        elif ticket in unresolved:
            broken.append(f"ticket {ticket} stands in two slots, {slot} the second")
        else:
            unresolved[ticket] = Kind(kind)
    ended = {name: count for name, count in zip(text.outcomes, counts, strict=True) if count}
    found = Snapshot(
        owner=text.owner,
        next=after,
        turning=header[Word.TURN] % 2 == 1,
        unresolved=unresolved,
        ended=ended,
        broken=broken,
    )
    if min(counts, default=0) < 0 or found.taken < 0:
        broken.append(
            f"of {after} tickets {len(unresolved)} have no outcome and {sum(counts)} ended: more than there are"
        )
    return found
