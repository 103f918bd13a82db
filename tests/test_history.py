"""The run's history: what an engine writes into its folder, whatever ends it, and within its bound."""

from __future__ import annotations

import itertools
import logging
import os
import random
import resource
import signal
import time
from pathlib import Path

import engines
import pytest
import rigs
from engines import until

import mprollout as mp
from mprollout import history
from mprollout.history import HISTORY, End, Evaluated, History, Life, Logged, Row, Start, Update, WorkerChange
from mprollout.stats import EngineStats

pytestmark = pytest.mark.timeout(60)


def stats(taken: int) -> EngineStats:
    """Of an engine that took so many groups."""
    zeros = {name: 0 for name in Row.__struct_fields__ if name != "t"}
    names = {name: {} for name in ("outcomes", "lags", "lengths_issued", "lengths_delivered", "discarded", "waited_s")}
    more = {"admitted": taken, "reward_last": 0.0, "waiting_s": 0.0, "waiting_for": "", "straggler": None}
    return EngineStats(**{**zeros, **names, **more, "taken": taken, "progress_s": 0.0, "workers": []})


def written(folder: Path, rows: range, max_bytes: int = history.MAX_BYTES) -> History:
    """A history with these rows, still open."""
    kept = History(folder, engines.config(), max_bytes)
    for taken in rows:
        kept.look(stats(taken))
        kept.write()
    return kept


def taken(life: Life) -> list[int]:
    return [row.taken for row in life.of(Row)]


def test_an_engine_writes_what_happened(tmp_path: Path) -> None:
    config = engines.config(workers=engines.TWO_WORKERS, run_dir=str(tmp_path), gate=mp.GateConfig(max_live_groups=8))
    checkpoint = tmp_path / "weights"
    engines.write_safetensors(checkpoint)
    with mp.RolloutEngine(config) as engine:
        engine.get(4, timeout=20).release()
        engine.update_weights(checkpoint)
        os.kill(engine.stats().workers[1].pid, signal.SIGKILL)
        until(lambda: engine.stats().workers[1].restarts == 1, "it is started again")
        until(lambda: engine.stats().workers[1].state == "ready", "and ready")
        with pytest.raises(ValueError, match=r"expected a torch\.Tensor; got str"):
            engine.update_weights({"w": "no tensor"})
        result = engine.evaluate([{"prompt": "held out"}])
        engine.log(7, {"accuracy": 0.25, "loss": float("nan"), "note": "no number"})
        until(lambda: engine.stats().live == 8, "the gate is full")
        until(lambda: engine.stats().pending == 8, "all are made")
        at_the_end = engine.stats()
    (life,) = history.read(tmp_path)
    assert (life.start.workers, life.start.trainer_pid) == (2, os.getpid())
    assert abs(life.start.at - time.time()) < 60 and life.start.about["model"] == "simulated"
    last = life.of(Row)[-1]
    for name in Row.__struct_fields__:
        if name != "t":
            assert getattr(last, name) == getattr(at_the_end, name), name
    assert taken(life)[0] == 0 and taken(life) == sorted(taken(life))
    assert all(b.t - a.t >= 0.9 * history.EVERY_S for a, b in zip(life.of(Row)[:-2], life.of(Row)[1:-1], strict=True))
    changes = [(change.worker, change.state) for change in life.of(WorkerChange)]
    assert [state for worker, state in changes if worker == 0] == ["starting", "ready"]
    assert [state for worker, state in changes if worker == 1] == [
        "starting",
        "ready",
        "restarting",
        "starting",
        "ready",
    ]
    death = next(change for change in life.of(WorkerChange) if change.state == "restarting")
    assert death.exit_code == -signal.SIGKILL and death.error
    good, bad = life.of(Update)
    assert (good.version, good.error) == (1, "") and 0 < good.seconds < 30
    assert bad.version == 1 and bad.error.startswith("ValueError: ")
    (evaluated,) = life.of(Evaluated)
    assert (evaluated.reward_mean, evaluated.version) == (pytest.approx(result.rewards.mean()), 1)
    assert [(line.step, line.metrics) for line in life.of(Logged)] == [(7, {"accuracy": 0.25})]
    assert life.lines[-1] == End(t=life.lines[-1].t)


