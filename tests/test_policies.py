"""The comparison of lag policies: what each pays, and that the README shows what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from mprollout.policies import BATCH, POLICIES, line, run, table
from mprollout.simulation import TrainerModel

pytestmark = pytest.mark.timeout(300)
SHORT = TrainerModel(groups_per_step=BATCH, step_s=4.0, steps=12)
NAMED = {policy.name: policy for policy in POLICIES}


@pytest.mark.parametrize("name", ["strict, K = 1", "recycle, K = 1", "drop-stale, K = 1", "drop-oldest"])
def test_only_the_strict_bound_costs_neither_prompts_nor_tokens_nor_long_answers(name: str) -> None:
    """prime-rl#2960, tinker-cookbook#822: the same run under the policies of other systems."""
    report = run(NAMED[name], SHORT)
    shown = line(NAMED[name], report)
    assert len(report.tickets) == len(set(report.tickets)) == BATCH * SHORT.steps
    strict = name.startswith("strict")
    assert (report.tokens_discarded > 0) == (not strict)
    assert (shown["prompts dropped"] > 0) == name.startswith("drop")
    assert (max(report.lags) <= 1) == (strict or name.startswith("drop-stale"))
    assert (sorted(report.issued_lengths) == sorted(report.delivered_lengths)) == strict


@pytest.mark.slow
def test_the_readme_shows_what_the_command_prints() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert table([line(policy, run(policy)) for policy in POLICIES]) in readme
