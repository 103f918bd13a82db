"""The demo's job: n groups -> GRPO update -> new weights into the running workers, again and again.

    engine.get(n) --Batch--> Trainer.step --weights--> engine.update_weights          (with max_lag=1 the workers generate meanwhile)
         |                                                    every k steps: engine.evaluate(held-out prompts)
         +--> Record (metrics.jsonl, samples.parquet), engine.log --> report.html

Ends after the last step, or at Ctrl-C; either way the run folder holds all that was done, and the summary says where it lies.
"""

from __future__ import annotations

import collections
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mprollout.attendant import log_to
from mprollout.demo import models, tasks
from mprollout.demo.args import DemoArgs, engine_config, held_out_source
from mprollout.demo.display import Display
from mprollout.demo.record import Record
from mprollout.report import REPORT, write_report

if TYPE_CHECKING:
    from mprollout.engine import RolloutEngine


class DemoResult(NamedTuple):
    """What came of a run."""

    folder: Path
    steps: int
    """Completed."""
    accuracies: list[tuple[int, float]]
    """(step, held-out accuracy as measured on the workers)."""
    rewards: list[float]
    """Mean reward of each step."""
    seconds: float
    """From the call to the end, the workers' start included."""
    interrupted: bool

    @property
    def began_at(self) -> float | None:
        return self.accuracies[0][1] if self.accuracies else None

    @property
    def ended_at(self) -> float | None:
        return self.accuracies[-1][1] if self.accuracies else None


def run_demo(args: DemoArgs) -> DemoResult:
    """Run the job that `args` describe. Blocks until it ends; Ctrl-C ends it early and is not passed on.

    Raises:
        MprolloutError: the engine's or a setting's own error; the run folder holds the steps before it
    """
    began, scale, interrupted = time.monotonic(), args.scale, False
    with Record(args.run_folder) as record:
        with Display(f"{args.model} learns {scale.task}", scale.steps) as display:
            try:
                with log_to(display.say):
                    _Job(args, record, display).run()
            except KeyboardInterrupt:
                interrupted = True
        seconds = time.monotonic() - began
        result = DemoResult(
            record.folder,
            int(record.steps[-1]["step"]) if record.steps else 0,
            list(zip(*record.series("accuracy"), strict=True)),
            record.series("reward")[1],
            seconds,
            interrupted,
        )
        if result.rewards:
            record.plot(f"{args.model}, {scale.task}, seed {args.seed}, max_lag {args.max_lag}")
    if result.rewards:
        write_report(record.folder)
    print(summary(result, record), flush=True)
    return result


class _Job:
    """The loop and what it holds."""

    def __init__(self, args: DemoArgs, record: Record, display: Display) -> None:
        self.args, self.record, self.display = args, record, display

    def run(self) -> None:
        import torch
        import transformers

        from mprollout.engine import RolloutEngine

        args, display = self.args, self.display
        transformers.utils.logging.disable_progress_bar()  # of loading a model; the display has its own
        # Every worker keeps a core; and matrices as small as tiny's gain nothing from a second thread.
        spare = len(os.sched_getaffinity(0)) - args.workers
        torch.set_num_threads(1 if args.model == "tiny" else max(1, spare))
        with display.doing("makes the model"):
            checkpoint = models.checkpoint(args.model, args.task_name, args.seed, display.say)
        with display.doing("loads the model"):
            self._load(checkpoint)
        engine = RolloutEngine(engine_config(args, checkpoint, self.tokenizer, self.record.folder))
        display.watch(engine)
        display.say(f"starting {args.workers} workers ({args.backend}); the run folder is {self.record.folder}")
        with display.doing("starts the workers") as start:
            engine.start(progress=False)
        try:
            display.say(f"{args.workers} workers started in {start.seconds:.0f} s")
            self._train(engine)
        finally:
            display.watch(None)
            with display.doing("closes the engine"):
                engine.close()

    def _load(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from mprollout.demo.recipe import Recipe, Trainer

        scale = self.args.scale
        device = f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device)
        self.trainer = Trainer(model, Recipe(lr=scale.lr, micro_batch_samples=scale.micro_batch_samples))

    def _train(self, engine: RolloutEngine) -> None:
        args, scale, display = self.args, self.args.scale, self.display
        version: int | None = engine.policy_version
        pad = self.tokenizer.pad_token_id or 0
        if scale.eval_every:
            self._note(engine, {"step": 0} | self._evaluate(engine))
        began = time.monotonic()
        marks = collections.deque([(began, engine.stats().tokens_generated)], maxlen=20)
        for step in range(1, scale.steps + 1):
            with display.doing(f"waits for {scale.groups} groups") as wait:
                batch = engine.get(scale.groups)
            with batch:
                rows, lags = batch.padded(pad), [group.lag for group in batch]
                self.record.add_samples(step, batch, self.tokenizer)
            stats = engine.stats()
            with display.doing("trains") as train:
                metrics = self.trainer.step(rows, version)
            with display.doing("pushes weights") as push:
                version = engine.update_weights(self.trainer.weights) if args.push else None
            marks.append((time.monotonic(), stats.tokens_generated))
            measured = {
                "step": step,
                "seconds": time.monotonic() - began,
                "reward": float(rows.rewards.mean()),
                "lag_mean": sum(lags) / len(lags),
                "lag_max": max(lags),
                "pending": stats.pending,
                "live": stats.live,
                "tokens_per_s": (marks[-1][1] - marks[0][1]) / max(1e-9, marks[-1][0] - marks[0][0]),
                "wait_s": wait.seconds,
                "train_s": train.seconds,
                "push_s": push.seconds,
                "version": version,
            }
            due = scale.eval_every and (step % scale.eval_every == 0 or step == scale.steps)
            self._note(engine, measured | metrics | (self._evaluate(engine) if due else {"accuracy": None}))

    def _note(self, engine: RolloutEngine, metrics: dict[str, Any]) -> None:
        self.record.add_step(metrics)
        engine.log(metrics["step"], metrics)
        self.display.step(metrics)

    def _evaluate(self, engine: RolloutEngine) -> dict[str, Any]:
        """Accuracy on the held-out prompts, as the workers' present weights answer them."""
        args = self.args
        with self.display.doing("evaluates on held-out prompts") as timer:
            result = engine.evaluate(held_out_source(args, self.tokenizer), args.evaluation)
        if args.is_gym:
            accuracy = float(result.rewards.mean())
        else:  # exact answers, whatever is rewarded
            answers = [row["answer"] for row in tasks.held_out_rows(args.task_name)]
            accuracy = tasks.accuracy([text for (text,) in result.texts], answers)
        return {"accuracy": accuracy, "evaluated_version": result.version, "evaluate_s": timer.seconds}


def summary(result: DemoResult, record: Record) -> str:
    """What the run did and where it all lies."""
    lines = [f"{'interrupted after' if result.interrupted else 'done:'} {result.steps} steps in {result.seconds:.0f} s"]
    if result.rewards:
        few = max(1, min(10, len(result.rewards) // 2))
        first, last = (sum(part) / len(part) for part in (result.rewards[:few], result.rewards[-few:]))
        lines.append(f"  reward             {first:.3f} -> {last:.3f} (mean of {few} steps)")
    if result.accuracies:
        lines.append(f"  held-out accuracy  {result.began_at:.3f} -> {result.ended_at:.3f}")
    lines += [
        f"  {what:<18} {path}"
        for what, path in (
            ("metrics", record.metrics_path),
            ("samples", record.samples_path),
            ("plot", record.curve_path),
            ("report", record.folder / REPORT),
        )
        if path.exists()
    ]
    return os.linesep.join(lines)
