"""`mprollout report`: the page of a run, looked at in a real browser."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from engines import until

import mprollout as mp
from mprollout import history, plots, report
from mprollout.cli import main
from mprollout.record import read

pytestmark = pytest.mark.timeout(120)
PLOTS = ["reward", "accuracy", "lag", "pending", "lengths", "tokens", "waits", "timeline"]
EVIL = "<script>console.error('the page ran a prompt')</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two engines in one folder: the first loses a worker, the second goes on from its state. Recorded, evaluated, logged."""
    folder = tmp_path_factory.mktemp("run") / "seven"
    folder.mkdir()
    rows = [{"prompt": f"question {i} {EVIL}", "answer": "x"} for i in range(200)]
    config = engines.config(
        source=mp.SourceConfig(rows=rows),
        generator=mp.SimulatedConfig(mean_tokens=12, tokens_per_s=400, vocab_size=300),
        workers=engines.TWO_WORKERS,
        gate=mp.GateConfig(groups_per_update=4, max_lag=1),
        run_dir=str(folder),
        record="run",
    )
    checkpoint = folder.parent / "weights"
    engines.write_safetensors(checkpoint)
    state: dict[str, Any] | None = None
    for life in range(2):
        engine = mp.RolloutEngine(config)
        if state is not None:
            engine.load_state_dict(state)
        with engine:
            if state is not None:
                engine.update_weights(checkpoint)
            for step in range(12):
                engine.get(4, timeout=20).release()
                engine.update_weights(checkpoint)
                engine.log(12 * life + step, {"accuracy": 0.3 + 0.02 * step, "loss": 1.0})
                if life == 0 and step == 5:
                    os.kill(engine.stats().workers[1].pid, signal.SIGKILL)
                    until(lambda: engine.stats().workers[1].restarts == 1, "it is started again")  # noqa: B023
            until(lambda: engine.stats().workers[1].state == "ready", "the second is there")  # noqa: B023
            engine.evaluate(rows[:4])
            state = engine.state_dict()
    return folder


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A page of a real one; the test is skipped where none is installed."""
    if (program := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip("no browser is installed (Debian: apt install chromium)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives the browser, is not installed"
    )
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=program, args=["--no-sandbox"])  # CI is root
        try:
            yield chromium.new_page(viewport={"width": 1400, "height": 1000})
        finally:
            chromium.close()


def colours(png: bytes) -> int:
    """Pixels that are not grey: what a trace has and axes have not."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return int(((pixels.max(axis=2) - pixels.min(axis=2)) > 40).sum())


@pytest.mark.slow
def test_every_plot_is_drawn_in_a_browser_and_nothing_is_loaded_or_complained_of(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(path)]) == 0
    said: list[str] = []
    asked: list[str] = []
    with browser() as page:
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        for name in PLOTS:
            plot = page.locator(f"#plot-{name}")
            plot.locator(".main-svg").first.wait_for(timeout=20_000)
            box = plot.locator(".main-svg").first.bounding_box()
            section = page.locator("section", has=plot).bounding_box()
            assert box["width"] > 500 and box["height"] > 200, name
            assert box["x"] + box["width"] <= section["x"] + section["width"] + 1, f"{name} overflows"
            assert colours(plot.screenshot()) > 300, f"{name} shows nothing"
        legend = page.locator("#plot-timeline .legendtext").all_text_contents()
        assert set(legend) == {"starting", "ready", "restarting", "update", "death"}
        assert (
            page.locator("#plot-timeline .bars .point").count() >= 8
        )  # 2 lives x 2 workers x (starting, ready), and a restart
        assert set(page.locator("#plot-lengths .legendtext").all_text_contents()) == {"issued", "delivered"}
        samples = page.locator("table").last.locator("tbody tr")
        assert samples.count() == 60
        assert EVIL in samples.first.inner_text()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_the_numbers_are_those_of_the_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out), "--json", "--samples", "3"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == str(out)
    assert (said["engines"], said["updates"], said["groups taken"], said["samples taken"]) == (2, 25, 96, 384)
    assert said["highest lag"] == 1 and said["worker deaths"] == 1 and said["state"] == "closed"
    rows = report.samples(run, 3)
    assert [row["ticket"] for row in rows] == [0, 47, 95]
    assert rows[0]["prompt"] == f"<|user|>\nquestion 0 {EVIL}\n<|assistant|>\n"
    recorded = {row.ticket: (row.lag, row.worker) for row in read(run / "record")}
    assert [(row["lag"], row["worker"]) for row in rows] == [recorded[row["ticket"]] for row in rows]
    assert all(0 <= len(row["answer"]) <= row["reward"] for row in rows)  # a token is a byte, or special


def test_intervals_lose_nothing_however_few_there_are(run: Path) -> None:
    course = plots.Course(history.read(run))
    for most in (3, 500):
        for life in course.intervals(most):
            assert len(life) <= most + 1
            assert sum(sum(i.gained("lags").values()) for i in life) == 48
            assert all(a.end_s == b.start_s for a, b in itertools.pairwise(life))
    first, second = course.intervals()
    assert first[-1].end_s < second[0].start_s
    samples = {n: sum(i.after.lengths_delivered.values()) for n, i in enumerate(first)}
    mean = sum(i.reward * (samples[n] - samples.get(n - 1, 0)) for n, i in enumerate(first) if i.reward is not None)
    assert mean / samples[len(first) - 1] == pytest.approx(first[-1].after.reward_mean)


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(r"^mprollout: .*no history of a run lies there", capsys.readouterr().err)
    kept = history.History(tmp_path, engines.config())
    kept.close(None)
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / report.REPORT).read_text()
    assert "No group was taken." in text and "Nothing was evaluated" in text and "None were recorded" in text
    assert "Plotly.newPlot" not in text
    assert main(["report", str(tmp_path), "--samples", "-1"]) == 2
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [history.HISTORY, report.REPORT]
