"""The control messages and the socket that carries them.

    trainer <--Channel--> keeper <--Channel--> worker          (Unix seqpacket: one datagram a message, descriptors beside it)

Invariant: a send never blocks and never loses a message: what the kernel does not take stands in the outbox until the socket is
writable again (`Channel.flush`). What is large travels as a sealed memfd (`blob`), since a datagram is bounded by the socket's buffer.
"""

from __future__ import annotations

import collections
import fcntl
import mmap
import os
import socket
import struct
import threading
from typing import Any, ClassVar

import msgspec

from mprollout.generator import PauseMode
from mprollout.route import Route

MAX_TEXT = 16_000  # characters of a traceback in a message: a datagram must fit the default socket buffer


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class Boot(_Message, frozen=True, kw_only=True):
    """Trainer to keeper, keeper to worker: the first message. Beside it a memfd with the pickled boot record, and for a worker the segment and the bells."""

    worker: int = -1


class Booted(_Message, frozen=True, kw_only=True):
    """Keeper to trainer: the memory stands. Beside it: the segment, the attendant's bell, the workers' bells; for a trainer that
    attaches, a blob behind them: the pickled (pickled `EngineConfig`, `WeightSync.updates`).
    """

    temp_dir: str
    highest_version: int = 0
    """Of all updates that were ever sent."""
    confirmed: int = 0
    """Resolved tickets of the newest state that was confirmed."""


class Attach(_Message, frozen=True, kw_only=True):
    """A new trainer to the keeper, by the socket in the run folder: take me for the one that died. Answered by Booted, or a Fault that says why not."""


class Detach(_Message, frozen=True, kw_only=True):
    """Trainer to keeper: I cannot go on from here after all; wait for another."""


class Observe(_Message, frozen=True, kw_only=True):
    """A monitor to the keeper, by the same socket. Answered by the workers' states, then Observed; then the keeper hangs up."""


class Observed(_Message, frozen=True, kw_only=True):
    """Keeper to a monitor. Beside it: the segment, opened for reading only."""

    trainer_pid: int
    """0: none is there."""


class Confirmed(_Message, frozen=True, kw_only=True):
    """Trainer to keeper: a checkpoint with so many resolved tickets was saved."""

    resolved: int


class WorkerReady(_Message, frozen=True, kw_only=True):
    """Worker to keeper: the engine runs; weights, then Go are expected."""

    worker: int
    start_s: float
    context_length: int


class WorkerFailed(_Message, frozen=True, kw_only=True):
    """Worker to keeper: about to end by an exception; `permanent` when a restart would fail the same way."""

    worker: int
    error: str
    traceback: str
    permanent: bool


class Go(_Message, frozen=True, kw_only=True):
    """Keeper to worker: claim tickets."""


class Hold(_Message, frozen=True, kw_only=True):
    """Keeper to worker: claim nothing until the next Go; what runs goes on."""


class Stop(_Message, frozen=True, kw_only=True):
    """Trainer to keeper, keeper to worker: end cleanly."""


class WorkerState(_Message, frozen=True, kw_only=True):
    """Keeper to trainer: what a worker is doing now; `lost` for ever when it has no restarts left."""

    worker: int
    pid: int
    state: str  # starting | syncing | ready | evaluating | asleep | restarting | lost
    restarts: int = 0
    exit_code: int | None = None
    error: str = ""
    traceback: str = ""
    permanent: bool = False
    start_s: float = 0.0


class Update(_Message, frozen=True, kw_only=True):
    """Trainer to keeper to worker: new weights; beside it the file with the staged copy."""

    version: int
    pause: PauseMode
    route: Route | None = None
    """By which the same bytes come faster; the keeper leaves it out for a worker that is not on it."""
    rolling: bool = False
    """One worker after another."""
    updates_before: int = 0
    """Updates behind the policy that this one replaces, from the run's first weights, over all its trainers."""
    updates_after: int = 0
    """And behind this one: as many where it is a trainer's first push, of its checkpoint's weights; else one more."""


class GiveUpUpdate(_Message, frozen=True, kw_only=True):
    """Trainer to keeper: wait no longer for workers to apply this version."""

    version: int
    why: str


class Applied(_Message, frozen=True, kw_only=True):
    """Worker to keeper: the result of an update. `harmed`: the engine's weights are undefined."""

    worker: int
    version: int
    pid: int = 0
    error: str = ""
    traceback: str = ""
    harmed: bool = False

    @property
    def who(self) -> str:
        """For an error; empty where no worker is to blame."""
        return f"worker {self.worker} (pid {self.pid}): " if self.worker >= 0 else ""


class UpdateDone(_Message, frozen=True, kw_only=True):
    """Keeper to trainer: every living worker answered."""

    version: int
    failures: list[Applied] = []


class Evaluate(_Message, frozen=True, kw_only=True):
    """Trainer to keeper to one worker: an `EvaluationRequest` in the memfd beside it."""

    id: int
    worker: int


