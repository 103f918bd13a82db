"""Staged weights: whole, sealed, checked, and gone when anything goes wrong."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mprollout.errors import MemoryBudgetError
from mprollout.staging import stage
from mprollout.weight_files import checkpoint_shapes, keep_last, write
from mprollout.weights import SEALS, StagedWeights, check_parameters

torch = pytest.importorskip("torch")


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "fp32": torch.randn(33, 7),
        "bf16": torch.randn(5).bfloat16(),
        "fp16": torch.randn(2, 3, 4).half(),
        "int64": torch.arange(9),
        "int8": torch.arange(3, dtype=torch.int8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def memory_files() -> int:
    return sum(
        "mprollout-weights" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)
    )


def _open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.fixture(autouse=True)
def no_memory_file_left() -> Iterator[None]:
    before = memory_files()
    yield
    assert memory_files() == before


def test_tensors_come_back_as_they_were() -> None:
    given = state()
    with stage(given) as weights:
        assert weights.names == list(given)
        assert weights.shapes["transposed"] == (6, 4)
        assert weights.nbytes == sum(t.nbytes for t in given.values())
        for name, tensor in weights.tensors():
            assert tensor.dtype == given[name].dtype, name
            assert torch.equal(tensor, given[name]), name


def test_names_and_dtypes_become_the_engines() -> None:
    """The longest prefix counts; integers keep their dtype; a folder is cast like a state_dict."""
    given = {"module.a.w": torch.randn(3), "module.w": torch.arange(2), "other": torch.randn(2).half()}
    with stage(given, dtype="bfloat16", rename={"module.": "model.", "module.a.": "b."}) as weights:
        assert weights.names == ["b.w", "model.w", "other"]
        tensors = dict(weights.tensors())
        assert [tensor.dtype for tensor in tensors.values()] == [torch.bfloat16, torch.int64, torch.bfloat16]
        assert torch.equal(tensors["b.w"], given["module.a.w"].bfloat16())
    with pytest.raises(ValueError, match="'x' comes twice"):
        stage({"a.x": torch.zeros(1), "b.x": torch.zeros(1)}, rename={"a.": "", "b.": ""})


def test_a_checkpoint_folder_is_cast_like_a_state_dict(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    given = {"w": torch.randn(3, 2), "n": torch.arange(3), "none": torch.zeros(0, 2)}
    save_file(given, tmp_path / "model.safetensors")
    with stage(tmp_path, dtype="float16") as weights:
        for name, tensor in weights.tensors():
            assert torch.equal(tensor, given[name].half() if name != "n" else given[name]), name


GATHERING = """
import os, sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from mprollout.staging import join_gathering, stage

rank = int(os.environ["RANK"])
mesh = init_device_mesh("cpu", (2,))
whole = {"w": torch.arange(20.0).view(5, 4), "b": torch.arange(3.0)}
sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
assert sharded["w"].to_local().shape[0] < 5
if rank == 0:
    with stage(sharded) as weights:
        assert all(torch.equal(tensor, whole[name]) for name, tensor in weights.tensors())
