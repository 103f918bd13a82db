"""`SampleFile`: the Parquet file of `mprollout generate`, a row a sample, which a broken run goes on filling.

    add(group) -> buffer --cut(state)--> OUT.parquet.parts/part-000000.parquet, ... --finish--> OUT.parquet
                                         samples and the engine's state, one file     whole, then the folder goes

Invariant: what is on disk is a checkpoint of the engine: a part's metadata holds `RolloutEngine.state_dict()` of its cut, and the parts up to
it hold exactly the groups that this state counts as taken. A part is whole or not there (`record.write_whole`), so a kill anywhere leaves such a
checkpoint, and a ticket that it does not hold is made again: none is lost, none is there twice. `cut` guarantees it by refusing a state
that counts otherwise. OUT.parquet is there only when it is whole. One process at a time: the folder's lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from mprollout.errors import ConfigError
from mprollout.ledger import Ledger
from mprollout.record import part, parts, remove_halves, write_whole

if TYPE_CHECKING:
    import pyarrow as pa

    from mprollout.batch import Group
    from mprollout.source import Prompt

_FORMAT = "1"
PART_BYTES = 32 << 20
"""Bytes of tokens, logprobs and text that are buffered before a part is due."""


class _Open(NamedTuple):
    """The part that is being filled. The next one takes its place by one store, so a `cut` that was interrupted writes the same part again."""

    number: int
    groups: list[list[dict[str, Any]]]


class SampleFile:
    """A context manager; it holds the lock of its folder.

    Args:
        path: the file to be; its folder must be there.
        settings: what the samples depend on; a file with others is refused.

    Raises:
        ConfigError: the file or its parts are of other settings or none of ours, or another process writes there.

    Example:
        >>> with SampleFile(Path("out.parquet"), {"model": "m"}) as file:      # doctest: +SKIP
        ...     file.add(group, source.prompt(group.ticket), ["2"], scored=True)
        ...     file.cut(engine.state_dict())
        ...     file.finish()
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self._settings = path, {key: json.loads(json.dumps(value)) for key, value in settings.items()}
        self.folder = path.with_name(path.name + ".parts")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
        self.finished = False
        """OUT.parquet is there, and whole."""
        self._lock = _lock(self.folder)
        try:
            if path.exists():
                self._check(path)
                self.finished = True
            remove_halves(self.folder)
            there = parts(self.folder)
            if there:
                self._check(there[-1])
            self.groups = sum(_count_groups(path) for path in there)
            """On disk."""
            self.state: dict[str, Any] | None = None
            """The engine's at the last cut."""
            if self.finished or there:
                self.state = json.loads(_metadata(path if self.finished else there[-1])[b"mprollout.state"])
            self._open, self._nbytes = _Open(len(there), []), 0
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the lock back; what was not cut is forgotten. An empty folder goes. Idempotent."""
        if self._lock is None:
            return
        if self.finished:  # killed before it could
            shutil.rmtree(self.folder, ignore_errors=True)
        elif not any(self.folder.iterdir()):
            self.folder.rmdir()
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- filling -------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """So much is buffered that it should be cut."""
        return self._nbytes >= PART_BYTES

    @property
    def buffered(self) -> int:
        """Groups that a kill would lose now, to be made again."""
        return len(self._open.groups)

    def add(self, group: Group, prompt: Prompt, texts: Sequence[str], scored: bool) -> None:
        """Copy a group. `texts`: of its samples, in order; `scored`: their rewards say something."""
        prompt_ids = np.array(group.prompt_ids)
        answer = None if prompt.answer is None else as_text(prompt.answer)
        about = {"row": prompt.row, "prompt": as_text(prompt.prompt), "answer": answer, "prompt_ids": prompt_ids}
        samples = []
        for number, (sample, text) in enumerate(zip(group.samples, texts, strict=True)):
            token_ids, logprobs = np.array(sample.token_ids), np.array(sample.logprobs)
            reward = sample.reward if scored else None
            own = {"sample": number, "text": text, "reward": reward, "finish_reason": sample.finish_reason}
            samples.append({**about, **own, "token_ids": token_ids, "logprobs": logprobs})
            self._nbytes += len(text) + prompt_ids.nbytes + token_ids.nbytes + logprobs.nbytes
        self._open.groups.append(samples)

    def holds(self, state: dict[str, Any]) -> bool:
        """Whether the parts and the buffer have exactly the groups that the state counts as taken."""
        return Ledger.from_state(state["ledger"]).taken == self.groups + self.buffered

    def cut(self, state: dict[str, Any]) -> None:
        """Write what is buffered as a part, and with it the state. Blocks for as long as the disk takes.

        Raises:
            AssertionError: the state counts other groups as taken than were added: a broken promise.
            OSError: the part could not be written; nothing has changed.
        """
        if not self.holds(state):
            raise AssertionError(
                f"{self.path}: {self.groups} + {self.buffered} groups are here; the state is {state['ledger']}"
            )
        number, groups = self._open
        samples = [sample for group in groups for sample in group]
        write_whole(part(self.folder, number), [_table(samples, self._metadata_of(state))])
        self.state, self._nbytes = state, 0
        self.groups += len(groups)  # an interrupt before the next line: `holds` then says no
        self._open = _Open(number + 1, [])

    def finish(self) -> None:
        """Make one file of the parts, and remove them. Everything must have been cut, and the last state must be that of the end."""
        assert self.state is not None and not self.buffered
        write_whole(self.path, self._tables(self._metadata_of(self.state)))
        self.finished = True
        shutil.rmtree(self.folder)

    def _tables(self, metadata: dict[str, str]) -> Iterator[pa.Table]:
        import pyarrow.parquet as pq

        for path in parts(self.folder):
            yield pq.read_table(path).replace_schema_metadata(metadata)

    # -- what a file says of itself --------------------------------------------------------------------------------

    def _metadata_of(self, state: dict[str, Any]) -> dict[str, str]:
        about = {"format": _FORMAT, "settings": json.dumps(self._settings), "state": json.dumps(state)}
        return {f"mprollout.{key}": value for key, value in about.items()}

    def _check(self, path: Path) -> None:
        metadata = _metadata(path)
        if metadata.get(b"mprollout.format") != _FORMAT.encode():
            raise ConfigError(f"{path} is there and was not written by this command: choose another --out")
        there = json.loads(metadata[b"mprollout.settings"])
        other = [
            f"{key} {there.get(key)!r:.200} (now {self._settings.get(key)!r:.200})"
            for key in dict.fromkeys((*there, *self._settings))
            if there.get(key) != self._settings.get(key)
        ]
        if other:
            raise ConfigError(
                f"{path} was made with other settings: {', '.join(other)}; give them again to go on, or choose another --out"
            )


def as_text(value: Any) -> str:
    """A string as it is; anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lock(folder: Path) -> int | None:
    while True:
        folder.mkdir(exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(folder)):
                return fd
        except FileNotFoundError:  # its owner has just finished
            pass
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{folder}: another process fills it now") from None
        os.close(fd)


