"""A weight update beside a plain copy of the same bytes in the same run, by transport and size.

One simulated worker, which maps what comes and holds every byte against its checksum; SGLang's own copy into the model is not in it.
As in bench_ring.py the tests only record; report.py judges.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import bench_engine
import pytest
import torch
from bench_ring import SMOKE

import mprollout as mp

pytestmark = pytest.mark.timeout(600)
MIB = 1 << 20
SIZES = [1 * MIB] if SMOKE else [1 * MIB, 32 * MIB, 256 * MIB, 2048 * MIB]
TENSOR_BYTES = 32 * MIB
TRANSPORTS = ("shm", "disk") if SMOKE else ("shm", "disk", "ipc", "distributed")


def state(size: int) -> dict[str, torch.Tensor]:
    """So many bytes of bfloat16 in tensors of at most 32 MiB, at least eight of them."""
    each = min(TENSOR_BYTES, size // 8)
    return {f"layer.{i}": torch.randn(each // 2).bfloat16() for i in range(size // each)}


def copied(source: dict[str, torch.Tensor], into: dict[str, torch.Tensor] | None) -> float:
    """Seconds of a memcpy; None: into new memory."""
    start = time.perf_counter()
    for name, tensor in source.items():
        if into is None:
            tensor.clone()
        else:
            into[name].copy_(tensor)
    return time.perf_counter() - start


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size // MIB}MiB")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_update(benchmark: Any, transport: str, size: int, tmp_path: Path) -> None:
    """Alternately an update and the copies, after two updates that make the memory (from the third on it is used again)."""
    source = state(size)
    warm = {name: tensor.clone() for name, tensor in source.items()}
    settings = bench_engine.config(
        mp.SimulatedConfig(),
        workers=1, places=1, live=1,
        source=mp.SourceConfig(rows=[{"prompt": "x", "answer": "x"}], epochs=1),
        weights=mp.WeightsConfig(transport=transport),  # type: ignore[arg-type]
        run_dir=str(tmp_path),
    )  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # memcpy is one thread's
    rounds: list[dict[str, Any]] = []
    try:
        with mp.RolloutEngine(settings) as engine:
            engine.get(1, timeout=30).release()  # nothing is generated beside it
            first = time.perf_counter()
            engine.update_weights(source)
            first = time.perf_counter() - first
            engine.update_weights(source)

            def measure() -> None:
                for _ in range(1 if SMOKE else 3 if size > 1024 * MIB else 7):
                    foreign, start = bench_engine.others(engine), time.perf_counter()
                    engine.update_weights(source)
                    ours = {"seconds": time.perf_counter() - start}
                    theirs = {"new": copied(source, None), "warm": copied(source, warm)}
                    rounds.append({"foreign": foreign.share(), "ours": ours, "theirs": theirs})

            benchmark.pedantic(measure, rounds=1)
    finally:
        torch.set_num_threads(threads)
    benchmark.extra_info.update(test="update", transport=transport, size=size, first=first, rounds=rounds)
