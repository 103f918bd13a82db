"""What goes into an extent: fields and lists in, typed read-only views out, and how much room there is."""

import os
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rigs import KIB, Rig

from mprollout import _native as native

pytestmark = pytest.mark.timeout(180)


def test_fields_arrive_as_typed_readonly_views(rig: Rig) -> None:
    rig.admitter.admit(1, b"")
    fields = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, np.float32),
        np.array([[1.5, 2.5]]),
        b"bytes",
        np.array(3, np.int64),
    ]
    assert rig.producer.publish(rig.claim(), fields)
    lease = rig.take()
    assert (lease.fields, lease.worker) == (5, 0)
    assert lease.nbytes == native.group_bytes([20, 0, 16, 5, 8])
    views = [lease.field(i, d) for i, d in enumerate(("int32", "float32", "<f8", "uint8", "int64"))]
    assert [v.tolist() for v in views] == [[0, 1, 2, 3, 4], [], [1.5, 2.5], list(b"bytes"), [3]]
    assert [v.dtype for v in views] == [np.int32, np.float32, np.float64, np.uint8, np.int64]
    for view in views:
        assert view.ctypes.data % 64 == 0 or view.size == 0
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    with pytest.raises(ValueError, match="field 3 of ticket 1: expected a multiple of 4 bytes"):
        lease.field(3, "int32")
    for index in (5, -1):
        with pytest.raises(IndexError, match="below 5"):
            lease.field(index, "int32")


@pytest.mark.parametrize("dtype", ["|u1", "<i4", ">i4", "<f8", "<c16", "<M8[s]", "V3", "S5", "(2,)<i4", "i4,f4"])
@pytest.mark.parametrize("items", [0, 1, 7])
def test_a_view_is_what_numpy_itself_makes(rig: Rig, dtype: str, items: int) -> None:
    rig.admitter.admit(1, b"")
    data = bytes(range(np.dtype(dtype).itemsize * items))
    assert rig.producer.publish(rig.claim(), [data])
    lease = rig.take()
    view = lease.field(0, dtype)
    like = np.frombuffer(data or bytes(np.dtype(dtype).itemsize), dtype)[: len(data)]
    assert type(view) is np.ndarray
    assert (view.dtype, view.shape, view.strides) == (like.dtype, like.shape, like.strides)
    for flag in ("c_contiguous", "f_contiguous", "aligned", "writebackifcopy"):
        assert getattr(view.flags, flag) == getattr(like.flags, flag), flag
    assert not view.flags.owndata and not view.flags.writeable
    assert view.tobytes() == memoryview(view.view("|u1")).tobytes() == data
    assert view.copy().tobytes() == data
    reference = weakref.ref(view)
    view.shape = (1, *view.shape)  # its own sizes are replaced
    del view
    assert reference() is None


def test_payload_layout_is_the_documented_one(rig: Rig) -> None:
    rig.admitter.admit(258, b"")
    assert rig.producer.publish(rig.claim(), [b"abc", b"", b"d"])
    segment, lease = rig.segment, rig.take()
    raw = os.pread(segment.fd, segment.size_bytes, 0)
    at = raw.rindex(b"abc") - 64
    table = np.frombuffer(raw, np.uint64, 8, at)
    assert lease.nbytes == 192
    assert table.tolist() == [3, 258, 64, 3, 128, 0, 128, 1]
    assert raw[at + 128 : at + 129] == b"d"
    assert raw[:16] == bytes.fromhex("1a0a4d50524f4c3102000000") + bytes([4, 3, 2, 1])


def test_group_too_large_leaves_the_claim_usable(rig: Rig) -> None:
    """slime#2384: both sizes named, the ring still works."""
    rig.admitter.admit(1, b"")
    claim = rig.claim()
    with pytest.raises(native.GroupTooLarge, match=r"8192 bytes, got 8256 for ticket 1"):
        rig.producer.publish(claim, [bytes(8 * KIB - 32)] * 1)
    assert claim.current
    assert rig.producer.publish(claim, [bytes(8 * KIB - 64)])
    assert rig.take().nbytes == 8 * KIB
    assert native.group_bytes([8 * KIB - 64]) == 8 * KIB


@pytest.mark.parametrize(
    ("wrong", "error"), [(np.zeros((4, 4))[:, 1], ValueError), ("text", TypeError), (7, TypeError)]
)
def test_unusable_buffers_are_refused_by_index(rig: Rig, wrong: Any, error: type[Exception]) -> None:
    rig.admitter.admit(1, b"")
    claim = rig.claim()
    with pytest.raises(error, match=r"arrays\[1\]: expected a C-contiguous buffer"):
        rig.producer.publish(claim, [b"", wrong])
    assert claim.current


