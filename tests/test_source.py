"""Claims about `PromptSource`: the order of epochs, the kinds of data, what is refused and how it is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mprollout.config import SourceConfig
from mprollout.errors import ConfigError, SourceError
from mprollout.source import Prompt, PromptSource, _keys, _permute, gym_dataset, render


def source_of(*prompts: Any, **settings: Any) -> PromptSource:
    return PromptSource(SourceConfig(rows=[{"prompt": prompt} for prompt in prompts], **settings))


def jsonl(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


# --- order ---


@given(count=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_an_epoch_visits_every_row_once(count: int, seed: int, epoch: int) -> None:
    keys = _keys(seed, epoch)
    assert sorted(_permute(position, count, keys) for position in range(count)) == list(range(count))


@given(count=st.integers(10**8, 10**12), positions=st.sets(st.integers(0, 10**8 - 1), min_size=2, max_size=50))
@settings(max_examples=30, deadline=None)
def test_large_epochs_are_permuted_without_a_table(count: int, positions: set[int]) -> None:
    keys = _keys(0, 0)
    rows = {_permute(position, count, keys) for position in positions}
    assert len(rows) == len(positions)
    assert all(0 <= row < count for row in rows)


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint's cursor means nothing under another permutation: these numbers are part of the format."""
    source = source_of(*map(str, range(10)), shuffle_seed=0)
    assert [source.row(ticket)[0] for ticket in range(10)] == [2, 8, 5, 0, 1, 6, 7, 4, 3, 9]
    assert [source.row(ticket)[0] for ticket in range(10, 20)] == [2, 9, 1, 4, 3, 7, 5, 0, 8, 6]
    assert _permute(12345, 10**8, _keys(7, 3)) == 40_810_275


def test_orders_are_spread_evenly() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        order = tuple(_permute(position, 3, _keys(seed, 0)) for position in range(3))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())


def test_row_depends_on_the_ticket_alone() -> None:
    """NeMo-RL#2899, AReaL-like resumes: any order of asking, any process, gives the same rows."""
    first, second = (source_of(*map(str, range(7)), shuffle_seed=3) for _ in range(2))
    forwards = [first.row(ticket) for ticket in range(30)]
    assert [second.row(ticket) for ticket in reversed(range(30))] == forwards[::-1]
    assert [epoch for _, epoch, _ in forwards] == [ticket // 7 for ticket in range(30)]


def test_no_seed_is_file_order() -> None:
    source = source_of("a", "b", "c")
    assert [source.row(ticket)[2]["prompt"] for ticket in range(4)] == ["a", "b", "c", "a"]


def test_epochs_end_at_last_ticket_or_never() -> None:
    """NeMo-RL#2899: one epoch asked is one epoch given; asked for ever, it goes round."""
    once = source_of("a", "b", epochs=1)
    assert (len(once), once.last_ticket) == (2, 2)
    with pytest.raises(IndexError, match=r"ticket must be in \[0, 2\); got 2"):
        once.row(2)
    with pytest.raises(IndexError):
        once.row(-1)
    for_ever = source_of("a", "b")
    assert for_ever.last_ticket is None
    assert for_ever.row(2 * 10**15 + 1) == (1, 10**15, {"prompt": "b"})


# --- prompts ---


def test_encode_carries_answer_and_other_fields() -> None:
    row = {"q": "1+1=", "a": 2, "level": 3, "tags": ["x"], "none": None}
    source = PromptSource(SourceConfig(rows=[row], prompt_field="q", answer_field="a"))
    prompt = Prompt.decode(source.encode(5))
    assert prompt == Prompt(
        ticket=5, row=0, epoch=5, prompt="1+1=", answer=2, fields={"level": 3, "tags": ["x"], "none": None}
    )


def test_answer_may_be_absent_or_unused() -> None:
    assert Prompt.decode(source_of("a").encode(0)).answer is None
    unused = PromptSource(SourceConfig(rows=[{"prompt": "a", "answer": 1}], answer_field=None))
    assert Prompt.decode(unused.encode(0)).fields == {"answer": 1}


def test_an_answer_may_lie_inside_a_field() -> None:
    """As in DAPO's rows; a field that is called so comes first."""
    nested = {"prompt": "a", "reward_model": {"ground_truth": "34", "style": "rule"}}
    rows = [
        nested,
        {"prompt": "b", "reward_model": "none"},
        {"prompt": "c"},
        {**nested, "reward_model.ground_truth": 5},
    ]
    source = PromptSource(SourceConfig(rows=rows, answer_field="reward_model.ground_truth"))
    prompts = [Prompt.decode(source.encode(ticket)) for ticket in range(4)]
    assert prompts == [source.prompt(ticket) for ticket in range(4)]
    assert [prompt.answer for prompt in prompts] == ["34", None, None, 5]
    assert prompts[0].fields == {"reward_model": nested["reward_model"]} == prompts[3].fields


def test_a_limit_keeps_the_first_rows() -> None:
    limited, whole = source_of("a", "b", "c", limit=2, epochs=2), source_of("a", "b", "c", limit=7, epochs=2)
    assert (len(limited), limited.last_ticket, len(whole), whole.last_ticket) == (2, 4, 3, 6)
    assert [limited.row(ticket)[0] for ticket in range(4)] == [0, 1, 0, 1]
    assert limited.fingerprint != whole.fingerprint == source_of("a", "b", "c").fingerprint
    shuffled = source_of(*"abcdef", limit=4, shuffle_seed=3)
    assert sorted(shuffled.row(ticket)[0] for ticket in range(4)) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="limit must be an integer >= 1 or None; got 0"):
        source_of("a", limit=0)


