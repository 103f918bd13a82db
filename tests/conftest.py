"""What every test may use, and the watch that none leaves a process, shared memory or a temporary file behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rigs import Rig
from tiny_model import make_tiny_model

session_processes: set[int] = set()
"""Pids of processes that outlive a test on purpose (a fixture of wider scope owns them); their descendants are spared too."""

_GRACE_S = 3.0
"""How long the last of a test may take to go away."""


TOGETHER = {
    "test_demo.py": "sglang",
    "test_engine_sglang.py": "sglang",
    "test_sglang_generator.py": "sglang",
    "test_attach_fuzz.py": "native",
    "test_bench.py": "native",
    "test_crash_points.py": "native",
    "test_model.py": "native",
    "test_native_storms.py": "native",
    "test_ring_machine.py": "native",
    "test_report.py": "report",
    "test_simulation.py": "native",
    "test_storm.py": "native",
}
"""Files whose tests stay on one process of xdist: they share a costly fixture, or fill a core. (Its own groups do not work with pytest 9.2.)"""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All other tests go to whoever is free."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(nodeid.partition("::")[0].rpartition("/")[2], nodeid)

    return Together(config, log)


def pytest_configure() -> None:
    """A shell ignores SIGINT in what it starts in the background, and children inherit that: the tests of Ctrl-C would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def private_tmp() -> Iterator[Path]:
    """A temporary folder of this session alone, so that a parallel run is not blamed on it. Short, for socket paths."""
    folder = Path(tempfile.mkdtemp(prefix="mpt-"))
    before, tempfile.tempdir = os.environ.get("TMPDIR"), None
    os.environ["TMPDIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    tempfile.tempdir = None
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_behind(private_tmp: Path) -> Iterator[None]:
    """Fails a test that leaves a child process, a file in /dev/shm or `mprollout-*` in the temporary folder."""
    looks: dict[str, Callable[[], set[str]]] = {
        "processes": _processes,
        "shared memory": _shared_memory,
        "files": lambda: _files(private_tmp),
    }
    before = {what: look() for what, look in looks.items()}
    yield
    deadline = time.monotonic() + _GRACE_S
    while True:
        left = {what: sorted(look() - before[what]) for what, look in looks.items()}
        left["shared memory"] = sorted(set(left["shared memory"]) - _of_others(left["shared memory"]))
        left = {what: names for what, names in left.items() if names}
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind after {_GRACE_S} s: {left}")
        time.sleep(0.05)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A segment with all four handles in this process."""
    rig = Rig()
    yield rig
    rig.consumer.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen2 checkpoint of 0.8 MB with tokenizer and chat template; EOS ids 2 and 7."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def _processes() -> set[str]:
    spared, found = set(session_processes), set()
    for process in psutil.Process().children(recursive=True):  # parents come before their children
        try:
            command = " ".join(process.cmdline())
            if process.pid in spared or process.ppid() in spared:
                spared.add(process.pid)
            elif process.status() != psutil.STATUS_ZOMBIE and "multiprocessing.resource_tracker" not in command:
                found.add(f"{process.pid} {command[:120]}")
        except psutil.NoSuchProcess:
            continue
    return found


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _of_others(names: list[str]) -> set[str]:
    """Those of the files in /dev/shm that a living process outside of this test run has mapped: not this test's."""
    own = {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
    maps = ""
    for pid in set(psutil.pids()) - own:
        with contextlib.suppress(OSError):
            maps += Path(f"/proc/{pid}/maps").read_text()
    return {name for name in names if f"/dev/shm/{name}" in maps}


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("mprollout-*")}
