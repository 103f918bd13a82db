"""A corrupt or foreign segment is refused, or gives errors, and crashes nobody (`native/tests/attach_fuzz.cpp`)."""

import pytest
from making import make


def fuzz(inputs: int, first: int, seconds: float) -> None:
    assert f"attach_fuzz: {inputs} inputs" in make("fuzz", str(inputs), str(first), seconds=seconds)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thousands_of_corrupt_segments_crash_nobody() -> None:
    fuzz(4000, 10_000_000, 280)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_a_million_corrupt_segments_crash_nobody() -> None:
    fuzz(1_000_000, 0, 3 * 3600 - 60)
