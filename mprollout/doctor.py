"""`mprollout doctor`: is this machine fit for a run, and what to do where it is not.

    each check --> Finding (what, found, verdict, do)         the machine, packages, GPUs; torch, SGLang and the ring in processes of their own

Invariant: it works before anything else does. Nothing but the standard library is imported here; what may be missing or may crash is looked at
in a process of its own, under a time limit; a check that fails is a finding, never the end.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mprollout.limits import cpu_limit, memory_limit

SGLANG = "0.5.23"
PACKAGES = ("msgspec", "numpy", "psutil", "pyarrow", "rich", "tyro")
"""Those of setup.cfg's install_requires."""
_PROBE_TIMEOUT_S = 180.0
"""Longest import of SGLang: a cold disk."""
_GIB = 1 << 30
_TEMP_CHARS = 107 - len("/mprollout-keeper-12345678/worker-63/tmp12345678")
"""Longest temporary folder in which SGLang's sockets have room."""

_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
_SGLANG = """
import json, sys, torch
from mprollout.sglang_setup import import_sglang, install_standins
if not torch.cuda.is_available():
    install_standins()
import_sglang()
import sglang
files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in ("torchvision", "vllm")}
print(json.dumps({"version": sglang.__version__, "standins": [name for name, file in files.items() if "_standins" in file]}))
"""
_RING = """
import json
from mprollout import self_test
print(json.dumps(self_test.run(1.0)._asdict()))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Look at this machine: cores, memory and its limit, huge pages, file limits, GPUs, torch, SGLang, the native part and the ring.

    Says for each what it found, whether that is fine, and what to do. It works where everything else fails to import.

    Example: `mprollout doctor`, or `mprollout doctor --json` for one JSON object a finding.

    Exit codes: 0 nothing is broken; 1 something is that a run needs.
    """

    quick: bool = False
    """Without the imports of torch and SGLang and the ring's second at work: what stands in files alone."""
    json: bool = False
    """One line of JSON a finding: what, found, verdict, do."""


Verdict = Literal["fine", "look", "broken"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check says."""

    what: str
    found: str
    verdict: Verdict = "fine"
    """fine; look: a run works, and could fare better; broken: a run needs it."""
    do: str = ""


class Absent(Exception):
    """A probe's process failed; its last words."""


def findings(quick: bool = False) -> Iterator[Finding]:
    """One after another, as they are found."""
    checks = [python, packages, native, cpus, memory, huge_pages, files, temporary_folder, gpus]
    for check in checks if quick else [*checks, ring, torch, sglang]:
        try:
            yield check()
        except Exception as error:  # a doctor does not fall ill
            name = check.__name__.replace("_", " ")
            yield Finding(name, f"could not be looked at: {type(error).__name__}: {error}", "look")


def run_doctor(args: DoctorArgs) -> int:
    """Say what is found; returns the exit code."""
    counts = {"fine": 0, "look": 0, "broken": 0}
    colours = {"fine": "\033[32m", "look": "\033[33m", "broken": "\033[1;31m"} if sys.stdout.isatty() else {}
    for found in findings(args.quick):
        counts[found.verdict] += 1
        if args.json:
            print(json.dumps(dataclasses.asdict(found)), flush=True)
            continue
        colour, plain = colours.get(found.verdict, ""), "\033[0m" if colours else ""
        print(f"{colour}{found.verdict:6}{plain}  {found.what:16}  {found.found}", flush=True)
        if found.do:
            print(f"{'':8}{'':16}    -> {found.do}", flush=True)
    if not args.json:
        print(f"{counts['fine']} fine, {counts['look']} to look at, {counts['broken']} broken")
    return 1 if counts["broken"] else 0


# -- the machine -----------------------------------------------------------------------------------------------------------


def python() -> Finding:
    found = f"Python {sys.version.split()[0]}, {sys.executable}"
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return Finding(
            "python", f"{found} on {sys.platform} {os.uname().machine}", "broken", "Linux on x86-64 is what there is"
        )
    return Finding("python", found)


def packages() -> Finding:
    """The required ones, by their metadata: nothing is imported."""
    versions = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version or 'MISSING'}" for name, version in versions.items())
    return (
        Finding("packages", found, "broken", f"pip install {' '.join(missing)}")
        if missing
        else Finding("packages", found)
    )


def native() -> Finding:
    folder = Path(__file__).parent
    built = sorted(path.name for path in folder.glob("_native*.so"))
    try:
        from mprollout import _native
    except ImportError as error:
        why = f"{', '.join(built)} cannot be imported: {error}" if built else f"not built: {folder} has no _native*.so"
        do = "pip install . (it needs g++), or in a checkout: python setup.py build_ext --inplace"
        return Finding("native part", why, "broken", do)
    return Finding("native part", str(_native.__file__))


def cpus() -> Finding:
    share, why = cpu_limit()
    found = f"{share:g} CPUs ({why})"
    if share < 2:
        do = "trainer, keeper and a worker share one CPU: everything works, slowly; give it two or more"
        return Finding("cpus", found, "look", do)
    return Finding("cpus", found)


def memory() -> Finding:
    left, why = memory_limit()
    found = f"{left / _GIB:.1f} GiB may be used ({why})"
    if left < 4 * _GIB:
        return Finding(
            "memory",
            found,
            "look",
            "an SGLang worker alone takes 2 GiB and its model: raise the limit, or use a small model",
        )
    return Finding("memory", found)


def huge_pages(root: Path = Path("/")) -> Finding:
    """For shared memory, which has a switch of its own."""
    path = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    chosen = re.search(r"\[(\w+)\]", path.read_text())
    found = f"{path} = {chosen[1] if chosen else '?'}"
    if chosen and chosen[1] in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", found)
    return Finding("huge pages", f"{found}: the ring uses pages of 4 KiB", "look", f"as root: echo advise > {path}")


