"""Staging: any source of tensors becomes one whole copy in a memory file, checked, in the engine's names and dtypes.

    state_dict | (name, tensor) stream | checkpoint folder --stage--> StagedWeights (weights)

Invariant: nothing reaches a worker before its source has ended without an error (C46): `stage` returns a whole copy or raises, whatever the
transport. A copy that is no longer needed can be written over (`spare`), since new pages cost several times what copying into old ones does.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mprollout import weight_files
from mprollout.errors import MemoryBudgetError
from mprollout.limits import memory_limit
from mprollout.weights import ALIGNMENT, ITEM_BYTES, PIECE_BYTES, SEALS, THREADS, Entry, StagedWeights, checksum, ending

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    import torch

    Source = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | os.PathLike[str]

_PINNED_BYTES = 64 << 20
"""Piece of a GPU tensor on its way through pinned memory."""


def stage(
    source: Source,
    *,
    dtype: str | None = None,
    rename: Mapping[str, str] | None = None,
    spare: StagedWeights | None = None,
) -> StagedWeights:
    """Copy `source` into one sealed memory file.

    Args:
        source: a state dict, an iterable of (name, tensor) (written as they come, so one tensor at a time is alive), or a
            folder with .safetensors files. Tensors on a GPU are copied through pinned memory. Tied tensors are staged under each of their names.
            A DTensor is gathered when its turn comes, which all ranks of its mesh must do (`join_gathering`).
        dtype: torch's name of the dtype that floating-point tensors are cast to (`"bfloat16"`); None: as they are.
        rename: prefixes of names and what takes their place, the longest first; see `WeightsConfig.rename`.
        spare: an earlier copy that no process reads any more; it is closed, and its memory used again where this one fits into it.

    Raises:
        ValueError: the source is none of these, a name comes twice, a tensor cannot be staged, or the folder holds no safetensors.
        MemoryBudgetError: the copy does not fit into what the cgroup or the machine has left.
        Exception: whatever the iterable raises. Nothing is left in any case.
    """
    with _Writer(spare) as writer:
        prefixes = sorted((rename or {}).items(), key=lambda pair: -len(pair[0]))
        on_gpu: dict[str, torch.Tensor] = {}
        for piece in _pieces(source, dtype):
            given = piece.name
            name = next((new + given[len(old) :] for old, new in prefixes if given.startswith(old)), given)
            if name in writer.entries:
                raise ValueError(f"staging weights: {name!r} comes twice")
            _check_dtype(name, piece.dtype)
            writer.add(name, piece)
            own = source[given] if isinstance(source, Mapping) else None
            if own is not None and own.is_cuda and not hasattr(own, "full_tensor"):  # its holder has it anyway
                on_gpu[name] = own.detach()
        if not writer.entries:
            raise ValueError("staging weights: the source has no tensors")
        staged = writer.seal()
    staged.on_gpu = on_gpu
    return staged


def join_gathering(source: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
    """What the ranks without an engine do while rank 0 calls `update_weights` with the same names in the same order: gathering a DTensor is collective.

    Blocks until all are gathered; keeps nothing. Returns at once where no tensor is a DTensor.
    """
    for _, tensor in _named_tensors(source):
        del tensor


class _Piece(NamedTuple):
    """One tensor of a source, in its dtype to be."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[Buffer]


class _Writer:
    """A memory file being written: a new one, or what the spare one has, as long as that is enough."""

    def __init__(self, spare: StagedWeights | None) -> None:
        self.entries: dict[str, Entry] = {}
        self._at = 0
        self._left, self._limit = memory_limit()
        self._threads = ThreadPoolExecutor(THREADS)
        self._mapping: mmap.mmap | None = None
        if spare is not None and (mapping := spare.take_mapping()) is not None:
            self._fd, self._mapping = spare.fd, mapping
        else:
            self._fd = _memory_file()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
        if self._mapping is not None:
            with contextlib.suppress(BufferError):
                self._mapping.close()

    def add(self, name: str, piece: _Piece) -> None:
        self._append(bytes(-self._at % ALIGNMENT))
        entry = Entry(piece.dtype, tuple(piece.shape), self._at, 0)
        end = self._at + entry.nbytes
        if self._mapping is not None and end > len(self._mapping):
            self._outgrow()
        if self._mapping is None and end > self._left:
            raise MemoryBudgetError(
                f"staging weights: {name!r} brings the copy to {end:,} bytes, but only {self._left:,} were left ({self._limit}); "
                "raise the limit, or give fewer or smaller tensors"
            )
        total = sum(self._append(chunk) for chunk in piece.chunks)
        self.entries[name] = entry._replace(checksum=total % 2**64)

    def seal(self) -> StagedWeights:
        """The whole copy, which owns the file from now on."""
        self._append(bytes(-self._at % ALIGNMENT))
        last = ending(self.entries)
        if self._mapping is not None and self._at + len(last) > len(self._mapping):
            self._outgrow()
        if self._mapping is None:
            size = self._at + len(last) + 9 * len(self.entries)  # other checksums can take more room in the header
            os.ftruncate(self._fd, size)
            self._mapping = mmap.mmap(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        self._mapping[-len(last) :] = last
        staged = StagedWeights(self._fd, self._mapping, self.entries)
        self._fd, self._mapping = -1, None
        return staged

    def _append(self, data: Buffer) -> int:
        """Write at the end; the checksum of what was written."""
        import numpy as np

        nbytes = memoryview(data).nbytes
        content = np.frombuffer(data, np.uint8) if nbytes else np.empty(0, np.uint8)
        at, self._at = self._at, self._at + nbytes
        if nbytes <= PIECE_BYTES:
            return self._put(content, at)
        pieces = range(0, nbytes, PIECE_BYTES)
        return sum(self._threads.map(lambda i: self._put(content[i : i + PIECE_BYTES], at + i), pieces))

    def _put(self, piece: Any, at: int) -> int:
        """Write a piece, uint8 `[n]`, there; its checksum, while it is in the cache."""
        import numpy as np

        if self._mapping is not None:
            if len(piece):
                np.copyto(np.frombuffer(self._mapping, np.uint8, len(piece), at), piece)
        else:
            left = memoryview(piece)
            while left:
                written = os.pwrite(self._fd, left, at)
                at, left = at + written, left[written:]
        return checksum(piece)

    def _outgrow(self) -> None:
        """More than the spare one holds: go on in a new file."""
        assert self._mapping is not None
        old, old_fd, self._mapping, self._fd = self._mapping, self._fd, None, _memory_file()
        with memoryview(old) as view, view[: self._at] as written:
            self._at = 0
            self._append(written)
        with contextlib.suppress(BufferError):  # a tensor is alive: unmapped when the last one dies
            old.close()
        os.close(old_fd)


def _memory_file() -> int:
    fd = os.memfd_create("mprollout-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    return fd


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"staging weights: {name!r} has dtype {dtype}; supported are {', '.join(ITEM_BYTES)}")


def _pieces(source: Any, cast_to: str | None) -> Iterator[_Piece]:
    folder = isinstance(source, (str, os.PathLike))
    if folder and cast_to is None:
        for content in weight_files.read_checkpoint(Path(source)):
            yield _Piece(*content)
        return
    import torch

    wanted = getattr(torch, cast_to) if cast_to else None
    for name, tensor in weight_files.checkpoint_tensors(Path(source)) if folder else _named_tensors(source):
        own = tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor
        yield _Piece(name, str(own.dtype).removeprefix("torch."), tuple(own.shape), _tensor_chunks(own))


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
