"""`PromptSource`: rows by ticket.

    ticket --(epoch, permutation)--> row index --(file, table, sequence, generator)--> row --> Prompt --msgpack--> worker
    worker: Prompt --render--> token ids

Invariant: `row(ticket)` is a pure function of the ticket, the data and the seed, so a cursor is one integer and a resumed
run meets the same rows. `_permute` guarantees that an epoch visits every row once (it is a bijection by construction);
`fingerprint` lets a checkpoint refuse other data.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
import weakref
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mprollout.config import SourceConfig
from mprollout.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from mprollout.generator import Tokenizer

GYM = "reasoning_gym:"
"""How a command names a data set of reasoning-gym: this, and its name."""
_ROUNDS = 6
_MASK64 = (1 << 64) - 1


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One row as a worker and a reward function see it."""

    ticket: int
    row: int
    epoch: int
    prompt: str | list[Any]
    """A string, a list of messages (`list[dict]`), or token ids (`list[int]`); as in the row, no system prompt added."""
    answer: Any = None
    fields: dict[str, Any] = {}
    """The row's other fields."""
    sampling: dict[str, Any] = {}
    """The row's own sampling settings; `SamplingConfig.of_row` checks them."""
    scorer: str | None = None
    """What `gym_dataset` takes to make the generator of this row again; None: the row brings no scorer."""

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Prompt:
        """From `PromptSource.encode`; copies.

        Raises:
            msgspec.MsgspecError: not such bytes.
        """
        return _decoder.decode(data)


_decoder = msgspec.msgpack.Decoder(Prompt)


