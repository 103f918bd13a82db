"""What is refused before anything starts: with the setting's or argument's name, what was expected, what came."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
from engines import config
from played import played

import mprollout as mp
from mprollout.child import worker_environment
from mprollout.limits import memory_limit
from mprollout.ring import check_memory, plan
from mprollout.rollout import load_rollout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": "cpu"}, r"WorkerConfig\.devices: Expected `array`, got `str`; got 'cpu'"),
        ({"devices": 2}, r"WorkerConfig\.devices: Expected `array`, got `int`; got 2"),
        (
            {"devices": [0, 1.5]},
            r"WorkerConfig\.devices: Expected `int \| str \| array`, got `float` - at `\$\[1\]`; got \[0, 1\.5\]",
        ),
        (
            {"devices": ["gpu"]},
            r'WorkerConfig\.devices must be GPU numbers >= 0, lists of them, or "cpu"; got \[\'gpu\'\]',
        ),
        ({"devices": [-1]}, r"WorkerConfig\.devices must be GPU numbers >= 0, .*; got \[-1\]"),
        ({"devices": [[]]}, r"WorkerConfig\.devices must be GPU numbers >= 0, .*; got \[\[\]\]"),
        ({"devices": [[0, 1], 1]}, r"WorkerConfig\.devices must be without a GPU twice; got \[\[0, 1\], 1\]"),
        ({"devices": ["cpu"] * 65}, r"WorkerConfig\.devices must be a list of 1 to 64 entries"),
        ({"env": ["A=1"]}, r"WorkerConfig\.env: Expected `object`, got `array`; got \['A=1'\]"),
        (
            {"env": {"OMP_NUM_THREADS": 1}},
            r"WorkerConfig\.env: Expected `str`, got `int` - at `\$\[\.\.\.\]`; got \{'OMP_NUM_THREADS': 1\}",
        ),
        ({"max_restarts": -1}, r"WorkerConfig\.max_restarts must be an integer >= 0; got -1"),
        ({"max_running_samples": True}, r"WorkerConfig\.max_running_samples: Expected `int`, got `bool`; got True"),
        (
            {"progress_timeout_s": math.inf},
            r"WorkerConfig\.progress_timeout_s must be a finite number of seconds > 0; got inf",
        ),
    ],
)
def test_a_wrong_worker_setting_is_named_with_its_rule_and_value(settings, message):
    with pytest.raises(mp.ConfigError, match=message):
        mp.WorkerConfig(**settings)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"workers": {"devices": [0, 0]}},
            r"EngineConfig\.workers: WorkerConfig\.devices must be without a GPU twice; got \[0, 0\]",
        ),
        (
            {"workers": {"device": [0]}},
            r"EngineConfig\.workers: Object contains unknown field `device`; got \{'device'",
        ),
        ({"workers": ["cpu"]}, r"EngineConfig\.workers: Expected `object`, got `array`; got \['cpu'\]"),
        ({"generator": "sglang"}, r"EngineConfig\.generator: Expected `object`, got `str`; got 'sglang'"),
        ({"run_dir": 7}, r"EngineConfig\.run_dir: Expected `str \| null`, got `int`; got 7"),
        ({"seed": "x"}, r"EngineConfig\.seed: Expected `int`, got `str`; got 'x'"),
    ],
)
def test_a_part_of_another_type_is_named(part, message):
    with pytest.raises(mp.ConfigError, match=message):
        config(**part)


def test_a_mapping_is_made_the_part_that_it_describes():
    made = config(workers={"devices": ["cpu"]}, generator={"backend": "simulated", "mean_tokens": 3})
    assert made.workers == mp.WorkerConfig(devices=["cpu"]) and made.generator == mp.SimulatedConfig(mean_tokens=3)


@pytest.mark.parametrize(
    ("visible", "devices", "given"),
    [
        (None, [0, 2], ["0", "2"]),
        ("4,7", [1, 0], ["7", "4"]),
        ("GPU-ab,GPU-cd,MIG-ef", [[0, 2], 1], ["GPU-ab,MIG-ef", "GPU-cd"]),
        ("4,7", ["cpu"], [""]),
        ("", [0, [1, 2]], ["", ""]),
    ],
)
def test_a_workers_gpus_are_those_that_the_trainer_sees(monkeypatch, visible, devices, given):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = mp.WorkerConfig(devices=devices, env={"MY_SETTING": "1"})
    made = [worker_environment(settings, index, Path("/w")) for index in range(len(devices))]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in made] == given
    assert all((environment["MY_SETTING"], environment["TMPDIR"]) == ("1", "/w") for environment in made)


def test_a_gpu_that_is_not_visible_and_a_run_dir_that_is_no_folder_are_refused_by_start(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    engine = mp.RolloutEngine(config(workers=mp.WorkerConfig(devices=[0, 1], max_running_samples=16)))
    with pytest.raises(
        mp.ConfigError, match=r"WorkerConfig\.devices: GPU 1 is asked for, CUDA_VISIBLE_DEVICES='3' has 1"
    ):
        engine.start()
    (tmp_path / "file").touch()
    engine = mp.RolloutEngine(config(run_dir=tmp_path / "file" / "run"))
    with pytest.raises(
        mp.ConfigError, match=r"EngineConfig\.run_dir='.*/file/run': no folder can be made there: .*Not a directory"
    ):
        engine.start()
    with pytest.raises(mp.EngineClosed):
        engine.start()


@pytest.mark.parametrize("n", [0, -1, 2.0, "4", None, True, np.int64(4)])
def test_get_takes_a_number_of_groups(n):
    with pytest.raises(mp.ConfigError, match=r"get\(n\): n must be an integer >= 1; got "):
        mp.RolloutEngine(config()).get(n)


@pytest.mark.parametrize("timeout", ["x", -1, math.nan, True])
def test_get_takes_seconds(timeout):
    with pytest.raises(mp.ConfigError, match=r"get\(timeout\): expected seconds >= 0 or None; got "):
        mp.RolloutEngine(config()).get(1, timeout=timeout)


def test_a_state_that_state_dict_did_not_return_is_refused_and_the_engine_can_still_load_one():
    with played() as on:
        on.publish(3)
        on.engine.get(2, timeout=10).release()
        state = json.loads(json.dumps(on.engine.state_dict()))
        with pytest.raises(mp.ConfigError, match=r"load_state_dict comes before start\(\)"):
            on.engine.load_state_dict(state)
    engine = mp.RolloutEngine(config())
    for field in ("ledger", "source", "minted"):
        with pytest.raises(mp.ConfigError, match=rf"state: expected what state_dict\(\) returned; got .*{field}"):
            engine.load_state_dict({key: value for key, value in state.items() if key != field})
    for other in (None, [], "state.json", 3, {**state, "minted": None}, {**state, "minted": "many"}):
        with pytest.raises(mp.ConfigError, match=r"state: expected what state_dict\(\) returned; got "):
            engine.load_state_dict(other)  # type: ignore[arg-type]
    for field, value in [
        ("format", 1),
        ("next", None),
        ("next", "two"),
        ("next", -1),
        ("next", 1 << 62),
        ("unresolved", [[5]]),
        ("unresolved", None),
        ("unresolved", [[4, 3], [2, 2]]),
        ("unresolved", [[3, 1 << 40]]),
        ("unresolved", [[-1, 0]]),
        ("ended", 3),
        ("ended", {"failed:reward": -1}),
        ("ended", {"failed:reward": 100}),
    ]:
        broken = copy.deepcopy(state)
        broken["ledger"][field] = value
        with pytest.raises(mp.ConfigError, match="state: expected a ledger state of format 2, got"):
            engine.load_state_dict(broken)
    for missing in state["ledger"]:
        with pytest.raises(mp.ConfigError, match=missing):
            engine.load_state_dict({**state, "ledger": {k: v for k, v in state["ledger"].items() if k != missing}})
    engine.load_state_dict(state)
    assert [engine._ledger.next_ticket() for _ in range(2)] == [2, 3]


async def some_rollout(session: object, prompt: object) -> None: ...


def plain_rollout(session: object, prompt: object) -> None: ...


def test_a_rollout_is_an_async_function():
    assert load_rollout(some_rollout) is load_rollout(f"{__name__}:some_rollout") is some_rollout
    message = r"EngineConfig\.rollout: expected `async def rollout\(session, prompt\)`, got "
    with pytest.raises(mp.ConfigError, match=message):
        mp.RolloutEngine(config(rollout=plain_rollout))
    with pytest.raises(mp.ConfigError, match=message):  # its module is imported by the workers alone
        load_rollout(f"{__name__}:plain_rollout")
    for rollout in ("no_such_module:rollout", __name__, "", 7):
        with pytest.raises(mp.ConfigError, match=r"EngineConfig\.rollout.*; got "):
            mp.RolloutEngine(config(rollout=rollout))
    with pytest.raises(
        mp.ConfigError, match=r"EngineConfig\.rollout=.*has no 'some_rolout' \(did you mean some_rollout"
    ):
        load_rollout(f"{__name__}:some_rolout")


def test_a_ring_beyond_the_cgroup_is_refused_with_size_limit_and_remedy(tmp_path):
    """dlrover#1046, pytorch#5040: a start-up error, never a SIGBUS; /dev/shm plays no part (memfd)."""
    group = tmp_path / "sys/fs/cgroup/job/step"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 8000000 kB\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("64000000\n")  # the parent's limit binds
    (group.parent / "memory.current").write_text("4000000\n")
    assert memory_limit(tmp_path)[0] == 60_000_000
    wide = plan(config(gate=mp.GateConfig(max_live_groups=1000)))
    with pytest.raises(
        mp.MemoryBudgetError, match=r"needs 70,000,000 bytes .* only 60,000,000 are left .*lower max_live_groups"
    ):
        check_memory(70_000_000, wide, tmp_path)


def test_a_ring_beyond_this_machine_is_refused_at_construction():
    with pytest.raises(mp.MemoryBudgetError, match="are left"):
        mp.RolloutEngine(config(gate=mp.GateConfig(max_live_groups=10_000), ring=mp.RingConfig(max_group_bytes=10**7)))
