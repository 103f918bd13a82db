"""Record and replay: every delivered group on disk, as the ring had it; and a trainer fed from there, without engines.

    get --Recorder.add--> part-000000.parquet, ...  (a row a group, its fields as lists) --ReplaySource.get--> the same batches

Invariant: a part is whole or not there (written beside its name, synced, then renamed), and groups stand in the order in which they were
taken, each once: the buffer is keyed by ticket and attempt and the last batch stays in it, so that a `get` that was interrupted and comes again records nothing twice.
What is buffered when the process is killed is lost: at most the last part. pyarrow is imported when the first part is written or read.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec
import numpy as np
import numpy.typing as npt

from mprollout import _native
from mprollout.batch import Batch, Group
from mprollout.config import EngineConfig, SGLangConfig
from mprollout.errors import ConfigError, DataExhausted
from mprollout.schema import SCHEMA, Field

if TYPE_CHECKING:
    import pyarrow as pa

RECORD_FOLDER = "record"
_FORMAT = "2"
_PART_BYTES = 32 << 20
"""Field bytes that are buffered before a part is written."""


class RecordedGroup(msgspec.Struct, kw_only=True):
    """One row of a part: a group with all that says how it was taken. `fields`: the ring's arrays, in the order of the schema."""

    batch: int
    """Number of the `get` that returned it, from 0."""
    policy_version: int
    """The trainer's at its take."""
    ticket: int
    worker: int
    attempt: int
    lag: int
    masked: bool
    fields: list[npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of its fields."""
        return sum(field.nbytes for field in self.fields)

    def field(self, index: int, dtype: str) -> npt.NDArray[Any]:
        """As `Lease.field`: read-only."""
        assert self.fields[index].dtype == np.dtype(dtype)
        return self.fields[index]

    def release(self) -> int:
        """As `Lease.release`; there is no memory to give back."""
        return 0


_ABOUT = ("batch", "policy_version", "ticket", "worker", "attempt", "lag", "masked")


class Recorder:
    """Writes a folder of parts. Used by the thread that takes; parts are written beside it, in order.

    Args:
        folder: made if it is not there; a recording that is there is continued.
        extra_fields: the run's own fields; kept as bytes.
        about: what a reader wants to know of the run (model, tokenizer); strings.
        max_bytes: of all parts together; the oldest are removed.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, folder: Path, extra_fields: tuple[Field, ...], about: Mapping[str, str], max_bytes: int) -> None:
        self._folder, self._extra, self._about, self._max_bytes = folder, extra_fields, dict(about), max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_halves(folder)
        except OSError as error:
            raise ConfigError(f"record={str(folder)!r}: no folder can be made there: {error}") from error
        there = parts(folder)
        self._number = _number(there[-1]) + 1 if there else 0
        self._batch = 1 + max((_last_batch(path) for path in there[-1:]), default=-1)
        self._buffer: dict[tuple[int, int], RecordedGroup] = {}
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="mprollout-record")
        self._writing: list[concurrent.futures.Future[None]] = []

    def add(self, batch: Batch, policy_version: int) -> None:
        """Copy a batch that is about to be handed over. Groups that come again (their `get` was interrupted) take the place of the first time's.

        Raises:
            OSError: an earlier part could not be written (a full disk): the recording has a hole there.
        """
        self._raise_failure(wait=False)
        for group in batch:
            self._buffer.pop((group.ticket, group.attempt), None)
        if sum(group.nbytes for group in self._buffer.values()) >= _PART_BYTES:
            self._write_out(before=self._batch - 1)
        for group in batch:
            fields = [np.array(group.lease.field(i, field.dtype)) for i, field in enumerate(SCHEMA + self._extra)]
            self._buffer[group.ticket, group.attempt] = RecordedGroup(
                batch=self._batch,
                policy_version=policy_version,
                ticket=group.ticket,
                worker=group.worker,
                attempt=group.attempt,
                lag=group.lag,
                masked=group.masked,
                fields=fields,
            )
        self._batch += 1

    def close(self, parked: Iterable[_native.Lease] = ()) -> None:
        """Write what is buffered and wait for it. Idempotent.

        Args:
            parked: groups of an interrupted `get` that nobody got.

        Raises:
            OSError: a part could not be written.
        """
        for lease in parked:
            self._buffer.pop((lease.ticket, lease.attempt), None)
        self._write_out(before=self._batch)
        self._writer.shutdown(wait=True)
        self._raise_failure(wait=True)

    def _write_out(self, before: int) -> None:
        """Start writing the groups of the batches below `before`: those of the last one may come again."""
        keys = [key for key, group in self._buffer.items() if group.batch < before]
        if keys:
            groups = [self._buffer.pop(key) for key in keys]
            self._writing.append(self._writer.submit(self._write, part(self._folder, self._number), groups))
            self._number += 1

    def _raise_failure(self, wait: bool) -> None:
        done = [future for future in self._writing if wait or future.done()]
        self._writing = [future for future in self._writing if future not in done]
        for future in done:
            future.result()

    def _write(self, path: Path, groups: list[RecordedGroup]) -> None:
        write_whole(path, [_table(groups, self._extra, self._about)])
        there = parts(self._folder)
        sizes = [path.stat().st_size for path in there]
        while len(there) > 1 and sum(sizes) > self._max_bytes:
            there.pop(0).unlink()
            sizes.pop(0)