def test_full_arena_claims_nothing_and_says_so() -> None:
    rig = Rig(arena_bytes=16 * KIB)
    for ticket in range(4):
        rig.admitter.admit(ticket, b"")
    held = [rig.claim(), rig.claim()]
    assert rig.producer.claim() is None
    assert rig.producer.starved_for_room
    assert rig.words() == {0: native.RUNNING, 1: native.RUNNING, 2: native.READY, 3: native.READY}
    assert rig.producer.publish(held[0], [bytes(KIB)])
    assert rig.producer.claim() is None  # trimmed: 7 KiB free, 8 needed
    assert rig.producer.starved_for_room
    lease = rig.take()
    rig.consumer.deliver([lease])
    assert lease.release() == 0
    assert rig.claim().ticket == 2
    assert not rig.producer.starved_for_room


def test_descriptors_run_out_like_room() -> None:
    rig = Rig(descriptors=1)
    rig.publish(0)
    rig.admitter.admit(1, b"")
    assert rig.producer.claim() is None
    assert rig.producer.starved_for_room
    lease = rig.take()
    rig.consumer.deliver([lease])
    lease.release()
    assert rig.claim().ticket == 1


def test_release_in_any_order_gives_all_room_back(rig: Rig) -> None:
    shuffle = random.Random(1)
    for round_ in range(40):
        tickets = range(8 * round_, 8 * round_ + 8)
        rig.publish(*tickets, size=shuffle.randrange(1, 500))
        leases = [rig.take() for _ in tickets]
        assert [lease.ticket for lease in leases] == list(tickets)
        shuffle.shuffle(leases)
        rig.consumer.deliver(leases)
        assert [lease.release() for lease in leases] == [0] * 8
        assert len(rig.admitter.sweep()) == 8
    assert rig.producer.free_bytes == rig.segment.arena_bytes


def test_prompts_have_one_slot_an_entry(rig: Rig) -> None:
    with pytest.raises(native.GroupTooLarge, match="max_prompt_bytes 64 bytes, got 65"):
        rig.admitter.admit(0, bytes(65))
    for ticket in range(8):
        assert rig.admitter.admit(ticket, bytes([ticket]) * 64)
    assert not rig.admitter.admit(8, b"")
    assert rig.producer.end(rig.claim(), native.FAILED, 1)
    assert [rig.claim().prompt for _ in range(7)] == [bytes([t]) * 64 for t in range(1, 8)]
    assert not rig.admitter.admit(8, b"")
    rig.admitter.sweep()
    assert rig.admitter.admit(8, b"")
    with pytest.raises(ValueError, match="ticket >= 0, got -1"):
        rig.admitter.admit(-1, b"")


TYPES = {"|u1": (0, 255), "<i4": (-(1 << 31), (1 << 31) - 1), "<i8": (-(1 << 63), (1 << 63) - 1)}


def through(rig: Rig, field: Any, dtype: str) -> list[Any]:
    """What arrives of one field."""
    rig.admitter.sweep()
    assert rig.admitter.admit(through.ticket, b"")  # type: ignore[attr-defined]
    through.ticket += 1  # type: ignore[attr-defined]
    claim = rig.claim()
    try:
        assert rig.producer.publish(claim, [b"before", field, b"after"])
    except BaseException:
        assert claim.current
        rig.producer.end(claim, native.FAILED, 1)
        raise
    lease = rig.take()
    rig.consumer.deliver([lease])
    assert (bytes(lease.field(0, "|u1")), bytes(lease.field(2, "|u1"))) == (b"before", b"after")
    return lease.field(1, dtype).tolist()


through.ticket = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", TYPES)
def test_lists_of_whole_numbers_arrive_exactly(rig: Rig, dtype: str) -> None:
    low, high = TYPES[dtype]
    dice = random.Random(1)
    numbers = [low, high, 0, 1, True, *(dice.randint(low, high) >> dice.randrange(60) for _ in range(99))]
    numbers = [min(max(n, low), high) for n in numbers]
    raw = np.array(numbers[:7], dtype)
    for parts in ([numbers], [numbers, [], tuple(numbers)], [numbers[:1], raw, bytes(raw), numbers], (), [[]]):
        want = [int(n) for part in parts for n in (np.frombuffer(part, dtype) if isinstance(part, bytes) else part)]
        assert through(rig, (dtype, parts), dtype) == want
    for wrong in (low - 1, high + 1):
        with pytest.raises((ValueError, OverflowError)):
            through(rig, (dtype, [[1, wrong]]), dtype)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_lists_of_real_numbers_and_of_triples_arrive_exactly(rig: Rig, dtype: str) -> None:
    """SGLang's output_token_logprobs: [logprob, token id, None]."""
    dice = random.Random(2)
    numbers = [0.0, -1e30, 7, float("-inf"), *(-dice.expovariate(1) for _ in range(99))]
    want = np.array(numbers, dtype).tolist()
    triples = [[x, i, None] if i % 2 else (x, i, "text") for i, x in enumerate(numbers)]
    assert through(rig, (dtype, [numbers]), dtype) == want
    assert through(rig, (dtype, [triples, numbers]), dtype) == want + want
    assert native.first_of_each(triples) == numbers == native.first_of_each(tuple(triples))
    for rows in ([[]], [1.0], ["ab"]):
        with pytest.raises(TypeError, match="first_of_each"):
            native.first_of_each(rows)