class PromptSource:
    """Rows by ticket. Opening a JSONL file reads and checks all of it once (blocking); then 8 bytes a row are held. A list is
    checked whole, too; the rows of a data set object are checked when they are reached (the first one at opening).

    A Parquet file is held in memory in Arrow's form. Not thread-safe: one thread asks for rows.

    Example:
        >>> source = PromptSource(SourceConfig(rows=[{"prompt": "1+1=", "answer": 2}], epochs=3))
        >>> source.row(2)
        (0, 2, {'prompt': '1+1=', 'answer': 2})

    Raises:
        SourceError: the file is missing, empty or broken, or a row has no usable prompt.
        ConfigError: the reasoning-gym name or its arguments are wrong.
    """

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._prompt_field = config.prompt_field
        self._scorer: str | None = None
        self._rows: _Rows
        if config.reasoning_gym is not None:
            if config.prompt_field == "prompt":  # the default: the package's rows call it so
                self._prompt_field = "question"
            self._scorer = _gym_spec(config.reasoning_gym, config.reasoning_gym_args)
            self._rows = _Sequence(gym_dataset(self._scorer), f"reasoning_gym {self._scorer}")
        elif config.path is not None:
            self._rows = _open(Path(config.path), self._prompt_field)
        else:
            self._rows = _Sequence(config.rows, f"rows ({type(config.rows).__name__})")
        self._count = len(self._rows) if config.limit is None else min(config.limit, len(self._rows))
        if self._count == 0:
            raise SourceError(f"{self._rows.name}: no rows")
        self._permutation: tuple[int, list[int]] | None = None  # the keys of the epoch asked for last
        self.encode(0)  # what is wrong with every row fails here, not in a running engine
        if type(config.rows) in (list, tuple):  # in memory already; a data set object may compute or load its rows
            for index in range(self._count):
                self._read(index)
        self.fingerprint = self._fingerprint()
        """Identity of the data for checkpoints: name, size, rows, a digest of the first and the last prompt, seed.
        Other contents with all of these equal are not noticed."""

    def __len__(self) -> int:
        """Rows of one epoch."""
        return self._count

    @property
    def last_ticket(self) -> int | None:
        """Tickets in all epochs together (the first ticket that does not exist); None: for ever."""
        return None if self._config.epochs is None else self._config.epochs * self._count

    def row(self, ticket: int) -> tuple[int, int, dict[str, Any]]:
        """`(row index, epoch, row)`; reads the row (may block on the disk), copies.

        Raises:
            IndexError: the ticket is negative or past the last epoch.
            SourceError: the row cannot be used: names it and the fields that it has.
        """
        last = self.last_ticket
        if ticket < 0 or (last is not None and ticket >= last):
            raise IndexError(f"ticket must be in [0, {'inf' if last is None else last}); got {ticket}")
        epoch, position = divmod(ticket, self._count)
        index = self._index(epoch, position)
        row = self._read(index)
        return index, epoch, row

    def prompt(self, ticket: int) -> Prompt:
        """What a worker sees of the ticket's row. Raises as `row`."""
        index, epoch, fields = self.row(ticket)
        prompt = fields.pop(self._prompt_field)
        answer = _take_answer(fields, self._config.answer_field)
        sampling = (fields.pop(self._config.sampling_field, None) or {}) if self._config.sampling_field else {}
        if not isinstance(sampling, Mapping):
            raise SourceError(
                f"{self._rows.name}, row {index}: field {self._config.sampling_field!r} (SourceConfig.sampling_field): expected "
                f"a mapping of sampling settings; got {sampling!r:.80}"
            )
        return Prompt(
            ticket=ticket,
            row=index,
            epoch=epoch,
            prompt=prompt,
            answer=answer,
            fields=fields,
            sampling={name: value for name, value in sampling.items() if value is not None},  # Parquet fills with null
            scorer=self._scorer,
        )

    def encode(self, ticket: int) -> bytes:
        """Msgpack of the ticket's `Prompt`.

        Raises:
            IndexError: as `row`.
            SourceError: as `row`, or a value that msgpack does not know: names the field.
        """
        made = self.prompt(ticket)
        try:
            return _encode(made)
        except _UNENCODABLE:
            for field, value in self._read(made.row).items():
                try:
                    _encode(value)
                except _UNENCODABLE as error:
                    raise SourceError(f"{self._rows.name}, row {made.row}: field {field!r}: {error}") from error
            raise

    def _read(self, index: int) -> dict[str, Any]:
        row = self._rows.read(index)
        where = f"{self._rows.name}, row {index}"
        if not isinstance(row, Mapping):
            raise SourceError(f"{where}: expected a mapping of fields; got {type(row).__name__}")
        row = dict(row)
        for field in row:
            if not isinstance(field, str):
                raise SourceError(f"{where}: field names must be strings; got {field!r}")
        _check_prompt(row, self._prompt_field, where)
        return row

    def _index(self, epoch: int, position: int) -> int:
        if self._config.shuffle_seed is None:
            return position
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, _keys(self._config.shuffle_seed, epoch)
        return _permute(position, self._count, self._permutation[1])

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for index in (0, self._count - 1):
            digest.update(_encode(self._read(index)[self._prompt_field]))
        return (
            f"{self._rows.identity}, {self._count} rows, digest {digest.hexdigest()}, seed {self._config.shuffle_seed}"
        )


