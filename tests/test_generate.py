"""`mprollout generate`: what the file holds, and that no break of the run changes it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engines import config, descendants, until
from rigs import fork

import mprollout as mp
from mprollout import sample_file
from mprollout.cli import main
from mprollout.ledger import Ledger
from mprollout.record import ReplaySource, parts
from mprollout.sample_file import SampleFile
from mprollout.source import Prompt
from mprollout.summary import pass_at_k

pytestmark = pytest.mark.timeout(120)

FAST = ["--backend", "simulated", "--max-new-tokens", "16", "--group-size", "4"]


def gsm8k(path: Path, rows: int) -> Path:
    lines = [{"question": f"What is {i} + {i}?", "answer": f"It doubles.\n#### {2 * i}"} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generate(out: Path, *arguments: str) -> int:
    return main(["generate", "--out", str(out), *FAST, *arguments])


# -- what the file holds ---------------------------------------------------------------------------------------------------


def test_the_file_has_every_sample_with_its_text_reward_and_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = gsm8k(tmp_path / "rows.jsonl", 12), tmp_path / "out.parquet"
    options = ["--prompts", str(prompts), "--preset", "gsm8k", "--reward", "rewards:length", "--pass-reward", "9"]
    assert generate(out, *options, "--limit", "10", "--json") == 0
    rows = pq.read_table(out).to_pylist()
    assert sorted((row["row"], row["sample"]) for row in rows) == list(itertools.product(range(10), range(4)))
    for row in rows:
        assert row["prompt"] == f"What is {row['row']} + {row['row']}?"
        assert row["answer"] == f"It doubles.\n#### {2 * row['row']}"
        assert bytes(row["prompt_ids"]).decode() == f"<|user|>\n{row['prompt']}\n<|assistant|>\n"
        assert row["text"] == bytes(row["token_ids"]).decode(errors="replace")
        assert row["reward"] == len(row["token_ids"]) == len(row["logprobs"])
        assert row["finish_reason"] == "stop" or len(row["token_ids"]) == 16
        assert max(row["logprobs"]) <= 0
    said = json.loads(capsys.readouterr().out)
    assert (said["prompts"], said["prompts_with_samples"], said["samples"]) == (10, 10, 40)
    assert said["tokens"] == said["tokens_sampled"] == sum(len(row["token_ids"]) for row in rows)
    assert said["mean_reward"] == pytest.approx(said["tokens"] / 40)
    right = [[row["reward"] >= 9 for row in rows if row["row"] == i] for i in range(10)]
    any_of_2 = [any(pair) for group in right for pair in itertools.combinations(group, 2)]
    assert said["pass_at"]["1"] == pytest.approx(sum(map(sum, right)) / 40)
    assert said["pass_at"]["2"] == pytest.approx(sum(any_of_2) / len(any_of_2))
    assert said["pass_at"]["4"] == pytest.approx(sum(map(any, right)) / 10)
    assert said["tokens_per_s"] == pytest.approx(said["tokens"] / said["seconds"])
    assert sorted(os.listdir(tmp_path)) == ["out.parquet", "rows.jsonl"]

    before = out.read_bytes()
    assert generate(out, *options, "--limit", "10") == 0  # finished: summed up again, nothing started
    assert "40 samples of 10 prompts" in (shown := capsys.readouterr().out) and "tokens/s" not in shown
    assert out.read_bytes() == before
    for other, why in (
        (["--seed", "1"], "seed 0 (now 1)"),
        (["--limit", "9"], "10 rows"),
        (["--temperature", "0.5"], "temperature 1.0 (now 0.5)"),
    ):
        assert generate(out, *options, "--limit", "10", *other) == 2
        error = capsys.readouterr().err
        assert why in error and "choose another --out" in error and error.count("\n") == 1
    assert out.read_bytes() == before


def test_rows_of_dapo_are_messages_and_a_nested_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": f"Solve {i}."} for i in range(3)]
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [message],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(i)},
        }
        for i, message in enumerate(messages)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dapo.parquet")
    out = tmp_path / "out.parquet"
    options = ["--prompts", str(tmp_path / "dapo.parquet"), "--preset", "dapo", "--reward", "none"]
    assert generate(out, *options, "--system-prompt", "Be brief.", "--top-p", "0.9", "--stop", "x", "--stop", "y") == 0
    found = pq.read_table(out).to_pylist()
    assert len(found) == 12
    for row in found:
        assert json.loads(row["prompt"]) == [messages[row["row"]]]
        assert row["answer"] == str(row["row"]) and row["reward"] is None
        rendered = f"<|system|>\nBe brief.\n<|user|>\nSolve {row['row']}.\n<|assistant|>\n"
        assert bytes(row["prompt_ids"]).decode() == rendered
    shown = capsys.readouterr().out
    assert "12 samples of 3 prompts" in shown and "reward" not in shown and "pass@" not in shown


def test_reasoning_gym_brings_its_own_rows_and_score(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert generate(out, "--prompts", "reasoning_gym:chain_sum", "--limit", "5", "--seed", "7") == 0
    import reasoning_gym

    expected = reasoning_gym.create_dataset("chain_sum", seed=7, size=5)
    found = pq.read_table(out).to_pylist()
    assert {(row["row"], row["prompt"], row["answer"]) for row in found} == {
        (i, entry["question"], entry["answer"]) for i, entry in enumerate(expected)
    }
    assert all(0 <= row["reward"] <= 1 for row in found)


def test_prompts_that_fail_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = gsm8k(tmp_path / "rows.jsonl", 6), tmp_path / "out.parquet"
    with prompts.open("a") as file:
        file.write(json.dumps({"question": "x" * 40_000}) + "\n")
    options = ["--prompts", str(prompts), "--preset", "gsm8k", "--reward", "rewards:broken_for_row_3"]
    assert generate(out, *options, "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ended"] == {"failed:reward": 1, "filtered:over_long": 1} and said["rows_without_samples"] == [3, 6]
    assert {row["row"] for row in pq.read_table(out).to_pylist()} == {0, 1, 2, 4, 5}
    assert generate(out, *options) == 1
    shown = capsys.readouterr().out
    assert "2 prompts have no samples: " in shown and "failed:reward 1" in shown and "rows 3, 6" in shown


def test_a_file_without_a_sample_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x" * 40_000}) + "\n")
    out = tmp_path / "out.parquet"
    assert generate(out, "--prompts", str(tmp_path / "rows.jsonl"), "--reward", "exact", "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["samples"], said["mean_reward"], said["pass_at"]) == (0, None, {})
    assert said["ended"] == {"filtered:over_long": 1} and said["rows_without_samples"] == [0]
    assert pq.read_table(out).num_rows == 0


def test_a_reward_that_is_broken_ends_the_run_and_keeps_what_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = gsm8k(tmp_path / "rows.jsonl", 30), tmp_path / "out.parquet"
    options = ["--prompts", str(prompts), "--preset", "gsm8k", "--reward", "rewards:broken"]
    assert generate(out, *options) == 2
    error = capsys.readouterr().err
    assert "prompts in a row ended FAILED" in error and "this reward is broken for good" in error
    assert "0 of 30 prompts are kept; the same command goes on" in error
    assert not out.exists() and len(parts(tmp_path / "out.parquet.parts")) == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (["--prompts", "no.jsonl"], "no.jsonl: no such file"),
        (["--out", "out.csv"], "--out must end in .parquet; got out.csv"),
        (["--out", "no/out.parquet"], "there is no folder no"),
        (["--workers", "0"], "--workers must be >= 1; got 0"),
        (["--flush-s", "0"], "--flush-s must be > 0; got 0"),
        (["--backend", "sglang"], "--model is missing"),
        (["--group-size", "0"], "group_size must be an integer >= 1; got 0"),
        (["--reward", "mathh"], "did you mean 'math'?"),
        (["--preset", "plain"], "no field 'prompt'; the row has 'question', 'answer'"),
    ],
)
def test_a_wrong_setting_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    gsm8k(tmp_path / "rows.jsonl", 2)
    given = {"--prompts": "rows.jsonl", "--preset": "gsm8k", "--out": "out.parquet", "--backend": "simulated"}
    given[change[0]] = change[1]
    assert main(["generate", *itertools.chain(*given.items())]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.startswith("mprollout: ") and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_a_terminal_has_a_bar_with_tokens_a_second_and_the_time_left(tmp_path: Path) -> None:
    prompts = gsm8k(tmp_path / "rows.jsonl", 12)
    command = [sys.executable, "-m", "mprollout", "generate", "--prompts", str(prompts), "--preset", "gsm8k", *FAST]
    command += ["--reward", "exact"]
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        run = subprocess.Popen([*command, "--out", str(tmp_path / "out.parquet")], stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end was closed
            while some := terminal.read(4096):
                shown += some
        assert run.wait(timeout=30) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"12/12 prompts, [0-9,]+ tokens/s, mean reward 0.000 0:00:00 left *\r?$", text, re.MULTILINE), text


def test_pass_at_k_is_what_drawing_gives() -> None:
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / math.comb(n, k))


# -- a run that is broken --------------------------------------------------------------------------------------------------


def test_killed_and_interrupted_runs_go_on_and_lose_and_repeat_nothing(tmp_path: Path) -> None:
    prompts, out = gsm8k(tmp_path / "rows.jsonl", 60), tmp_path / "out.parquet"
    command = [
        *(sys.executable, "-m", "mprollout", "generate", "--prompts", str(prompts), "--preset", "gsm8k", "--json"),
        *("--out", str(out), "--backend", "simulated", "--max-new-tokens", "64", "--group-size", "4"),
        *("--max-running-samples", "8", "--flush-s", "0.1", "--reward", "rewards:length_on_the_loop"),
    ]
    folder, kept, dice = tmp_path / "out.parquet.parts", 0, random.Random(0)
    for how, exit_code in (("SIGKILL", -signal.SIGKILL), ("SIGINT", 130), ("keeper", 2), ("SIGKILL", -signal.SIGKILL)):
        run = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=Path(__file__).parent)
        try:
            until(lambda kept=kept: len(parts(folder)) >= kept + 2, "two more parts", 30)
            time.sleep(dice.uniform(0, 0.2))  # anywhere between two parts
            if how == "keeper":
                (keeper,) = descendants(run.pid, "mprollout.keeper")
                keeper.kill()
            else:
                run.send_signal(signal.Signals[how])
            _, error = run.communicate(timeout=30)
        finally:
            run.kill()
        assert run.returncode == exit_code, error.decode()
        assert not out.exists()
        kept = len(parts(folder))
        on_disk = [row for path in parts(folder) for row in pq.read_table(path, columns=["row"])["row"].to_pylist()]
        assert 0 < len(on_disk) < 240 and all(on_disk.count(row) == 4 for row in set(on_disk))
        if how != "SIGKILL":
            assert f"{len(on_disk) // 4} of 60 prompts are kept" in error.decode()
    done = subprocess.run(command, capture_output=True, cwd=Path(__file__).parent, timeout=60, check=True)
    assert f"{len(on_disk) // 4} of 60 prompts are in {folder}; going on" in done.stderr.decode()
    rows = pq.read_table(out, columns=["row", "sample"]).to_pylist()
    assert sorted((row["row"], row["sample"]) for row in rows) == list(itertools.product(range(60), range(4)))
    said = json.loads(done.stdout)
    assert said["samples"] == 240 and said["ended"] == {} and said["tokens_sampled"] < said["tokens"]
    assert not folder.exists()


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Six groups, as the engine delivered them."""
    folder = tmp_path_factory.mktemp("recording")
    with mp.RolloutEngine(config(rows=6, record=str(folder))) as engine:
        engine.get(6, timeout=20).release()
    return list(ReplaySource(folder).get(6))


