"""Weight updates that do not go as planned: given up by time or by Ctrl-C, asked for twice at once, refused."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading

import pytest
import torch
from engines import TWO_WORKERS, config, drain, until
from played import Interrupter, PlayedKeeper, played

import mprollout as mp
from mprollout import messages

pytestmark = pytest.mark.timeout(60)
WEIGHTS = {"w": torch.zeros(2)}


def test_a_late_an_interrupted_and_two_simultaneous_updates():
    """slime#2279: an update given up has no effect: workers go back, its number is gone, no lag is negative."""
    changes = {"generator": mp.SimulatedConfig(mean_tokens=12, tokens_per_s=200), "reward": mp.RewardConfig("exact")}
    with mp.RolloutEngine(config(rows=100, workers=TWO_WORKERS, **changes)) as engine:

        def suspend_worker_1(restarts: int) -> None:
            until(lambda: state_of(1) == (restarts, "ready"), "worker 1 is ready")
            os.kill(engine.stats().workers[1].pid, signal.SIGSTOP)

        def state_of(index: int) -> tuple[int, str]:
            return engine.stats().workers[index].restarts, engine.stats().workers[index].state

        def interrupt_update(version: int) -> None:
            oldest = -1
            while oldest != version:  # worker 0 has applied the update and sampled a whole group with it
                with engine.get(1, timeout=20) as batch:
                    oldest = int(batch[0].token_versions.min())
                    tickets.append(batch[0].ticket)
                    lags.append(batch[0].lag)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

        def taken_back() -> bool:
            return engine.stats().workers[0].version == 1 and state_of(0) == (0, "ready")

        tickets: list[int] = []
        lags: list[int] = []
        assert engine.update_weights(WEIGHTS) == 1
        suspend_worker_1(restarts=0)
        with pytest.raises(
            mp.WeightUpdateFailed,
            match=r"update 2: .* stays 1, .*: worker 1 \(pid \d+\): it has not begun: .* within 1 s; worker 0 ",
        ):
            engine.update_weights(WEIGHTS, timeout=1)
        until(taken_back, "worker 0 is back at version 1")
        suspend_worker_1(restarts=1)
        thread = threading.Thread(target=interrupt_update, args=(3,))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(WEIGHTS)
        thread.join()
        assert engine.policy_version == 1
        made: list[int] = []
        both = [threading.Thread(target=lambda: made.append(engine.update_weights(WEIGHTS))) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert sorted(made) == [4, 5] and engine.policy_version == 5
        until(lambda: (state_of(0), state_of(1)) == ((0, "ready"), (2, "ready")), "only the late one was restarted")
        tickets += drain(engine, lags=lags)
        assert sorted(tickets) == list(range(100)) and min(lags) >= 0


def answer_updates(keeper: PlayedKeeper, wrong: list[str]) -> None:
    """What a keeper does with updates: each version comes once and is answered once, applied or given up."""
    heard = answered = 0
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = keeper.hear((messages.Update, messages.GiveUpUpdate))
            if isinstance(message, messages.Update):
                if message.version <= heard:
                    wrong.append(f"update {message.version} came after {heard}")
                heard = answered = message.version
                keeper.tell(messages.UpdateDone(version=message.version))
            elif message.version > answered:
                answered = message.version
                keeper.tell(
                    messages.UpdateDone(
                        version=answered, failures=[messages.Applied(worker=-1, version=answered, error="no")]
                    )
                )


def test_an_update_interrupted_at_any_line_leaves_the_engine_able_to_update_and_to_deliver():
    with played(rows=10_000) as on:
        wrong: list[str] = []
        thread = threading.Thread(target=answer_updates, args=(on.keeper, wrong), daemon=True)
        thread.start()
        interrupter, places, last = Interrupter(spare=("staging.py", "weights.py", "ring.py")), set(), 0
        for k in itertools.count(1):
            done = None
            with contextlib.suppress(KeyboardInterrupt):
                done = interrupter.run(k, lambda: on.engine.update_weights(WEIGHTS, timeout=10))
            places.add(interrupter.where)
            if done is not None and not interrupter.where:
                break
            version = on.engine.update_weights(WEIGHTS, timeout=10)
            assert last < version == on.engine.policy_version and not wrong, (
                f"{wrong}, interrupted at {interrupter.where}"
            )
            last = version
            on.publish(1, version)  # the attendant admits: it lives, and no lock was left behind
            with on.engine.get(1, timeout=10) as batch:
                assert [group.lag for group in batch] == [0]
        assert len(places) > 30 and any(place.startswith("attendant.py") for place in places)
        on.keeper.channel.socket.shutdown(2)
        thread.join()


def test_an_update_of_nothing_is_refused_and_mints_no_version():
    with played() as on:
        for nothing in ({}, []):
            with pytest.raises(ValueError, match="the source has no tensors"):
                on.engine.update_weights(nothing)
        assert on.engine.policy_version == 0 and on.engine.state_dict()["minted"] == 0


def test_with_a_lag_bound_groups_come_in_ticket_order_and_lag_is_bounded():
    """prime-rl#2960, prime-rl#1901: lag <= K for every group, nothing discarded."""
    for max_lag in (0, 2):
        changes = {
            "workers": TWO_WORKERS,
            "gate": mp.GateConfig(groups_per_update=4, max_lag=max_lag),
            "generator": mp.SimulatedConfig(mean_tokens=20, sigma=1.0, tokens_per_s=3000),
        }
        with mp.RolloutEngine(config(**changes)) as engine:
            tickets, lags = [], []
            for version in range(1, 10):
                with engine.get(4, timeout=20) as batch:
                    tickets += batch.tickets
                    lags += [group.lag for group in batch]
                    assert all((group.token_versions >= version - 1 - max_lag).all() for group in batch)
                assert engine.update_weights({"w": torch.full((4,), float(version))}) == version
            assert tickets == list(range(36)) and 0 <= max(lags) <= max_lag
            assert engine.stats().outcomes == {"taken": 36}


def test_an_update_without_its_groups_is_refused_under_a_lag_bound():
    gate = mp.GateConfig(groups_per_update=4, max_lag=1)
    with played(gate=gate) as on, pytest.raises(mp.ConfigError, match="update_weights refused"):
        on.engine.update_weights({"w": torch.zeros(1)})


def test_the_gate_can_wait_for_the_first_weights():
    with mp.RolloutEngine(config(gate=mp.GateConfig(groups_per_update=4, max_lag=0, await_weights=True))) as engine:
        with pytest.raises(mp.GateStarved, match="waits for the first update_weights"):
            engine.get(4)
        assert engine.update_weights({"w": torch.zeros(1)}) == 1
        with engine.get(4, timeout=20) as batch:
            assert all((group.token_versions == 1).all() and group.lag == 0 for group in batch)


def test_a_failed_update_does_not_advance_the_version():
    """slime#2279: and its number is never used again."""
    with mp.RolloutEngine(config()) as engine:
        assert engine.update_weights({"w": torch.zeros(4)}) == 1
        with pytest.raises(mp.WeightUpdateFailed, match="stays 1"):
            engine.update_weights({"other": torch.zeros(4)})
        assert engine.policy_version == 1
        assert engine.update_weights({"w": torch.ones(4)}) == 3
        assert len(drain(engine)) == 40


def test_a_restarted_worker_has_the_current_weights_before_it_claims():
    workers = mp.WorkerConfig(devices=["cpu"], max_running_samples=16)
    with mp.RolloutEngine(
        config(rows=100, workers=workers, generator=mp.SimulatedConfig(mean_tokens=12, tokens_per_s=500))
    ) as engine:
        engine.get(4, timeout=20).release()
        engine.update_weights({"w": torch.zeros(4)})
        os.kill(engine.stats().workers[0].pid, signal.SIGKILL)
        until(
            lambda: engine.stats().workers[0].restarts == 1 and engine.stats().workers[0].state == "ready", "restarted"
        )
        for taken in range(12):
            with engine.get(4, timeout=20) as batch:
                assert taken < 4 or all((group.token_versions == 1).all() for group in batch)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("update_timeout_s", "phase `update` took more than WeightsConfig.update_timeout_s=0.3"),
        ("timeout_s", "phase `update`: the update took more than WeightsConfig.timeout_s=0.3"),
    ],
)
def test_a_worker_that_is_late_in_a_phase_is_named_and_started_again(setting: str, says: str):
    """vllm#46611: the error names phase, setting, worker and pid; each attempt has a version of its own."""
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=12, update_s=30.0),
        "weights": mp.WeightsConfig(**{setting: 0.3}),
    }
    with mp.RolloutEngine(config(**changes)) as engine:
        for attempt in (1, 2):
            worker = engine.stats().workers[0]
            with pytest.raises(
                mp.WeightUpdateFailed, match=rf"update {attempt}: .* stays 0, .*: {re.escape(says)}"
            ) as caught:
                engine.update_weights(WEIGHTS, timeout=20)
            assert (caught.value.worker, caught.value.pid) == (0, worker.pid)
            until(
                lambda n=attempt: (engine.stats().workers[0].restarts, engine.stats().workers[0].state) == (n, "ready"),
                "it is back",
            )
        assert sorted(drain(engine)) == list(range(40))


