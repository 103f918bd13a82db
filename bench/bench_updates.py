"""What a weight update costs the generation beside it, by pause mode: real SGLang, the tiny model, two workers.

As in bench_ring.py the test only records; report.py prints. Under BENCH_SMOKE the generator is simulated, to show that all of it runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from bench_engine import at_once
from bench_ring import SMOKE, Foreign

import mprollout as mp

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from tiny_model import make_tiny_model, tiny_qwen2

pytestmark = pytest.mark.timeout(600)
MODES: dict[str, dict[str, Any]] = {
    "retract": {"pause": "retract"},
    "in_place": {"pause": "in_place"},
    "abort": {"pause": "abort"},
    "retract, rolling": {"pause": "retract", "rolling": True},
    "in_place, rolling": {"pause": "in_place", "rolling": True},
}
ROUNDS, GROUPS, UPDATES, TOKENS, PLACES = (1, 4, 2, 8, 4) if SMOKE else (5, 32, 4, 128, 16)


def config(folder: Path) -> mp.EngineConfig:
    generator: Any = mp.SGLangConfig(model=str(folder), device="cpu", dtype="float32")
    return mp.EngineConfig(
        source=mp.SourceConfig(rows=[{"prompt": f"Q: what is {i} + {i + 1}?", "answer": ""} for i in range(64)]),
        generator=mp.SimulatedConfig(tokens_per_s=200) if SMOKE else generator,
        sampling=mp.SamplingConfig(group_size=4, max_new_tokens=TOKENS, ignore_eos=True),
        reward=mp.RewardConfig(at_once),
        workers=mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=PLACES),
        gate=mp.GateConfig(
            max_live_groups=2 * PLACES // 4 + 4
        ),  # few finished ones in stock: a window is time to generate
    )


def window(engine: mp.RolloutEngine, weights: list[Any], updates: int) -> dict[str, float]:
    """Take so many groups, with so many updates evenly between them: what it took, what was sampled again.

    Recomputed are the tokens before each change of version within a sample (`retract` runs them through the new weights again);
    discarded those that an aborted request had made.
    """
    before, start, recomputed = engine.stats().tokens_discarded, time.perf_counter(), 0
    retracts = engine._updates.settings.pause == "retract"
    pushing = 0.0
    for taken in range(GROUPS):
        if updates and taken % (GROUPS // updates) == 0:
            pushed = time.perf_counter()
            engine.update_weights(weights[taken % len(weights)])
            pushing += time.perf_counter() - pushed
        with engine.get(1, timeout=120) as batch:
            for group in batch:
                prompt = len(group.prompt_ids)
                if retracts:
                    recomputed += sum(prompt + span.start for sample in group.samples for span in sample.versions[1:])
    return {
        "seconds": time.perf_counter() - start,
        "pushing_s": pushing,
        "recomputed": recomputed,
        "discarded": engine.stats().tokens_discarded - before,
    }


def test_update_cost(benchmark: Any, tmp_path: Path) -> None:
    """Windows of equal work, without updates and with 4 in each mode, in turn: the time that the updates took is tokens not generated."""
    weights: list[Any] = [{"w": torch.zeros(4)}] * 2 if SMOKE else [tiny_qwen2(seed).state_dict() for seed in range(2)]
    rows: dict[str, list[dict[str, float]]] = {}
    with mp.RolloutEngine(config(tmp_path if SMOKE else make_tiny_model(tmp_path))) as engine:

        def run(mode: str, updates: int, **changes: Any) -> None:
            engine._updates.settings = msgspec.structs.replace(engine.config.weights, **changes)
            pids = [worker.pid for worker in engine.stats().workers]
            foreign = Foreign([*pids, *(child.pid for pid in pids for child in psutil.Process(pid).children(True))])
            row = window(engine, weights, updates) | {"foreign": foreign.share()}
            rows.setdefault(mode, []).append(row)

        def measure() -> None:
            for _ in range(ROUNDS):
                run("none", 0)
                for mode, changes in MODES.items():
                    run(mode, UPDATES, **changes)

        run("warm", UPDATES)
        benchmark.pedantic(measure, rounds=1)
    tokens, plain = GROUPS * 4 * TOKENS, rows.pop("none")
    tokens_per_s = tokens / statistics.median(row["seconds"] for row in plain)

    def each(mode: str, key: str) -> float:
        return statistics.median(row[key] for row in rows[mode]) / UPDATES

    modes = {
        mode: {
            "lost": tokens_per_s / UPDATES
            * statistics.median(row["seconds"] - base["seconds"] for row, base in zip(rows[mode], plain, strict=True)),
            **{key: each(mode, key) for key in ("pushing_s", "recomputed", "discarded")},
        }
        for mode in MODES
    }  # fmt: skip
    benchmark.extra_info.update(
        test="update_cost", tokens_per_s=tokens_per_s, running=2 * PLACES, modes=modes, windows=rows
    )
