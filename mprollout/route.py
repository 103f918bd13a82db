"""A route: the process group of trainer and engine processes in which the buckets of an update travel, both ends of it.

    trainer (rank 0)   fill a bucket --+-- broadcast ------------------+--> check --> load      an engine process (rank 1..)
                                       +-- memory that both have mapped +

Invariant: what `arrivals` yields has the staged checksums. The group's store listens on this machine's loopback only. A rank that fails leaves
the group (`leave`), so that the others' collectives fail and none waits for ever; the trainer's end of it is in `transports`.
torch is imported only when one of these is called. The CUDA parts have not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import pickle
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from mprollout.weights import StagedWeights

HOST = "127.0.0.1"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process needs to know of its group."""

    group: str
    """The group's name, its own for each set of processes."""
    port: int
    """Of the group's store."""
    world_size: int
    backend: str
    """`gloo` or `nccl`."""
    timeout_s: float
    """Of each step in the group."""
    bucket_bytes: int
    first_ranks: dict[int, tuple[int, int]]
    """By worker: its incarnation (restarts), and the rank of its first engine process."""
    rank: int = 0
    """The first rank of the worker that was sent this."""
    buffers: list[bytes] = []
    """By rank, from 1: the memory in which that process finds one bucket after the other (`SharedBuffer.name`); empty: they are broadcast."""

    def to(self, worker: int, restarts: int) -> Route | None:
        """As that worker needs it; None: it is not the process that was counted in, or not counted."""
        incarnation, rank = self.first_ranks.get(worker, (-1, 0))
        return msgspec.structs.replace(self, rank=rank) if incarnation == restarts else None


def join(route: Route, rank: int) -> ProcessGroup:
    """Become one of the group. Blocks until all have come.

    What SGLang's `init_weights_update_group` does, but for two things: there is a time limit, and the group can be left. SGLang's updater keeps
    its reference, and with it the connections, so that the others would wait for ever for a rank that broke off (gloo closes with the last one).

    Raises:
        RuntimeError: the store was closed, or not all came in time.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    timeout = datetime.timedelta(seconds=route.timeout_s)
    store = dist.TCPStore(HOST, route.port, route.world_size, False, timeout)  # type: ignore[attr-defined]
    # What init_process_group does, beside a default group that the process may have or not have.
    group, _ = c10d._new_process_group_helper(
        route.world_size,
        rank,
        [],
        c10d.Backend(route.backend),
        dist.PrefixStore(route.group, store),  # type: ignore[attr-defined]
        group_name=c10d.GroupName(route.group),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(route.world_size)}
    return group  # type: ignore[no-any-return]


def leave(group: str) -> None:
    """End this process's part in the group; the others' collectives fail from now on. Nothing happens where it is in no such group."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    global _member_of
    _member_of = None if _member_of == group else _member_of
    _mapped.pop(group, None)
    with contextlib.suppress(Exception):
        found = c10d._resolve_process_group(c10d.GroupName(group))  # type: ignore[attr-defined]
        if dist.get_backend(found) == "nccl":
            found.abort()
        dist.destroy_process_group(found)


def meet(group: ProcessGroup) -> None:
    """Wait until every rank has come here."""
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    here = torch.zeros(1, device=device)
    dist.all_reduce(here, group=group)
    here.item()  # on a GPU the wait is here


def arrivals(
    route: Route, rank: int, weights: StagedWeights, device: torch.device
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors of one bucket after the other, as they come from the trainer; valid until the next is asked for. Blocks.

    Joins the group first, where this process is not in it since an earlier update.

    Raises:
        ValueError: a tensor is not what was staged.
        RuntimeError: another rank left.
    """
    import torch
    import torch.distributed as dist

    group = _membership(route, rank)
    buffer = _map_once(route, rank) if route.buffers else None
    for bucket in weights.buckets(route.bucket_bytes):
        nbytes = bucket.end - bucket.start
        if buffer is None:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            dist.broadcast(flat, src=0, group=group)
        else:
            meet(group)  # the bucket is there
            flat = buffer[:nbytes]
        bucket.check(flat)
        yield bucket.views(flat)
        if buffer is not None:
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)
            meet(group)  # it may be written over
    meet(group)  # all of it arrived everywhere


_member_of: str | None = None
"""The group in which this engine process is."""


def _membership(route: Route, rank: int) -> ProcessGroup:
    from torch.distributed import distributed_c10d as c10d

    global _member_of
    if _member_of != route.group:
        if _member_of is not None:
            leave(_member_of)  # the trainer broke it up
        group, _member_of = join(route, rank), route.group
        return group
    return c10d._resolve_process_group(c10d.GroupName(route.group))  # type: ignore[attr-defined]


# -- memory that trainer and engine both have mapped ---------------------------------------------------------------------

_mapped: dict[str, torch.Tensor] = {}
"""By group; the memory stays the same for a group's life."""


def _map_once(route: Route, rank: int) -> torch.Tensor:
    if route.group not in _mapped:
        _mapped.clear()
        rebuild, args = pickle.loads(route.buffers[rank - 1])  # the trainer's, by the worker's own socket
        _mapped[route.group] = rebuild(*args)
    return _mapped[route.group]


class SharedBuffer:
    """Memory of the trainer that an engine process maps by its `name`.

    Attributes:
        flat: uint8 `[nbytes]`, on the device.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import numpy as np
        import torch

        self._fd = -1
        if device.type == "cuda":
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self._fd = os.memfd_create("mprollout-bucket", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, nbytes)
            self.flat = torch.from_numpy(np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8))

    def name(self) -> bytes:
        """For one other process, which keeps what it maps: a CUDA IPC handle, or on a CPU the file."""
        import torch

        if self._fd >= 0:
            return pickle.dumps((_open_file, (f"/proc/{os.getpid()}/fd/{self._fd}",)))
        from torch.multiprocessing.reductions import reduce_tensor

        uuid = str(torch.cuda.get_device_properties(self.flat.device).uuid)
        return pickle.dumps((_open_handle, (uuid, reduce_tensor(self.flat)[1])))

    def close(self) -> None:
        """Give up the file; memory that is mapped stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_file(path: str) -> torch.Tensor:
    import numpy as np
    import torch

    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch cannot know that nobody writes
        return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8))


def _open_handle(uuid: str, args: tuple[Any, ...]) -> torch.Tensor:
    """Device numbers differ between processes (CUDA_VISIBLE_DEVICES), so the GPU is told by its UUID."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    devices = range(torch.cuda.device_count())
    number = next((n for n in devices if str(torch.cuda.get_device_properties(n).uuid) == uuid), None)
    if number is None:
        raise RuntimeError(f"the trainer's GPU {uuid} is not visible to this process: ipc needs one that both share")
    device = 6  # where the trainer's own number for it stands
    rebuilt: torch.Tensor = rebuild_cuda_tensor(*args[:device], number, *args[device + 1 :])  # type: ignore[call-arg]
    return rebuilt