def render(prompt: Prompt, config: SourceConfig, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt. Pure; blocks for as long as the tokenizer takes.

    Token ids are used as they are. Messages go through the chat template, the system prompt first unless they bring their
    own. A string is one user message if `config.chat` is True, or is None and the tokenizer has a template; else it is
    tokenized as it stands.

    Raises:
        ConfigError: a template is needed and there is none, or `chat=False` forbids what the prompt or the settings need.
        SourceError: the prompt has no tokens.
    """
    ids: list[int]
    if isinstance(prompt.prompt, list) and isinstance(prompt.prompt[0], int):
        ids = prompt.prompt
    elif isinstance(prompt.prompt, list) or (tokenizer.has_chat_template if config.chat is None else config.chat):
        if not tokenizer.has_chat_template or config.chat is False:
            what = "prompts that are lists of messages" if isinstance(prompt.prompt, list) else "SourceConfig.chat=True"
            why = "SourceConfig.chat is False" if tokenizer.has_chat_template else "the tokenizer has none"
            raise ConfigError(
                f"{what} need a chat template, but {why}: use string prompts with chat=None or another model"
            )
        messages = prompt.prompt if isinstance(prompt.prompt, list) else [{"role": "user", "content": prompt.prompt}]
        if config.system_prompt is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": config.system_prompt}, *messages]
        ids = tokenizer.encode_chat(messages, config.tools, config.chat_template_kwargs)
    else:
        for field in ("system_prompt", "tools"):
            if getattr(config, field) is not None:
                raise ConfigError(
                    f"SourceConfig.{field} is applied by the chat template, but this prompt is rendered without one "
                    f"(chat={config.chat}): write it into the prompts, or use a tokenizer with a template"
                )
        ids = tokenizer.encode(prompt.prompt)
    if not ids:
        raise SourceError(f"row {prompt.row}: the prompt has no tokens")
    return ids


# --- the order of an epoch ---------------------------------------------------------------------------------------------


def _keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def _permute(position: int, count: int, keys: Iterable[int]) -> int:
    """Position -> row index, a bijection of [0, count) in O(1) memory.

    A Feistel network permutes [0, 4**half) whatever its round function is; walking its cycle until it is back in
    [0, count) keeps the bijection (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002) and takes fewer
    than 4 turns on average, because 4**half < 4 * count.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for key in keys:
            # the finalizer of splitmix64: every bit of the key and of `right` reaches the bits kept
            mixed = (right ^ key) * 0xBF58476D1CE4E5B9 & _MASK64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK64
            left, right = right, left ^ (mixed ^ mixed >> 31) & mask
        position = left << half | right
        if position < count:
            return position


# --- where rows come from ----------------------------------------------------------------------------------------------


class _Rows(Protocol):
    name: str
    """For messages."""
    identity: str
    """For the fingerprint."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> Any: ...


class _Sequence:
    """A Python sequence, a Hugging Face dataset, a reasoning-gym data set: `__len__` and `__getitem__`."""

    def __init__(self, rows: Any, name: str) -> None:
        # a dict has both methods, but its keys are not row numbers
        if isinstance(rows, Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise SourceError(f"{name}: expected a sequence of mappings (something with __len__ and __getitem__)")
        self._rows, self.name, self.identity = rows, name, name

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Any:
        return self._rows[index]


class _Jsonl:
    """One JSON object a line; blank lines are skipped. The index is the offset of each row's first byte."""

    def __init__(self, path: Path, prompt_field: str) -> None:
        self.name = str(path)
        self._offsets = array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    where = f"{path}, line {number}"
                    try:
                        row = msgspec.json.decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                        raise SourceError(f"{where}: {error}") from error
                    if not isinstance(row, dict):
                        raise SourceError(f"{where}: expected a JSON object; got {type(row).__name__}")
                    _check_prompt(row, prompt_field, where)
                    self._offsets.append(offset)
                offset += len(line)
        self.identity = f"jsonl {path.name}, {offset} bytes"
        self._offsets.append(offset)  # a row ends where the next one starts
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, index: int) -> Any:
        start, end = self._offsets[index], self._offsets[index + 1]
        # pread, not mmap: a file that was cut in the meantime is then an error and not a SIGBUS
        line = os.pread(self._fd, end - start, start)
        try:
            if len(line) != end - start:
                raise ValueError(f"expected {end - start} bytes at {start}; got {len(line)}")
            return msgspec.json.decode(line)
        except ValueError as error:  # msgspec's and unicode errors derive from it
            raise SourceError(f"{self.name}, row {index}: the file has changed since it was opened: {error}") from error


