"""`mprollout generate`: the engine without a trainer. Scored samples in a Parquet file: best-of-n, rejection sampling, data sets.

    --prompts --PromptSource--> RolloutEngine (workers, reward) --get(1)--> group --tokenizer--> texts --SampleFile--> OUT.parquet --summary-->
                                      ^------------------ load_state_dict <-- the last part -------'

A broken run goes on where its last part was cut: `SampleFile` has the argument, the engine's own state is the cursor. What differs from training:
the model on disk is the policy, so no weights are awaited; one epoch in publish order; logprobs may be biased (top-p, greedy).
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
import tyro

from mprollout.config import (
    EngineConfig,
    RewardConfig,
    SamplingConfig,
    SGLangConfig,
    SimulatedConfig,
    SourceConfig,
    WorkerConfig,
)
from mprollout.errors import ConfigError, DataExhausted, GetTimeout
from mprollout.ledger import Ledger
from mprollout.sample_file import SampleFile
from mprollout.sglang_setup import worker_devices
from mprollout.source import GYM, PromptSource
from mprollout.summary import show, sum_up

if TYPE_CHECKING:
    from rich.console import Console

    from mprollout.engine import RolloutEngine
    from mprollout.generator import Tokenizer

UNSCORED = "mprollout.reward:unscored"
PRESETS: dict[str, tuple[str, str]] = {
    "plain": ("prompt", "answer"),
    "gsm8k": ("question", "answer"),
    "dapo": ("prompt", "reward_model.ground_truth"),
}
"""Prompt field and answer field of the rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Sample and score completions of prompts, without a trainer, into a Parquet file: best-of-n, rejection sampling, data sets.

    Example: `mprollout generate --model Qwen/Qwen2.5-0.5B-Instruct --prompts gsm8k.jsonl --preset gsm8k --reward math --group-size 8 --out samples.parquet`.
    Without a file: `mprollout generate --model smollm2 --prompts reasoning_gym:chain_sum --limit 200 --max-new-tokens 64 --out samples.parquet`.

    The file has a row a sample: row (number of the prompt), sample (number in its group), prompt, answer, text, reward, finish_reason,
    prompt_ids, token_ids, logprobs; prompts in the order in which they were finished. Until it is whole its parts stand in OUT.parquet.parts, and
    a run that was broken, by kill -9 too, goes on when the same command is given again: no prompt is lost or sampled into it twice.

    Exit codes: 0 every prompt has its samples; 1 some have none (failed, or over-long: the summary counts them by reason); 2 a wrong setting or an
    engine error, said in one line; 130 Ctrl-C (what was made is kept).
    """

    prompts: str
    """A .jsonl or .parquet file, or `reasoning_gym:NAME`. A prompt is a string, a list of messages (both go through the chat template, where the model has one), or a list of token ids."""
    out: Path
    """The file to be. A finished one is only summed up again."""
    model: str = ""
    """A Hugging Face checkpoint's folder, a name that SGLang resolves, or `smollm2` (as in `mprollout demo`)."""
    preset: Literal["plain", "gsm8k", "dapo"] = "plain"
    """Where the rows have prompt and answer. plain: `prompt`, `answer`. gsm8k: `question`, `answer` (behind its `####`). dapo: `prompt`, a list of messages, and `reward_model.ground_truth`."""
    prompt_field: str | None = None
    """Instead of the preset's."""
    answer_field: str | None = None
    """Instead of the preset's; `a.b` is field b inside of field a."""
    system_prompt: str | None = None
    """Put before prompts that bring none; needs a chat template."""
    reward: str | None = None
    """`math`, `exact`, `row` (the row's own scorer), `none`, or MODULE:FUNCTION, of this folder or installed. Default: `row` for reasoning_gym, else `none`."""
    reward_timeout_s: float = 30.0
    """Deadline of one call of the reward function, in seconds."""
    group_size: int = 8
    """Samples of a prompt."""
    max_new_tokens: int = 256
    """Longest completion."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """Below 1, and when greedy, the logprobs are not those of the distribution sampled from."""
    stop: Annotated[list[str], tyro.conf.UseAppendAction] = dataclasses.field(default_factory=list)
    """A string that ends a completion; may be given several times."""
    workers: int = 1
    """Worker processes: one GPU each, or all on the CPU."""
    max_running_samples: int | None = None
    """Samples that generate at once on a worker. Default: 256, on a CPU 64."""
    limit: int | None = None
    """Only so many prompts, the first ones (reasoning_gym: as many are made; default 500)."""
    seed: int = 0
    """Of the sampling and of reasoning_gym's rows."""
    pass_reward: float = 1.0
    """A sample counts as right in pass@k from this reward on."""
    flush_s: float = 30.0
    """A part is written at least so often, in seconds. A kill loses what was finished since the last one, and what was under way."""
    backend: Literal["sglang", "simulated"] = "sglang"
    """`simulated` makes random tokens without a model: a rehearsal of everything else."""
    json: bool = False
    """The summary as one JSON object on stdout; all else goes to stderr."""

    @property
    def reward_name(self) -> str:
        """The one asked for, or the default."""
        return self.reward or ("row" if self.prompts.startswith(GYM) else "none")

    @property
    def scored(self) -> bool:
        """The rewards say something."""
        return self.reward_name != "none"


