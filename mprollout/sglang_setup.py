"""What importing and starting SGLang would do to a process, a machine without a GPU, or /dev/shm, and must not; what it asks of a model's folder and of devices."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mprollout.errors import ConfigError
from mprollout.orphans import patch_spawn


def run_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process, without what it would leave in /dev/shm after a kill: a semaphore, its ranks' queue, and its load file, which
    nothing here reads.
    """
    patch_spawn()
    _no_named_semaphore()
    from sglang.srt.managers import scheduler

    if server_args.tp_size > 1:
        _nameless_queues()
    if server_args.enable_lora:
        _pin_only_with_an_accelerator()
    scheduler.create_load_snapshot_writer = lambda *_args, **_kwargs: None
    return scheduler.run_scheduler_process(server_args, *args, **kwargs)


def _nameless_queues() -> None:
    """The queue between tensor-parallel ranks is a file in /dev/shm, left there by a kill: take its name away as soon as all ranks have opened it."""
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue

    create = MessageQueue.create_from_process_group

    def create_nameless(*args: Any, **kwargs: Any) -> Any:
        queue = create(*args, **kwargs)  # which waits for all of them
        if queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False
        return queue

    MessageQueue.create_from_process_group = staticmethod(create_nameless)


def _pin_only_with_an_accelerator() -> None:
    """SGLang's LoRA layers pin what they copy to a GPU, without asking whether there is one; torch refuses to pin on a CPU alone."""
    import torch

    if torch.accelerator.is_available():
        return
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    for name in ("tensor", "empty", "zeros"):
        make = getattr(torch, name)

        def unpinned(*args: Any, _make: Any = make, pin_memory: bool = False, **kwargs: Any) -> Any:
            return _make(*args, **kwargs)

        setattr(torch, name, unpinned)


def import_sglang() -> tuple[Any, Any]:
    """An `Engine` class whose scheduler is `run_scheduler`, and the module with SGLang's request classes."""
    _no_named_semaphore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = importlib.import_module("sglang.srt.entrypoints.engine").Engine
        io = importlib.import_module("sglang.srt.managers.io_struct")
    return type("Engine", (engine,), {"run_scheduler_process_func": staticmethod(run_scheduler)}), io


def _no_named_semaphore() -> None:
    """Give tqdm a lock, because the one it makes itself is a named semaphore, left in /dev/shm after a kill."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    tqdm.set_lock(threading.RLock())


def bind_ranks(ranks: int) -> None:
    """Say which CPUs each tensor-parallel rank has: SGLang asks for that where there are more ranks than NUMA nodes."""
    cpus = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        own = [",".join(map(str, cpus[rank::ranks] or cpus)) for rank in range(ranks)]
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(own))


def install_standins() -> None:
    """Put `_standins` on the path for what SGLang imports and a CPU-only machine lacks; spawned processes inherit the path."""
    folder = str(Path(__file__).parent / "_standins")
    if folder in sys.path:
        return
    try:
        importlib.import_module("torchvision")
    except Exception:  # a CUDA build beside a CPU torch fails in many ways
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.path.insert(0, folder)
    else:
        sys.path.append(folder)  # for vllm, where it is not installed


@contextlib.contextmanager
def our_logging_and_policy() -> Iterator[None]:
    """Undo what importing and starting SGLang does to this process's logging and event-loop policy."""
    root = logging.getLogger()
    handlers, level, policy = root.handlers[:], root.level, asyncio.get_event_loop_policy()
    root.handlers = []  # logging.basicConfig(force=True) would close them
    launcher = logging.getLogger("sglang.srt.entrypoints.engine")
    launcher.setLevel(logging.CRITICAL)  # it calls our SIGQUIT handler an error
    try:
        yield
    finally:
        launcher.setLevel(logging.NOTSET)
        root.handlers, root.level = handlers, level
        logging.getLogger("sglang").setLevel(logging.ERROR)
        asyncio.set_event_loop_policy(policy)


def ignore(signum: int, frame: Any) -> None:
    """The start's exception, or later `check`, says what happened."""


def check_folder(model: str) -> None:
    """Raise ValueError unless `model` is a folder with a checkpoint, or a name."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"SGLangConfig.model: {model} is no Hugging Face checkpoint: it has no config.json")
        if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
            raise ValueError(
                f"SGLangConfig.model: {model} is no Hugging Face checkpoint: it has no .safetensors or .bin file"
            )
    elif path.is_absolute() or model.startswith((".", "~")) or path.exists():
        raise ValueError(f"SGLangConfig.model: {model} is no folder")


def checkpoint_folder(model: str) -> Path | None:
    """Where the checkpoint lies; None when only SGLang knows."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    with contextlib.suppress(Exception):  # loaded from elsewhere: coverage is then checked against the first update
        return Path(snapshot_download(model, local_files_only=True))
    return None


def worker_devices(workers: int) -> list[int | str | list[int]]:
    """GPU numbers while there are enough of them, else `"cpu"` for all."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return ["cpu"] * workers
    if workers > gpus:
        raise ConfigError(f"--workers {workers}, but this machine has {gpus} GPUs: one worker a GPU")
    return list(range(workers))