else:
    join_gathering(sharded)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_shards_of_two_ranks_are_gathered(tmp_path: Path) -> None:
    """A DTensor's shards: rank 0 stages, the other joins the collective. Real gloo, two processes."""
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GATHERING],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_another_process_opens_the_descriptor() -> None:
    with stage(state()) as weights:
        program = (
            "import sys, os; from mprollout.weights import StagedWeights; w = StagedWeights.open(int(sys.argv[1]))\n"
            "assert 'torch' not in sys.modules; print({n: t.double().sum().item() for n, t in w.tensors()}['fp32'])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(weights.fd)],
            pass_fds=[weights.fd],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert float(done.stdout) == state()["fp32"].double().sum().item(), done.stderr


def test_memory_is_sealed_and_private() -> None:
    with stage(state()) as weights:
        assert os.fstat(weights.fd).st_mode & 0o777 == 0o600
        with pytest.raises(PermissionError):
            os.pwrite(weights.fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(weights.fd, 1)


def test_stream_that_raises_midway_leaves_nothing() -> None:
    """An update's source that raises at the third bucket (C46)."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1000)
        raise ConnectionError("the trainer's shard 3 is gone")

    with pytest.raises(ConnectionError, match="shard 3"):
        stage(stream())


def test_tensors_stay_valid_after_close() -> None:
    with stage(state()) as weights:
        tensor = dict(weights.tensors())["fp32"]
    assert torch.equal(tensor, state()["fp32"])
    with pytest.raises(ValueError, match="closed"):
        weights.tensors()


def test_checkpoint_folder(tiny_model: Path) -> None:
    from safetensors.torch import load_file

    expected = load_file(tiny_model / "model.safetensors")
    with stage(tiny_model) as weights:
        assert weights.shapes == checkpoint_shapes(tiny_model)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.tensors())


def test_tied_weights_are_staged_under_each_name() -> None:
    tensor = torch.randn(4, 4)
    with stage({"embed": tensor, "lm_head": tensor}) as weights:
        assert weights.names == ["embed", "lm_head"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (lambda: iter([("a", torch.ones(1)), ("a", torch.ones(1))]), "'a' comes twice"),
        (lambda: {"c": torch.ones(1, dtype=torch.complex64)}, "'c' has dtype complex64"),
        (lambda: "/nonexistent", "holds no .safetensors"),
    ],
)
def test_refused_sources(source: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        stage(source())  # type: ignore[operator]


def _forged(change: object) -> int:
    """A sealed copy of staged weights with a change made to its bytes."""
    with stage({"a": torch.arange(100.0)}) as weights:
        content = bytearray(os.pread(weights.fd, 1 << 20, 0))
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.write(fd, change(content))  # type: ignore[operator]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: bytes([b[0] ^ 1]) + b[1:], "checksum"),
        (lambda b: b[:-1] + b"?", "magic"),
        (lambda b: b[:-30], "magic"),
        (lambda b: b"", "at least 24"),
    ],
)
def test_damaged_memory_is_refused(change: object, complaint: str) -> None:
    fd = _forged(change)
    with pytest.raises(ValueError, match=complaint):
        StagedWeights.open(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)  # it was owned, and closed


def test_memory_that_nobody_reads_any_more_is_used_again() -> None:
    """A spare copy's file, where the new one fits; its stale bytes do not show, neither between the tensors nor behind the last."""
    first = stage({"a": torch.ones(33), "b": torch.ones(1000), "c": torch.ones(3, dtype=torch.int8)})
    inode = os.fstat(first.fd).st_ino
    fits = {"x": torch.arange(5.0), "y": torch.arange(300.0), "z": torch.arange(5, dtype=torch.int8)}
    second = stage(fits, spare=first)
    assert os.fstat(second.fd).st_ino == inode
    assert_whole(second, fits)
    larger = {"w": torch.arange(20_000.0), "v": torch.arange(7)}
    with stage(larger, spare=second) as third:
        assert os.fstat(third.fd).st_ino != inode
        assert_whole(third, larger)


def assert_whole(staged: StagedWeights, given: dict[str, torch.Tensor]) -> None:
    with StagedWeights.open(os.dup(staged.fd)) as opened:
        assert {n: tensor.tolist() for n, tensor in opened.tensors()} == {
            n: tensor.tolist() for n, tensor in given.items()
        }
        for bucket in opened.buckets(64):
            bucket.check(opened.bytes(bucket.start, bucket.end))


def test_a_source_that_raises_gives_the_spare_memory_up() -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(10)
        raise ConnectionError

    spare = stage({"a": torch.ones(1000)})
    with pytest.raises(ConnectionError):
        stage(stream(), spare=spare)
    with pytest.raises(ValueError, match="closed"):
        spare.tensors()


def test_buckets_hold_whole_tensors_and_name_what_is_not_as_staged() -> None:
    with stage(
        {"a": torch.zeros(16), "b": torch.ones(16), "large": torch.ones(100), "c": torch.ones(3).half()}
    ) as weights:
        buckets = weights.buckets(128)
        assert [list(bucket.entries) for bucket in buckets] == [["a", "b"], ["large"], ["c"]]
        flat = weights.bytes(buckets[0].start, buckets[0].end).clone()
        buckets[0].check(flat)
        assert [(name, tensor.sum().item()) for name, tensor in buckets[0].views(flat)] == [("a", 0), ("b", 16)]
        flat[70] ^= 1
        with pytest.raises(
            ValueError, match=r"'b': checksum 0x[0-9a-f]{16} expected, 0x[0-9a-f]{16} found in 64 bytes"
        ):
            buckets[0].check(flat)


def test_a_file_on_disk_is_a_staged_copy_and_a_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    given = state()
    with stage(given) as weights:
        paths = [write(weights, tmp_path, version) for version in (8, 9, 10)]
    loaded = load_file(paths[0])
    with StagedWeights.open(os.open(paths[0], os.O_RDONLY)) as opened:
        assert opened.shapes == {name: tuple(tensor.shape) for name, tensor in given.items()}
        for name, tensor in opened.tensors():
            assert torch.equal(tensor, given[name]) and torch.equal(loaded[name], given[name]), name
    content = bytearray(paths[0].read_bytes())
    content[-3] ^= 1
    paths[0].write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        StagedWeights.open(os.open(paths[0], os.O_RDONLY))
    paths[0].write_bytes(b"no safetensors " * 9)
    with pytest.raises(ValueError, match="no safetensors file"):
        StagedWeights.open(os.open(paths[0], os.O_RDONLY))
    keep_last(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["10.safetensors", "9.safetensors"]


def test_unsealed_memory_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    with pytest.raises(ValueError, match="seals"):
        StagedWeights.open(fd)


def test_check_parameters_spares_optional_names() -> None:
    expected = {"a": (1,), "lm_head": (2,)}
    check_parameters({"a": (1,)}, expected, ["lm_head"])
    check_parameters(expected, expected, ["lm_head"])
    with pytest.raises(ValueError, match="lm_head is missing"):
        check_parameters({"a": (1,)}, expected)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "expected a state_dict, .* or a checkpoint folder; got None"),
        ({}, "has no tensors"),
        ([("w", torch.zeros(1), 3)], r"expected \(name, tensor\) pairs"),
        (torch.zeros(2, 2), r"expected \(name, tensor\) pairs"),
        ({"w": torch.zeros(2).numpy()}, "'w': expected a torch.Tensor; got ndarray"),
        ({"w": None}, "'w': expected a torch.Tensor; got NoneType"),
        ({"w": torch.zeros(2, device="meta")}, "'w': .* got a meta tensor"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "'w': .* layout torch.sparse_coo"),
    ],
)
def test_what_is_no_set_of_tensors_is_named(source: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage(source)  # type: ignore[arg-type]


def test_a_copy_beyond_the_memory_that_is_left_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mprollout.staging.memory_limit", lambda: (4096, "memory.max = 8,192 bytes"))
    with pytest.raises(MemoryBudgetError, match=r"'big' brings .* only 4,096 were left \(memory.max = 8,192 bytes\)"):
        stage({"small": torch.zeros(16), "big": torch.zeros(4096)})
