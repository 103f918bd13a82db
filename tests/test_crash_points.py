"""The ring survives a kill, or a stop for a whole lap, at every step of every operation (`native/crash`)."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def run(*arguments: str, seconds: float) -> None:
    done = subprocess.run(
        ["make", "crash", f"ARGS={' '.join(arguments)}"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    if "crash_points: skipped" in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_may_die_or_stop_before_any_access_to_shared_memory() -> None:
    run(seconds=280)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_a_process_may_die_or_stop_at_any_instruction() -> None:
    run("--all", seconds=3 * 3600 - 60)
