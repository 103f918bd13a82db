"""`mprollout doctor`: what it says of machines as they are and as they could be, and that it says it where nothing else works."""

from __future__ import annotations

import configparser
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mprollout import doctor, self_test
from mprollout.doctor import Finding
from mprollout.limits import cpu_limit

pytestmark = pytest.mark.timeout(120)

BLOCKER = """
import importlib.abc, os, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in os.environ.get("BLOCKED", "").split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def without(folder: Path, blocked: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where these modules are missing, in the processes that it starts as well."""
    (folder / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join([str(folder), str(Path(doctor.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-P", "-m", "mprollout", *arguments],
        env={**os.environ, "PYTHONPATH": path, "BLOCKED": blocked},
        capture_output=True,
        text=True,
        timeout=60,
    )


def by_what(text: str) -> dict[str, Finding]:
    return {found.what: found for found in (Finding(**json.loads(line)) for line in text.splitlines())}


def test_it_works_where_nothing_else_does(tmp_path: Path) -> None:
    blocked = "mprollout._native,torch,sglang,msgspec,numpy,psutil,pyarrow,rich,tyro"
    done = without(tmp_path, blocked, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    found = by_what(done.stdout)
    broken = {what for what, finding in found.items() if finding.verdict == "broken"}
    assert broken == {"native part", "ring", "torch", "sglang"} and all(found[what].do for what in broken)
    assert found["torch"].found == "ModuleNotFoundError: No module named 'torch'"
    assert "requirements/cpu.txt" in found["torch"].do and "requirements/cpu.txt" in found["sglang"].do
    assert "build_ext --inplace" in found["native part"].do
    assert {"python", "packages", "cpus", "memory", "huge pages", "file limit", "temporary folder", "gpus"} < set(found)
    assert "CPUs (" in found["cpus"].found and "GiB may be used (" in found["memory"].found
    other = without(tmp_path, blocked, "top", "runs/7")
    assert other.returncode == 2 and other.stdout == ""
    assert other.stderr.startswith("mprollout: ") and other.stderr.count("\n") == 1
    assert "`mprollout doctor` says what is missing" in other.stderr


@pytest.mark.parametrize("blocked", ["mprollout._native", "tyro", "pyarrow"])
def test_one_thing_that_is_missing_is_named(tmp_path: Path, blocked: str) -> None:
    done = without(tmp_path, blocked, "doctor", "--quick")
    broken = [line for line in done.stdout.splitlines() if line.startswith("broken")]
    if blocked == "mprollout._native":
        assert done.returncode == 1 and len(broken) == 1 and "native part" in broken[0]
    else:  # its metadata are there, and nothing of it is needed for these looks
        assert done.returncode == 0 and not broken
    assert done.stdout.splitlines()[-1].endswith(f"{len(broken)} broken")


def test_the_packages_are_those_that_the_installation_requires() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(doctor.__file__).parents[1] / "setup.cfg")
    required = [line.partition(">=")[0] for line in setup["options"]["install_requires"].split()]
    assert list(doctor.PACKAGES) == required
    assert setup["options.extras_require"]["sglang"].strip() == f"sglang=={doctor.SGLANG}"


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("msgspec", "no-such-package"))
    found = doctor.packages()
    assert found.verdict == "broken" and found.do == "pip install no-such-package"
    assert "no-such-package MISSING" in found.found


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cpus() -> Finding:
        raise PermissionError("/proc is hidden")

    monkeypatch.setattr(doctor, "cpus", cpus)
    assert doctor.run_doctor(doctor.DoctorArgs(quick=True, json=True)) == 0
    found = by_what(capsys.readouterr().out)
    assert found["cpus"].verdict == "look" and "PermissionError: /proc is hidden" in found["cpus"].found
    assert found["gpus"].verdict in ("fine", "look")  # and the others follow


@pytest.mark.parametrize(
    ("chosen", "verdict"), [("advise", "fine"), ("always", "fine"), ("never", "look"), ("deny", "look")]
)
def test_huge_pages_are_fine_where_shared_memory_may_have_them(tmp_path: Path, chosen: str, verdict: str) -> None:
    path = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    path.parent.mkdir(parents=True)
    path.write_text("always within_size advise never deny force\n".replace(chosen, f"[{chosen}]"))
    found = doctor.huge_pages(tmp_path)
    assert found.verdict == verdict and found.found.startswith(f"{path} = {chosen}")
    assert found.do == ("" if verdict == "fine" else f"as root: echo advise > {path}")


def test_limits_that_are_too_low_say_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limits, do in (
        ((1024, 4096), "ulimit -n 4096"),
        ((1024, -1), "ulimit -n 65536"),
        ((1024, 1 << 20), "ulimit -n 65536"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        found = doctor.files()
        assert found.verdict == "look" and found.do == f"{do}, before the start"
    monkeypatch.setattr(doctor, "cpu_limit", lambda: (1.0, "cpu.max"))
    monkeypatch.setattr(doctor, "memory_limit", lambda: (1 << 30, "memory.max"))
    assert doctor.cpus().verdict == "look" and doctor.memory().verdict == "look"
    assert doctor.memory().found == "1.0 GiB may be used (memory.max)"
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert doctor.temporary_folder().verdict == "broken" and "set TMPDIR" in doctor.temporary_folder().do


SMI = """#!/bin/sh
case "$*" in
    "--query-gpu"*) printf 'NVIDIA H200, 143771 MiB, 575.57.08\\nNVIDIA H200, 143771 MiB, 575.57.08\\nNVIDIA H200, 143771 MiB, 575.57.08\\n' ;;
    "topo -p2p r") cat "$(dirname "$0")/matrix" ;;
    *) exit 9 ;;
esac
"""
MATRIX = """ \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\t{0}\t
 GPU1\tOK\tX\t{0}\t
 GPU2\t{0}\t{0}\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def test_gpus_are_told_with_the_pairs_that_do_not_reach_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's answers as it prints them; no GPU is here."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    (tmp_path / "matrix").write_text(MATRIX.format("OK"))
    found = doctor.gpus()
    assert found.verdict == "fine" and "all reach each other" in found.found
    assert found.found.startswith("3 x NVIDIA H200, 143771 MiB, 575.57.08; CUDA_VISIBLE_DEVICES=0,2")
    (tmp_path / "matrix").write_text(MATRIX.format("NS"))
    found = doctor.gpus()
    assert found.verdict == "look" and "2 pairs without peer access (0-2: NS, 1-2: NS)" in found.found
    assert "WorkerConfig.devices" in found.do
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver' >&2; exit 9\n")
    with pytest.raises(doctor.Absent, match=r"exit code 9: NVIDIA-SMI has failed: no driver"):
        doctor.gpus()
    # and torch, which sees none of them, is at fault
    monkeypatch.setattr(doctor, "_probe", lambda code: {"version": "2.13.0+cpu", "cuda": None, "gpus": []})
    assert doctor.torch().verdict == "broken"


def test_the_tightest_cpu_quota_counts(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job/step"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    assert cpu_limit(tmp_path) == (len(os.sched_getaffinity(0)), f"of {os.cpu_count()} in the machine")
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("50000 100000\n")
    share, why = cpu_limit(tmp_path)
    assert share == 0.5 and why.endswith("job/cpu.max = 50000 100000")
    (tmp_path / "proc/self/cgroup").write_text("3:cpu,cpuacct:/old\n")
    old = tmp_path / "sys/fs/cgroup/cpu/old"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("25000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_limit(tmp_path)[0] == 0.25


def test_the_ring_is_tested_between_two_processes() -> None:
    result = self_test.run(0.2)
    assert result.groups > 0 and result.nbytes == result.groups * 65536
    assert 0.2 <= result.seconds < 2.5 and 0 <= result.huge_bytes <= result.segment_bytes


def test_the_self_test_sees_a_group_that_is_not_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    from mprollout import _native

    def publish_wrong(segment: Any) -> None:
        producer = _native.Producer(segment, 0)
        while True:
            if (claim := producer.claim()) is not None:
                producer.publish(claim, [bytes(65536), b"%d 77" % claim.ticket])

    monkeypatch.setattr(self_test, "_publish", publish_wrong)
    with pytest.raises(RuntimeError, match="the group of ticket 0 is not what was published: b'0 77'"):
        self_test.run(0.2)


def test_a_crash_of_the_native_part_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_RING", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    found = doctor.ring()
    assert found.verdict == "broken" and "(signal 4)" in found.found


@pytest.mark.slow
def test_this_machine_can_run_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run_doctor(doctor.DoctorArgs()) == 0
    text = capsys.readouterr().out
    assert "0 broken" in text.splitlines()[-1] and "look    sglang" not in text
    assert "groups in 1.0 s between two processes, each as it was published" in text
