"""A keeper's temporary folder: locked while its keeper lives, so that the next start knows the stale ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

TEMP_PREFIX = "mprollout-"


def make_folder() -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock; removes what killed keepers left."""
    clean_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def remove_folder(folder: Path) -> None:
    """A keeper's folder, its lock last: cut short anywhere, it is still one that the next start knows as stale."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != "lock":
                os.unlink(entry.path)
    shutil.rmtree(folder, ignore_errors=True)


def clean_stale_folders() -> None:
    """Remove temporary folders whose keeper was killed: its lock is free then, and only then."""
    for lock in Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}*/lock"):
        with contextlib.suppress(OSError):
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folder(lock.parent)
            finally:
                os.close(fd)