def test_numbers_that_only_python_can_convert_are_converted(rig: Rig) -> None:
    class Odd:
        def __index__(self) -> int:
            return 7

    assert through(rig, ("<i4", [[1, np.int64(2), Odd()], [np.uint8(3)]]), "<i4") == [1, 2, 7, 3]
    assert through(rig, ("<f4", [[np.float32(0.5), np.float64(1.5), [np.float16(2), 3]]]), "<f4") == [0.5, 1.5, 2]


def test_a_list_that_changes_while_it_is_converted_is_measured_again(rig: Rig) -> None:
    class Grows:
        def __index__(self) -> int:
            other.extend([9] * 500)
            return 1

    other = [5]
    assert through(rig, ("<i4", [[Grows()], other]), "<i4") == [1, 5] + [9] * 500


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (("<i4", [[1, 2.0]]), TypeError, "part 0: expected a number, got float at 1"),
        (("<i4", [[1], [None]]), TypeError, "part 1: expected a number, got NoneType at 0"),
        (("<i4", [[[1]]]), TypeError, "got list"),
        (("<f4", [["1.0"]]), TypeError, "got str"),
        (("<f4", [[[None, 5, None]]]), TypeError, "got NoneType"),
        (("<f4", [1.0]), TypeError, "part 0: expected a C-contiguous buffer, got float"),
        (("<f4", [np.zeros(3)]), ValueError, "part 0: expected a buffer of <f4 items"),
        (("<i4", [b"abc"]), ValueError, "part 0: expected a buffer of <i4 items"),
        (("<i2", [[1]]), ValueError, "got <i2"),
        (("<i4",), TypeError, r"\(dtype, parts\)"),
        (("|u1", [[256]]), ValueError, "fits 1 bytes, got 256 at 0"),
        (np.array([object()]), ValueError, "without Python objects"),
    ],
)
def test_lists_that_do_not_fit_are_refused_by_place(rig: Rig, wrong: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=r"arrays\[1\].*" + says if says[0] != "g" else says):
        through(rig, wrong, "|u1")
    assert rig.producer.free_bytes == rig.segment.arena_bytes


def test_lists_beyond_the_extent_are_refused_before_a_byte(rig: Rig) -> None:
    with pytest.raises(native.GroupTooLarge, match="8192 bytes"):
        through(rig, ("<i8", [[1] * 1100]), "<i8")


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_arrays_of_any_number_and_shape_are_published_as_they_lie(rig: Rig, kind: Callable[[Any], Any]) -> None:
    """A few arrays in a list go a shorter way than others; both write the same bytes and refuse the same."""
    shapes = [(), (0,), (3,), (2, 3), (2, 0, 4), (1,)]
    for count in (0, 1, 6, 32, 33, 60):
        arrays = [np.full(shapes[i % 6], i, np.int32) for i in range(count)]
        rig.admitter.sweep()
        assert rig.admitter.admit(count, b"")
        assert rig.producer.publish(rig.claim(), kind(arrays))
        lease = rig.take()
        assert lease.fields == count
        for i, array in enumerate(arrays):
            assert lease.field(i, "<i4").tolist() == array.reshape(-1).tolist()
        rig.consumer.deliver([lease])
    assert rig.admitter.admit(100, b"")
    claim = rig.claim()
    for wrong in (np.arange(6)[::2], np.array([None])):
        with pytest.raises(ValueError, match=r"arrays\[1\].*C-contiguous"):
            rig.producer.publish(claim, kind([np.zeros(1), wrong]))
    with pytest.raises(native.GroupTooLarge, match="max_group_bytes"):
        rig.producer.publish(claim, kind([np.zeros(8 * KIB)]))
    for not_a_claim in (None, object(), 1):
        with pytest.raises(TypeError, match="Claim"):
            rig.producer.publish(not_a_claim, kind([]))  # type: ignore[arg-type]
    unmade = native.Producer.__new__(native.Producer)
    for call in (unmade.claim, lambda: unmade.publish(claim, [])):
        with pytest.raises(TypeError, match="initialised"):
            call()
    assert rig.producer.publish(claim, kind([np.zeros(1)]))
