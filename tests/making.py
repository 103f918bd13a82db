"""Targets of the Makefile, run by tests."""

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


def make(target: str, *arguments: str, seconds: float) -> str:
    """What `make target ARGS=...` says; it must succeed, within so many seconds."""
    done = subprocess.run(
        ["make", target, f"ARGS={' '.join(arguments)}"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    return done.stdout
