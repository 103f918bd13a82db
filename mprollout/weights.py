"""A whole set of named tensors in one file that is written once: `StagedWeights`, and what an engine asks of it.

    stage (staging) --> memory file ----+--> StagedWeights.open --> read-only views, in any process
    write (weight_files) -> .safetensors +

Layout of the memory file (little-endian; a footer instead of a header, because a stream's names are known only at its end):

    tensor bytes, each at a multiple of 64
    header: msgpack map of name -> [dtype, shape, offset, checksum]
    footer, 24 bytes: uint64 header length, uint64 crc32 of the header, 8 bytes magic

A tensor's checksum is the sum of its 64-bit words (modulo 2^64, the last one filled up with zeros): a CPU and a GPU both have it at the
speed of memory, so what came by another way (`transports`) is held against it as well.

Invariant: a `StagedWeights` that exists is whole. `StagedWeights.open` checks seals, magic, every offset and every checksum. The seals
(size, and writing by whoever has only the descriptor) leave the writer alone able to change it, who does so only when no process reads it
any more (`updates`). The memory is gone with the last descriptor and view, `kill -9` included. torch is imported only when tensors are touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    import torch

ALIGNMENT = 64
_FOOTER = struct.Struct("<QQ8s")
_MAGIC = b"mpweigh2"
_F_SEAL_FUTURE_WRITE = 0x10  # of linux/fcntl.h; Python 3.11 does not name it
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
THREADS = min(4, len(os.sched_getaffinity(0)))
"""That sum, and copy: one alone does not fill the memory's speed."""
PIECE_BYTES = 1 << 20
"""Piece that is summed, and copied, while it is in the cache."""

# safetensors' names of the dtypes -> torch's names, and the bytes of one element
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U8": ("uint8", 1), "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
}  # fmt: skip
ITEM_BYTES = dict(DTYPES.values())


class Entry(NamedTuple):
    """Where a tensor lies in the file, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Bucket(NamedTuple):
    """Whole tensors that lie one behind the other: the bytes [start, end) of the file."""

    start: int
    end: int
    entries: dict[str, Entry]

    def views(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The tensors in `flat`, uint8 `[end - start]` on any device, which holds the bucket's bytes; no copy."""
        import torch

        found = []
        for name, entry in self.entries.items():
            at = entry.offset - self.start
            found.append((name, flat[at : at + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)))
        return found

    def check(self, flat: torch.Tensor) -> None:
        """Hold every tensor in `flat` against its checksum, on the device where it is.

        Raises:
            ValueError: names the first that is not what was staged.
        """
        import torch

        sums = []
        for entry in self.entries.values():
            at = entry.offset - self.start
            sums.append(flat[at : at + (entry.nbytes + 7 & ~7)].view(torch.int64).sum())
        for (name, entry), found in zip(self.entries.items(), torch.stack(sums).tolist(), strict=True):
            _compare(name, entry, found % 2**64)