def check(args: GenerateArgs) -> None:
    """Refuse what no other check sees.

    Raises:
        ConfigError: names the option and its value.
    """
    if not args.model and args.backend == "sglang":
        raise ConfigError("--model is missing: a checkpoint's folder, a model's name, or smollm2")
    for name in ("workers", "max_running_samples"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= 1; got {value}")
    if not args.flush_s > 0:
        raise ConfigError(f"--flush-s must be > 0; got {args.flush_s:g}")
    if args.out.suffix != ".parquet":
        raise ConfigError(f"--out must end in .parquet; got {args.out}")


def config_of(args: GenerateArgs, devices: list[int | str | list[int]]) -> EngineConfig:
    """The engine's configuration.

    Raises:
        ConfigError: a setting breaks its rule.
    """
    prompt_field, answer_field = PRESETS[args.preset]
    rows: dict[str, Any] = {"path": args.prompts, "limit": args.limit}
    if args.prompts.startswith(GYM):
        size = {"size": args.limit} if args.limit is not None else {}
        rows = {"reasoning_gym": args.prompts.removeprefix(GYM), "reasoning_gym_args": {"seed": args.seed, **size}}
    generator: SGLangConfig | SimulatedConfig = SGLangConfig(
        model=args.model, dtype="float32" if "cpu" in devices else "auto"
    )
    if args.backend == "simulated":
        generator = SimulatedConfig(
            seed=args.seed, mean_tokens=args.max_new_tokens / 2, vocab_size=256, tokens_per_s=200
        )
    return EngineConfig(
        source=SourceConfig(
            prompt_field=args.prompt_field or prompt_field,
            answer_field=args.answer_field or answer_field,
            system_prompt=args.system_prompt,
            epochs=1,
            **rows,
        ),
        generator=generator,
        sampling=SamplingConfig(
            group_size=args.group_size,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            stop=args.stop,
            allow_biased_logprobs=True,
        ),
        reward=RewardConfig(args.reward_name if args.scored else UNSCORED, timeout_s=args.reward_timeout_s),
        workers=WorkerConfig(
            devices=devices, max_running_samples=args.max_running_samples or (64 if "cpu" in devices else 256)
        ),
        seed=args.seed,
    )


def settings_of(args: GenerateArgs, config: EngineConfig, source: PromptSource) -> dict[str, Any]:
    """What the samples depend on."""
    return {
        "prompts": source.fingerprint,
        "model": args.model or args.backend,
        "prompt_field": config.source.prompt_field,
        "answer_field": config.source.answer_field,
        "system_prompt": args.system_prompt,
        "reward": args.reward_name,
        "seed": args.seed,
        **msgspec.to_builtins(config.sampling),
    }


def run_generate(args: GenerateArgs) -> int:
    """The command; returns its exit code."""
    from rich.console import Console

    check(args)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if ":" in args.reward_name and os.getcwd() not in sys.path:  # the workers take it over
        sys.path.insert(0, os.getcwd())
    if args.model == "smollm2":
        from mprollout.demo.models import smollm2

        args = dataclasses.replace(args, model=str(smollm2(console.print)))
    devices: list[int | str | list[int]] = ["cpu"] * args.workers
    if args.backend == "sglang":
        devices = worker_devices(args.workers)
    config = config_of(args, devices)
    source = PromptSource(config.source)  # the engine's own belongs to its thread
    with SampleFile(args.out, settings_of(args, config, source)) as file:
        sampled, seconds = 0, 0.0
        if not file.finished:
            if file.state is None or Ledger.from_state(file.state["ledger"]).resolved < len(source):
                sampled, seconds = _sample(args, config, source, file, console)
            file.finish()
        assert file.state is not None
        summary = sum_up(args.out, len(source), file.state, args.pass_reward)
    summary.tokens_sampled, summary.seconds = sampled, seconds
    if args.json:
        print(msgspec.json.encode(msgspec.to_builtins(summary) | {"tokens_per_s": summary.tokens_per_s}).decode())
    else:
        show(summary)
    return 0 if summary.prompts_with_samples == summary.prompts else 1


# -- the run ---------------------------------------------------------------------------------------------------------------


def _sample(
    args: GenerateArgs, config: EngineConfig, source: PromptSource, file: SampleFile, console: Console
) -> tuple[int, float]:
    """Fill the file up to the last prompt; tokens sampled and seconds taken."""
    from mprollout.attendant import log_to
    from mprollout.engine import RolloutEngine
    from mprollout.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(args.model if args.backend == "sglang" else "")
    engine = RolloutEngine(config)
    if file.state is not None:
        engine.load_state_dict(file.state, await_weights=False)
        console.print(f"{file.groups:,} of {len(source):,} prompts are in {file.folder}; going on")
    with log_to(console.print), engine:
        began = time.monotonic()
        try:
            with _Progress(engine, len(source), args.scored, console) as progress:
                _take_all(engine, source, file, tokenizer, args, progress)
        finally:  # after a fault and at Ctrl-C, too
            state = engine.state_dict()
            # An interrupt may have fallen between the delivery of a group and its place in the file: then it is made again, with what was not cut.
            if state != file.state and file.holds(state):
                file.cut(state)
            if Ledger.from_state(state["ledger"]).resolved < len(source):
                console.print(f"{file.groups:,} of {len(source):,} prompts are kept; the same command goes on")
        return engine.stats().tokens_generated, time.monotonic() - began


def _take_all(
    engine: RolloutEngine,
    source: PromptSource,
    file: SampleFile,
    tokenizer: Tokenizer,
    args: GenerateArgs,
    progress: _Progress,
) -> None:
    """Take groups as they come until the data ends."""
    due = math.inf
    while True:
        try:
            with engine.get(1, None if due == math.inf else max(0.0, due - time.monotonic())) as batch:
                group = batch[0]
                texts = [tokenizer.decode(sample.token_ids.tolist()) for sample in group.samples]
                file.add(group, source.prompt(group.ticket), texts, args.scored)
                progress.took(float(batch.rewards.mean()))
            due = min(due, time.monotonic() + args.flush_s)
        except GetTimeout:  # nothing came, and a part is due
            pass
        except DataExhausted:
            return
        if file.due or time.monotonic() >= due:
            state = engine.state_dict()
            file.cut(state)
            engine.confirm(state)
            progress.cut()
            due = math.inf


class _Progress:
    """A bar with tokens a second and the time left on a terminal; elsewhere a line a part. Made and used while the engine runs."""

    def __init__(self, engine: RolloutEngine, prompts: int, scored: bool, console: Console) -> None:
        from rich import progress, table, text

        class Speed(progress.ProgressColumn):
            """Drawn by rich's thread four times a second: it moves while the first prompts are under way."""

            def render(_, task: progress.Task) -> text.Text:  # noqa: N805
                return text.Text(self._speed())

        self._engine, self._prompts, self._scored, self._console = engine, prompts, scored, console
        self._began, self._done_before = time.monotonic(), self._done()
        self._groups, self._rewards = 0, 0.0
        bar, speed = progress.BarColumn(bar_width=None), Speed(table_column=table.Column(no_wrap=True))
        columns = (bar, progress.MofNCompleteColumn(), "prompts,", speed, progress.TimeRemainingColumn(), "left")
        self._bar = progress.Progress(*columns, console=console, disable=not console.is_terminal, expand=True)
        self._task = self._bar.add_task("", total=prompts, completed=self._done_before)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def took(self, reward: float) -> None:
        """A group came; its mean reward."""
        self._groups, self._rewards = self._groups + 1, self._rewards + reward
        self._bar.advance(self._task)

    def cut(self) -> None:
        """A part was written."""
        done = self._done()
        self._bar.update(self._task, completed=done)
        if not self._console.is_terminal:
            left_s = (time.monotonic() - self._began) / (done - self._done_before) * (self._prompts - done)
            line = f"{done:,} of {self._prompts:,} prompts, {self._speed()}, {left_s:,.0f} s left"
            self._console.print(line)

    def _done(self) -> int:
        return sum(self._engine.stats().outcomes.values())

    def _speed(self) -> str:
        tokens_per_s = self._engine.stats().tokens_generated / (time.monotonic() - self._began)
        reward = f", mean reward {self._rewards / max(1, self._groups):.3f}" if self._scored else ""
        return f"{tokens_per_s:,.0f} tokens/s{reward}"