def test_numpy_values_travel_as_plain_ones() -> None:
    rows = [{"prompt": np.array([1, 2]), "answer": np.float32(0.5), "grid": np.eye(2), "name": np.str_("x")}]
    prompt = Prompt.decode(PromptSource(SourceConfig(rows=rows)).encode(0))
    assert (prompt.prompt, prompt.answer) == ([1, 2], 0.5)
    assert prompt.fields == {"grid": [[1.0, 0.0], [0.0, 1.0]], "name": "x"}


@pytest.mark.parametrize("value", [object(), {"deep": [2**70]}])
def test_a_value_that_cannot_travel_names_its_field(value: Any) -> None:
    with pytest.raises(SourceError, match=r"rows \(list\), row 0: field 'odd': "):
        PromptSource(SourceConfig(rows=[{"prompt": "a", "odd": value}]))


@pytest.mark.parametrize(
    "prompt", [3, None, [], True, [True], ["a"], [1, "a"], [{"content": "no role"}], [-1], {"role": "user"}]
)
def test_a_prompt_of_another_type_is_refused(prompt: Any) -> None:
    with pytest.raises(SourceError, match=r"row 0: field 'prompt': expected a string, a list of messages"):
        source_of(prompt)


class DataSet(list[dict[str, object]]):
    """Rows that are no plain list may be computed or loaded one by one."""


def test_later_rows_of_a_data_set_are_checked_when_they_are_reached() -> None:
    source = PromptSource(SourceConfig(rows=DataSet([{"prompt": "a"}, {"question": "b", "id": 1}, {"prompt": "c"}])))
    with pytest.raises(SourceError, match=r"row 1: no field 'prompt'; the row has 'question', 'id'"):
        source.row(1)
    assert source.row(2)[2] == {"prompt": "c"}


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([], "no rows"),
        ({"prompt": ["a"]}, "expected a sequence"),
        (7, "expected a sequence"),
        (["a"], "expected a mapping"),
    ],
)
def test_rows_must_be_a_sequence_of_mappings(rows: Any, complaint: str) -> None:
    with pytest.raises(SourceError, match=complaint):
        PromptSource(SourceConfig(rows=rows))