def fill(out: Path, groups: list[Any]) -> None:
    """What `generate` does, with groups that are there: a part every two of them; ticket 5 fails."""
    with SampleFile(out, {"model": "m"}) as file:
        ledger = Ledger() if file.state is None else Ledger.from_state(file.state["ledger"])
        if not file.finished:
            for ticket in iter(ledger.next_ticket, 6):
                if ticket == 5:
                    ledger.resolve(5, "failed:reward")
                else:
                    prompt = Prompt(ticket=ticket, row=ticket, epoch=0, prompt=f"p{ticket}")
                    file.add(groups[ticket], prompt, ["text"] * 4, scored=True)
                    ledger.resolve(ticket, "taken")
                if ticket % 2:
                    file.cut({"ledger": ledger.state(without=[6])})
            file.finish()


def test_a_kill_at_any_step_of_writing_loses_and_repeats_nothing(tmp_path: Path, groups: list[Any]) -> None:
    """Every event of the file system that Python tells of, opening and removing included, is the last one once."""
    whole = tmp_path / "whole.parquet"
    fill(whole, groups)
    wanted = pq.read_table(whole)
    assert sorted(wanted["row"].to_pylist()) == sorted([*range(5)] * 4)
    for step in range(1, 1000):
        out = tmp_path / f"{step}.parquet"

        def body(step: int = step, out: Path = out) -> None:
            left = step

            def count(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal left
                if event.split(".")[0] in ("os", "open", "shutil") and str(out) in str(arguments):
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            fill(out, groups)

        status = os.waitstatus_to_exitcode(os.waitpid(fork(body), 0)[1])
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert not out.exists() or pq.read_table(out).equals(wanted)
        fill(out, groups)
        assert pq.read_table(out).equals(wanted) and pq.read_schema(out).metadata == pq.read_schema(whole).metadata
        assert [path.name for path in tmp_path.glob(f"*{step}.parquet*")] == [out.name]
    assert step > 12, "the kills hit nothing"


def test_a_state_that_counts_other_groups_is_never_written(tmp_path: Path, groups: list[Any]) -> None:
    """An interrupt between the delivery of a group and its row: what was not cut is made again."""
    ledger = Ledger()
    with SampleFile(tmp_path / "out.parquet", {}) as file:
        for ticket in (0, 1):
            ledger.resolve(ledger.next_ticket(), "taken")
            if ticket == 0:
                file.add(groups[0], Prompt(ticket=0, row=0, epoch=0, prompt="p"), ["t"] * 4, scored=False)
        state = {"ledger": ledger.state()}
        assert not file.holds(state) and file.buffered == 1
        with pytest.raises(AssertionError, match=r"0 \+ 1 groups are here"):
            file.cut(state)
    assert os.listdir(tmp_path) == []


def test_one_process_fills_a_file_and_foreign_files_are_left_alone(
    tmp_path: Path, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.parquet"
    monkeypatch.setattr(sample_file, "PART_BYTES", 1)
    with SampleFile(out, {"model": "m"}) as file:
        with pytest.raises(mp.ConfigError, match="another process fills it now"):
            SampleFile(out, {"model": "m"})
        assert not file.due
        file.add(
            groups[0], Prompt(ticket=0, row=0, epoch=0, prompt=[{"role": "user"}], answer=3), ["t"] * 4, scored=True
        )
        assert file.due
        ledger = Ledger()
        ledger.resolve(ledger.next_ticket(), "taken")
        file.cut({"ledger": ledger.state()})
        assert not file.due
    (row, *_) = pq.read_table(parts(file.folder)[0]).to_pylist()
    assert (row["prompt"], row["answer"]) == ('[{"role": "user"}]', "3")
    with pytest.raises(mp.ConfigError, match=r"model 'm' \(now 'n'\)"):
        SampleFile(out, {"model": "n"})
    for content, complaint in ((b"mine", "is no Parquet file"), (None, "was not written by this command")):
        if content is None:
            pq.write_table(pa.table({"a": [1]}), out)
        else:
            out.write_bytes(content)
        with pytest.raises(mp.ConfigError, match=complaint):
            SampleFile(out, {"model": "m"})
        assert out.exists() and len(parts(file.folder)) == 1