def intervals(engine: mp.RolloutEngine) -> list[tuple[float, float, int]]:
    """Beginning and end of each worker's last update, in order."""
    return sorted((*worker.update_s, worker.worker) for worker in engine.stats().workers)


def test_a_rolling_update_never_stops_all_workers_and_keeps_the_lag():
    """One after another; meanwhile the others generate; the version moves when all have it."""
    changes = {
        "generator": mp.SimulatedConfig(mean_tokens=10, sigma=0.0, tokens_per_s=25, update_s=0.1),
        "workers": mp.WorkerConfig(devices=["cpu"] * 3, max_running_samples=16),
        "gate": mp.GateConfig(groups_per_update=12, max_lag=2),
        "weights": mp.WeightsConfig(rolling=True),
    }
    with mp.RolloutEngine(config(rows=400, **changes)) as engine:
        busy: list[tuple[int, int, int]] = []
        lags: list[int] = []
        rolled: list[list[tuple[float, float, int]]] = []

        def take() -> None:
            with engine.get(12, timeout=20) as batch:
                busy.extend((group.worker, group.meta.started_ns, group.meta.generated_ns) for group in batch)
                lags.extend(group.lag for group in batch)

        for version in range(1, 7):
            take()
            assert engine.update_weights(WEIGHTS, timeout=20) == version == engine.policy_version
            rolled.append(intervals(engine))
            assert [worker.version for worker in engine.stats().workers] == [version] * 3
        take()
        take()
        for update in rolled:
            for (_, end, _), (begin, _, _) in itertools.pairwise(update):
                assert end <= begin
            for begin, end, worker in update:
                assert end - begin >= 0.1
                assert any(
                    other != worker and started_ns < end * 1e9 and generated_ns > begin * 1e9
                    for other, started_ns, generated_ns in busy
                )
        assert min(lags) >= 0 and 1 <= max(lags) <= 2