# --- files ---

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    rows=st.lists(st.fixed_dictionaries({"prompt": st.text(), "extra": _json}), min_size=1, max_size=8),
    ascii_only=st.booleans(),
    blanks=st.sampled_from(["", "\n", " \r\n\t\n"]),
    last=st.sampled_from(["", "\n"]),
)
@settings(max_examples=30, deadline=None)
def test_jsonl_round_trips(tmp_path_factory: Any, rows: list[Any], ascii_only: bool, blanks: str, last: str) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "rows.jsonl"
    lines = ("\n" + blanks).join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    source = PromptSource(SourceConfig(path=jsonl(path, (blanks + lines + last).encode("utf-8", "surrogatepass"))))
    assert [source.row(ticket)[2] for ticket in range(len(source))] == rows
    assert Prompt.decode(source.encode(0)).fields == {"extra": rows[0]["extra"]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a"', "line 3: Input data was truncated"),
        ('{"prompt": NaN}', "line 3: JSON is malformed"),
        ('["a"]', "line 3: expected a JSON object; got list"),
        ('{"question": "a", "id": 1}', "line 3: no field 'prompt'; the row has 'question', 'id'"),
        ('{"prompt": 5}', "line 3: field 'prompt': expected a string"),
        (b'{"prompt": "\xff"}', "line 3: "),
    ],
)
def test_a_broken_jsonl_line_is_named_when_the_file_is_opened(
    tmp_path: Path, line: str | bytes, complaint: str
) -> None:
    raw = line.encode() if isinstance(line, str) else line
    path = jsonl(tmp_path / "rows.jsonl", b'{"prompt": "a"}\n\n' + raw + b'\n{"prompt": "b"}\n')
    with pytest.raises(SourceError, match=r"rows\.jsonl, ") as caught:
        PromptSource(SourceConfig(path=path))
    assert complaint in str(caught.value)


def test_a_jsonl_file_cut_in_the_meantime_is_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    source = PromptSource(SourceConfig(path=path))
    jsonl(tmp_path / "rows.jsonl", '{"prompt": "a"}\n')
    with pytest.raises(SourceError, match="row 1: the file has changed since it was opened"):
        source.row(1)


def test_parquet_rows_are_plain_python(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    messages = [{"role": "user", "content": "hi"}]
    table = pa.table({"prompt": [messages] * 5, "answer": range(5), "meta": [{"a": [1.5]}] * 5})
    pq.write_table(table, path, row_group_size=2)
    source = PromptSource(SourceConfig(path=path))
    assert len(source) == 5
    assert source.row(3) == (3, 0, {"prompt": messages, "answer": 3, "meta": {"a": [1.5]}})
    assert Prompt.decode(source.encode(3)).answer == 3


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"question": ["a"]}, "no field 'prompt'; the columns are question"),
        ({"prompt": [1.5]}, "column 'prompt': expected a string.*; got double"),
        ({"prompt": ["a", None]}, "row 1: field 'prompt' is null"),
        ({"prompt": pa.array([], pa.string())}, "no rows"),
    ],
)
def test_parquet_is_checked_when_it_is_opened(tmp_path: Path, columns: dict[str, Any], complaint: str) -> None:
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table(columns), path)
    with pytest.raises(SourceError, match=complaint):
        PromptSource(SourceConfig(path=path))


def test_a_file_that_is_no_parquet_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"rows\.parquet: .*Parquet"):
        PromptSource(SourceConfig(path=jsonl(tmp_path / "rows.parquet", '{"prompt": "a"}\n')))


def test_missing_empty_and_unknown_files_are_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", '{"prompt": "a"}\n')
    with pytest.raises(SourceError, match=r"trian\.jsonl: no such file .* did you mean train\.jsonl"):
        PromptSource(SourceConfig(path=str(tmp_path / "trian.jsonl")))
    with pytest.raises(SourceError, match="there is no folder"):
        PromptSource(SourceConfig(path=str(tmp_path / "nowhere" / "train.jsonl")))
    with pytest.raises(SourceError, match="no rows"):
        PromptSource(SourceConfig(path=jsonl(tmp_path / "empty.jsonl", "\n\n")))
    with pytest.raises(SourceError, match=r"expected a file that ends in \.jsonl"):
        PromptSource(SourceConfig(path=jsonl(tmp_path / "rows.csv", "prompt\n")))


# --- identity ---


