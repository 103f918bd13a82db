"""A keeper's temporary folder: locked while its keeper lives, so that the next start knows the stale ones.

Invariant: a folder whose lock (on the folder itself) is free belongs to nobody, at every moment from `mkdtemp` to the last `rmdir`, so a
kill anywhere leaves one that the next start removes. `make_folder` guarantees it: it hands out a folder only if it still stands under its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

TEMP_PREFIX = "mprollout-keeper-"
"""Long enough that no folder of a user's own is taken for a stale one."""


def make_folder() -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock; removes what killed keepers left."""
    clean_stale_folders()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
        with contextlib.suppress(FileNotFoundError):  # another start took it for a stale one before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def remove_folder(folder: Path) -> None:
    """The folder of a keeper that is dead, or of this one."""
    shutil.rmtree(folder, ignore_errors=True)


def clean_stale_folders() -> None:
    """Remove temporary folders whose keeper was killed: its lock is free then, and only then."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}*/"):
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folder(folder)
            finally:
                os.close(fd)