def _metadata(path: Path) -> Mapping[bytes, bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path).metadata or {}
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is there and is no Parquet file ({error}): choose another --out") from error


def _count_groups(path: Path) -> int:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    return int(pc.count_distinct(pq.read_table(path, columns=["row"])["row"]).as_py())


def _table(samples: list[dict[str, Any]], metadata: dict[str, str]) -> pa.Table:
    import pyarrow as pa

    types = {
        "row": pa.int64(), "sample": pa.int32(), "prompt": pa.string(), "answer": pa.string(), "text": pa.string(),
        "reward": pa.float32(), "finish_reason": pa.string(),
        "prompt_ids": pa.int32(), "token_ids": pa.int32(), "logprobs": pa.float32(),
    }  # fmt: skip
    columns = {}
    for name, kind in types.items():
        values = [sample[name] for sample in samples]
        if name in ("prompt_ids", "token_ids", "logprobs"):
            ends = np.concatenate(([0], np.cumsum([len(value) for value in values], dtype=np.int64)))
            items = np.concatenate([np.zeros(0, kind.to_pandas_dtype()), *values])
            columns[name] = pa.LargeListArray.from_arrays(ends, pa.array(items, kind))
        else:
            columns[name] = pa.array(values, kind)
    return pa.table(columns, metadata=metadata)
