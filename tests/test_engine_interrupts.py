"""Ctrl-C at any moment of a `get`: nothing is lost, nothing comes twice; a checkpoint holds what the trainer has."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import threading
import time

import pytest
from engines import config
from played import Interrupter, played

import mprollout as mp
from mprollout.ledger import Ledger

pytestmark = pytest.mark.timeout(60)


def resolved(engine: mp.RolloutEngine) -> list[int]:
    """The tickets that a checkpoint made now would not train again."""
    ledger = Ledger.from_state(engine.state_dict()["ledger"])
    return [ticket for ticket in range(engine._ledger.next) if ledger.is_resolved(ticket)]


@pytest.mark.parametrize(
    "gate",
    [mp.GateConfig(max_live_groups=6), mp.GateConfig(max_live_groups=6, groups_per_update=2, max_lag=1000)],
    ids=["publish order", "ticket order"],
)
def test_a_get_interrupted_at_any_line_neither_loses_nor_repeats(gate):
    with played(rows=10_000, gate=gate) as on:
        taken: list[int] = []
        interrupter, places = Interrupter(), set()
        for k in itertools.count(1):
            on.publish(2)
            got = None
            with contextlib.suppress(KeyboardInterrupt):
                got = interrupter.run(k, lambda: on.engine.get(2, timeout=10))
            places.add(interrupter.where)
            if got is None:
                assert resolved(on.engine) == taken, f"interrupted at {interrupter.where}"
                on.engine.audit()
                got = on.engine.get(2, timeout=10)
            elif not interrupter.where:
                break
            taken += got.tickets
            got.release()
            assert taken == list(range(len(taken))), f"interrupted at {interrupter.where}"
            assert on.engine.stats().taken == len(taken)
        assert k > 50 and len(places) > 30  # every line of the path was one


@pytest.mark.parametrize(
    "gate",
    [mp.GateConfig(max_live_groups=6), mp.GateConfig(groups_per_update=6, max_lag=0)],
    ids=["the data ends", "the credit ends"],
)
def test_groups_kept_from_an_interrupted_get_count_for_a_larger_one(gate, monkeypatch):
    with played(rows=6, gate=gate) as on:
        on.publish(4)
        with monkeypatch.context() as patch:
            patch.setattr(on.engine._attendant, "ring", lambda: signal.raise_signal(signal.SIGINT))  # its last call
            with pytest.raises(KeyboardInterrupt):
                on.engine.get(4, timeout=10)
        with pytest.raises(mp.GetTimeout):
            on.engine.get(6, timeout=0.1)
        on.publish(2)
        assert resolved(on.engine) == []
        assert on.engine.get(6, timeout=10).tickets == [0, 1, 2, 3, 4, 5]


def test_a_storm_of_interrupts_while_workers_publish_neither_loses_nor_repeats():
    """pmem#168: signals at 500 Hz, the waits of `get` and its native steps among what they hit."""
    armed = [False]  # not an Event: a signal could raise inside its methods, after `get` has handed over
    storm_over, main = threading.Event(), threading.get_ident()

    def on_signal(*_: object) -> None:
        if armed[0]:
            raise KeyboardInterrupt

    def storm() -> None:
        dice = random.Random(0)
        while not storm_over.is_set():
            time.sleep(dice.uniform(0, 0.004))
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, on_signal)
    changes = {
        "reward": mp.RewardConfig("exact"),
        "workers": mp.WorkerConfig(devices=["cpu"], max_running_samples=16),
        "generator": mp.SimulatedConfig(mean_tokens=8, tokens_per_s=2000),
    }
    thread = threading.Thread(target=storm)
    try:
        with mp.RolloutEngine(config(rows=300, **changes)) as engine:
            taken: list[int] = []
            interrupts = 0
            thread.start()
            while len(taken) < 300:
                try:
                    armed[0] = True
                    batch = engine.get(4, timeout=20)
                    armed[0] = False
                except KeyboardInterrupt:
                    armed[0] = False
                    interrupts += 1
                    assert resolved(engine) == sorted(taken)
                    continue
                finally:
                    armed[0] = False
                taken += batch.tickets
                batch.release()
            assert sorted(taken) == list(range(300)) and interrupts > 20
            assert engine.audit() == {"taken": 300} and engine._taker.parked == []
    finally:
        storm_over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
