"""The control channel: nothing blocks, nothing is lost, descriptors travel and are closed."""

import os

import pytest

from mprollout import messages
from mprollout.messages import Channel


@pytest.fixture
def ends():
    left, raw = Channel.pair()
    right = Channel(raw)
    yield left, right
    left.close()
    right.close()


def test_messages_arrive_typed_and_in_order(ends):
    left, right = ends
    left.send(messages.Go())
    left.send(messages.Update(version=3, pause="retract"))
    assert right.receive() == (messages.Go(), [])
    assert right.receive() == (messages.Update(version=3, pause="retract"), [])
    assert right.receive() is None


def test_a_full_socket_neither_blocks_nor_loses(ends):
    left, right = ends
    count = 3000
    for i in range(count):
        left.send(
            messages.Note(worker=0, ticket=i, attempt=0, reason="reward", error="e" * 500, traceback="", final=False)
        )
    assert left.wants_write
    seen = []
    while len(seen) < count:
        while (received := right.receive()) is not None:
            seen.append(received[0].ticket)
        left.flush()
    assert seen == list(range(count)) and not left.wants_write


def test_blobs_travel_as_sealed_descriptors(ends):
    left, right = ends
    data = os.urandom(1_000_000)
    fd = messages.blob(data)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    left.send(messages.Evaluate(id=1, worker=0), [fd])
    os.close(fd)
    _, (got,) = right.receive()
    assert messages.read_blob(got) == data
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(got)


def test_the_peers_end_is_an_end_of_file(ends):
    left, right = ends
    left.close()
    with pytest.raises(EOFError):
        right.receive()


def test_the_last_words_of_a_peer_that_left_ours_unread_are_heard(ends):
    """The kernel reports a reset before what still stands in the queue; a trainer's Detach was lost so."""
    left, right = ends
    right.send(messages.Go())
    left.send(messages.Detach())
    left.close()
    assert right.receive()[0] == messages.Detach()
    with pytest.raises(EOFError):
        right.receive()


def test_descriptors_of_an_undelivered_outbox_are_closed():
    before = len(os.listdir("/proc/self/fd"))
    left, raw = Channel.pair()
    fd = messages.blob(b"x" * 100)
    for _ in range(2000):
        left.send(messages.Update(version=1, pause="retract"), [fd])
        if left.wants_write:
            break
    os.close(fd)
    left.close()
    raw.close()
    assert len(os.listdir("/proc/self/fd")) == before