def test_a_run_without_a_folder_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with mp.RolloutEngine(engines.config()) as engine:
        engine.log(1, {"loss": 1.0})
    assert list(tmp_path.rglob(HISTORY)) == []
    with pytest.raises(mp.ConfigError, match="no history of a run lies there"):
        history.read(tmp_path)


def test_whatever_a_cut_leaves_is_read_and_goes_on(tmp_path: Path) -> None:
    written(tmp_path, range(6)).close(stats(6))
    whole = (tmp_path / HISTORY).read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[0] + 1, len(whole), 7):
        (tmp_path / HISTORY).write_bytes(whole[:cut])
        (life,) = history.read(tmp_path)
        lines = sum(end < cut for end in ends) - 1  # but the start
        assert len(life.lines) in (lines, lines + 1), "at most the newline was cut"
        written(tmp_path, range(10, 12)).close(None)
        first, second = history.read(tmp_path)
        assert first.lines == life.lines and taken(second) == [10, 11]


def test_a_kill_leaves_all_but_the_last_line(tmp_path: Path) -> None:
    def write_hard() -> None:
        kept, number = History(tmp_path, engines.config(), 200_000), 0
        while True:
            kept.look(stats(number := number + 1))
            kept.write()

    for round_ in range(5):
        pid = rigs.fork(write_hard)
        until(lambda: (tmp_path / HISTORY).exists() and len(history.read(tmp_path)) == round_ + 1, "it writes")  # noqa: B023
        time.sleep(0.1 * random.random())
        rigs.kill(pid)
        lives = history.read(tmp_path)
        assert len(lives) == round_ + 1
        for life in lives:
            assert taken(life) == sorted(set(taken(life)))


def test_a_long_history_stays_within_its_bound_and_is_still_the_whole_run(tmp_path: Path) -> None:
    bound = 300_000
    kept = History(tmp_path, engines.config(), bound)
    for number in range(20_000):
        kept.look(stats(number))
        if number == 10:
            kept.on_log(1, {"accuracy": 0.5})
        kept.on_log(number, {"loss": 1.0})
        kept.write()
        if number % 1000 == 0:
            assert (tmp_path / HISTORY).stat().st_size <= bound
    kept.close(stats(20_000))
    (life,) = history.read(tmp_path)
    rows = taken(life)
    times = [row.t for row in life.of(Row)]
    assert rows[-1] == 20_000 and rows[0] < 1000 and len(rows) > 200
    assert max(b - a for a, b in itertools.pairwise(times)) < 0.05 * times[-1], "evenly over the run"
    assert any("accuracy" in line.metrics for line in life.of(Logged)), "a rare line gave way to a frequent one"
    assert [path.name for path in tmp_path.iterdir()] == [HISTORY]


def test_a_full_disk_ends_the_history_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = written(tmp_path, range(3))
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / HISTORY).stat().st_size + 10, hard))
    try:
        with caplog.at_level(logging.WARNING, logger="mprollout"):
            kept.look(stats(4))
            kept.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert "ends here: [Errno 27]" in caplog.text
    assert not kept.due
    kept.look(stats(5))
    kept.write()
    kept.close(None)
    assert taken(history.read(tmp_path)[0]) == [0, 1, 2]


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / HISTORY).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(mp.ConfigError, match="no history can be kept there"):
        History(tmp_path, engines.config())
    (tmp_path / HISTORY).unlink()
    (tmp_path / HISTORY).write_text("something else\n")
    with pytest.raises(mp.ConfigError, match="expected lines of a run's history; got b'something else"):
        history.read(tmp_path)


def test_lines_of_one_life_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    kept = History(tmp_path, engines.config())
    kept.tell(Logged(t=2.0, step=2, metrics={}))
    kept.tell(Logged(t=1.0, step=1, metrics={}))
    kept.close(None)
    (life,) = history.read(tmp_path)
    assert [line.step for line in life.of(Logged)] == [1, 2]
    assert isinstance(life.start, Start)
