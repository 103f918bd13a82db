"""Record and replay: byte for byte, in order, each group once, whatever interrupts; and the recording's own limits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import rewards
import torch
from engines import config

import mprollout as mp
from mprollout import record
from mprollout.batch import Batch
from mprollout.record import Recorder, ReplaySource
from mprollout.schema import SCHEMA, Field

pytestmark = pytest.mark.timeout(60)
EXTRA = Field("image", "<f2", "sample", (2, 2))


def contents(batch: Batch) -> list[tuple[object, ...]]:
    """Everything of a batch, as bytes."""
    names = [field.name for field in (*SCHEMA, EXTRA)]
    found: list[tuple[object, ...]] = []
    for group in batch:
        fields = [(group.field(name).dtype.str, group.field(name).shape, group.field(name).tobytes()) for name in names]
        found.append((group.ticket, group.worker, group.attempt, group.lag, *fields))
    return found


def as_bytes(packed: mp.Packed) -> dict[str, bytes]:
    arrays = packed._asdict()
    return {name: array.tobytes() for name, array in {**arrays, **arrays.pop("extra")}.items() if name != "extra"}


def settings(tmp_path: Path, **changes: object) -> mp.EngineConfig:
    parts: dict[str, object] = {
        "rollout": rewards.with_an_image,
        "ring": mp.RingConfig(extra_fields=(EXTRA,)),
        "record": "run",
        "run_dir": str(tmp_path / "run"),
        "weights": mp.WeightsConfig(keep_versions=2),
    }
    return config(**(parts | changes))


def test_a_replayed_run_gives_the_same_batches_byte_for_byte(tmp_path: Path) -> None:
    taken, packed = [], []
    with mp.RolloutEngine(settings(tmp_path)) as engine:
        for n in (3, 1, 4, 4):
            with engine.get(n, timeout=20) as batch:
                taken.append((engine.policy_version, contents(batch)))
                packed.append(batch.packed())
            engine.update_weights({"w": torch.full((2,), float(n))})
    with ReplaySource(tmp_path / "run" / "record") as source:
        replayed = []
        for want in packed:
            with source.get() as batch:
                replayed.append((source.policy_version, contents(batch)))
                for name, array in as_bytes(batch.packed()).items():
                    assert array == as_bytes(want)[name], name
        assert replayed == taken
        with pytest.raises(mp.BatchReleased):
            batch[0].rewards  # noqa: B018
        with pytest.raises(mp.DataExhausted, match="has ended"):
            source.get()
    with ReplaySource(tmp_path / "run" / "record") as source:  # and in batches of another size
        together = contents(source.get(5)) + contents(source.get(5))
        with pytest.raises(mp.DataExhausted) as caught:
            source.get(5)
        together += contents(source.get(caught.value.available))
        assert together == [group for _, groups in taken for group in groups]
    kept = sorted(path.name for path in (tmp_path / "run" / "weights").iterdir())
    assert kept == ["3.safetensors", "4.safetensors"]  # the last two of four


def test_an_interrupted_get_is_recorded_once_and_what_nobody_got_is_not(tmp_path: Path) -> None:
    """Ctrl-C between the recording of a batch and its hand-over, at each place in turn."""
    got: list[int] = []
    with mp.RolloutEngine(settings(tmp_path, weights=mp.WeightsConfig())) as engine:
        recorder = engine._recorder
        assert recorder is not None
        add = recorder.add

        def interrupted(batch: Batch, version: int) -> None:
            add(batch, version)
            recorder.add = add  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGINT)

        with engine.get(2, timeout=20) as batch:
            got += batch.tickets
        for n in (2, 1, 3):  # the next get asks for as many, for fewer, for more
            recorder.add = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                engine.get(2, timeout=20)
            with engine.get(n, timeout=20) as batch:
                got += batch.tickets
        recorder.add = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.get(2, timeout=20)
        assert len(engine._taker.parked) == 2  # type: ignore[union-attr]
    rows = list(record.read(tmp_path / "run" / "record"))
    assert [row.ticket for row in rows] == got
    sizes = [sum(row.batch == batch for row in rows) for batch in sorted({row.batch for row in rows})]
    assert sizes == [2, 2, 1, 3]


@pytest.fixture
def batches(tmp_path: Path) -> list[Batch]:
    """Four recorded batches, to record again."""
    with mp.RolloutEngine(settings(tmp_path, weights=mp.WeightsConfig())) as engine:
        for _ in range(4):
            engine.get(2, timeout=20).release()
    source = ReplaySource(tmp_path / "run" / "record")
    return [source.get() for _ in range(4)]


def test_a_recording_is_bounded_continued_and_whole(
    tmp_path: Path, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_PART_BYTES", 1)  # a part a batch, if it cannot come again
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / ".part-000007.parquet").write_bytes(b"half of one")
    for parts in (3, 6):  # the second time, it is continued; the last two batches of each share a part
        recorder = Recorder(folder, (EXTRA,), {"model": ""}, max_bytes=1 << 30)
        for batch in batches:
            recorder.add(batch, 0)
        recorder.close()
        assert sorted(os.listdir(folder)) == [f"part-{i:06d}.parquet" for i in range(parts)]
    assert [row.batch for row in record.read(folder)] == [i // 2 for i in range(16)] and record.count(folder) == 16
    size = (folder / "part-000005.parquet").stat().st_size
    recorder = Recorder(folder, (EXTRA,), {"model": ""}, max_bytes=int(2.5 * size))
    recorder.add(batches[0], 2)
    recorder.close()
    assert sorted(os.listdir(folder)) == ["part-000005.parquet", "part-000006.parquet"]  # the oldest are gone


def test_a_disk_that_is_full_is_told_before_the_next_batch_is_handed_over(
    tmp_path: Path, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_PART_BYTES", 1)
    recorder = Recorder(tmp_path / "gone", (EXTRA,), {}, max_bytes=1 << 30)
    os.rmdir(tmp_path / "gone")
    for batch in batches[:3]:
        recorder.add(batch, 0)
    with pytest.raises(FileNotFoundError):
        recorder.close()


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(mp.ConfigError, match="no recording"):
        ReplaySource(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "part-000000.parquet")
    with pytest.raises(mp.ConfigError, match="its format is None"):
        ReplaySource(tmp_path)
    with pytest.raises(mp.ConfigError, match="need run_dir"):
        config(record="run")
    with pytest.raises(mp.ConfigError, match="no folder can be made"):
        Recorder(tmp_path / "part-000000.parquet" / "x", (), {}, 1)
