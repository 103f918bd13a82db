"""A worker's process: its first acts, its config, its engine, and its end. `python -m mprollout.worker_process FD KEEPER_PID INDEX`.

    die_with_parent -> patch_spawn -> Boot (segment, bells, record) -> user's script as __main__ -> RolloutWorker.run -> exit

Invariant: the first act ties this process to the keeper, before anything is imported that could start a child. It ends by `os._exit`:
an engine's threads and exit hooks must not keep a failed worker alive; the keeper ends what is left of its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import selectors
import socket
import sys
import traceback
from typing import TYPE_CHECKING

import mprollout
from mprollout import _native, messages
from mprollout.config import EngineConfig, SimulatedConfig
from mprollout.errors import MprolloutError
from mprollout.functions import import_main
from mprollout.orphans import patch_spawn

if TYPE_CHECKING:
    from mprollout.generator import Generator

PERMANENT = (ValueError, ImportError, AttributeError, OSError, MprolloutError, SyntaxError)
"""A start that fails by one of these would fail the same way again."""


class _PreciseSelector(selectors.EpollSelector):
    """Timers to the microsecond: `epoll_wait` takes milliseconds, and rounds up. `select` on the epoll's own descriptor does not."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], (), (), timeout)
            timeout = 0
        return super().select(timeout)


def make_generator(config: EngineConfig, index: int) -> Generator:
    """The generator that the config names; the only place that knows which ones there are."""
    if isinstance(config.generator, SimulatedConfig):
        from mprollout.simulated import SimulatedGenerator

        return SimulatedGenerator(config.generator)
    from mprollout.sampler import derive_seed
    from mprollout.sglang_generator import SGLangGenerator

    devices = config.workers.devices[index]
    return SGLangGenerator(
        config.generator,
        devices=devices if isinstance(devices, list) else [devices],
        max_running_samples=config.workers.max_running_samples,
        seed=derive_seed(config.seed, index),
        colocated=config.workers.placement == "colocated",
    )


async def live(index: int, channel: messages.Channel, fds: list[int]) -> None:
    """Read the record, make the worker, run it."""
    record_fd, segment_fd, bell, attendant_bell = fds
    segment = _native.Segment.attach(segment_fd)
    os.close(segment_fd)
    main_name, main_path, sys.path[:], pickled = pickle.loads(messages.read_blob(record_fd))
    import_main(main_name, main_path)
    config: EngineConfig = pickle.loads(pickled)
    from mprollout.rollout import load_rollout
    from mprollout.worker import RolloutWorker

    generator, rollout = make_generator(config, index), load_rollout(config.rollout)
    await RolloutWorker(index, config, generator, rollout, segment, channel, bell, attendant_bell).run()


def main() -> None:
    fd, keeper_pid, index = map(int, sys.argv[1:])
    _native.die_with_parent(keeper_pid)
    patch_spawn()
    mprollout._inside = f"worker {index}"
    channel = messages.Channel(socket.socket(fileno=fd))
    channel.socket.setblocking(True)
    received = channel.receive()
    channel.socket.setblocking(False)
    assert received is not None and isinstance(received[0], messages.Boot)
    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_PreciseSelector())) as runner:
            runner.run(live(index, channel, received[1]))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        sys.stderr.flush()
        channel.socket.setblocking(True)
        with contextlib.suppress(OSError):
            channel.send(
                messages.WorkerFailed(
                    worker=index,
                    error=f"{type(error).__name__}: {error}",
                    traceback=messages.clip(text),
                    permanent=isinstance(error, PERMANENT),
                )
            )
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