def recorder(config: EngineConfig) -> Recorder | None:
    """What a config asks for; None: nothing."""
    if config.record is None:
        return None
    folder = Path(config.run_dir or "") / RECORD_FOLDER if config.record == "run" else Path(config.record)
    generator = config.generator
    about = {"model": generator.model if isinstance(generator, SGLangConfig) else ""}
    return Recorder(folder, config.ring.stored_fields, about, config.record_max_bytes)


class ReplayedBatch(Batch):
    """A `Batch` whose groups own their memory."""

    def release(self) -> None:
        """As a batch from the ring: its groups cannot be read any more. Idempotent."""
        self.released = True
        for group in self.groups:
            group._released = True


class ReplaySource:
    """Feeds a recorded run to a trainer: the same groups in the same order, bytes for bytes, with the lags and versions they had.

    Args:
        folder: what `EngineConfig.record` named.

    Raises:
        ConfigError: no recording lies there, or one of another format.

    Example:
        >>> with ReplaySource("runs/7/record") as engine:                      # doctest: +SKIP
        ...     with engine.get() as batch:
        ...         train(batch.packed())
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._rows = read(self._folder)
        self._next = next(self._rows, None)
        if self._next is None:
            raise ConfigError(f"{self._folder}: no recording (part-*.parquet) lies there")
        self._extra = extra_fields(self._folder)
        self.policy_version = self._next.policy_version
        """The trainer's version when the last batch was taken."""

    def get(self, n: int | None = None, timeout: float | None = None) -> Batch:
        """The next n groups; None: as many as the recorded `get` returned. `timeout` is that of `RolloutEngine.get`, and unused.

        Raises:
            DataExhausted: fewer than n are left; `get(error.available)` takes them.
        """
        if n is not None and not (type(n) is int and n >= 1):
            raise ConfigError(f"get(n): n must be an integer >= 1, or None; got {n!r}")
        rows: list[RecordedGroup] = []
        while self._next is not None and (
            len(rows) < n if n is not None else not rows or self._next.batch == rows[0].batch
        ):
            rows.append(self._next)
            self._next = next(self._rows, None)
        if not rows or (n is not None and len(rows) < n):
            self._rows = iter(rows)
            self._next = next(self._rows, None)
            raise DataExhausted(f"get({n}): the recording {self._folder} has ended", available=len(rows))
        self.policy_version = rows[-1].policy_version
        # A row answers to what is asked of a lease.
        return ReplayedBatch(cast(list[_native.Lease], rows), lambda lease: self.group(cast(RecordedGroup, lease)))

    def group(self, row: RecordedGroup) -> Group:
        """A recorded row as the trainer had it."""
        group = Group(cast(_native.Lease, row), self._extra)
        group.lag, group.masked = row.lag, row.masked
        return group

    def update_weights(self, source: Any, timeout: float | None = None) -> int:
        """Nobody samples: the weights go nowhere. Returns the recorded version."""
        return self.policy_version

    def close(self) -> None:
        """Nothing is held but a file."""
        self._rows = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def recording_of(run: Path) -> Path:
    """The recording in a run's folder; or the folder itself, which then should be one."""
    return run / RECORD_FOLDER if (run / RECORD_FOLDER).is_dir() else run


