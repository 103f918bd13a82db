"""mprollout: the rollout engine for reinforcement-learning post-training of language models on one node.

    import mprollout as mp
    with mp.RolloutEngine(config) as engine:
        with engine.get(8) as batch: ...

Names load on first use, so that `import mprollout` costs nothing and pulls in neither torch nor sglang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_inside: str = ""  # what this process is, when it is one of mprollout's own: an engine made in it lacks its guard

_HOMES = {
    "batch": ("Batch", "Group", "LeaseWarning", "Packed", "Padded", "Sample"),
    "config": (
        "EngineConfig",
        "FaultConfig",
        "FilterConfig",
        "GateConfig",
        "RewardConfig",
        "RingConfig",
        "SamplingConfig",
        "SGLangConfig",
        "SimulatedConfig",
        "SourceConfig",
        "WeightsConfig",
        "WorkerConfig",
    ),
    "engine": ("RolloutEngine",),
    "errors": (
        "BatchReleased",
        "BiasedLogprobs",
        "ConcurrentGet",
        "ConfigError",
        "DataExhausted",
        "DeadlineExceeded",
        "EngineAsleep",
        "EngineClosed",
        "EngineFault",
        "GateStarved",
        "GetTimeout",
        "GroupTooLarge",
        "KeeperLost",
        "MainGuardMissing",
        "MemoryBudgetError",
        "MprolloutError",
        "PromptsFailing",
        "RewardError",
        "RewardFault",
        "RingStarved",
        "SampleAborted",
        "SampleFailed",
        "SourceError",
        "WeightUpdateFailed",
        "WorkersLost",
        "WorkerStartError",
    ),
    "evaluation": ("EvaluationResult",),
    "generator": ("VersionSpan",),
    "record": ("ReplaySource",),
    "reward": ("RewardInput",),
    "rollout": ("Session",),
    "schema": ("Field",),
    "source": ("Prompt", "PromptSource"),
    "stats": ("EngineStats", "WorkerStats"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)  # noqa: PLE0605

if TYPE_CHECKING:
    from mprollout.batch import Batch, Group, LeaseWarning, Packed, Padded, Sample
    from mprollout.config import (
        EngineConfig,
        FaultConfig,
        FilterConfig,
        GateConfig,
        RewardConfig,
        RingConfig,
        SamplingConfig,
        SGLangConfig,
        SimulatedConfig,
        SourceConfig,
        WeightsConfig,
        WorkerConfig,
    )
    from mprollout.engine import RolloutEngine
    from mprollout.errors import (
        BatchReleased,
        BiasedLogprobs,
        ConcurrentGet,
        ConfigError,
        DataExhausted,
        DeadlineExceeded,
        EngineClosed,
        EngineFault,
        GateStarved,
        GetTimeout,
        GroupTooLarge,
        KeeperLost,
        MainGuardMissing,
        MemoryBudgetError,
        MprolloutError,
        PromptsFailing,
        RewardError,
        RewardFault,
        RingStarved,
        SampleAborted,
        SampleFailed,
        SourceError,
        WeightUpdateFailed,
        WorkersLost,
        WorkerStartError,
    )
    from mprollout.evaluation import EvaluationResult
    from mprollout.generator import VersionSpan
    from mprollout.record import ReplaySource
    from mprollout.reward import RewardInput
    from mprollout.rollout import Session
    from mprollout.schema import Field
    from mprollout.source import Prompt, PromptSource
    from mprollout.stats import EngineStats, WorkerStats


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mprollout' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"mprollout.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