def test_a_rolling_update_that_fails_spares_those_whose_turn_it_was_not():
    changes = {
        "workers": mp.WorkerConfig(devices=["cpu"] * 3, max_running_samples=16),
        "weights": mp.WeightsConfig(rolling=True),
    }
    with mp.RolloutEngine(config(rows=100, **changes)) as engine:
        assert engine.update_weights(WEIGHTS, timeout=20) == 1
        began = {worker: begin for begin, _, worker in intervals(engine)}
        late = engine.stats().workers[1].pid
        os.kill(late, signal.SIGSTOP)
        with pytest.raises(mp.WeightUpdateFailed, match=rf"worker 1 \(pid {late}\): it has not begun"):
            engine.update_weights(WEIGHTS, timeout=1.5)
        until(
            lambda: [w.state for w in engine.stats().workers] == ["ready"] * 3 and engine.stats().workers[1].restarts,
            "all are back",
        )
        until(lambda: [w.version for w in engine.stats().workers] == [1, 1, 1], "with the last good version")
        assert {worker: begin for begin, _, worker in intervals(engine)}[2] == began[2]
        assert engine.update_weights(WEIGHTS, timeout=20) == 3
        assert [w.restarts for w in engine.stats().workers] == [0, 1, 0]
        assert sorted(drain(engine)) == list(range(100))


def test_rolling_is_refused_where_nothing_generates_beside_an_update():
    with pytest.raises(mp.ConfigError, match=r"rolling needs GateConfig\.max_lag >= 1 or None"):
        config(weights=mp.WeightsConfig(rolling=True), gate=mp.GateConfig(groups_per_update=4, max_lag=0))
    with pytest.raises(mp.ConfigError, match='rolling needs transport="shm" or "disk": with \'ipc\' all'):
        mp.WeightsConfig(rolling=True, transport="ipc")