class StagedWeights:
    """Named tensors in a file; owns its descriptor and its mapping.

    Attributes:
        fd: the descriptor; another process opens a duplicate of it with `StagedWeights.open`.
        shapes: shape by name, in the order staged.
        nbytes: bytes of all tensors.
        on_gpu: tensors of the trainer from which GPU buckets are filled without the way over this copy, by their names here.

    Example:
        with stage(model.state_dict()) as weights:
            other = StagedWeights.open(os.dup(weights.fd))
            tensors = dict(other.tensors())
    """

    def __init__(self, fd: int, mapping: mmap.mmap, entries: dict[str, Entry]) -> None:
        self.fd = fd
        self._mapping: mmap.mmap | None = mapping
        self.entries = entries
        self.shapes: dict[str, tuple[int, ...]] = {name: entry.shape for name, entry in entries.items()}
        self.nbytes = sum(entry.nbytes for entry in entries.values())
        self.on_gpu: dict[str, torch.Tensor] = {}

    @classmethod
    def open(cls, fd: int, verify: bool = True) -> StagedWeights:
        """Map what `fd` holds, a staged memory file or a file that `weight_files.write` wrote, read-only; no copy. Owns `fd` from now on, also
        when it raises.

        Args:
            verify: read all bytes once and compare the checksums (about 0.1 s a GB; releases the GIL).

        Raises:
            ValueError: not sealed, not whole, or not the bytes that were staged; says which.
        """
        try:
            on_disk = _is_on_disk(fd)
            mapping = _map(fd)
            try:
                if on_disk:
                    from mprollout.weight_files import entries_of

                    entries = entries_of(fd)
                else:
                    entries = _entries(mapping)
                if verify:
                    _verify(mapping, entries)
                return cls(fd, mapping, entries)
            except BaseException:
                mapping.close()
                raise
        except BaseException:
            os.close(fd)
            raise

    @property
    def names(self) -> list[str]:
        return list(self.entries)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU tensor) one by one: read-only views of the mapping, no copy. Writing to one is a segmentation fault."""
        whole = self.bytes(0, len(self._open()))
        return iter(Bucket(0, len(whole), self.entries).views(whole))

    def bytes(self, start: int, end: int) -> torch.Tensor:
        """The bytes [start, end) of the file as a CPU tensor: a read-only view, no copy."""
        import numpy as np
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch cannot know that nobody writes
            # Through numpy, which exports the buffer, so that `close` cannot unmap it under a live tensor; torch.frombuffer does not.
            return torch.from_numpy(np.frombuffer(self._open(), np.uint8, end - start, start))

    def buckets(self, max_bytes: int) -> list[Bucket]:
        """All tensors in the order of the file, in buckets of at most so many bytes; a larger tensor is a bucket of its own."""
        buckets: list[Bucket] = []
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].offset):
            end = entry.offset + (entry.nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
            if buckets and end - buckets[-1].start <= max_bytes:
                buckets[-1] = buckets[-1]._replace(end=end, entries={**buckets[-1].entries, name: entry})
            else:
                buckets.append(Bucket(entry.offset, end, {name: entry}))
        return buckets

    def close(self) -> None:
        """Give up the descriptor and the mapping; tensors that are still alive stay valid. Idempotent."""
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # a tensor is alive: unmapped when the last one dies
                self._mapping.close()
            self._mapping = None
            os.close(self.fd)

    def take_mapping(self) -> mmap.mmap | None:
        """Hand file and mapping to whoever writes the next copy there; None: they were closed. No tensor of this one may be alive."""
        mapping, self._mapping = self._mapping, None
        return mapping

    def _open(self) -> mmap.mmap:
        if self._mapping is None:
            raise ValueError("these staged weights are closed")
        return self._mapping

    def __enter__(self) -> StagedWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def checksum(data: Buffer) -> int:
    """Sum of the 64-bit words of `data`, the last one filled up with zeros, modulo 2^64. Reads every byte once; releases the GIL."""
    import numpy as np

    with memoryview(data) as view:
        if not view.nbytes:
            return 0
        with view.cast("B") as content:
            whole = len(content) & ~7
            total = int(np.frombuffer(content, np.uint64, whole // 8).sum()) if whole else 0
            return (total + int.from_bytes(content[whole:], "little")) % 2**64


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


def ending(entries: dict[str, Entry]) -> bytes:
    """Header and footer: the last bytes of a memory file."""
    header = msgspec.msgpack.encode(entries)
    return header + _FOOTER.pack(len(header), zlib.crc32(header), _MAGIC)


def _verify(mapping: mmap.mmap, entries: dict[str, Entry]) -> None:
    with memoryview(mapping) as content, ThreadPoolExecutor(THREADS) as threads:

        def checksum_of(entry: Entry) -> int:
            with content[entry.offset : entry.offset + entry.nbytes] as part:
                return checksum(part)

        for (name, entry), found in zip(entries.items(), threads.map(checksum_of, entries.values()), strict=True):
            _compare(name, entry, found)


def _compare(name: str, entry: Entry, found: int) -> None:
    if found != entry.checksum:
        raise ValueError(
            f"staged weights: {name!r}: checksum {entry.checksum:#018x} expected, {found:#018x} found in {entry.nbytes} bytes"
        )


def _is_on_disk(fd: int) -> bool:
    """Raises ValueError for a memory file without the seals."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return True
    if seals & SEALS != SEALS:
        raise ValueError(
            f"descriptor {fd} is no staged weights: its seals are {seals:#x}, expected {SEALS:#x} (no growing, shrinking or new writer)"
        )
    return False


def _map(fd: int) -> mmap.mmap:
    size = os.fstat(fd).st_size
    if size < _FOOTER.size:
        raise ValueError(f"staged weights of {size} bytes: at least {_FOOTER.size} expected")
    return mmap.mmap(fd, size, access=mmap.ACCESS_READ)


def _entries(mapping: mmap.mmap) -> dict[str, Entry]:
    end = len(mapping) - _FOOTER.size
    header_bytes, crc, magic = _FOOTER.unpack_from(mapping, end)
    if magic != _MAGIC or header_bytes > end:
        raise ValueError(
            f"staged weights: magic {_MAGIC!r} and a header of at most {end} bytes expected, {magic!r} and {header_bytes} found"
        )
    start = end - header_bytes
    header = mapping[start:end]
    if zlib.crc32(header) != crc:
        raise ValueError(f"staged weights: bad header: crc32 {crc:#010x} expected, {zlib.crc32(header):#010x} found")
    try:
        entries = msgspec.msgpack.decode(header, type=dict[str, Entry])
        for name, entry in entries.items():
            if entry.offset < 0 or entry.offset % ALIGNMENT or entry.offset + entry.nbytes > start:
                raise ValueError(
                    f"{name!r} at offset {entry.offset}, {entry.nbytes} bytes, lies outside [0, {start}) or is not aligned"
                )
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise ValueError(f"staged weights: bad header: {error}") from error
    return entries
