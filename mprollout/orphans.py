"""No orphans: every process that multiprocessing spawns from here dies with its parent.

Invariant: a spawned child's first act is PR_SET_PDEATHSIG and then a look at its parent, so there is no moment, start-up included, at
which the parent can die and the child live on. The patched spawn command line guarantees it: the act precedes the first import of
the child's own code. It is plain ctypes because at that moment the child's `sys.path` is not yet its parent's.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
from typing import Any

_FIRST_ACT = (
    "import ctypes, os; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == {parent} or os._exit(1); "
)


def patch_spawn() -> None:
    """Make `multiprocessing` spawn only children that die with this process (with the thread that spawns, to be exact). Idempotent."""
    original = multiprocessing.spawn.get_command_line
    if getattr(original, "_dies_with_parent", False):
        return

    def get_command_line(**kwargs: Any) -> list[str]:
        command = original(**kwargs)
        if "-c" in command:  # a frozen executable has no such line
            at = command.index("-c") + 1
            command[at] = _FIRST_ACT.format(parent=os.getpid()) + command[at]
        return command

    get_command_line._dies_with_parent = True  # type: ignore[attr-defined]
    multiprocessing.spawn.get_command_line = get_command_line
