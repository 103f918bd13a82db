"""Every transport brings the same bytes, and none leaves a worker with mixed weights."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines import TWO_WORKERS, config, drain, until

import mprollout as mp
from mprollout.loading import Order, orders
from mprollout.route import Route, SharedBuffer
from mprollout.staging import stage
from mprollout.transports import Group
from mprollout.weights import Bucket, StagedWeights

pytestmark = pytest.mark.timeout(120)

TRANSPORTS = ("shm", "ipc", "distributed", "disk")
NINE = {f"layer.{i}": torch.randn(16, 16) for i in range(9)}
"""Each 1 KiB, and each a bucket."""


def engine_config(transport: str, run_dir: Path, **changes: Any) -> mp.EngineConfig:
    weights = mp.WeightsConfig(transport=transport, bucket_bytes=1024)  # type: ignore[arg-type]
    return config(**{"rows": 60, "workers": TWO_WORKERS, "weights": weights, "run_dir": str(run_dir), **changes})


def versions(engine: mp.RolloutEngine) -> list[int]:
    return [worker.version for worker in engine.stats().workers]


def is_back(engine: mp.RolloutEngine, worker: int) -> bool:
    """The keeper has let its second incarnation claim; it began with version 0."""
    attendant = engine._attendant
    assert attendant is not None
    return (attendant.states[worker].restarts, attendant.states[worker].state) == (1, "ready")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_that_raises_at_the_third_bucket_of_nine_leaves_every_worker_as_it_was(
    transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C46; then C45: the next attempt's number is new, a worker that starts again has the last good weights, and the update after that reaches both."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(NINE.items()):
            if i == 2:
                raise ConnectionError("the trainer's shard 3 is gone")
            yield pair

    caplog.set_level(logging.INFO, "mprollout")
    with mp.RolloutEngine(engine_config(transport, tmp_path)) as engine:
        assert engine.update_weights(NINE) == 1
        with pytest.raises(ConnectionError, match="shard 3"):
            engine.update_weights(stream())
        assert engine.policy_version == 1 and versions(engine) == [1, 1]
        with pytest.raises(mp.WeightUpdateFailed, match=r"layer\.8 is missing"):
            engine.update_weights(dict(list(NINE.items())[:8]))
        assert engine.policy_version == 1 and versions(engine) == [1, 1]
        os.kill(engine.stats().workers[0].pid, signal.SIGKILL)
        until(lambda: is_back(engine, 0), "it is back")
        assert versions(engine) == [1, 1]
        assert engine.update_weights(NINE.items()) == 3
        assert versions(engine) == [3, 3]
        assert sorted(drain(engine)) == list(range(60))
    sent = [record.message for record in caplog.records if "9 buckets in" in record.message]
    assert len(sent) == (2 if transport in ("ipc", "distributed") else 0), "the route carried what was whole"


@pytest.mark.parametrize("transport", ["ipc", "distributed"])
def test_a_worker_that_dies_between_two_buckets_takes_no_other_with_it_and_no_wrong_bytes_are_loaded(
    transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update 1: one worker dies; the other takes the staged copy, the dead one when it is back. 2: a bit flips; both take the copy. 3: all is well."""
    caplog.set_level(logging.INFO, "mprollout")
    fill: Any = Group._fill

    def at_the_third(do: Callable[[torch.Tensor], torch.Tensor]) -> None:
        filled: list[Bucket] = []

        def filling(group: Group, staged: StagedWeights, bucket: Bucket) -> torch.Tensor:
            filled.append(bucket)
            flat: torch.Tensor = fill(group, staged, bucket)
            return do(flat) if len(filled) == 3 else flat

        monkeypatch.setattr(Group, "_fill", filling)

    def said(text: str) -> bool:
        return any(text in record.message for record in caplog.records)

    def kill(flat: torch.Tensor) -> torch.Tensor:
        os.kill(engine.stats().workers[1].pid, signal.SIGKILL)
        return flat

    def flip(flat: torch.Tensor) -> torch.Tensor:
        return torch.cat([flat[:-1], flat[-1:] ^ 1])

    with mp.RolloutEngine(engine_config(transport, tmp_path)) as engine:
        at_the_third(kill)
        assert engine.update_weights(NINE) == 1 and said("update 1: its route broke")
        assert versions(engine)[0] == 1 and engine.stats().workers[0].restarts == 0
        until(lambda: is_back(engine, 1), "it is back")
        assert versions(engine) == [1, 1]
        at_the_third(flip)
        assert engine.update_weights(NINE) == 2 and said("update 2: its route broke")
        at_the_third(lambda flat: flat)
        assert engine.update_weights(NINE) == 3 and said("update 3: 9 buckets")
        assert versions(engine) == [3, 3] and [worker.restarts for worker in engine.stats().workers] == [0, 1]
    assert "'layer.2': checksum" in (tmp_path / "logs" / "worker-0.log").read_text()


