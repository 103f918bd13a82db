"""What a file of `mprollout generate` holds: how many samples, how good, pass@k, and which prompts have none and why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

_NAMED = 20


class Summary(msgspec.Struct, kw_only=True):
    """What the file holds, and how fast this run was."""

    out: str
    prompts: int
    prompts_with_samples: int
    samples: int
    tokens: int
    mean_reward: float | None
    """None: nothing was scored."""
    pass_at: dict[int, float]
    """pass@k by k, the mean over the prompts that have k samples; empty: nothing was scored."""
    ended: dict[str, int]
    """Prompts without samples, by reason."""
    rows_without_samples: list[int]
    tokens_sampled: int
    """By this run, those of failed attempts and of lost parts included."""
    seconds: float
    """Of this run's generation, without the start."""

    @property
    def tokens_per_s(self) -> float:
        """Of this run."""
        return self.tokens_sampled / self.seconds if self.seconds else 0.0


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that of k samples, drawn from all without replacement, one is right; k <= samples.

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code": 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def sum_up(path: Path, prompts: int, state: dict[str, Any], pass_reward: float) -> Summary:
    """Of a finished file; reads two columns of it and the lengths."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["row", "reward", "token_ids"])
    rows = table["row"].to_numpy()
    _, which, counts = np.unique(rows, return_inverse=True, return_counts=True)
    scored = table.num_rows > 0 and table["reward"].null_count == 0
    rewards = table["reward"].to_numpy() if scored else np.zeros(0)
    pass_at: dict[int, float] = {}
    if scored:
        right = np.bincount(which, weights=rewards >= pass_reward).astype(int)
        largest = int(counts.max())
        for k in dict.fromkeys([*(1 << i for i in range(largest.bit_length())), largest]):
            each = [pass_at_k(int(n), int(c), k) for n, c in zip(counts, right, strict=True) if n >= k]
            pass_at[k] = sum(each) / len(each)
    return Summary(
        out=str(path),
        prompts=prompts,
        prompts_with_samples=len(counts),
        samples=len(rows),
        tokens=pc.sum(pc.list_value_length(table["token_ids"])).as_py() or 0,
        mean_reward=float(rewards.mean()) if scored else None,
        pass_at=pass_at,
        ended=state["ledger"]["ended"],
        rows_without_samples=np.setdiff1d(np.arange(prompts), rows).tolist(),
        tokens_sampled=0,
        seconds=0.0,
    )


def show(summary: Summary) -> None:
    """On stdout."""
    lines = [
        f"{summary.samples:,} samples of {summary.prompts_with_samples:,} prompts, {summary.tokens:,} tokens: {summary.out}"
    ]
    if summary.mean_reward is not None:
        lines.append(
            f"mean reward {summary.mean_reward:.3f}; "
            + ", ".join(f"pass@{k} {p:.3f}" for k, p in summary.pass_at.items())
        )
    if summary.seconds:
        lines.append(f"{summary.tokens_per_s:,.0f} tokens/s: {summary.tokens_sampled:,} in {summary.seconds:,.1f} s")
    if without := summary.rows_without_samples:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in summary.ended.items())
        named = ", ".join(map(str, without[:_NAMED])) + (" ..." if len(without) > _NAMED else "")
        lines.append(f"{len(without):,} prompts have no samples: {reasons}; rows {named}")
    print("\n".join(lines))
