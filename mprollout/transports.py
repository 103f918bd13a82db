"""How a staged copy reaches the engines: four transports behind one interface, the trainer's end.

    shm          the engines map the staged memory file                      one copy, whatever the number of workers
    disk         the engines read a safetensors file in RUN/weights          no memory is held between updates
    ipc          buckets in memory that trainer and engine both have mapped  a GPU that both use (CUDA IPC); memory files on a CPU
    distributed  buckets broadcast in a process group                        NCCL between GPUs, gloo on a CPU

Invariant: the file that is handed over with an update is a whole, verified copy, whatever the transport. The keeper keeps it for workers that
start again, and an engine whose route breaks midway loads it instead, inside the same pause: so no worker runs mixed weights, and none restarts
because a neighbour died. For ipc and distributed that copy is the staged memory file (a restarted worker can join no broadcast that is over, and
memory is faster to read than a disk); for disk it is the file, and the memory is given back.

    its thread  sends buckets of one update / waits for the other ranks / unblocked by them, by their death, by the group's end

ipc and distributed have not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprollout import messages, weight_files
from mprollout.config import EngineConfig
from mprollout.route import HOST, Route, SharedBuffer, join, leave, meet

if TYPE_CHECKING:
    import torch

    from mprollout.weights import Bucket, StagedWeights

log = logging.getLogger("mprollout")

_numbers = itertools.count()
_LAST_WORD_S = 2.0
"""How long after the workers' answers the sending thread may take to end, before its group is broken up."""

States = Mapping[int, messages.WorkerState]


class Carriage:
    """One update on its way to the workers.

    Attributes:
        fd: the whole copy that they, and the keeper, are given.
        route: where the bytes come from faster.
    """

    def __init__(self, fd: int, route: Route | None = None) -> None:
        self.fd, self.route = fd, route

    def depart(self) -> None:
        """The workers are being told of it."""

    def look(self, states: States) -> None:
        """Something has happened to a worker."""

    def end(self, applied: bool) -> None:
        """The workers have answered, or are waited for no longer. `applied`: by all of them."""


class Transport:
    """What all have in common, which is `shm`. Made once an engine, used for one update at a time."""

    holds_memory = True
    """The staged memory file is what the keeper keeps, until the next update is applied."""

    def prepare(self, staged: StagedWeights, version: int, states: States) -> Carriage:
        """Make ready to carry a staged copy to the workers that are ready. `staged` lives longer than the carriage."""
        return Carriage(staged.fd)

    def close(self) -> None:
        """Give up what is kept from one update to the next."""


def make_transport(config: EngineConfig) -> Transport:
    """The transport that the config names."""
    match config.weights.transport:
        case "shm":
            return Transport()
        case "disk":
            return Disk(config)
        case _:
            return Collective(config)


class Disk(Transport):
    holds_memory = False

    def __init__(self, config: EngineConfig) -> None:
        self._run_dir, self._kept = Path(config.run_dir or ""), max(1, config.weights.keep_versions)

    def prepare(self, staged: StagedWeights, version: int, states: States) -> Carriage:
        return _OnDisk(weight_files.write(staged, self._run_dir, version), self._run_dir, self._kept)


class _OnDisk(Carriage):
    def __init__(self, path: Path, run_dir: Path, kept: int) -> None:
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._path, self._run_dir, self._kept = path, run_dir, kept

    def end(self, applied: bool) -> None:
        os.close(self.fd)
        if applied:
            weight_files.keep_last(self._run_dir, self._kept)
        else:
            self._path.unlink(missing_ok=True)