class _Parquet:
    """A Parquet file, whole in memory in Arrow's form: a shuffled order would else decompress a row group a row."""

    def __init__(self, path: Path, prompt_field: str) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        self.name = str(path)
        self.identity = f"parquet {path.name}, {path.stat().st_size} bytes"
        try:
            schema = pq.read_schema(path)
            if prompt_field not in schema.names:
                raise SourceError(f"{path}: no field {prompt_field!r}; the columns are {', '.join(schema.names)}")
            kind = schema.field(prompt_field).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
            text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
            if not text and not (
                listed and (pa.types.is_struct(kind.value_type) or pa.types.is_integer(kind.value_type))
            ):
                raise SourceError(f"{path}: column {prompt_field!r}: {_EXPECTED}; got {kind}")
            self._table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{path}: {error}") from error
        prompts = self._table.column(prompt_field)
        if prompts.null_count:
            row = pc.index(pc.is_null(prompts), True).as_py()
            raise SourceError(f"{path}, row {row}: field {prompt_field!r} is null")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, index: int) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def _open(path: Path, prompt_field: str) -> _Rows:
    if not path.is_file():
        folder = path.parent
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=3)
        hint = (
            f"; did you mean {', '.join(near)}?"
            if near
            else ""
            if folder.is_dir()
            else f"; there is no folder {folder}"
        )
        raise SourceError(f"{path}: no such file (looked in {folder.absolute()}){hint}")
    if path.suffix in (".parquet", ".pq"):
        return _Parquet(path, prompt_field)
    if path.suffix in (".jsonl", ".ndjson"):
        return _Jsonl(path, prompt_field)
    raise SourceError(f"{path}: expected a file that ends in .jsonl, .ndjson, .parquet or .pq")


# --- reasoning-gym -----------------------------------------------------------------------------------------------------


def _gym_spec(name: str, args: Mapping[str, Any]) -> str:
    """The data set's name and arguments as one string, from which any process makes the same rows."""
    try:
        # without a seed the package draws one, and every process would have other rows
        return msgspec.json.encode({"name": name, "args": {"seed": 0, **args}}).decode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"SourceConfig.reasoning_gym_args must be JSON values; got {args!r}: {error}") from error


@functools.lru_cache(maxsize=8)
def gym_dataset(spec: str) -> Any:
    """The reasoning-gym data set of a `Prompt.scorer`; its entries depend on the row number alone.

    Raises:
        ConfigError: the package is not installed, the name is unknown (near ones are listed), or the arguments are wrong.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"SourceConfig.reasoning_gym needs the package: pip install reasoning-gym ({error})"
        ) from error
    wanted = msgspec.json.decode(spec)
    name, args = wanted["name"], wanted["args"]
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"SourceConfig.reasoning_gym must be a data set of the package; got {name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(name, **args)
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ConfigError(f"SourceConfig.reasoning_gym_args: {name} does not accept {args!r}: {error}") from error


# --- checks ------------------------------------------------------------------------------------------------------------

_EXPECTED = "expected a string, a list of messages with a role, or a list of token ids"
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)


def _check_prompt(row: dict[str, Any], field: str, where: str) -> None:
    if field not in row:
        raise SourceError(f"{where}: no field {field!r}; the row has {', '.join(map(repr, row)) or 'no fields'}")
    value = row[field]
    if hasattr(value, "tolist"):  # numpy, from a dataset with that format
        value = row[field] = value.tolist()
    if isinstance(value, str):
        return
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value):
            return
        if all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value):
            return
    shown = repr(value)
    raise SourceError(f"{where}: field {field!r}: {_EXPECTED}; got {shown[:80]}{'...' if len(shown) > 80 else ''}")


def _take_answer(fields: dict[str, Any], name: str | None) -> Any:
    """The answer, which then is none of the fields, unless it lies inside one of them (`reward_model.ground_truth`)."""
    if name is None or name in fields or "." not in name:
        return fields.pop(name, None) if name is not None else None
    value: Any = fields
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    raise NotImplementedError(f"values of type {type(value).__name__} cannot be handed to a worker")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except NotImplementedError as error:
        raise TypeError(str(error)) from None
