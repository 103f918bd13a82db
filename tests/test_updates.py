"""The protocol of a weight update: one answer an attempt, whatever is interrupted."""

from __future__ import annotations

from collections.abc import Callable

import engines
import pytest
import torch

import mprollout as mp
from mprollout import messages
from mprollout.gate import Gate
from mprollout.updates import Updates

pytestmark = pytest.mark.timeout(60)

WEIGHTS = {"w": torch.zeros(4)}


@pytest.mark.parametrize("cut", [(messages.Update,), (messages.Update, messages.GiveUpUpdate), ()])
def test_an_interrupted_update_is_given_up_and_the_next_one_goes_through(
    monkeypatch: pytest.MonkeyPatch, cut: tuple[type, ...]
) -> None:
    """Ctrl-C before the send, before the send and the giving up, and while it waits: the version number is used up, nothing hangs."""
    with mp.RolloutEngine(engines.config(workers=mp.WorkerConfig(devices=["cpu"], max_running_samples=16))) as engine:
        assert engine.update_weights(WEIGHTS) == 1
        attendant = engine._attendant
        assert attendant is not None
        send = attendant.send

        def interrupted_send(message: messages.Message, fds: list[int] | None = None) -> None:
            if isinstance(message, cut):
                raise KeyboardInterrupt
            send(message, fds)

        def interrupted_wait(true: Callable[[], object], give_up: Callable[[], None]) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(attendant, "send", interrupted_send)
            if not cut:
                patched.setattr(attendant, "wait_news", interrupted_wait)
            with pytest.raises(KeyboardInterrupt):
                engine.update_weights(WEIGHTS)
        assert engine.policy_version == 1
        assert engine.update_weights(WEIGHTS, timeout=20) == 3
        assert engine.policy_version == 3
        assert sorted(engines.drain(engine)) == list(range(40))


def test_a_version_that_a_dead_trainer_minted_and_never_completed_counts_as_the_one_before() -> None:
    """Workers that had applied it sampled with it; the update died with its trainer."""
    gate = Gate(mp.GateConfig(groups_per_update=1, max_lag=1), max_live_groups=2)
    updates = Updates(engines.config(), gate, minted=6, known={1: 1, 2: 2, 4: 3, 5: 4}, base=2)
    gate.updates = 1
    assert [updates.lag(version, gate.updates) for version in range(7)] == [3, 2, 1, 1, 0, 0, 0]
    assert updates.mint() == 7 and updates.lag(7, gate.updates) == 0
    gate.updates = 3
    assert [updates.lag(version, gate.updates) for version in range(8)] == [5, 4, 3, 3, 2, 1, 1, 2]


def test_a_trainers_first_push_is_no_update_of_the_policy() -> None:
    """Trainer 1 pushed 1 to 3 (the first its own weights on disk), trainer 2 began from 2 as 4, pushed 5, and was given up with 6; trainer 3 has 5's checkpoint."""
    gate = Gate(mp.GateConfig(groups_per_update=1, max_lag=1), max_live_groups=2)
    updates = Updates(engines.config(), gate, minted=6, known={1: 0, 2: 1, 3: 2, 4: 1, 5: 2, 6: 2}, base=2)
    gate.updates = 1
    assert [updates.lag(version, gate.updates) for version in range(7)] == [3, 3, 2, 1, 2, 1, 1]
    assert updates.updates == 3
