"""Every transport brings the same bytes, and none leaves a worker with mixed weights."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TWO_WORKERS, config, drain, until

import mprollout as mp

pytestmark = pytest.mark.timeout(120)

TRANSPORTS = ("shm", "ipc", "distributed", "disk")
NINE = {f"layer.{i}": torch.randn(16, 16) for i in range(9)}
"""Each 1 KiB, and each a bucket."""


def engine_config(transport: str, run_dir: Path, **changes: Any) -> mp.EngineConfig:
    weights = mp.WeightsConfig(transport=transport, bucket_bytes=1024)  # type: ignore[arg-type]
    return config(**{"rows": 60, "workers": TWO_WORKERS, "weights": weights, "run_dir": str(run_dir), **changes})


def versions(engine: mp.RolloutEngine) -> list[int]:
    return [worker.version for worker in engine.stats().workers]


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
        until(
            lambda: (engine.stats().workers[0].restarts, engine.stats().workers[0].state) == (1, "ready"), "it is back"
        )
        assert versions(engine) == [1, 1]
        assert engine.update_weights(NINE.items()) == 3
        assert versions(engine) == [3, 3]
        assert sorted(drain(engine)) == list(range(60))
    sent = [record.message for record in caplog.records if "9 buckets in" in record.message]
    assert len(sent) == (2 if transport in ("ipc", "distributed") else 0), "the route carried what was whole"
