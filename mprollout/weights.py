"""Staged weights: a whole set of tensors in one sealed memory file, written once and read by every worker.

    state_dict | (name, tensor) stream | checkpoint folder --stage--> memfd --open--> read-only views, in any process

Layout (little-endian; a footer instead of a header, because a stream's names are known only at its end):

    tensor bytes, each at a multiple of 64
    header: msgpack map of name -> [dtype, shape, offset]
    footer, 24 bytes: uint64 header length, uint64 crc32 of all bytes before the footer, 8 bytes magic

Invariant: a `StagedWeights` that exists is whole and can no longer change. The seals (no write, grow or shrink) guarantee the
second; `StagedWeights.open` checks seals, magic, every offset and the checksum, which guarantees the first. The memory is gone with the last
descriptor and view, `kill -9` included. torch and numpy are imported only when tensors are touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mprollout.errors import MemoryBudgetError
from mprollout.limits import memory_limit

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    import torch

    Source = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | os.PathLike[str]

WEIGHTS_FOLDER = "weights"
_ALIGNMENT = 64
_FOOTER = struct.Struct("<QQ8s")
_MAGIC = b"mpweigh1"
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PINNED_BYTES = 64 << 20
"""Piece of a GPU tensor on its way through pinned memory."""
_WRITE_BYTES = 1 << 20
"""Piece that is summed and written while it is in the cache."""

# safetensors' names of the dtypes -> torch's names, and the bytes of one element
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U8": ("uint8", 1), "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
}  # fmt: skip
_ITEM_BYTES = dict(_DTYPES.values())


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class StagedWeights:
    """Named tensors in a sealed memory file; owns its descriptor and its mapping.

    Attributes:
        fd: the descriptor; another process opens a duplicate of it with `StagedWeights.open`.
        shapes: shape by name, in the order staged.
        nbytes: bytes of all tensors.

    Example:
        with stage(model.state_dict()) as weights:
            other = StagedWeights.open(os.dup(weights.fd))
            tensors = dict(other.tensors())
    """

    def __init__(self, fd: int, mapping: mmap.mmap, entries: dict[str, _Entry]) -> None:
        self.fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._entries = entries
        self.shapes: dict[str, tuple[int, ...]] = {name: entry.shape for name, entry in entries.items()}
        self.nbytes = sum(entry.nbytes for entry in entries.values())

    @classmethod
    def open(cls, fd: int, verify: bool = True) -> StagedWeights:
        """Map what `fd` holds, read-only; no copy. Owns `fd` from now on, also when it raises.

        Args:
            fd: a descriptor of a staged memory file.
            verify: read all bytes once and compare the checksum (about 1 s a GB; releases the GIL).

        Raises:
            ValueError: not sealed, not whole, or not the bytes that were staged; says which.
        """
        try:
            mapping = _map(fd)
            try:
                return cls(fd, mapping, _entries(mapping, verify))
            except BaseException:
                mapping.close()
                raise
        except BaseException:
            os.close(fd)
            raise

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU tensor) one by one: read-only views of the mapping, no copy. Writing to one is a segmentation fault."""
        import numpy as np
        import torch

        if self._mapping is None:
            raise ValueError("these staged weights are closed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch cannot know that nobody writes
            # Through numpy, which exports the buffer, so that `close` cannot unmap it under a live tensor; torch.frombuffer does not.
            base = torch.from_numpy(np.frombuffer(self._mapping, dtype=np.uint8))
        for name, entry in self._entries.items():
            flat = base[entry.offset : entry.offset + entry.nbytes]
            yield name, flat.view(getattr(torch, entry.dtype)).view(entry.shape)

    def close(self) -> None:
        """Give up the descriptor and the mapping; tensors that are still alive stay valid. Idempotent."""
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # a tensor is alive: unmapped when the last one dies
                self._mapping.close()
            self._mapping = None
            os.close(self.fd)

    def __enter__(self) -> StagedWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def stage(source: Source, *, dtype: str | None = None, rename: Mapping[str, str] | None = None) -> StagedWeights:
    """Copy `source` into one sealed memory file.

    Args:
        source: a state dict, an iterable of (name, tensor) (written as they come, so one tensor at a time is alive), or a
            folder with .safetensors files. Tensors on a GPU are copied through pinned memory. Tied tensors are staged under each of their names.
            A DTensor is gathered when its turn comes, which all ranks of its mesh must do (`join_gathering`).
        dtype: torch's name of the dtype that floating-point tensors are cast to (`"bfloat16"`); None: as they are.
        rename: prefixes of names and what takes their place, the longest first; see `WeightsConfig.rename`.

    Raises:
        ValueError: the source is none of these, a name comes twice, a tensor cannot be staged, or the folder holds no safetensors.
        MemoryBudgetError: the copy does not fit into what the cgroup or the machine has left.
        Exception: whatever the iterable raises. Nothing is left in any case.
    """
    left, limit = memory_limit()
    fd = os.memfd_create("mprollout-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        entries: dict[str, _Entry] = {}
        at = checksum = 0
        prefixes = sorted((rename or {}).items(), key=lambda pair: -len(pair[0]))
        for given, own_dtype, shape, chunks in _pieces(source, dtype):
            name = next((new + given[len(old) :] for old, new in prefixes if given.startswith(old)), given)
            if name in entries:
                raise ValueError(f"staging weights: {name!r} comes twice")
            _check_dtype(name, own_dtype)
            at, checksum = _append(fd, bytes(-at % _ALIGNMENT), at, checksum)
            entries[name] = entry = _Entry(own_dtype, tuple(shape), at)
            if at + entry.nbytes > left:
                raise MemoryBudgetError(
                    f"staging weights: {name!r} brings the copy to {at + entry.nbytes:,} bytes, but only {left:,} were left ({limit}); "
                    "raise the limit, or give fewer or smaller tensors"
                )
            for chunk in chunks:
                at, checksum = _append(fd, chunk, at, checksum)
        if not entries:
            raise ValueError("staging weights: the source has no tensors")
        header = msgspec.msgpack.encode(entries)
        at, checksum = _append(fd, header, at, checksum)
        _append(fd, _FOOTER.pack(len(header), checksum, _MAGIC), at, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return StagedWeights.open(fd, verify=False)


def join_gathering(source: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
    """What the ranks without an engine do while rank 0 calls `update_weights` with the same names in the same order: gathering a DTensor is collective.

    Blocks until all are gathered; keeps nothing. Returns at once where no tensor is a DTensor.
    """
    for _, tensor in _named_tensors(source):
        del tensor


def keep(weights: StagedWeights, run_dir: Path, version: int, versions: int) -> None:
    """Write a completed version to `RUN/weights/<version>.safetensors` and remove all but the last `versions`; never a half-written one."""
    from safetensors.torch import save_file

    folder = run_dir / WEIGHTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{version}.safetensors"
    try:
        save_file(dict(weights.tensors()), beside)
        beside.rename(folder / f"{version}.safetensors")
    finally:
        beside.unlink(missing_ok=True)
    for old in sorted(folder.glob("*.safetensors"), key=lambda path: int(path.stem))[:-versions]:
        old.unlink()


def checkpoint_shapes(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Shape by parameter name of a checkpoint folder, read from its safetensors headers; empty when it has none."""
    return {
        name: tuple(info["shape"])
        for path in sorted(Path(folder).glob("*.safetensors"))
        for name, info in _safetensors_header(path)[0].items()
    }


def check_parameters(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()
) -> None:
    """Whether an update covers every parameter of an engine, with the right shapes.

    Args:
        given, expected: shape by name.
        optional: expected names that may be absent (tied weights).

    Raises:
        ValueError: names up to five parameters that are unknown, missing or of another shape.
    """
    spared = set(optional)
    wrong = [f"{name} is unknown to the engine" for name in given if name not in expected]
    wrong += [f"{name} is missing" for name in expected if name not in given and name not in spared]
    wrong += [
        f"{name} has shape {list(given[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError("weight update refused, nothing was changed: " + "; ".join(wrong[:5]) + more)


def load_staged(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """SGLang's `custom_weight_loader`: runs in the scheduler, where each name is the path of a staged memory file's descriptor.

    So the tensors are not copied on their way: every tensor-parallel rank maps the same memory and loads its own slices from it.
    """
    for path, _ in named_tensors:
        with StagedWeights.open(os.open(path, os.O_RDONLY | os.O_CLOEXEC), verify=False) as weights:
            model.load_weights(weights.tensors())


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"staging weights: {name!r} has dtype {dtype}; supported are {', '.join(_ITEM_BYTES)}")


def _append(fd: int, data: Buffer, at: int, checksum: int) -> tuple[int, int]:
    view = memoryview(data)
    if view.nbytes:
        view = view.cast("B")
        for start in range(0, len(view), _WRITE_BYTES):
            piece = view[start : start + _WRITE_BYTES]
            checksum = zlib.crc32(piece, checksum)
            while piece:
                written = os.pwrite(fd, piece, at)
                at, piece = at + written, piece[written:]
    return at, checksum


def _map(fd: int) -> mmap.mmap:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise ValueError(
            f"descriptor {fd} is no staged weights: its seals are {seals:#x}, expected {_SEALS:#x} (no write, grow or shrink)"
        )
    size = os.fstat(fd).st_size
    if size < _FOOTER.size:
        raise ValueError(f"staged weights of {size} bytes: at least {_FOOTER.size} expected")
    return mmap.mmap(fd, size, access=mmap.ACCESS_READ)


def _entries(mapping: mmap.mmap, verify: bool) -> dict[str, _Entry]:
    end = len(mapping) - _FOOTER.size
    header_bytes, checksum, magic = _FOOTER.unpack_from(mapping, end)
    if magic != _MAGIC or header_bytes > end:
        raise ValueError(
            f"staged weights: magic {_MAGIC!r} and a header of at most {end} bytes expected, {magic!r} and {header_bytes} found"
        )
    if verify:
        with memoryview(mapping) as whole, whole[:end] as content:
            found = zlib.crc32(content)
        if found != checksum:
            raise ValueError(f"staged weights: checksum {checksum:#010x} expected, {found:#010x} found in {end} bytes")
    start = end - header_bytes
    try:
        entries = msgspec.msgpack.decode(mapping[start:end], type=dict[str, _Entry])
        for name, entry in entries.items():
            if entry.offset < 0 or entry.offset % _ALIGNMENT or entry.offset + entry.nbytes > start:
                raise ValueError(
                    f"{name!r} at offset {entry.offset}, {entry.nbytes} bytes, lies outside [0, {start}) or is not aligned"
                )
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise ValueError(f"staged weights: bad header: {error}") from error
    return entries


def _pieces(source: Any, cast_to: str | None) -> Iterator[tuple[str, str, tuple[int, ...], Iterable[Buffer]]]:
    """(name, dtype, shape, its bytes in chunks) of every tensor of any source."""
    folder = isinstance(source, (str, os.PathLike))
    if folder and cast_to is None:
        yield from _from_checkpoint(Path(source))
        return
    import torch

    wanted = getattr(torch, cast_to) if cast_to else None
    for name, tensor in _checkpoint_tensors(Path(source)) if folder else _named_tensors(source):
        own = tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor
        yield name, str(own.dtype).removeprefix("torch."), tuple(own.shape), _tensor_chunks(own)


def _named_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if not isinstance(source, Iterable):
        raise ValueError(
            f"staging weights: expected a state_dict, (name, tensor) pairs or a checkpoint folder; got {source!r:.200}"
        )
    for pair in source.items() if isinstance(source, Mapping) else source:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f"staging weights: expected (name, tensor) pairs; got {pair!r:.200}")
        name, tensor = pair
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"staging weights: {name!r}: expected a torch.Tensor; got {type(tensor).__name__}")
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "a meta tensor, which has no data" if tensor.is_meta else f"a tensor of layout {tensor.layout}"
            raise ValueError(f"staging weights: {name!r}: expected a dense tensor; got {kind}")
        yield (
            name,
            tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor,
        )  # a DTensor's shards, a collective


def _tensor_chunks(tensor: torch.Tensor) -> Iterator[Buffer]:
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type != "cuda":
        yield flat.cpu().numpy()
        return
    pinned = torch.empty(min(_PINNED_BYTES, flat.numel()), dtype=torch.uint8, pin_memory=True)
    for start in range(0, flat.numel(), _PINNED_BYTES):
        part = flat[start : start + _PINNED_BYTES]
        yield pinned[: part.numel()].copy_(part).numpy()


def _from_checkpoint(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...], Iterable[Buffer]]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no .safetensors file")
    for path in paths:
        header, start = _safetensors_header(path)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            for name, info in header.items():
                first, last = info["data_offsets"]
                dtype = _DTYPES.get(info["dtype"], (info["dtype"], 0))[0]
                with view[start + first : start + last] as part:
                    yield name, dtype, tuple(info["shape"]), (part,)


def _checkpoint_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    import numpy as np
    import torch

    for name, dtype, shape, chunks in _from_checkpoint(folder):
        _check_dtype(name, dtype)
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            (chunk,) = chunks
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(chunk, np.uint8)
        yield name, tensor


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors' descriptions and the offset of the first tensor's bytes."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > path.stat().st_size:
            raise ValueError(
                f"{path} is no safetensors file: a header of {length} bytes in {path.stat().st_size} bytes"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + length
