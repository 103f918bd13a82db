"""The run folder: `metrics.jsonl` (a line a step), `samples.parquet` (a row a completion), `curve.png`.

Invariant: what was recorded can be read, however the run ends: every line is flushed, and `close` writes the Parquet footer.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprollout.errors import ConfigError

if TYPE_CHECKING:
    from mprollout.batch import Batch

ROWS_BUFFERED = 4096


class Record:
    """Writes a run folder; a context manager.

    Raises:
        ConfigError: the folder holds a run already
    """

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.metrics_path, self.samples_path, self.curve_path = (
            folder / n for n in ("metrics.jsonl", "samples.parquet", "curve.png")
        )
        self.steps: list[dict[str, Any]] = []
        try:
            self._metrics = self.metrics_path.open("x")
        except FileExistsError:
            raise ConfigError(f"--out {folder} holds a run already (metrics.jsonl); choose another folder") from None
        self._schema = pa.schema(
            [
                ("step", pa.int32()),
                ("ticket", pa.int64()),
                ("prompt", pa.string()),
                ("text", pa.string()),
                ("reward", pa.float32()),
                ("lag", pa.int32()),
                ("versions", pa.list_(pa.int64())),  # policy versions that sampled its tokens, oldest first
                ("finish_reason", pa.string()),
                ("worker", pa.int32()),
            ]
        )
        self._samples = pq.ParquetWriter(self.samples_path, self._schema)
        self._rows: list[dict[str, Any]] = []

    def add_step(self, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)
        self._metrics.write(json.dumps(metrics) + "\n")
        self._metrics.flush()

    def add_samples(self, step: int, batch: Batch, tokenizer: Any) -> None:
        """Copies what it keeps; no view of the batch outlives the call."""
        for group in batch:
            samples = group.samples
            prompt = tokenizer.decode(group.prompt_ids.tolist())
            texts = tokenizer.batch_decode([sample.token_ids.tolist() for sample in samples], skip_special_tokens=True)
            self._rows += [
                {
                    "step": step,
                    "ticket": group.ticket,
                    "prompt": prompt,
                    "text": text,
                    "reward": sample.reward,
                    "lag": group.lag,
                    "versions": [span.version for span in sample.versions],
                    "finish_reason": sample.finish_reason,
                    "worker": group.worker,
                }
                for sample, text in zip(samples, texts, strict=True)
            ]
        if len(self._rows) >= ROWS_BUFFERED:
            self._write_rows()

    def _write_rows(self) -> None:
        import pyarrow as pa

        self._samples.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows.clear()

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values at which `name` was measured."""
        points = [(entry["step"], entry[name]) for entry in self.steps if entry.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def plot(self, title: str) -> None:
        """Reward of each step, its mean over ten, and held-out accuracy."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(title=title, xlabel="step (policy updates)", ylim=(0, 1))
        steps, rewards = self.series("reward")
        axes.plot(steps, rewards, color="tab:blue", alpha=0.25, linewidth=1)
        means = [sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
        axes.plot(steps, means, color="tab:blue", label="reward (mean of 10 steps)")
        steps, accuracies = self.series("accuracy")
        if steps:
            axes.plot(steps, accuracies, "o-", color="tab:orange", label="held-out accuracy (greedy)")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left")
        figure.savefig(self.curve_path, dpi=120)

    def close(self) -> None:
        """Finish the files. A run that recorded nothing leaves none; the workers' logs stay."""
        if self._metrics.closed:
            return
        self._metrics.close()
        if self._rows:
            self._write_rows()
        self._samples.close()
        if not self.steps:
            self.metrics_path.unlink()
            self.samples_path.unlink()
            with contextlib.suppress(OSError):  # not empty: the logs
                self.folder.rmdir()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
