"""The C++ core: one shared-memory segment, its live table, its ring. Bytes in, bytes out; knows nothing of PyTorch.

Every handle keeps the segment mapped. Blocking calls release the GIL, look again at least every 50 ms, and let Python
signals (Ctrl-C) through. A forked child can neither release nor close.
"""

from collections.abc import Sequence
from typing import Any, Never, final, overload

import numpy.typing as npt
from typing_extensions import Buffer

# States of a live-table word.
FREE: int
READY: int
RUNNING: int
PUBLISHING: int
DONE: int
FILTERED: int
FAILED: int

class _NativeType(type): ...  # nanobind's
class SegmentError(ValueError): ...  # attach refused: what was expected, what came, at which offset
class GroupTooLarge(ValueError): ...  # names both sizes in bytes
class TakerBusy(RuntimeError): ...  # a live process already takes

def die_with_parent(expected_parent_pid: int) -> None:
    """PR_SET_PDEATHSIG(SIGKILL), then exit at once if the parent is already another one."""

def become_subreaper() -> None: ...

@final
class Segment(metaclass=_NativeType):
    """One sealed memfd, mapped. Mode 0600. Gone with its last holder."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # made by create and attach
    @staticmethod
    def create(
        *,
        workers: int,  # 1..64
        entries: int,  # live-table entries (>= max_live_groups)
        cells: int,  # index cells, a power of two >= entries
        descriptors: int,  # a worker's descriptors
        arena_bytes: int,  # a worker's arena
        max_group_bytes: int,  # worst-case extent, <= arena_bytes / 2
        max_prompt_bytes: int,  # one slot an entry
        schema: bytes,  # opaque to the core; readers decode it
    ) -> Segment:
        """Create, seal against shrink and grow, populate. Raises MemoryError naming the bytes asked for."""
    @staticmethod
    def attach(fd: int, read_only: bool = False) -> Segment:
        """Map a duplicate of fd after validating magic, version, endianness, every size and offset against fstat.
        read_only: for monitors (table, words, pending); also with a descriptor opened for reading. Handles and recover() refuse it (ValueError).
        """
    @staticmethod
    def size_of(
        *,
        workers: int,
        entries: int,
        cells: int,
        descriptors: int,
        arena_bytes: int,
        max_group_bytes: int,
        max_prompt_bytes: int,
        schema: bytes,
    ) -> int:
        """Bytes that create() would ask for; refuses what create() refuses (ValueError)."""
    @property
    def fd(self) -> int: ...
    @property
    def address(self) -> int:
        """Where it is mapped in this process, for whoever registers the memory with a device."""
    @property
    def read_only(self) -> bool: ...
    @property
    def taker_bell(self) -> int:
        """This process's duplicate of the taker's eventfd; -1: none. Whoever wakes the taker from here (a publish, an ending, a
        recovery, wake_taker) writes it, too. Set it in the keeper and in every worker, non-blocking, to let the taker sleep in a poll.
        """
    @taker_bell.setter
    def taker_bell(self, fd: int, /) -> None: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def cells(self) -> int: ...
    @property
    def descriptors(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def max_group_bytes(self) -> int: ...
    @property
    def max_prompt_bytes(self) -> int: ...
    @property
    def schema(self) -> bytes: ...
    @property
    def global_words(self) -> memoryview:
        """Memoryview of 64 int64 statistics words (format 'q'), writable unless read_only; each word has one writer, chosen by the user."""
    def worker_words(self, worker: int) -> memoryview:
        """The same of one worker."""
    def table(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """A stable snapshot of the entries that are not FREE: (ticket, state, attempt, deaths, worker, reason, generation)."""
    def pending(self) -> int:
        """tail - head: published, not yet ingested by the taker."""
    def wake_taker(self) -> None:
        """Make a sleeping taker look again (an ending, a fault). Safe from any process."""
    def idle_workers(self) -> int:
        """Bit mask of workers that said they sleep; seq_cst on both sides, read after admitting or releasing."""
    def close(self) -> None:
        """Drop this handle's use of the mapping; it is unmapped when the last view dies."""