class Evaluated(_Message, frozen=True, kw_only=True):
    """Worker to keeper to trainer: the share's items in the memfd beside it, or an error; `absent`: the worker is not there, deal again."""

    id: int
    worker: int
    absent: bool = False
    error: str = ""
    traceback: str = ""


class SetAside(_Message, frozen=True, kw_only=True):
    """Trainer to keeper: so many ready workers are for this evaluation alone: they claim nothing and no update reaches them. Answered by Aside."""

    id: int
    count: int


class Aside(_Message, frozen=True, kw_only=True):
    """Keeper to trainer: these are; fewer than asked for where no worker would be left for training."""

    id: int
    workers: list[int]


class LetBack(_Message, frozen=True, kw_only=True):
    """Trainer to keeper: the evaluation is over; its workers catch up and claim again."""

    id: int


class Sleep(_Message, frozen=True, kw_only=True):
    """Trainer to keeper to workers: release the engine's memory, or (`asleep=False`) take it back. `id`: of the trainer's request."""

    id: int
    asleep: bool


class Slept(_Message, frozen=True, kw_only=True):
    """Worker to keeper: it is done, or why not."""

    worker: int
    asleep: bool
    error: str = ""
    traceback: str = ""


class SleepDone(_Message, frozen=True, kw_only=True):
    """Keeper to trainer: every living worker is asleep, or awake. `failures`: of workers that are restarted for it."""

    id: int
    failures: list[str] = []


class Note(_Message, frozen=True, kw_only=True):
    """Worker to trainer, by way of the keeper: why an attempt failed. Sent before the word changes."""

    worker: int
    ticket: int
    attempt: int
    reason: str
    error: str
    traceback: str
    final: bool


class Fault(_Message, frozen=True, kw_only=True):
    """To the trainer: a permanent fault that `get` must raise."""

    kind: str
    message: str
    worker: int = -1
    traceback: str = ""


Message = (
    Boot
    | Booted
    | Attach
    | Detach
    | Observe
    | Observed
    | Confirmed
    | WorkerReady
    | WorkerFailed
    | Go
    | Hold
    | Stop
    | WorkerState
    | Update
    | GiveUpUpdate
    | Applied
    | UpdateDone
    | Evaluate
    | Evaluated
    | SetAside
    | Aside
    | LetBack
    | Sleep
    | Slept
    | SleepDone
    | Note
    | Fault
)


def clip(text: str) -> str:
    """The end of a long text, where a traceback says what happened."""
    return text if len(text) <= MAX_TEXT else "... " + text[-MAX_TEXT:]


def blob(data: bytes) -> int:
    """A sealed memfd that holds `data`; the caller closes it."""
    fd = os.memfd_create("mprollout-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return fd


def read_blob(fd: int) -> bytes:
    """The bytes of a `blob`; closes the descriptor."""
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return b""
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as view:
            return bytes(view)
    finally:
        os.close(fd)


class Channel:
    """One end of a control socket. `send` from any thread; `receive` from one."""

    _encoder: ClassVar[msgspec.msgpack.Encoder] = msgspec.msgpack.Encoder()
    _decoder: ClassVar[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._outbox: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel and the raw socket of the other end, to be handed to a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self.socket.fileno()

    def peer(self) -> tuple[int, int]:
        """Process and user on the other side, as they were when it connected; the kernel says so."""
        pid, uid, _ = struct.unpack(
            "3i", self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        return pid, uid

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Send, or keep for `flush`. Descriptors are duplicated into the outbox, so the caller may close its own.

        Where a signal raises in here (Ctrl-C), the message was sent once or not at all.

        Raises:
            OSError: the peer is gone (the process watch reports it too; callers may ignore it).
        """
        with self._lock:
            self._outbox.append((self._encoder.encode(message), [os.dup(fd) for fd in fds or []]))
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes now."""
        with self._lock:
            while self._outbox:
                data, fds = self._outbox.popleft()  # not after the send: a signal may raise between the two
                try:
                    socket.send_fds(self.socket, [data], fds)
                except BlockingIOError:
                    self._outbox.appendleft((data, fds))
                    return
                except OSError:
                    self._outbox.appendleft((data, fds))
                    self._drop_outbox()
                    raise
                for fd in fds:
                    os.close(fd)

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors; None when there is none now.

        Raises:
            EOFError: the peer closed its end or died.
        """
        try:
            try:
                data, fds, flags, _ = self._receive()
            except ConnectionResetError:  # it left what we sent unread; what it sent before that is still to be had
                data, fds, flags, _ = self._receive()
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise OSError(f"control message cut: {len(data)} bytes, {len(fds)} descriptors came through")
        return self._decoder.decode(data), fds

    def _receive(self) -> tuple[bytes, list[int], int, Any]:
        return socket.recv_fds(self.socket, 1 << 18, 80, socket.MSG_CMSG_CLOEXEC)

    def _drop_outbox(self) -> None:
        while self._outbox:
            for fd in self._outbox.popleft()[1]:
                os.close(fd)

    def close(self) -> None:
        with self._lock:
            self._drop_outbox()
        self.socket.close()
