"""The keeper's door: a socket in the run folder, for whoever was not there from the start.

    monitor, or a new trainer --knock--> RUN/keeper.sock --Door--> the keeper, once per visitor, with its first message

Owner only, and each side asks the kernel who the other is: so what a keeper hands out, and what it unpickles of a trainer, stays in one user.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from mprollout.messages import Channel, Message

DOOR = "keeper.sock"


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """The door's path by way of a descriptor: a Unix socket's name has at most 107 bytes, a folder's has no such bound."""
    fd = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{DOOR}"
    finally:
        os.close(fd)


def knock(folder: Path) -> Channel:
    """A channel to the keeper that listens in a run folder.

    Raises:
        FileNotFoundError: there is no socket.
        ConnectionRefusedError: nobody listens any more.
        PermissionError: it is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(folder) as path:
            sock.connect(path)
        channel = Channel(sock)
        if channel.peer()[1] != os.getuid():
            raise PermissionError(f"{folder / DOOR}: the process that listens there belongs to another user")
        return channel
    except BaseException:
        sock.close()
        raise


def remove_stale(folder: Path) -> None:
    """Remove the socket of a keeper that was killed. One where somebody listens stays."""
    try:
        knock(folder).close()
    except ConnectionRefusedError:
        (folder / DOOR).unlink(missing_ok=True)
    except OSError:
        pass


class Door:
    """Made by the keeper; lives on its selector.

    Args:
        on_visitor: called with each visitor and its first message; who is not kept (False) is sent away.

    Raises:
        OSError: the folder cannot be used, or another keeper listens there.
    """

    def __init__(
        self, folder: Path, selector: selectors.BaseSelector, on_visitor: Callable[[Channel, Message], bool]
    ) -> None:
        self._folder, self._selector, self._on_visitor = folder, selector, on_visitor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # before bind, which makes the file with this mode
            with _short(folder) as path:
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                    knock(folder).close()
                    raise FileExistsError(f"{folder / DOOR}: another keeper listens there")
                Path(path).unlink(missing_ok=True)  # of a keeper that was killed
                self._socket.bind(path)
            self._socket.listen()
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        selector.register(self._socket, selectors.EVENT_READ, self._on_knock)

    def close(self) -> None:
        """Stop listening; no file is left."""
        self._socket.close()
        (self._folder / DOOR).unlink(missing_ok=True)

    def _on_knock(self) -> None:
        with contextlib.suppress(OSError):
            visitor = Channel(self._socket.accept()[0])
            if visitor.peer()[1] == os.getuid():
                self._selector.register(visitor, selectors.EVENT_READ, lambda: self._on_first_message(visitor))
            else:
                visitor.close()

    def _on_first_message(self, visitor: Channel) -> None:
        kept = False
        try:
            if (received := visitor.receive()) is None:
                return
            for fd in received[1]:
                os.close(fd)
            self._selector.unregister(visitor)
            kept = self._on_visitor(visitor, received[0])
        except (EOFError, OSError, msgspec.MsgspecError):  # it left again, or speaks another language
            with contextlib.suppress(KeyError):
                self._selector.unregister(visitor)
        if not kept:
            visitor.close()
