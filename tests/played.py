"""An engine whose keeper and worker are played by the test: messages and groups come when it says so."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import config, until

import mprollout as mp
from mprollout import _native, messages
from mprollout.generator import VersionSpan
from mprollout.keeper_process import KeeperProcess
from mprollout.ring import RolledSample, WorkerWord, encode_group, segment_arguments
from mprollout.schema import Meta

PACKAGE = str(Path(mp.__file__).parent)


class PlayedKeeper(KeeperProcess):
    """`far` is the keeper's end of the channel; its process is this one, which nobody ends."""

    def __init__(self, settings: mp.EngineConfig, plan: Any) -> None:
        channel, theirs = messages.Channel.pair()
        super().__init__(channel, os.getpid(), None)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.segment = _native.Segment.create(**segment_arguments(plan))
        self.bell, self.worker_bells = os.eventfd(0, flags), [os.eventfd(0, flags) for _ in settings.workers.devices]
        self.booted = messages.Booted(temp_dir="")
        self.far = messages.Channel(theirs)
        for worker in range(len(self.worker_bells)):
            self.tell(messages.WorkerState(worker=worker, pid=self.pid, state="ready"))

    def tell(self, message: messages.Message) -> None:
        """Say something to the trainer."""
        self.far.send(message)

    def hear(self, kind: Any) -> Any:
        """Wait for the trainer's next message, which must be of this kind (of one of these kinds)."""
        self.far.socket.setblocking(True)
        received = self.far.receive()
        assert received is not None
        for fd in received[1]:
            os.close(fd)
        assert isinstance(received[0], kind), received[0]
        return received[0]

    @property
    def exit_code(self) -> int | None:
        return -9

    def end_orphans(self) -> None: ...

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.send(messages.Stop())

    def let_go(self) -> None:
        super().let_go()
        self.far.close()


class Played:
    """A running engine, and the means to play what is below it."""

    def __init__(self, engine: mp.RolloutEngine, keeper: PlayedKeeper) -> None:
        self.engine, self.keeper = engine, keeper
        self.producer = _native.Producer(keeper.segment, 0)

    def claim(self) -> _native.Claim:
        """The lowest waiting ticket, as a worker claims it."""
        claims: list[_native.Claim] = []

        def claimed() -> bool:
            claim = self.producer.claim()
            claims.extend([claim] if claim is not None else [])
            return bool(claims)

        until(claimed, "a ticket to claim")
        return claims[0]

    def publish(self, groups: int, version: int = 0) -> None:
        """Publish so many groups of one sample each."""
        for _ in range(groups):
            claim = self.claim()
            sample = RolledSample(
                token_ids=[1],
                logprobs=[-1.0],
                loss_mask=[1],
                finish_reason="stop",
                versions=[VersionSpan(version, 0, 1)],
            )
            meta = Meta(*[0] * len(Meta._fields))._replace(row=claim.ticket, oldest_version=version)
            assert self.producer.publish(claim, encode_group(meta, [5], [sample], [1.0]))
            self.keeper.segment.worker_words(0)[WorkerWord.GROUPS_PUBLISHED] += 1


@contextlib.contextmanager
def played(**changes: Any) -> Iterator[Played]:
    """A started engine of one worker, by default with at most 6 live groups of one sample."""
    keepers: list[PlayedKeeper] = []

    def make(settings: mp.EngineConfig, plan: Any) -> PlayedKeeper:
        keepers.append(PlayedKeeper(settings, plan))
        return keepers[0]

    parts = {
        "sampling": mp.SamplingConfig(group_size=1),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=6),
        "gate": mp.GateConfig(max_live_groups=6),
    }
    engine = mp.RolloutEngine(config(**(parts | changes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeeperProcess, "start", make)
        engine.start(progress=False)
    try:
        yield Played(engine, keepers[0])
    finally:
        engine.close()


class Interrupter:
    """Raises KeyboardInterrupt at the k-th line that this thread runs of mprollout's code or `threading`'s.

    CPython runs signal handlers after calls, at jumps backward and at the start of functions. So none can raise between
    a block's last call and the release of a lock written in C (traced as the `with` line), nor between the `del` that
    ends `get` and its return.
    """

    def __init__(self, spare: tuple[str, ...] = ()) -> None:
        """`spare`: files in which nothing is interrupted."""
        self.spare, self.left, self.where = spare, 0, ""

    def run(self, k: int, call: Callable[[], Any]) -> Any:
        """`call()`, interrupted at its k-th line; its result when it has fewer."""
        self.left, self.where = k, ""
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(None)

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if (not file.startswith(PACKAGE) and file != threading.__file__) or file.endswith(self.spare):
            return None
        if event == "line" and not linecache.getline(file, frame.f_lineno).strip().startswith(
            ("with ", "try:", "return batch")
        ):
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(file).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace
