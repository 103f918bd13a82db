"""`mprollout view`: a recording in the terminal, and as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import config

import mprollout as mp
from mprollout.cli import main
from mprollout.view import _printable

pytestmark = pytest.mark.timeout(60)


def told(group: mp.Group, get: int, policy_version: int) -> list[dict[str, Any]]:
    return [
        {
            "ticket": group.ticket,
            "row": group.row,
            "sample": number,
            "reward": sample.reward,
            "finish_reason": sample.finish_reason,
            "tokens": len(sample.token_ids),
            "trained_tokens": int(sample.loss_mask.sum()),
            "masked": False,
            "mean_logprob": pytest.approx(float(sample.logprobs.mean())),
            "versions": [list(span) for span in sample.versions],
            "policy_version": policy_version,
            "lag": group.lag,
            "batch": get,
            "worker": group.worker,
            "attempt": group.attempt,
            "prompt": bytes(group.prompt_ids.tolist()).decode(),
            "text": bytes(i for i in sample.token_ids.tolist() if i < 256).decode(errors="replace"),
        }
        for number, sample in enumerate(group.samples)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A recorded run of three gets with an update after each, and its samples as the trainer had them."""
    import torch

    folder, samples = tmp_path_factory.mktemp("run"), []
    with mp.RolloutEngine(config(run_dir=str(folder), record="run")) as engine:
        for get in range(3):
            with engine.get(4, timeout=20) as batch:
                for i in range(4):
                    samples += told(batch[i], get, engine.policy_version)
            engine.update_weights({"w": torch.zeros(2)})
    return folder, samples


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["view", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_has_what_the_trainer_had(run: tuple[Path, list[Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, samples = run
    assert len(samples) == 48 and {sample["policy_version"] for sample in samples} == {0, 1, 2}
    assert shown(capsys, str(folder), "--limit", "0") == samples
    assert shown(capsys, str(folder / "record")) == samples[:8]
    ticket = samples[20]["ticket"]
    assert shown(capsys, str(folder), "--ticket", str(ticket)) == [s for s in samples if s["ticket"] == ticket]


def test_best_and_worst_are_ranked_over_all(run: tuple[Path, list[Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, samples = run
    ranked = sorted(samples, key=lambda sample: sample["reward"])
    assert shown(capsys, str(folder), "--worst", "--limit", "5") == ranked[:5]
    best = sorted(samples, key=lambda sample: -sample["reward"])
    assert shown(capsys, str(folder), "--best", "--limit", "0") == best
    assert main(["view", str(folder), "--best", "--worst"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_the_terminal_shows_reward_versions_and_text(
    run: tuple[Path, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, samples = run
    assert main(["view", str(folder), "--ticket", str(samples[0]["ticket"]), "--limit", "1", "--max-chars", "10"]) == 0
    text, one = capsys.readouterr().out, samples[0]
    assert f"ticket {one['ticket']}, sample 0: reward {one['reward']:g}" in text
    assert f"{one['tokens']} tokens ({one['finish_reason']}), v0:0-{one['tokens']}, lag 0" in text
    assert f"<|user|>\nq ... ({len(one['prompt']) - 10} characters more)" in text
    assert f"1 samples of {folder / 'record'}: 12 groups of the simulated generator" in text


def test_what_a_model_wrote_does_not_steer_the_terminal() -> None:
    assert _printable("a\x1b[2J\x07[bold]\n\tü\u202e", 0) == "a\\x1b[2J\\x07[bold]\n\tü\\x202e"


def test_where_nothing_was_recorded_it_says_so(
    run: tuple[Path, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, complaint in (
        ([str(tmp_path)], "no recording (part-*.parquet) lies there"),
        ([str(run[0]), "--ticket", "999"], "none of its 12 groups is of ticket 999"),
        ([str(run[0]), "--limit", "-1"], "must be >= 0; got -1"),
    ):
        assert main(["view", *arguments]) == 2
        error = capsys.readouterr().err
        assert complaint in error and error.startswith("mprollout: ") and error.count("\n") == 1
