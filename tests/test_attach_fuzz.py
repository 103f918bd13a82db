"""A corrupt or foreign segment is refused, or gives errors, and crashes nobody (`native/tests/attach_fuzz.cpp`)."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def fuzz(inputs: int, first: int, seconds: float) -> None:
    done = subprocess.run(
        ["make", "fuzz", f"ARGS={inputs} {first}"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    print(done.stdout)
    assert done.returncode == 0 and f"attach_fuzz: {inputs} inputs" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thousands_of_corrupt_segments_crash_nobody() -> None:
    fuzz(4000, 10_000_000, 280)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_a_million_corrupt_segments_crash_nobody() -> None:
    fuzz(1_000_000, 0, 3 * 3600 - 60)
