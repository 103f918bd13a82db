"""The ledger against a plain dictionary."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprollout import ConfigError
from mprollout.ledger import Ledger


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=200))
def test_a_ledger_partitions_tickets_like_a_dictionary(actions):
    ledger, live, ended = Ledger(), [], {}
    for admit, pick in actions:
        if admit or not live:
            ticket = ledger.next_ticket()
            assert ticket not in ended and ticket not in live
            live.append(ticket)
        else:
            ticket = live.pop(pick % len(live))
            ended[ticket] = "taken"
            ledger.resolve(ticket, "taken")
        assert ledger.resolved == len(ended) and ledger.admitted_below == len(ended) + len(live)
        assert all(ledger.is_resolved(t) == (t in ended) for t in range(ledger.admitted_below))
        assert ledger.watermark == min(live, default=ledger.admitted_below)
    # A loaded state hands out exactly what was not resolved, lowest first, then goes on.
    loaded = Ledger.from_state(json.loads(json.dumps(ledger.state())))
    assert [loaded.next_ticket() for _ in live] == sorted(live)
    assert loaded.next_ticket() == ledger.admitted_below


def test_a_ticket_has_one_outcome():
    ledger = Ledger()
    ledger.next_ticket()
    ledger.resolve(0, "taken")
    with pytest.raises(AssertionError, match="ticket 0"):
        ledger.resolve(0, "failed:reward")
    with pytest.raises(AssertionError, match="never admitted"):
        ledger.resolve(1, "taken")


def test_peeking_hands_nothing_out():
    ledger = Ledger()
    assert ledger.peek_ticket() == ledger.peek_ticket() == ledger.next_ticket() == 0


def test_a_foreign_state_is_refused():
    with pytest.raises(ConfigError, match="expected a ledger state of format 1"):
        Ledger.from_state({"watermark": 3})
