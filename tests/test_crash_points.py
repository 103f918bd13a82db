"""The ring survives a kill, or a stop for a whole lap, at every step of every operation (`native/crash`)."""

import pytest
from making import make


def run(*arguments: str, seconds: float) -> None:
    said = make("crash", *arguments, seconds=seconds)
    if "crash_points: skipped" in said:
        pytest.skip(said.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_may_die_or_stop_before_any_access_to_shared_memory() -> None:
    run(seconds=280)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_a_process_may_die_or_stop_at_any_instruction() -> None:
    run("--all", seconds=3 * 3600 - 60)
