"""The Prometheus endpoint of a living run, and the dashboard that asks it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import engines
import pytest
from engines import until

import mprollout as mp
from mprollout.cli import main
from mprollout.monitor import RunEnded, RunView
from mprollout.prometheus import DASHBOARD, serving

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.timeout(60)


def scrape(url: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, {})
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_a_scrape_says_what_top_says_and_the_dashboard_asks_for_nothing_else(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 500 if i == 1 else f"question {i}"} for i in range(40)]
    changes = {
        "source": mp.SourceConfig(rows=rows, epochs=1, max_prompt_tokens=200),
        "workers": engines.TWO_WORKERS,
        "generator": mp.SimulatedConfig(mean_tokens=12, tokens_per_s=200, faults={"abort": 0.15}),
        "fault": mp.FaultConfig(max_attempts=100, retry_delay_s=0.001),
        "run_dir": str(tmp_path),
    }
    with mp.RolloutEngine(engines.config(**changes)) as engine:
        engine.get(4, timeout=20).release()
        until(lambda: engine.stats().pending == 10, "the gate is full")
        view = RunView(tmp_path)
        try:
            until(lambda: view.look()["taken"] == 4 and view.look()["live"] == 10, "the attendant has told")
            seen = view.look()
        finally:
            view.close()
        with serving(tmp_path, 0, "127.0.0.1") as url:
            assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/metrics", url)
            found = scrape(url)
            assert engine.get(4, timeout=20).tickets
            until(lambda: scrape(url)["mprollout_groups_taken_total"][()] == 8, "a later scrape sees later numbers")

    assert found["mprollout_up"] == {(): 1}
    for name, key in (
        ("live_groups", "live"),
        ("pending_groups", "pending"),
        ("groups_taken_total", "taken"),
        ("groups_admitted_total", "admitted"),
        ("tokens_delivered_total", "tokens_delivered"),
        ("reward_mean", "reward_mean"),
        ("policy_version", "policy_version"),
    ):
        assert found[f"mprollout_{name}"] == {(): seen[key]}, name
    for name, key in (
        ("tokens_generated_total", "tokens_generated"),
        ("samples_finished_total", "samples_finished"),
        ("attempts_retried_total", "retried"),
        ("running_samples", "running_samples"),
    ):
        by_worker = {(("worker", str(worker["worker"])),): worker[key] for worker in seen["workers"]}
        assert found[f"mprollout_{name}"] == by_worker, name
    waited = {labels[0][1]: value for labels, value in found["mprollout_trainer_wait_seconds_total"].items()}
    assert waited == seen["waited_s"]
    assert found["mprollout_tokens_discarded_total"] == {(("reason", "abort"),): seen["discarded"]["abort"]}
    assert found["mprollout_groups_ended_total"] == {(("reason", "over_long"),): 1}
    assert found["mprollout_worker_ready"] == {(("worker", "0"),): 1, (("worker", "1"),): 1}
    lags = found["mprollout_group_lag_bucket"]
    assert lags[("le", "0.0"),] == lags[("le", "+Inf"),] == found["mprollout_group_lag_count"][()] == 4
    lengths = found["mprollout_sample_tokens_bucket"]
    delivered = [value for labels, value in lengths.items() if ("stage", "delivered") in labels]
    assert delivered == sorted(delivered) and delivered[-1] == 16
    assert lengths[("le", "15.0"), ("stage", "issued")] == sum(
        n for least, n in seen["lengths_issued"].items() if least < 16
    )
    assert found["mprollout_sample_tokens_sum"][("stage", "delivered"),] == seen["tokens_delivered"]

    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"\bmprollout_\w+", expr)}
    assert len(asked) >= 20 and names <= found.keys(), names - found.keys()
    for expr in asked:  # each label that a query groups or a legend shows by is there
        for labels in re.findall(r"by \(([^)]*)\)", expr):
            name = re.search(r"\bmprollout_\w+", expr).group()
            have = {key for sample in found[name] for key, _ in sample}
            assert set(labels.replace(" ", "").split(",")) <= have, expr
    boxes = [panel["gridPos"] for panel in board["panels"]]
    places = {
        (x, y)
        for box in boxes
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    }
    assert len(places) == sum(box["w"] * box["h"] for box in boxes), "panels overlap"


def test_top_serves_until_the_run_ends(tmp_path: Path) -> None:
    with mp.RolloutEngine(engines.config(run_dir=str(tmp_path))) as engine:
        program = [
            sys.executable,
            "-m",
            "mprollout.cli",
            "top",
            str(tmp_path),
            "--prometheus",
            "0",
            "--interval-s",
            "0.1",
        ]
        process = subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            url = process.stderr.readline().strip().removeprefix("serving ")
            assert scrape(url)["mprollout_up"] == {(): 1}
            engine.close()
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
            process.communicate()
        assert (process.returncode, out, err) == (0, "", "")


def test_a_scrape_after_the_end_says_that_it_is_down(tmp_path: Path) -> None:
    with mp.RolloutEngine(engines.config(run_dir=str(tmp_path))) as engine, serving(tmp_path, 0, "127.0.0.1") as url:
        engine.close()
        found = scrape(url)
    assert found == {"mprollout_up": {(): 0}}
    with pytest.raises(RunEnded), serving(tmp_path, 0, "127.0.0.1"):
        pass


def test_what_cannot_be_served_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path), "--prometheus", "70000"]) == 2
    assert "must be a port, 0 to 65535; got 70000" in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--prometheus", "0", "--once"]) == 2
    with mp.RolloutEngine(engines.config(run_dir=str(tmp_path))), serving(tmp_path, 0, "127.0.0.1") as url:
        port = re.search(r":([0-9]+)/", url).group(1)
        assert main(["top", str(tmp_path), "--prometheus", port]) == 2
        assert f"nothing can listen at 127.0.0.1:{port}" in capsys.readouterr().err
