"""The README's examples are what they say: the script runs, the TOML file is a valid configuration."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def block(name: str, language: str) -> str:
    """The first code block of `language` after the comment `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\s*```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, f"README.md has no block `<!-- test: {name} -->` followed by ```{language}"
    return found[1]


def test_example_runs_as_a_script(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block("example", "python"))
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("8 groups") == 5, done.stdout + done.stderr


def test_toml_is_a_valid_configuration(tmp_path: Path) -> None:
    from mprollout.config import EngineConfig, SGLangConfig

    path = tmp_path / "run.toml"
    path.write_text(block("toml", "toml"))
    config = EngineConfig.from_toml(path)
    assert isinstance(config.generator, SGLangConfig)
    assert (config.gate.groups_per_update, config.gate.max_lag) == (64, 1)


def test_the_two_commands_are_named_word_for_word() -> None:
    text = README.read_text()
    for command in ("make demo", "make test", 'pip install "mprollout[sglang]"'):
        assert f"\n    {command}\n" in text
