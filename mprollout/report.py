"""`mprollout report RUN`: one HTML page of a run, of what lies in its folder alone.

    RUN/history.jsonl --history.read--> Course --run_plots--+
    RUN/record, or the demo's RUN/samples.parquet --samples--+--page--> RUN/report.html

Works while the run goes on, after its end, and after any kill.
"""

from __future__ import annotations

import dataclasses
import html
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import tyro

from mprollout import plots, record
from mprollout.errors import ConfigError
from mprollout.history import Update, WorkerChange, read
from mprollout.plots import Course
from mprollout.tokenizer import tokenizer_of

REPORT = "report.html"
SAMPLES = "samples.parquet"
"""A row a completion, its text in it: what the demo writes."""


@dataclasses.dataclass(kw_only=True)
class ReportArgs:
    """One self-contained HTML page of a run: reward, held-out accuracy, lag, pending depth, response lengths, tokens/s, the trainer's wait by
    cause, a timeline of the workers, and a table of samples. For any run with a run folder, alive, ended or killed; it is not disturbed.

    Example: `mprollout report runs/7` writes runs/7/report.html; `mprollout report runs/7 --json` prints the run's numbers, too.

    The samples are those of the recording (`EngineConfig.record = "run"`) or of the demo. Exit codes: 0 written; 2 no run lies there, or the
    page cannot be written.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder (`EngineConfig.run_dir`)."""
    out: Path | None = None
    """The page. Default: RUN/report.html."""
    samples: int = 60
    """Rows of the table of samples, spread over the run; 0: none."""
    json: bool = False
    """Print one JSON object with the run's numbers and the page's path."""


def run_report(args: ReportArgs) -> None:
    """Write it and name it."""
    path, numbers = write_report(args.run, args.out, args.samples)
    print(json.dumps({"report": str(path), **numbers}) if args.json else f"{path}")


def write_report(run: Path, out: Path | None = None, rows: int = 60) -> tuple[Path, dict[str, Any]]:
    """Write the page of a run; whole, or not at all. Returns its path and the run's numbers.

    Raises:
        ConfigError: the folder has no history of a run, its samples cannot be read, or plotly is not installed.
    """
    if rows < 0:
        raise ConfigError(f"ReportArgs.samples must be >= 0; got {rows}")
    course = Course(read(run))
    numbers = summary(course)
    about = course.lives[-1].start.about
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(course.lives[0].start.at))
    settings = ", ".join(f"{name} {value}" for name, value in about.items() if name != "model")
    headline = f"{about.get('model', '')}; began {when}; {settings}"
    before = f"<p>{html.escape(headline)}</p>{plots.html_table([numbers])}"
    found = samples(run, rows) if rows else []
    after = "<h2>Samples</h2>" + (
        plots.html_table(found, preformatted=("prompt", "answer"))
        or "<p>None were recorded: set EngineConfig.record to 'run'.</p>"
    )
    path = out or run / REPORT
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(plots.page(f"Run {run.resolve().name}", plots.run_plots(course), before, after))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path, numbers


def summary(course: Course) -> dict[str, Any]:
    """The run in one line; seconds are of the wall clock."""
    rewards = [reward for life in course.intervals() for i in life if (reward := i.reward) is not None]
    tenth = max(1, len(rewards) // 10)
    lags = course.totals("lags")
    seconds = sum(course.end(life) - course.time(life, 0.0) for life in course.lives)
    waited = course.totals("waited_s")
    changes = course.events(WorkerChange)
    return {
        "state": plots.ended(course),
        "seconds": round(seconds, 1),
        "engines": len(course.lives),
        "updates": sum(not update.error for _, update in course.events(Update)),
        "groups taken": course.total("taken"),
        "samples taken": sum(course.totals("lengths_delivered").values()),
        "tokens delivered": course.total("tokens_delivered"),
        "tokens discarded": sum(course.totals("discarded").values()),
        "reward, first tenth": round(statistics.fmean(rewards[:tenth]), 4) if rewards else None,
        "reward, last tenth": round(statistics.fmean(rewards[-tenth:]), 4) if rewards else None,
        "highest lag": max((lag for lag, count in lags.items() if count), default=None),
        "share of time waited": round(sum(waited.values()) / seconds, 3) if seconds else None,
        "worker deaths": sum(change.state in ("restarting", "lost") for _, change in changes),
    }


# -- samples --------------------------------------------------------------------------------------------------------------


def samples(run: Path, most: int) -> list[dict[str, Any]]:
    """Rows of the table, spread evenly over the run; empty: none were recorded.

    Raises:
        ConfigError: they cannot be read, or the model's tokenizer cannot be loaded.
    """
    if (run / SAMPLES).exists() and (found := _of_the_demo(run / SAMPLES, most)) is not None:
        return found
    folder = run / record.RECORD_FOLDER
    return _recorded(folder, most) if list(folder.glob("part-*.parquet")) else []


def _of_the_demo(path: Path, most: int) -> list[dict[str, Any]] | None:
    """None: the file has no footer yet; its run goes on, or was killed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid:
        return None
    rows = table.take(_spread(table.num_rows, most)).to_pylist()
    return [{("answer" if name == "text" else name): value for name, value in row.items()} for row in rows]


def _recorded(folder: Path, most: int) -> list[dict[str, Any]]:
    try:
        decode = tokenizer_of(record.about(folder).get("model", "")).decode
    except ConfigError as error:
        raise ConfigError(f"{error}; --samples 0 leaves the samples out") from error
    chosen = set(_spread(record.count(folder), most))
    found = []
    with record.ReplaySource(folder) as source:
        for number, row in enumerate(record.read(folder)):
            if number not in chosen:
                continue
            group = source.group(row)
            sample = group.samples[number % len(group)]
            found.append(
                {
                    "batch": row.batch,
                    "ticket": row.ticket,
                    "prompt": decode(group.prompt_ids.tolist()),
                    "answer": decode(sample.token_ids.tolist()),
                    "reward": round(sample.reward, 4),
                    "lag": row.lag,
                    "versions": [span.version for span in sample.versions],
                    "finish_reason": sample.finish_reason,
                    "worker": row.worker,
                    "attempt": row.attempt,
                }
            )
    return found


def _spread(count: int, most: int) -> list[int]:
    """At most so many of [0, count), the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // max(1, most - 1) for i in range(most)]
