"""The ring and its rivals, each in the form that its own users would call fast. All deliver the five arrays of a group.

Invariant: each message leaves arrays that belong to the producer and arrives as arrays that the consumer may read until
it takes the next; nothing is sent by reference except by `InProcess`, which says so.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import queue
import select
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from transport import FIELDS, FORK, POOL, Group, Read, Shape, Transport, layout, payload, split

from mprollout import _native
from mprollout.admission import Bells

NAMES = tuple(name for name, _ in FIELDS)


class Ring(Transport):
    """The product, used as the engine uses it: the consumer admits, takes n at a time, rings who sleeps."""

    name = "ring"
    END = b"end"  # the prompt of a ticket that ends a producer's round

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        room, live = _native.group_bytes([array.nbytes for array in payload(shape.size)]), shape.depth + shape.producers
        self.segment = _native.Segment.create(
            workers=shape.producers,
            entries=live,
            cells=1 << (live - 1).bit_length(),
            descriptors=4 * shape.depth,
            arena_bytes=(2 * shape.depth + 2) * room,
            max_group_bytes=room,
            max_prompt_bytes=64,
            schema=b"",
        )
        self.bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(shape.producers)]
        self.ringer = Bells(self.segment, self.bells)
        self.ticket = 0

    def open(self) -> None:
        self.admitter, self.consumer = _native.Admitter(self.segment), _native.Consumer(self.segment)

    # -- the producer

    def all_sender(self, worker: int) -> Callable[[Iterator[Group]], int]:
        producer = _native.Producer(_native.Segment.attach(self.segment.fd), worker)
        bell, end = select.poll(), self.END
        bell.register(self.bells[worker], select.POLLIN)

        def send(groups: Iterator[Group]) -> int:
            sent = 0
            while True:
                claim = producer.claim() or self.sleep_until_claim(producer, worker, bell)
                if claim.prompt == end:
                    producer.end(claim, _native.FILTERED, 0)
                    return sent
                producer.publish(claim, next(groups))
                sent += 1

        return send

    def sleep_until_claim(self, producer: _native.Producer, worker: int, bell: select.poll) -> _native.Claim:
        """As a worker does: say that it sleeps, look again, wait for the bell."""
        producer.set_idle(True)
        try:
            while (claim := producer.claim()) is None:
                if bell.poll(250):
                    os.eventfd_read(self.bells[worker])
            return claim
        finally:
            producer.set_idle(False)

    # -- the consumer

    def share(self, count: int) -> int:
        return count  # at most: the tickets decide who sends how many

    def consume(self, count: int, read: Read) -> int:
        dtypes, depth = [dtype for _, dtype in FIELDS], self.shape.depth
        total = admitted = taken = 0
        while taken < count:
            n = min(self.shape.step, count - taken)
            more = min(depth - (admitted - taken), count - admitted)
            self.admit(more, last=admitted + more == count and more > 0)
            admitted += more
            leases = self.take(n)
            self.consumer.deliver(leases)
            total += sum(map(read, _native.views(leases, dtypes)))
            _native.release(leases)
            taken += n
        return total

    def admit(self, count: int, last: bool) -> None:
        admit = self.admitter.admit
        self.admitter.sweep()
        prompts = [b""] * count + [self.END] * (self.shape.producers if last else 0)
        for ticket, prompt in enumerate(prompts, self.ticket):
            admit(ticket, prompt)
        self.ticket += len(prompts)
        self.ringer.ring_idle()

    def take(self, n: int) -> list[_native.Lease]:
        return self.consumer.take(n, None)

    def release(self) -> None:
        if hasattr(self, "consumer"):
            self.consumer.close()
        self.segment.close()
        for bell in self.bells:
            os.close(bell)


class RingSpin(Ring):
    """The ring with a consumer that never sleeps."""

    name = "ring-spin"

    def take(self, n: int) -> list[_native.Lease]:
        return self.consumer.take(n, None, spin=True)


class Queue(Transport):
    """multiprocessing.Queue of a dict of arrays."""

    name = "multiprocessing.Queue"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.queue: Any = self.make()

    def make(self) -> Any:
        return FORK.Queue()

    def sender(self, worker: int) -> Callable[[Group], None]:
        return lambda group: self.queue.put(self.encode(group))

    def encode(self, group: Group) -> Any:
        return dict(zip(NAMES, group, strict=True))

    def consume(self, count: int, read: Read) -> int:
        get = self.queue.get
        return sum(read(get().values()) for _ in range(count))

    def release(self) -> None:
        self.queue.close()


class TorchQueue(Queue):
    """torch.multiprocessing.Queue of a dict of tensors: each travels as a shared-memory file descriptor."""

    name = "torch.multiprocessing.Queue"
    module = "torch"

    def make(self) -> Any:
        import torch.multiprocessing

        return torch.multiprocessing.get_context("fork").Queue()

    def encode(self, group: Group) -> Any:
        import torch

        return {name: torch.from_numpy(array) for name, array in zip(NAMES, group, strict=True)}

    def consume(self, count: int, read: Read) -> int:
        get = self.queue.get
        return sum(read([tensor.numpy() for tensor in get().values()]) for _ in range(count))


class FasterFifo(Queue):
    """faster-fifo with get_many, a dict of arrays by pickle."""

    name = "faster-fifo"
    module = "faster_fifo"

    def make(self) -> Any:
        import faster_fifo

        return faster_fifo.Queue(max_size_bytes=(self.shape.depth + 2) * (self.shape.size + 4096))

    def consume(self, count: int, read: Read) -> int:
        total = 0
        while count:
            groups = self.queue.get_many(timeout=60)
            total += sum(read(group.values()) for group in groups)
            count -= len(groups)
        return total


class Pipe(Transport):
    """multiprocessing.Pipe: one message of joined bytes, arrays made over what arrived. One producer."""

    name = "Pipe"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.reader, self.writer = FORK.Pipe(duplex=False)

    def sender(self, worker: int) -> Callable[[Group], None]:
        return lambda group: self.writer.send_bytes(b"".join(group))

    def consume(self, count: int, read: Read) -> int:
        receive, where = self.reader.recv_bytes, layout(self.shape.size)
        return sum(read(split(receive(), where)) for _ in range(count))

    def release(self) -> None:
        self.reader.close()
        self.writer.close()


class Zmq(Transport):
    """pyzmq PUSH/PULL over ipc: joined bytes in one frame or, where copies cost more than frames, a frame an array."""

    name = "pyzmq ipc"
    module = "zmq"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.folder = tempfile.TemporaryDirectory(prefix="mpb-")
        self.address = f"ipc://{self.folder.name}/s"
        self.frames = shape.size > 128 << 10  # measured

    def open(self) -> None:
        import zmq

        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, self.shape.depth)
        self.socket.bind(self.address)

    def sender(self, worker: int) -> Callable[[Group], None]:
        import zmq

        socket = zmq.Context().socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, self.shape.depth)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.connect(self.address)

        if self.frames:
            return lambda group: socket.send_multipart(group, copy=False)
        return lambda group: socket.send(b"".join(group), copy=False)

    def consume(self, count: int, read: Read) -> int:
        if self.frames:
            receive, dtypes = self.socket.recv_multipart, [dtype for _, dtype in FIELDS]
            return sum(read(list(map(np.frombuffer, receive(copy=False), dtypes))) for _ in range(count))
        receive, where = self.socket.recv, layout(self.shape.size)
        return sum(read(split(receive(copy=False), where)) for _ in range(count))

    def release(self) -> None:
        if hasattr(self, "socket"):
            self.socket.close(0)
            self.context.term()
        self.folder.cleanup()


class Iceoryx2(Transport):
    """iceoryx2 publish-subscribe of byte slices: fields copied into a loaned sample, arrays over it; it spins."""

    name = "iceoryx2"
    module = "iceoryx2"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.folder = tempfile.TemporaryDirectory(prefix="mpb-")
        self.prefix = f"mpb{uuid.uuid4().hex[:8]}_"

    def port(self) -> Any:
        import ctypes

        import iceoryx2 as iox

        iox.set_log_level(iox.LogLevel.Error)
        config = iox.config.default()
        config.global_cfg.root_path = iox.Path.new(self.folder.name)
        config.global_cfg.prefix = iox.FileName.new(self.prefix)
        quiet = iox.SignalHandlingMode.Disabled
        node = iox.NodeBuilder.new().config(config).signal_handling_mode(quiet).create(iox.ServiceType.Ipc)
        service = (
            node.service_builder(iox.ServiceName.new("groups"))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .payload_alignment(iox.Alignment.new(64))
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(self.shape.depth)
            .max_publishers(self.shape.producers)
            .open_or_create()
        )
        return node, service

    def open(self) -> None:
        self.node, self.factory = self.port()
        self.subscriber = self.factory.subscriber_builder().buffer_size(self.shape.depth).create()

    def sender(self, worker: int) -> Callable[[Group], None]:
        import iceoryx2 as iox

        _node, factory = self.port()
        publisher = (
            factory.publisher_builder()
            .initial_max_slice_len(self.shape.size)
            .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        where, size = layout(self.shape.size), sum(array.nbytes for array in payload(self.shape.size))

        def send(group: Group) -> None:
            sample = publisher.loan_slice_uninit(size)
            for to, array in zip(split(sample.payload().as_memory_view(), where), group, strict=True):
                to[:] = array
            sample.assume_init().send()

        return send

    def consume(self, count: int, read: Read) -> int:
        receive, where, total = self.subscriber.receive, layout(self.shape.size), 0
        while count:
            if (sample := receive()) is None:
                time.sleep(0)
                continue
            total += read(split(sample.payload().as_memory_view(), where))
            sample.delete()
            count -= 1
        return total

    def release(self) -> None:
        for name in ("subscriber", "factory", "node"):
            self.__dict__.pop(name, None)
        self.folder.cleanup()
        for left in Path("/dev/shm").glob(f"{self.prefix}*"):  # its global_mgmt outlives the last node
            left.unlink()


class SharedMemory(Transport):
    """A multiprocessing.shared_memory segment a group, its name by a queue; at most `depth` of them stand."""

    name = "shared_memory a message"

    def __init__(self, shape: Shape) -> None:
        from multiprocessing import resource_tracker

        super().__init__(shape)
        resource_tracker.ensure_running()  # one for both sides, else each blames the other for leaks
        self.names, self.room = FORK.SimpleQueue(), FORK.Semaphore(shape.depth)

    def sender(self, worker: int) -> Callable[[Group], None]:
        from multiprocessing.shared_memory import SharedMemory as Segment

        size = sum(array.nbytes for array in payload(self.shape.size))
        where = layout(self.shape.size)

        def send(group: Group) -> None:
            self.room.acquire()
            segment = Segment(create=True, size=size)
            for to, array in zip(split(segment.buf, where), group, strict=True):
                to[:] = array
            del to
            segment.close()
            self.names.put(segment.name)

        return send

    def consume(self, count: int, read: Read) -> int:
        from multiprocessing.shared_memory import SharedMemory as Segment

        where, total = layout(self.shape.size), 0
        for _ in range(count):
            segment = Segment(self.names.get())
            total += read(split(segment.buf, where))
            segment.close()
            segment.unlink()
            self.room.release()
        return total

    def release(self) -> None:
        self.names.close()


class InProcess(Transport):
    """queue.Queue between two threads of this process, passing references: no copy, one GIL. A floor."""

    name = "queue.Queue in-process"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.queue: queue.Queue[Group] = queue.Queue(maxsize=shape.depth)

    def start(self) -> None:
        ours, theirs = FORK.Pipe()
        self.controls.append(ours)
        self.thread = threading.Thread(target=self._thread, args=(theirs,), daemon=True)
        self.thread.start()

    def _thread(self, control: Any) -> None:
        os.sched_setaffinity(0, self.shape.producer_cpus(0))  # this thread alone
        self.produce(0, control)

    def sender(self, worker: int) -> Callable[[Group], None]:
        return self.queue.put

    def consume(self, count: int, read: Read) -> int:
        get = self.queue.get
        return sum(read(get()) for _ in range(count))

    def release(self) -> None:
        self.thread.join(5)


class Ray(Transport):
    """Ray: an actor puts dicts of arrays into the object store, the consumer gets them, two batches ahead."""

    name = "Ray put/get"
    module = "ray"

    def start(self) -> None:
        import ray

        os.environ["RAY_AUTH_MODE"] = "disabled"
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        self.folder = tempfile.TemporaryDirectory(prefix="mpb-")  # its sessions stay where they were
        ray.init(num_cpus=2, object_store_memory=512 << 20, _temp_dir=self.folder.name, **quiet)

        class Maker:
            def __init__(self, group: list[np.ndarray]) -> None:
                self.rest = group[1:]

            def make(self, first: int, count: int) -> list[Any]:
                metas = [np.array([i % POOL, 0, 0, 0], "<i8") for i in range(first, first + count)]
                return [ray.put(dict(zip(NAMES, [meta, *self.rest], strict=True))) for meta in metas]

        self.actor = ray.remote(Maker).remote(payload(self.shape.size))
        ray.get(ray.get(self.actor.make.remote(0, 1)))
        self._pids = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before]

    @property
    def pids(self) -> list[int]:
        return [pid for pid in self._pids if psutil.pid_exists(pid)]

    def sent(self, count: int) -> list[int]:
        return [count]

    def consume(self, count: int, read: Read) -> int:
        import ray

        step, total = self.shape.step, 0
        steps = iter([(first, min(step, count - first)) for first in range(0, count, step)])
        ahead = [self.actor.make.remote(*order) for order in itertools.islice(steps, 2)]
        while ahead:
            refs = ray.get(ahead.pop(0))
            ahead += [self.actor.make.remote(*order) for order in itertools.islice(steps, 1)]
            total += sum(read(ray.get(ref).values()) for ref in refs)
        return total

    def release(self) -> None:
        import ray

        ray.shutdown()
        self.folder.cleanup()


RIVALS: tuple[type[Transport], ...] = (
    Queue,
    TorchQueue,
    Pipe,
    FasterFifo,
    Zmq,
    Iceoryx2,
    SharedMemory,
    InProcess,
    Ray,
)


def missing(kind: type[Transport]) -> str | None:
    """Why it cannot run here."""
    if kind.module and importlib.util.find_spec(kind.module) is None:
        return f"{kind.name}: the package {kind.module} is not installed (requirements/bench.txt)"
    return None