def read(folder: Path) -> Iterator[RecordedGroup]:
    """All recorded groups in the order taken; one row group of one part is in memory at a time.

    Raises:
        ConfigError: a part is no recording of this format; names it.
    """
    import pyarrow.parquet as pq

    for path in parts(folder):
        with pq.ParquetFile(path) as file:
            fields = _fields(path, file.schema_arrow)
            for i in range(file.num_row_groups):
                table = file.read_row_group(i)
                about = {name: table[name].to_pylist() for name in _ABOUT}
                columns = [table[field.name].combine_chunks() for field in fields]
                for row in range(table.num_rows):
                    arrays = [_array(column[row], field) for column, field in zip(columns, fields, strict=True)]
                    yield RecordedGroup(**{name: about[name][row] for name in _ABOUT}, fields=arrays)


def count(folder: Path) -> int:
    """Recorded groups."""
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in parts(folder))


def extra_fields(folder: Path) -> tuple[Field, ...]:
    """The run's own fields."""
    import pyarrow.parquet as pq

    path = parts(folder)[0]
    return tuple(_fields(path, pq.read_schema(path))[len(SCHEMA) :])


def about(folder: Path) -> dict[str, str]:
    """What the recorder was told of the run.

    Raises:
        ConfigError: no recording lies there.
    """
    import pyarrow.parquet as pq

    there = parts(folder)
    if not there:
        raise ConfigError(f"{folder}: no recording (part-*.parquet) lies there")
    metadata = pq.read_schema(there[-1]).metadata or {}
    return {
        key.decode().removeprefix("mprollout."): value.decode()
        for key, value in metadata.items()
        if key.startswith(b"mprollout.")
    }


def part(folder: Path, number: int) -> Path:
    """The name of a part."""
    return folder / f"part-{number:06d}.parquet"


def parts(folder: Path) -> list[Path]:
    """The parts that are there, in order."""
    return sorted(folder.glob("part-*.parquet"), key=_number)


def remove_halves(folder: Path) -> None:
    """Remove what processes that were killed while they wrote a part left."""
    for left in folder.glob(".part-*"):
        left.unlink()


def write_whole(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write a Parquet file that is whole or not there, in the place of one of its name. A table is a row group; the first has the metadata.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    import pyarrow.parquet as pq

    beside, rest = path.with_name("." + path.name), iter(tables)
    first = next(rest)
    try:
        with beside.open("wb") as file:
            with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
                writer.write_table(first)
                for table in rest:
                    writer.write_table(table)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


def _last_batch(path: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_table(path, columns=["batch"])["batch"][-1].as_py())


def _table(groups: list[RecordedGroup], extra: tuple[Field, ...], about: Mapping[str, str]) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, Any] = {name: [getattr(group, name) for group in groups] for name in _ABOUT}
    for i, field in enumerate(SCHEMA + extra):
        arrays = [group.fields[i] for group in groups]
        if i >= len(SCHEMA):  # any dtype, any shape
            columns[field.name] = pa.array([array.tobytes() for array in arrays], pa.binary())
        else:
            offsets = np.concatenate(([0], np.cumsum([len(array) for array in arrays]))).astype(np.int64)
            columns[field.name] = pa.LargeListArray.from_arrays(offsets, np.concatenate(arrays))
    fields = msgspec.json.encode(SCHEMA + extra).decode()
    metadata = {"format": _FORMAT, "fields": fields, **about}
    return pa.table(columns).replace_schema_metadata({f"mprollout.{key}": value for key, value in metadata.items()})


def _fields(path: Path, schema: pa.Schema) -> tuple[Field, ...]:
    metadata = schema.metadata or {}
    if metadata.get(b"mprollout.format") != _FORMAT.encode():
        found = metadata.get(b"mprollout.format")
        raise ConfigError(f"{path}: no recording of format {_FORMAT}; its format is {found!r}")
    return msgspec.json.decode(metadata[b"mprollout.fields"], type=tuple[Field, ...])


def _array(value: Any, field: Field) -> npt.NDArray[Any]:
    array: npt.NDArray[Any]
    if hasattr(value, "values"):
        array = value.values.to_numpy(zero_copy_only=False).astype(field.dtype, copy=True)
    else:
        array = np.frombuffer(value.as_py(), field.dtype).copy()
    array.flags.writeable = False
    return array