def test_fingerprint_tells_other_data_and_survives_a_move(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'

    def fingerprint(path: Path, text: str, **settings: Any) -> str:
        return PromptSource(SourceConfig(path=jsonl(path, text), **settings)).fingerprint

    one = fingerprint(tmp_path / "rows.jsonl", text)
    assert fingerprint(tmp_path / "moved" / "rows.jsonl", text, epochs=3) == one
    others = [
        fingerprint(tmp_path / "rows.jsonl", text, shuffle_seed=0),
        fingerprint(tmp_path / "rows.jsonl", text + '{"prompt": "b"}\n'),
        fingerprint(tmp_path / "rows.jsonl", text.replace("b", "c")),
        fingerprint(tmp_path / "other.jsonl", text),
    ]
    assert len({one, *others}) == 5


# --- reasoning-gym ---


def test_reasoning_gym_rows_are_questions_with_a_scorer() -> None:
    config = SourceConfig(reasoning_gym="chain_sum", reasoning_gym_args={"size": 4, "seed": 7}, shuffle_seed=1)
    source = PromptSource(config)
    prompt = Prompt.decode(source.encode(9))
    assert len(source) == 4
    assert prompt.scorer is not None
    entry = gym_dataset(prompt.scorer)[prompt.row]
    assert (prompt.prompt, prompt.answer) == (entry["question"], entry["answer"])
    assert prompt.fields["metadata"]["source_dataset"] == "chain_sum"


@pytest.mark.parametrize(
    ("name", "args", "complaint"),
    [
        ("chan_sum", {}, "got 'chan_sum'; did you mean chain_sum"),
        ("chain_sum", {"siez": 3}, "chain_sum does not accept .*siez"),
        ("chain_sum", {"size": object()}, "must be JSON values"),
    ],
)
def test_wrong_reasoning_gym_settings_are_config_errors(name: str, args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PromptSource(SourceConfig(reasoning_gym=name, reasoning_gym_args=args))


# --- rendering ---


class WordTokenizer:
    """A token a character; a chat is rendered as `role:content|`."""

    def __init__(self, has_chat_template: bool) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Any, tools: Any, template_kwargs: dict[str, Any]) -> list[int]:
        text = "".join(f"{message['role']}:{message['content']}|" for message in messages)
        return self.encode(text + "".join(tool["name"] for tool in tools or ()) + "".join(template_kwargs))

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode()


def rendered(prompt: Any, template: bool = True, **settings: Any) -> str:
    source = source_of(prompt, **settings)
    tokenizer = WordTokenizer(template)
    return tokenizer.decode(render(Prompt.decode(source.encode(0)), source._config, tokenizer))


def test_strings_are_chat_if_there_is_a_template() -> None:
    assert rendered("hi") == "user:hi|"
    assert rendered("hi", template=False) == "hi"
    assert rendered("hi", chat=False) == "hi"
    assert rendered("hi", chat=True, system_prompt="be") == "system:be|user:hi|"


def test_messages_keep_their_own_system_prompt() -> None:
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}
    assert rendered([user], system_prompt="be") == "system:be|user:hi|"
    assert rendered([system, user], system_prompt="be") == "system:own|user:hi|"


def test_tools_and_template_kwargs_reach_the_template() -> None:
    assert rendered("hi", tools=[{"name": "T"}], chat_template_kwargs={"think": True}) == "user:hi|Tthink"


def test_token_ids_are_used_as_they_are() -> None:
    assert rendered([104, 105], chat=True, system_prompt="be") == "hi"


@pytest.mark.parametrize(
    ("prompt", "settings", "complaint"),
    [
        ("hi", {"chat": True, "template": False}, "chat=True need a chat template, but the tokenizer has none"),
        ([{"role": "user", "content": "hi"}], {"template": False}, "lists of messages need a chat template"),
        ([{"role": "user", "content": "hi"}], {"chat": False}, "but SourceConfig.chat is False"),
        ("hi", {"chat": False, "system_prompt": "be"}, "SourceConfig.system_prompt is applied by the chat template"),
        ("hi", {"template": False, "tools": [{"name": "T"}]}, "SourceConfig.tools is applied by the chat template"),
    ],
)
def test_a_template_that_is_needed_and_missing_is_a_config_error(prompt: Any, settings: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        rendered(prompt, **settings)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(SourceError, match="row 0: the prompt has no tokens"):
        rendered("", template=False)


def test_a_list_is_checked_whole_at_opening() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"question": "c"}]
    with pytest.raises(SourceError, match="row 2: no field 'prompt'; the row has 'question'"):
        PromptSource(SourceConfig(rows=rows))


def test_reading_jsonl_imports_nothing_heavy(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", '{"prompt": "a"}\n')
    code = (
        "import sys; from mprollout.source import *; import mprollout.reward as r; from mprollout.config import RewardConfig\n"
        f"PromptSource(SourceConfig(path={path!r})).encode(0); r.check(RewardConfig('math'))\n"
        "print(sorted({'torch', 'transformers', 'pyarrow', 'reasoning_gym', 'sympy', 'math_verify'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_other_bytes_are_no_prompt() -> None:
    with pytest.raises(msgspec.MsgspecError):
        Prompt.decode(b"\x93")