def files() -> Finding:
    """Open files: sockets, pipes and shared memory of a worker; SGLang's own are most of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} open files at most (hard limit {hard:,})"
    if soft < 4096:
        most = hard if 0 < hard < 65536 else 65536  # -1: no limit
        return Finding("file limit", found, "look", f"ulimit -n {most}, before the start")
    return Finding("file limit", found)


def temporary_folder() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    found = f"{folder}, {free / _GIB:.1f} GiB free"
    if len(folder) > _TEMP_CHARS:
        do = f"SGLang's sockets lie in it, and their paths end at 107 characters: set TMPDIR to one of {_TEMP_CHARS} or less"
        return Finding("temporary folder", found, "broken", do)
    if free < _GIB:
        return Finding("temporary folder", found, "look", "make room, or set TMPDIR to another disk")
    return Finding("temporary folder", found)


# -- GPUs ------------------------------------------------------------------------------------------------------------------


def gpus() -> Finding:
    """By the driver's own program: it needs neither torch nor CUDA."""
    if shutil.which("nvidia-smi") is None:
        devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
        if devices:
            return Finding(
                "gpus", f"{', '.join(devices)}, and no nvidia-smi", "look", "install the driver's nvidia-smi"
            )
        return Finding("gpus", "none: SGLang runs on the CPU, to develop and to test")
    found = [
        line.strip()
        for line in _smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()
    ]
    if not found:
        return Finding(
            "gpus", "nvidia-smi names none", "broken", "nvidia-smi, and dmesg, say why the driver sees no GPU"
        )
    names = [f"{found.count(name)} x {name}" for name in dict.fromkeys(found)]
    text = "; ".join(names) + (
        f"; CUDA_VISIBLE_DEVICES={given}" if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) else ""
    )
    if len(found) == 1:
        return Finding("gpus", text)
    apart = without_p2p(_smi("topo", "-p2p", "r"))
    if apart:
        pairs = ", ".join(f"{a}-{b}: {why}" for a, b, why in apart[:4]) + (" ..." if len(apart) > 4 else "")
        do = "tensor parallelism goes through host memory: put GPUs that reach each other into one worker (WorkerConfig.devices)"
        return Finding("gpus", f"{text}; {len(apart)} pairs without peer access ({pairs})", "look", do)
    return Finding("gpus", f"{text}; all reach each other (P2P)")


def without_p2p(matrix: str) -> list[tuple[int, int, str]]:
    """Pairs of GPUs that `nvidia-smi topo -p2p r` does not call OK, and what it calls them."""
    rows = [line.split() for line in matrix.splitlines() if re.match(r"\s*GPU\d+\s+(X|OK|\w+)\b", line)]
    rows = [row for row in rows if len(row) > 1 and not row[1].startswith("GPU")]
    return [(i, j, said) for i, row in enumerate(rows) for j, said in enumerate(row[1:]) if j > i and said != "OK"]


def _smi(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Absent(
            f"nvidia-smi {arguments[0]}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
        )
    return done.stdout


# -- in processes of their own ---------------------------------------------------------------------------------------------


def ring() -> Finding:
    try:
        said = _probe(_RING)
    except Absent as error:
        return Finding(
            "ring",
            f"its self-test failed: {error}",
            "broken",
            "the native part must be built, and by a compiler of this machine",
        )
    megabytes = said["nbytes"] / said["seconds"] / 1e6
    huge = said["huge_bytes"] / said["segment_bytes"]
    return Finding(
        "ring",
        f"{said['groups']:,} groups in {said['seconds']:.1f} s between two processes, each as it was published "
        f"({megabytes:,.0f} MB/s with checksums; {huge:.0%} in huge pages)",
    )


def torch() -> Finding:
    try:
        said = _probe(_TORCH)
    except Absent as error:
        return Finding(
            "torch", str(error), "broken", 'pip install "mprollout[sglang]" on a GPU machine; else requirements/cpu.txt'
        )
    found = f"{said['version']}, " + (
        f"CUDA {said['cuda']}, sees {len(said['gpus'])} GPUs" if said["cuda"] else "for CPUs"
    )
    if shutil.which("nvidia-smi") is not None and not said["gpus"]:
        return Finding(
            "torch",
            found,
            "broken",
            "there is a GPU driver, and torch sees no GPU: install a build for its CUDA version",
        )
    return Finding("torch", found)


def sglang() -> Finding:
    try:
        said = _probe(_SGLANG)
    except Absent as error:
        do = f'pip install "mprollout[sglang]" (sglang=={SGLANG}); without a GPU: requirements/cpu.txt, then cpu-nodeps.txt with --no-deps'
        return Finding("sglang", str(error), "broken", do)
    standins = (
        f", stand-ins for {' and '.join(said['standins'])} (import only)" if said["standins"] else ", no stand-ins"
    )
    if said["version"] != SGLANG:
        return Finding(
            "sglang",
            said["version"] + standins,
            "look",
            f"written for and tested with {SGLANG}: pip install sglang=={SGLANG}",
        )
    return Finding("sglang", said["version"] + standins)


def _probe(code: str) -> dict[str, Any]:
    """What the code prints last, as JSON, from a process with this one's path.

    Raises:
        Absent: it failed; says how.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}\n{code}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Absent(f"not done within {_PROBE_TIMEOUT_S:g} s") from None
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise Absent(words[-1].strip()[:500] + (f" (signal {-done.returncode})" if done.returncode < 0 else ""))
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
