"""A reward process: loads its functions, says that it is ready, then answers one call after the other.
`python -m mprollout.reward_process FD RECORD_FD PARENT_PID`.

    RewardPool --call: (what, samples, rewards), pickle--> job(samples, rewards) --Outcome, msgpack--> RewardPool

Invariant: the first act ties this process to its parent, before anything of the user's is imported. What a function raises, SystemExit
included, is an answer (`_attempt`), so only a death ends the process before its socket's end of file. It imports little, asyncio and
numpy not among it: a pool of many starts as fast as the user's functions load.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

import mprollout
from mprollout import _native
from mprollout.filter import filter_job
from mprollout.functions import import_main
from mprollout.reward import Job, Outcome, failure_of, reward_job

T = TypeVar("T")


def _send(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(len(payload).to_bytes(4, "little") + payload)


def _attempt(work: Callable[[], T]) -> T | Outcome:
    try:
        return work()
    except BaseException as error:  # SystemExit too: the caller is told, the process lives to tell it
        return failure_of(error)


def _makers(record: int) -> dict[str, Callable[[], Job]]:
    main_name, main_path, sys.path[:], pickled = pickle.loads(os.pread(record, os.fstat(record).st_size, 0))
    import_main(main_name, main_path)
    reward, filter_ = pickle.loads(pickled)
    makers: dict[str, Callable[[], Job]] = {"reward": lambda: reward_job(reward)}
    if filter_.function is not None:
        makers["filter"] = lambda: filter_job(filter_)
    return makers


def main() -> None:
    fd, record, parent_pid = map(int, sys.argv[1:])
    _native.die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which ends its workers in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # one that SGLang's process ignores would not end a hung call
    mprollout._inside = "a reward process"
    jobs: dict[str, Job | Outcome]
    made = _attempt(lambda: _makers(record))
    os.close(record)
    if isinstance(made, dict):
        jobs = {what: _attempt(make) for what, make in made.items()}
    else:
        jobs = {"reward": made, "filter": made}
    with socket.socket(fileno=fd) as connection, connection.makefile("rb") as calls:
        _send(connection, b"")
        while calls.peek(1):
            what, samples, rewards = pickle.load(calls)
            job = jobs[what]
            outcome = job if isinstance(job, Outcome) else _attempt(lambda: job(samples, rewards))  # noqa: B023
            _send(connection, msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    main()
