"""The gate's arithmetic, against the promise it makes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprollout import ConfigError, GateConfig, GateStarved
from mprollout.gate import Gate


def test_credit_is_bounded_by_live_groups():
    gate = Gate(GateConfig(), max_live_groups=3)
    gate.admitted = 3
    assert gate.credit == 0 and gate.live == 3
    gate.taken = 1
    assert gate.credit == 1
    gate.ended = 1
    assert gate.credit == 2


def test_max_lag_0_admits_one_batch_an_update():
    gate = Gate(GateConfig(groups_per_update=8, max_lag=0), max_live_groups=8)
    gate.admitted = gate.taken = 8
    assert gate.credit == 0
    gate.updated()
    assert gate.credit == 8


def test_endings_return_their_lag_credit():
    gate = Gate(GateConfig(groups_per_update=8, max_lag=0), max_live_groups=8)
    gate.admitted, gate.ended = 8, 1
    assert gate.credit == 1


def test_the_first_update_is_the_baseline_when_weights_are_awaited():
    gate = Gate(GateConfig(groups_per_update=2, max_lag=0, await_weights=True), max_live_groups=2)
    assert gate.credit == 0
    gate.check_update()
    gate.updated()
    assert gate.credit == 2 and gate.updates == 0


def test_an_update_that_would_break_the_bound_is_refused():
    gate = Gate(GateConfig(groups_per_update=4, max_lag=1), max_live_groups=8)
    gate.admitted, gate.taken = 8, 3
    with pytest.raises(ConfigError, match="groups_per_update=4 taken groups; 3 were taken and 0 updates are done"):
        gate.check_update()
    gate.taken = 4
    gate.check_update()


def test_a_get_beyond_the_credit_names_what_is_needed():
    gate = Gate(GateConfig(groups_per_update=4, max_lag=1), max_live_groups=8)
    gate.admitted = gate.taken = 8
    with pytest.raises(GateStarved, match="0 updates allow 8 tickets, 8 were taken: call update_weights first"):
        gate.check_get(4, None)
    gate.updated()
    gate.check_get(4, None)


@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.integers(1, 12))
def test_no_schedule_breaks_the_lag_bound(data, batch, max_lag, max_live):
    """prime-rl#2960: whatever the order of admissions, endings, takes and updates, no group is older than K updates at its take."""
    gate = Gate(GateConfig(groups_per_update=batch, max_lag=max_lag), max_live)
    live: list[tuple[int, int]] = []  # ticket, completed updates when it was admitted (it is sampled no earlier)
    for action in data.draw(st.lists(st.sampled_from(["admit", "take", "end", "update"]), max_size=80)):
        if action == "admit" and gate.credit:
            live.append((gate.admitted, gate.updates))
            gate.admitted += 1
        elif action == "take" and live:
            _, admitted_at = live.pop(0)  # ticket order
            gate.taken += 1
            assert gate.updates - admitted_at <= max_lag
        elif action == "end" and live:
            live.pop(data.draw(st.integers(0, len(live) - 1)))
            gate.ended += 1
        elif action == "update":
            try:
                gate.check_update()
            except ConfigError:
                continue
            gate.updated()
        assert 0 <= gate.live == len(live) <= max_live
