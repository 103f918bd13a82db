"""Weights as safetensors on disk: a checkpoint's folder read tensor by tensor, a staged copy written as a file, the last versions kept.

Invariant: a file in `RUN/weights` is whole (written beside its name, then renamed). One that `write` made carries the staged checksums, so that
`StagedWeights.open` takes it for a staged copy. torch is imported only where a tensor is asked for.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprollout.weights import DTYPES, ITEM_BYTES, Entry, StagedWeights

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    import torch

WEIGHTS_FOLDER = "weights"
_CHECKSUMS = "mprollout.checksums"


def checkpoint_shapes(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Shape by parameter name of a checkpoint folder, read from its safetensors headers; empty when it has none."""
    return {
        name: tuple(info["shape"])
        for path in sorted(Path(folder).glob("*.safetensors"))
        for name, info in _header(path)[0].items()
    }


def read_checkpoint(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...], Iterable[Buffer]]]:
    """(name, dtype, shape, its bytes) of every tensor of a checkpoint folder.

    Raises:
        ValueError: there is no safetensors file, or it is none.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no .safetensors file")
    for path in paths:
        header, _, start = _header(path)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            for name, info in header.items():
                first, last = info["data_offsets"]
                dtype = DTYPES.get(info["dtype"], (info["dtype"], 0))[0]
                with view[start + first : start + last] as part:
                    yield name, dtype, tuple(info["shape"]), (part,)


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as tensors, each a copy."""
    import numpy as np
    import torch

    for name, dtype, shape, chunks in read_checkpoint(folder):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            (chunk,) = chunks
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(chunk, np.uint8)
        yield name, tensor


def write(weights: StagedWeights, run_dir: Path, version: int) -> Path:
    """Write a staged copy to `RUN/weights/<version>.safetensors`; never a half-written one. Takes the disk's time."""
    names = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {_CHECKSUMS: ""}}
    at, sums = 0, {}
    # The widest first, so that every tensor is aligned; the header fills up to a multiple of 64.
    order = sorted(weights.entries.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
    for name, entry in order:
        header[name] = {"dtype": names[entry.dtype], "shape": entry.shape, "data_offsets": [at, at + entry.nbytes]}
        sums[name] = entry.checksum
        at += entry.nbytes
    header["__metadata__"][_CHECKSUMS] = json.dumps(sums)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % 64)
    folder = run_dir / WEIGHTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path, beside = folder / f"{version}.safetensors", folder / f".{version}.safetensors"
    try:
        with beside.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.flush()
            for _, entry in order:
                sent = 0
                while sent < entry.nbytes:
                    sent += os.sendfile(file.fileno(), weights.fd, entry.offset + sent, entry.nbytes - sent)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def keep(weights: StagedWeights, run_dir: Path, version: int, versions: int) -> None:
    """Have a completed version in `RUN/weights`, and none but the last `versions`."""
    if not (run_dir / WEIGHTS_FOLDER / f"{version}.safetensors").exists():
        write(weights, run_dir, version)
    keep_last(run_dir, versions)


def keep_last(run_dir: Path, versions: int) -> None:
    """Remove all but the last so many versions from `RUN/weights`."""
    kept = sorted((run_dir / WEIGHTS_FOLDER).glob("*.safetensors"), key=lambda path: int(path.stem))
    for old in kept[: max(0, len(kept) - versions)]:
        old.unlink()


def entries_of(fd: int) -> dict[str, Entry]:
    """What lies where in a file that `write` made.

    Raises:
        ValueError: it is no such file.
    """
    path = Path(f"/proc/self/fd/{fd}")
    header, metadata, start = _header(path)
    size = os.fstat(fd).st_size
    try:
        sums = json.loads(metadata[_CHECKSUMS])
        entries = {}
        for name, info in header.items():
            first, last = info["data_offsets"]
            entry = Entry(DTYPES[info["dtype"]][0], tuple(info["shape"]), start + first, sums[name])
            if first < 0 or last - first != entry.nbytes or start + last > size:
                raise ValueError(f"{name!r}: {entry.nbytes} bytes in [{first}, {last}) of {size - start}")
            entries[name] = entry
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.readlink()} is no staged weights on disk: {error!r}") from error
    return entries


def _header(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """The tensors' descriptions, the metadata, and the offset of the first tensor's bytes."""
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
    return header, header.pop("__metadata__", {}), 8 + length
