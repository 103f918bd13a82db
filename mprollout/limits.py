"""What the machine and its cgroups (version 2 or 1) allow this process. The standard library alone, so that `mprollout doctor` always can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that may still be charged, and what limits them: the tightest cgroup above this process, or the machine."""
    best, why = _available(root), "MemAvailable of the machine"
    for group, unified in _cgroups("memory", root):
        limit_file = "memory.max" if unified else "memory.limit_in_bytes"
        used_file = "memory.current" if unified else "memory.usage_in_bytes"
        limit = _read(group / limit_file).strip()
        if limit.isdigit() and (left := int(limit) - int(_read(group / used_file).strip() or 0)) < best:
            best, why = left, f"{group / limit_file} = {int(limit):,} bytes"
    return max(best, 0), why


def cpu_limit(root: Path = Path("/")) -> tuple[float, str]:
    """CPUs' worth of time, and what limits it: the tightest cgroup's quota, or the CPUs that this process may run on."""
    best, why = float(len(os.sched_getaffinity(0))), f"of {os.cpu_count()} in the machine"
    for group, unified in _cgroups("cpu", root):
        files = ["cpu.max"] if unified else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        words = " ".join(_read(group / name) for name in files).split()
        if len(words) == 2 and words[0].isdigit() and (share := int(words[0]) / int(words[1])) < best:
            best, why = share, f"{group / files[0]} = {' '.join(words)}"
    return best, why


def _cgroups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's cgroup and those above it (a parent's limit binds its children); whether they are of version 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            bases = [f"sys/fs/cgroup/{controller}"]
        else:
            continue
        for base in bases:
            folder = root / base / path.lstrip("/")
            for group in (folder, *folder.parents):
                yield group, controllers == ""
                if group == root / base:
                    break


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62