class Collective(Transport):
    """ipc and distributed: a group of trainer and engine processes, made for the first update and again whenever one of them has changed."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._group: Group | None = None

    def prepare(self, staged: StagedWeights, version: int, states: States) -> Carriage:
        buckets = staged.buckets(self._config.weights.bucket_bytes)
        largest = max(bucket.end - bucket.start for bucket in buckets)
        workers = _ready(states)
        if self._group is not None and not self._group.serves(workers, largest):
            self.close()
        if not workers:
            return Carriage(staged.fd)  # whoever starts gets the staged copy
        if self._group is None:
            self._group = Group(self._config, workers, largest)
        return Sending(staged, buckets, self._group, version)

    def close(self) -> None:
        if self._group is not None:
            self._group.break_up()
            self._group = None


class Group:
    """Trainer and engine processes, for as long as the workers are the same incarnations. A broken one is not used again."""

    def __init__(self, config: EngineConfig, workers: dict[int, int], largest: int) -> None:
        """`workers`: restarts by worker; `largest`: bytes of a bucket."""
        import torch
        import torch.distributed as dist

        self.workers, self.broken, self._largest = workers, False, largest
        self._group: dist.ProcessGroup | None = None
        gpus = [gpu for worker in workers for gpu in config.gpus(worker)]  # of rank 1 and up
        on_gpu, ipc = None not in gpus, config.weights.transport == "ipc"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        # One buffer a GPU, so that each engine process reads its own GPU's memory.
        devices = {gpu: torch.device("cpu") if gpu is None else torch.device("cuda", gpu) for gpu in gpus if ipc}
        self._buffers = {gpu: SharedBuffer(largest, device) for gpu, device in devices.items()}
        first_ranks, rank = {}, 1
        for worker, restarts in workers.items():
            first_ranks[worker] = (restarts, rank)
            rank += len(config.gpus(worker))
        listener = socket.create_server((HOST, 0))  # torch itself would listen on every interface
        # The server is nobody's client: with this reference it ends, and every `join` that waits for a rank with it.
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            HOST,
            listener.getsockname()[1],
            rank,
            True,
            datetime.timedelta(seconds=config.weights.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.route = Route(
            group=f"mprollout-{os.getpid()}-{next(_numbers)}",
            port=self._store.port,
            world_size=rank,
            backend="nccl" if on_gpu and not ipc else "gloo",
            timeout_s=config.weights.timeout_s,
            bucket_bytes=config.weights.bucket_bytes,
            first_ranks=first_ranks,
            buffers=[self._buffers[gpu].name() for gpu in gpus if ipc],
        )

    def serves(self, workers: dict[int, int], largest: int) -> bool:
        return not self.broken and self.workers == workers and (not self._buffers or largest <= self._largest)

    def carry(self, staged: StagedWeights, buckets: list[Bucket]) -> None:
        """Bring every bucket to every rank. Blocks until all have checked and loaded all of it.

        Raises:
            RuntimeError: a rank left, or did not come.
        """
        import torch
        import torch.distributed as dist

        if self._group is None:
            self._group = join(self.route, 0)
        for bucket in buckets:
            flat = self._fill(staged, bucket)
            if not self._buffers:
                dist.broadcast(flat, src=0, group=self._group)
                continue
            for buffer in self._buffers.values():
                buffer.flat[: len(flat)].copy_(flat)
                if buffer.flat.is_cuda:
                    torch.cuda.synchronize(buffer.flat.device)
            meet(self._group)  # the bucket is there
            meet(self._group)  # it may be written over
        meet(self._group)  # all of it arrived everywhere

    def _fill(self, staged: StagedWeights, bucket: Bucket) -> torch.Tensor:
        """The bucket's bytes on the trainer's device: on a CPU those of the staged copy, on a GPU from the trainer's own tensors, where it has them."""
        import torch

        whole = staged.bytes(bucket.start, bucket.end)
        if self._device.type == "cpu":
            return whole
        if not bucket.entries.keys() <= staged.on_gpu.keys():
            return whole.to(self._device)
        flat = torch.zeros(bucket.end - bucket.start, dtype=torch.uint8, device=self._device)
        for name, view in bucket.views(flat):
            view.copy_(staged.on_gpu[name])  # which casts as staging did
        return flat

    def give_up(self) -> None:
        """Make `carry`, in another thread, and the ranks that wait for others end with an error. (A process's death does so by itself.)"""
        self.broken, self._store = True, None
        if self._group is not None and self.route.backend == "nccl":
            with contextlib.suppress(RuntimeError):
                self._group.abort()

    def break_up(self) -> None:
        """The trainer leaves, and so the group ends."""
        self.give_up()
        self._group = None
        leave(self.route.group)
        for buffer in self._buffers.values():
            buffer.close()


class Sending(Carriage):
    """An update whose buckets a thread sends.

    Attributes:
        why: when its group is broken, by what.
    """

    def __init__(self, staged: StagedWeights, buckets: list[Bucket], group: Group, version: int) -> None:
        super().__init__(staged.fd, group.route)
        self._staged, self._buckets, self.group, self._version = staged, buckets, group, version
        self.why = "a worker has gone, or has come"
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._send, name="mprollout-weights", daemon=True)

    def _send(self) -> None:
        try:
            self.group.carry(self._staged, self._buckets)
        except Exception as error:
            self.why = f"{type(error).__name__}: {error}"
            self.group.break_up()  # the others wait for the next bucket

    def depart(self) -> None:
        self._thread.start()

    def look(self, states: States) -> None:
        if not self.group.broken and _ready(states) | self.group.workers != _ready(states):
            self.group.give_up()

    def end(self, applied: bool) -> None:
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORD_S if applied else 0)
            if self._thread.is_alive():
                self.group.give_up()
                self._thread.join(_LAST_WORD_S)
        if self.group.broken and applied:
            log.warning("update %d: its route broke, the workers took the staged copy: %s", self._version, self.why)
        elif self.group.broken:
            log.info("update %d: its route was broken up: %s", self._version, self.why)
        else:
            took_s = time.monotonic() - self._began
            log.info("update %d: %d buckets in %.2f s", self._version, len(self._buckets), took_s)


def _ready(states: States) -> dict[int, int]:
    """Restarts of the workers that are ready."""
    return {worker: state.restarts for worker, state in sorted(states.items()) if state.state == "ready"}
