"""The benches still run: every transport carries verified groups, every number of the report is made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_benches_run_in_small_and_the_report_prints_every_goal(tmp_path: Path) -> None:
    run, png = tmp_path / "bench.json", tmp_path / "bench.png"
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }  # xdist's would be seen
    environment = {**ours, "BENCH_SMOKE": "1"}
    command = [sys.executable, "-m", "pytest", "bench", "-q", "--benchmark-quiet", f"--benchmark-json={run}"]
    bench = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert bench.returncode == 0, bench.stdout + bench.stderr
    assert json.loads(run.read_text())["benchmarks"]
    command = [sys.executable, "bench/report.py", str(run), str(png), "--keep-loaded"]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert report.returncode == 0, report.stderr
    assert "vs multiprocessing.Queue, 64 KiB, every byte touched" in report.stdout
    assert "last publish to get returning, median" in report.stdout
    assert png.stat().st_size > 0
