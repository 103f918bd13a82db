"""Sleep and wake of the workers around a training step on the same GPUs: nothing runs meanwhile, nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
import torch
from engines import TWO_WORKERS, attachable, config, drain, until

import mprollout as mp

pytestmark = pytest.mark.timeout(60)
COLOCATED = mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16, placement="colocated")
SLOW = {"generator": mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=20), "workers": COLOCATED}
"""Each sample takes half a second."""


def states(engine: mp.RolloutEngine) -> list[str]:
    return [worker.state for worker in engine.stats().workers]


def test_samples_that_run_are_retracted_and_go_on_after_waking() -> None:
    """Their deadline stands still meanwhile; an update while they sleep is theirs when they wake."""
    staggered = mp.SimulatedConfig(lengths=[4, 7, 10, 13, 16], tokens_per_s=20)
    changes = SLOW | {"generator": staggered, "fault": mp.FaultConfig(sample_timeout_s=1.6)}
    with mp.RolloutEngine(config(rows=20, **changes)) as engine:
        until(lambda: engine.stats().pending > 0, "groups are finished")
        until(lambda: engine.stats().running_samples >= 8, "others run")
        engine.sleep(timeout=20)
        engine.sleep(timeout=20)
        assert states(engine) == ["asleep", "asleep"]
        finished, ready = sum(worker.samples_finished for worker in engine.stats().workers), engine.stats().pending
        began = time.monotonic()
        engine.get(ready, timeout=20).release()  # what is finished can be had
        assert time.monotonic() - began < 0.5
        with pytest.raises(mp.EngineAsleep, match=r"get\(1\): 0 groups are deliverable, and the workers sleep"):
            engine.get(1)
        with pytest.raises(mp.EngineAsleep, match="evaluate: the workers sleep"):
            engine.submit_evaluation([{"prompt": "x"}])
        time.sleep(1.7)  # the training step: longer than the samples' deadline
        assert (
            sum(worker.samples_finished for worker in engine.stats().workers) == finished
            and engine.stats().running_samples >= 8
        )
        assert engine.update_weights({"w": torch.zeros(4)}, timeout=20) == 1
        assert states(engine) == ["asleep", "asleep"]
        engine.wake(timeout=20)
        engine.wake(timeout=20)
        assert states(engine) == ["ready", "ready"]
        with engine.get(10 - ready, timeout=20) as batch:
            assert any(len(sample.versions) == 2 for group in batch for sample in group.samples)
        assert len(drain(engine)) == 10
        assert engine.stats().retried == 0 and engine.stats().outcomes == {"taken": 20}


def test_a_worker_that_dies_or_starts_while_the_others_sleep_gets_no_memory_before_they_do() -> None:
    generator = mp.SimulatedConfig(mean_tokens=10, start_s=0.5)
    with mp.RolloutEngine(config(rows=40, generator=generator, workers=COLOCATED)) as engine:
        os.kill(engine.stats().workers[0].pid, signal.SIGKILL)
        until(lambda: states(engine)[0] == "starting", "worker 0 starts again")
        engine.sleep(timeout=20)
        assert states(engine) == ["asleep", "asleep"]
        victim = engine.stats().workers[1].pid
        os.kill(victim, signal.SIGKILL)
        until(lambda: states(engine)[1] == "restarting", "worker 1 is dead")
        assert engine.update_weights({"w": torch.zeros(4)}, timeout=20) == 1
        engine.sleep(timeout=20)
        assert states(engine) == ["asleep", "restarting"] and engine.stats().workers[1].pid == victim
        engine.wake(timeout=20)
        until(lambda: states(engine) == ["ready", "ready"], "worker 1 is back")
        assert [worker.version for worker in engine.stats().workers] == [1, 1]
        assert sorted(drain(engine)) == list(range(40))


def test_an_evaluation_sleeps_and_wakes_with_its_workers() -> None:
    with mp.RolloutEngine(config(rows=12, **SLOW)) as engine:
        rows = [{"prompt": str(i)} for i in range(8)]
        one = engine.submit_evaluation(rows, timeout=30, pinned="share")
        other = engine.submit_evaluation(rows, timeout=30)
        until(lambda: states(engine)[1] == "evaluating", "a worker is set aside")
        until(lambda: engine.stats().workers[1].running_samples == 16, "it evaluates")
        engine.sleep(timeout=20)
        assert states(engine) == ["asleep", "asleep"]
        assert engine.update_weights({"w": torch.zeros(4)}, timeout=20) == 1
        assert not one.done() and not other.done()
        engine.wake(timeout=20)
        assert one.result(timeout=20).versions == [0] and set(other.result(timeout=20).versions) <= {0, 1}
        until(lambda: [worker.version for worker in engine.stats().workers] == [1, 1], "worker 1 catches up")
        assert sorted(drain(engine)) == list(range(12))


def test_workers_with_gpus_of_their_own_do_not_sleep() -> None:
    with mp.RolloutEngine(config(workers=TWO_WORKERS)) as engine:
        for change in (engine.sleep, engine.wake):
            with pytest.raises(
                mp.ConfigError, match=f'{change.__name__}: needs WorkerConfig.placement="colocated"; got'
            ):
                change()


def test_a_late_sleeper_is_named_and_wakes_with_the_others() -> None:
    with mp.RolloutEngine(config(rows=40, workers=COLOCATED)) as engine:
        late = engine.stats().workers[1].pid
        os.kill(late, signal.SIGSTOP)
        with pytest.raises(
            mp.GetTimeout,
            match=rf"sleep: not all workers did so within 1 s; worker 0 .* asleep.*worker 1 \(pid {late}\) ready",
        ):
            engine.sleep(timeout=1)
        with pytest.raises(mp.EngineAsleep):
            engine.get(40)
        os.kill(late, signal.SIGCONT)
        engine.wake(timeout=20)
        assert sorted(drain(engine)) == list(range(40))


def test_the_workers_of_a_dead_trainer_wake(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(attachable(str(tmp_path)), workers=COLOCATED)
    engine = mp.RolloutEngine(settings)
    engine.start()
    state = engine.state_dict()
    engine.sleep(timeout=20)
    engine.detach()
    with mp.RolloutEngine.attach(str(tmp_path), state) as engine:
        until(lambda: states(engine) == ["ready", "ready"], "they are awake")
        engine.update_weights({"w": torch.zeros(4)})
        assert sorted(drain(engine)) == list(range(40))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_a_gpu_the_memory_is_released_and_the_weights_come_back(tiny_model: Path) -> None:
    """Not yet run: needs a GPU and the package torch_memory_saver."""
    settings = config(
        generator=mp.SGLangConfig(model=str(tiny_model), engine_args={"mem_fraction_static": 0.5}),
        workers=mp.WorkerConfig(devices=[0], max_running_samples=16, placement="colocated"),
    )
    with mp.RolloutEngine(settings) as engine:
        greedy = mp.SamplingConfig(
            group_size=1, max_new_tokens=32, temperature=0, allow_biased_logprobs=True, ignore_eos=True
        )
        before = engine.evaluate([{"prompt": "one"}], greedy, timeout=60)
        free, total = torch.cuda.mem_get_info(0)
        engine.sleep(timeout=60)
        assert torch.cuda.mem_get_info(0)[0] - free > 0.3 * total
        engine.wake(timeout=60)
        assert engine.evaluate([{"prompt": "one"}], greedy, timeout=60).token_ids == before.token_ids