@final
class Claim:
    """One running attempt: what publish, retry, end and give_back act on."""
    def __init__(self) -> None: ...  # raises: made by Producer.claim and retry
    @property
    def ticket(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def deaths(self) -> int: ...
    @property
    def prompt(self) -> bytes: ...
    @property
    def current(self) -> bool:
        """Whether the word still says that this attempt owns the ticket."""

@final
class Producer(metaclass=_NativeType):
    """A worker's handle. A later one of the same worker number supersedes it: its claims turn stale."""
    def __init__(self, segment: Segment, worker: int) -> None: ...
    def claim(self) -> Claim | None:
        """Reserve a descriptor and max_group_bytes, then READY->RUNNING on the lowest READY ticket. None: no ticket, or no room (see `starved_for_room`)."""
    @property
    def starved_for_room(self) -> bool:
        """Whether the last claim returned None for want of room in this arena although a READY ticket stood there."""
    def publish(self, claim: Claim, arrays: Sequence[Buffer | tuple[str, Sequence[Sequence[Any] | Buffer]]], /) -> bool:
        """Write the fields (one a schema field, any length incl. 0) and publish. False: a stale attempt, nothing published, room freed.

        A field is an array or another C-contiguous buffer, or (dtype, parts): lists or tuples of numbers, and buffers of that dtype, written one
        after another without an array in between. dtype: |u1, <i4, <i8 (whole numbers that fit), <f4, <f8 (of a list or tuple its first
        item: SGLang's [logprob, id, text]). Raises GroupTooLarge, TypeError, ValueError (nothing changed, the claim stands).
        """
    def retry(self, claim: Claim) -> Claim | None:
        """RUNNING -> RUNNING with attempt + 1; the extent moves to the new handle, the old one is dead. None: stale (room freed) or dead.
        Raises OverflowError beyond attempt 255 (the claim stands).
        """
    def give_back(self, claim: Claim) -> bool:
        """RUNNING -> READY, same attempt (a clean shutdown, a worker that leaves). Room freed."""
    def end(self, claim: Claim, state: int, reason: int) -> bool:
        """RUNNING -> FILTERED or FAILED with a reason code 0..4095; wakes the taker. Room freed. False: stale."""
    def set_idle(self, idle: bool) -> None:
        """Say that this worker sleeps (then look once more with claim) or no longer does. seq_cst."""
    @property
    def claims(self) -> int:
        """Open claims. One that is dropped without an end stays RUNNING: only recover() gives it back."""
    @property
    def incarnation(self) -> int:
        """How many Producers this worker number has had, this one included."""
    @property
    def free_bytes(self) -> int: ...

@final
class Lease:
    """A published group that the taker ingested. Its memory stays until delivery, release and the death of its last view;
    a delivered lease that dies unreleased is released, an undelivered one never is (the next taker gets it).
    """
    def __init__(self) -> None: ...  # raises: made by Consumer.take
    @property
    def ticket(self) -> int: ...
    @property
    def worker(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes that it holds in the arena (see group_bytes)."""
    @property
    def fields(self) -> int: ...
    @property
    def delivered(self) -> bool:
        """Whether this taker, or a dead one before it, delivered the group."""
    def field(self, index: int, dtype: str, /) -> npt.NDArray[Any]:
        """Read-only 1-D view of a field (numpy dtype string); keeps the lease alive. No copy. RuntimeError after the memory went back."""
    def release(self) -> int:
        """Give the memory back as soon as no view is alive; returns the number of views alive now (0: given back now). Idempotent.
        Raises RuntimeError on an undelivered lease.
        """

@final
class Consumer(metaclass=_NativeType):
    """The taker. One live process at a time owns it."""
    def __init__(self, segment: Segment, bell_fd: int = -1) -> None:
        """`bell_fd`: an eventfd written when room is released while a worker is idle. Raises TakerBusy: a live process takes, or views of an
        earlier Consumer's groups live in this one. After a dead taker, everything it had TAKEN and not released comes back from take() first, in FIFO order.
        """
    @overload
    def take(self) -> Lease | None:
        """Ingest the next published group, FIFO; None when nothing is pending."""
    @overload
    def take(self, count: int, timeout_s: float | None, spin: bool = False) -> list[Lease]:
        """Ingest exactly `count`, FIFO, or none: [] after the timeout. Waits; Ctrl-C gets through.

        `spin`: never sleep, for the last microseconds of latency. It costs a CPU (yielded now and then), and runs without the GIL.
        """
    def try_take(self, count: int) -> list[Lease]:
        """Ingest exactly `count`, FIFO, or none ([])."""
    def available(self) -> int:
        """Groups that take() would give now, those adopted from a dead taker included."""
    def peek(self, count: int) -> list[int]:
        """The tickets of the next ones, at most `count`, in the order of take(); nothing changes."""
    def held(self) -> list[Lease]:
        """Ingested and not delivered, in FIFO order; the same objects that take() returned."""
    @property
    def held_count(self) -> int:
        """How many are held, in constant time."""
    @property
    def leased_count(self) -> int:
        """How many are delivered and their memory not given back."""
    def find(self, ticket: int) -> Lease | None:
        """The held one of this ticket. In constant time, however many are held."""
    def deliver(self, leases: Sequence[Lease]) -> None:
        """PUBLISHING -> DONE for all, in one step that no signal interrupts: the trainer has them.
        Checks all before the first; idempotent.
        """
    def news(self) -> int:
        """The eventcount; read it before looking, pass it to wait."""
    def wait(self, count: int, seen: int, timeout_s: float) -> bool:
        """Sleep until `count` groups (>= 1) are pending, or news() != seen, or the timeout. True when count are pending; else False (every wake may be spurious)."""
    def arm(self, count: int, seen: int) -> bool:
        """The first half of a wait that sleeps in a poll (asyncio) on the segment's taker_bell, which it empties. True: sleep; the bell becomes readable
        when `count` groups are pending or news() changes. False: it is so already. Then disarm(), in both cases, and look again: every wake may be
        spurious, and nobody should sleep longer than 50 ms without a look (the one who would ring may have died).
        """
    def disarm(self) -> None: ...
    def close(self) -> None:
        """Let another taker in; it gets the undelivered groups."""

@final
class Admitter(metaclass=_NativeType):
    """The trainer's side of the live table: the only one that fills and empties entries. On a used segment it adopts what stands there."""
    def __init__(self, segment: Segment) -> None: ...
    def admit(self, ticket: int, prompt: bytes) -> bool:
        """FREE -> READY. False: no free entry. Raises GroupTooLarge when the prompt exceeds max_prompt_bytes, ValueError for a live ticket."""
    def sweep(self) -> list[tuple[int, int, int, int, int]]:
        """Collect entries in DONE, FILTERED, FAILED: (ticket, state, reason, attempt, deaths), make them FREE."""

@final
class Recovered(metaclass=_NativeType):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # made by recover
    @property
    def published(self) -> list[int]: ...  # tickets whose group stands in the ring
    @property
    def reissued(self) -> list[int]: ...  # back to READY
    @property
    def failed(self) -> list[int]: ...  # deaths exceeded -> FAILED

def recover(segment: Segment, worker: int, max_deaths: int, reason: int, count_death: bool = True) -> Recovered:
    """After the PROVEN death of `worker`'s process: decide its claims (index first, then descriptor words), rebuild what the next
    Producer needs, help the tail once, wake the taker. Idempotent; may be interrupted anywhere and run again.
    count_death=False (killed on purpose): no ticket's deaths grow.
    """

def group_bytes(lengths: Sequence[int]) -> int:
    """What a group of fields of these byte lengths takes: table, alignment to 64 and all. publish() needs it to be <= max_group_bytes."""

def views(leases: list[Lease], dtypes: Sequence[str]) -> list[tuple[npt.NDArray[Any], ...]]:
    """For each lease the views of its first fields, one a dtype: Lease.field() for a whole batch."""

def copies(leases: list[Lease], fields: Sequence[int]) -> list[tuple[bytes, ...]]:
    """For each lease the bytes of these fields: what is still needed when the group is released. Raises RuntimeError for one that is."""

def release(leases: list[Lease]) -> int:
    """Lease.release() of all; returns the number of views alive now. Raises RuntimeError, with nothing released, when one is undelivered."""

def first_of_each(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """[row[0] for row in rows], for lists and tuples: the logprobs of SGLang's [logprob, id, text]."""