def test_the_keeper_leaves_a_route_out_for_processes_that_were_not_counted_in() -> None:
    route = Route(
        group="g", port=1, world_size=4, backend="gloo", timeout_s=1, bucket_bytes=1, first_ranks={0: (0, 1), 2: (3, 2)}
    )
    assert [(found.rank if (found := route.to(*worker)) else None) for worker in ((0, 0), (0, 1), (1, 0), (2, 3))] == [
        1, None, None, 2
    ]  # fmt: skip


def test_each_tensor_parallel_rank_gets_a_payload_of_its_own() -> None:
    route = Route(
        group="g",
        port=1,
        world_size=4,
        backend="gloo",
        timeout_s=1,
        bucket_bytes=1,
        first_ranks={1: (0, 2)},
        rank=2,
        buffers=[b"a", b"b", b"c"],
    )
    with stage(NINE) as staged:
        made = [msgspec.json.decode(text, type=Order) for text in orders(staged, route, ranks=2)]
        assert [order.rank for order in made] == [2, 3]
        assert [order.route.buffers[order.rank - 1] for order in made if order.route] == [b"b", b"c"]
        assert {order.path for order in made} == {f"/proc/{os.getpid()}/fd/{staged.fd}"}


def test_gpus_become_ranks_in_the_order_of_the_devices() -> None:
    workers = mp.WorkerConfig(devices=[[0, 1], [2, 3], 4, "cpu"])
    settings = config(workers=workers)
    assert [settings.gpus(worker) for worker in range(4)] == [[0, 1], [2, 3], [4], [None]]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"generator": {"backend": "sglang", "model": "m", "engine_args": {"dp_size": 2}}}, "dp_size=2 is refused"),
        ({"weights": {"transport": "disk"}}, "needs EngineConfig.run_dir"),
        (
            {
                "generator": {"backend": "sglang", "model": "m", "engine_args": {"tp_size": 4}},
                "workers": {"devices": [[0, 1]]},
            },
            r"tp_size=4 is not the 2 GPUs of WorkerConfig.devices\[0\]",
        ),
        (
            {"generator": {"backend": "sglang", "model": "m", "adapter": {"r": 4}}},
            "SGLangConfig.adapter must be with `r` and `lora_alpha`, numbers, and `target_modules`",
        ),
        (
            {
                "generator": {
                    "backend": "sglang",
                    "model": "m",
                    "adapter": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
                },
                "weights": {"transport": "ipc"},
            },
            "for SGLangConfig.adapter use shm or disk",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(mp.ConfigError, match=complaint):
        config(**changes)


MAPS = """
import pickle, sys, torch
rebuild, args = pickle.loads(bytes.fromhex(sys.stdin.readline()))
flat = rebuild(*args)
for _ in sys.stdin:
    print(int(flat.to(torch.int64).sum()), flush=True)
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_bucket_is_the_same_memory_in_two_processes(device: str) -> None:
    """What `ipc` sends by: on a GPU a CUDA IPC handle (not yet run on one), on a CPU a memory file."""
    buffer = SharedBuffer(1 << 20, torch.device(device))
    with subprocess.Popen([sys.executable, "-P", "-c", MAPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        engine.stdin.write(buffer.name().hex().encode() + b"\n")
        for value in (1, 7):
            buffer.flat.fill_(value)
            if device == "cuda":
                torch.cuda.synchronize()
            engine.stdin.write(b"\n")
            engine.stdin.flush()
            assert int(engine.stdout.readline()) == value << 20
        engine.stdin.close()
    assert engine.returncode == 0
    buffer.close()
