"""What a bound on staleness costs: lag policies side by side under heavy tails, in virtual time. `python -m mprollout.policies` prints the table.

    strict, recycle (`GateConfig`), drop-stale, drop-oldest (other systems' way, here as takers) --simulate--> one line each

Invariant: all lines have the same source, workers, trainer and lengths; only the policy differs.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from mprollout.batch import Group
from mprollout.config import (
    EngineConfig,
    GateConfig,
    RewardConfig,
    SamplingConfig,
    SimulatedConfig,
    SourceConfig,
    WorkerConfig,
)
from mprollout.simulation import SimulationReport, TrainerModel, simulate
from mprollout.taker import Taker


class DropStale(Taker):
    """For comparison: a group over the lag is thrown away, its prompt with it."""

    def recycle(self) -> None:
        stale = len(self.to_recycle)
        super().recycle()
        for _ in range(stale):
            ticket = self._ledger.next_ticket()  # what was sent back is not to be tried again
            self._ledger.resolve(ticket, "dropped:stale")
            self._gate.admitted += 1
            self._gate.ended += 1
            self.recycled.pop(ticket)


class DropOldest(Taker):
    """For comparison: the newest groups are taken; older ones beyond one batch are thrown away, their prompts with them."""

    def park(self, n: int) -> int:
        if published := self.consumer.available():
            self.consumer.try_take(published)
        held = self.consumer.held()
        surplus = held[: max(0, len(held) - n)]
        for lease in surplus:
            self.tokens_discarded += int(Group(lease).lengths.sum())
            self._deliver([lease])
            lease.release()
            self._ledger.resolve(lease.ticket, "dropped:oldest")
            self._gate.ended += 1
        return super().park(n)


class Policy(msgspec.Struct, frozen=True):
    """A line of the table."""

    name: str
    gate: GateConfig
    taker: type[Taker] = Taker


BATCH = 8
TAIL = [40] * 19 + [800]
"""Lengths in tokens: 5% of the answers are 20 times longer."""
TRAINER = TrainerModel(groups_per_step=BATCH, step_s=4.0, steps=60)
POLICIES = [
    *(Policy(f"strict, K = {lag}", GateConfig(groups_per_update=BATCH, max_lag=lag)) for lag in range(5)),
    Policy("recycle, K = 1", GateConfig(max_live_groups=4 * BATCH, max_lag=1, lag_policy="recycle")),
    Policy(
        "drop-stale, K = 1",
        GateConfig(max_live_groups=4 * BATCH, max_lag=1, lag_policy="recycle", max_recycles=10**6),
        DropStale,
    ),
    Policy("drop-oldest", GateConfig(max_live_groups=4 * BATCH), DropOldest),
]


def run(policy: Policy, trainer: TrainerModel = TRAINER) -> SimulationReport:
    """One policy: 2 workers of 128 places, groups of 8; 50 tokens/s a sample, 4,000 a worker."""
    config = EngineConfig(
        source=SourceConfig(
            rows=[{"prompt": f"q{i}", "answer": "x"} for i in range(BATCH * trainer.steps)],
            epochs=1 if policy.taker is Taker else None,  # whoever drops prompts needs more of them
        ),
        generator=SimulatedConfig(lengths=TAIL, tokens_per_s=50, max_tokens_per_s=4000),
        sampling=SamplingConfig(group_size=8, max_new_tokens=1000),
        reward=RewardConfig("exact"),
        workers=WorkerConfig(devices=["cpu"] * 2, max_running_samples=128),
        gate=policy.gate,
    )
    return simulate(config, trainer, policy.taker)


def line(policy: Policy, report: SimulationReport) -> dict[str, Any]:
    """The columns of one policy."""
    steps = len(report.trainer_wait_s)
    issued, delivered = report.issued_lengths, report.delivered_lengths
    return {
        "policy": policy.name,
        "highest lag": max(report.lags),
        "prompts dropped": sum(count for outcome, count in report.outcomes.items() if outcome.startswith("dropped")),
        "tokens discarded": f"{report.tokens_discarded / sum(issued):.1%}",
        "mean length delivered / issued": f"{sum(delivered) / len(delivered):.1f} / {sum(issued) / len(issued):.1f}",
        "steps an hour": f"{3600 * steps / report.wall_s:.0f}",
        "wait a step, s": f"{sum(report.trainer_wait_s) / steps:.2f}",
        "of it stragglers, s": f"{report.waited_s['straggler'] / steps:.2f}",
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown."""
    rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(map(str, one.values())) for one in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(table([line(policy, run(policy)) for policy in POLICIES]) + "\n")
