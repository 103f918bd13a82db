"""All subcommands: their `--help` teaches, their examples are valid, their errors are one line, the shell completes them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import tyro

from mprollout.cli import Command, main

COMMANDS: dict[str, Any] = {
    configuration.name: kind for kind, configuration in (get_args(annotated)[:2] for annotated in get_args(Command))
}
READS_A_RUN = ("audit", "report", "top", "verify", "view")


def test_the_subcommands_are_found() -> None:
    assert {"generate", "doctor", "view", "demo", *READS_A_RUN} <= set(COMMANDS)


def test_the_list_has_a_sentence_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], []):  # none: an error that lists them, too
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == (2 if not arguments else 0)
        said = capsys.readouterr()
        text = said.out + said.err
        assert all(name in text for name in COMMANDS)
        assert "Example" not in text and ("2 a wrong setting" in text) == bool(arguments)
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_the_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"Example: `mprollout {name}" in text
    assert re.search(r"Exit codes: 0 [^;]+; [12] ", text)
    examples = re.findall(r"`mprollout ([^`]+)`", COMMANDS[name].__doc__)
    mine = [example for example in examples if example.split()[0] == name]
    assert mine, COMMANDS[name].__doc__
    for example in examples:
        parsed = tyro.cli(Command, args=shlex.split(example))
        assert type(parsed) is COMMANDS[example.split()[0]]


@pytest.mark.parametrize("name", [name for name, kind in COMMANDS.items() if "json" not in kind.__dataclass_fields__])
def test_only_the_demo_has_no_json(name: str) -> None:
    """It leaves `metrics.jsonl`."""
    assert name.startswith("demo")


@pytest.mark.parametrize("name", READS_A_RUN)
def test_an_error_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"mprollout: {tmp_path}") and said.err.count("\n") == 1


def test_a_shell_can_complete_them() -> None:
    program = [sys.executable, "-m", "mprollout", "--tyro-print-completion", "bash"]
    script = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout
    assert all(name in script for name in COMMANDS) and "--max-new-tokens" in script
    bash = ["bash", "-c", 'eval "$(cat)"; complete -p mprollout']
    assert (
        "mprollout" in subprocess.run(bash, input=script, text=True, capture_output=True, check=True, timeout=30).stdout
    )
