"""What a checkpoint needs of an engine, and an engine made from one.

    RolloutEngine.state_dict <- save --> JSON --> restore --> Restored -> RolloutEngine.load_state_dict, attach

Invariant: a state is pure and exact at any moment: it is read under the engine's lock, when what was taken is counted (`Taker.count`).
Groups taken are done, all others come again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from mprollout.config import EngineConfig, SourceConfig
from mprollout.errors import ConfigError
from mprollout.gate import Gate
from mprollout.keeper_process import KeeperProcess
from mprollout.ledger import Ledger
from mprollout.ring import Plan
from mprollout.source import PromptSource
from mprollout.taker import Taker
from mprollout.updates import Updates


class Restored(NamedTuple):
    """The parts of an engine that a state brings."""

    ledger: Ledger
    gate: Gate
    updates: Updates
    recycled: dict[int, int]


def save(ledger: Ledger, taker: Taker, updates: Updates, source: PromptSource) -> dict[str, Any]:
    """JSON-able. Under the engine's lock."""
    return {
        "ledger": ledger.state(without={lease.ticket for lease in taker.parked}),
        "recycled": {str(ticket): count for ticket, count in taker.recycled.items()},
        "source": source.fingerprint,
        "minted": updates.minted,
        "policy_version": updates.version,
        "updates": updates.updates,
    }


def restore(
    state: dict[str, Any],
    config: EngineConfig,
    plan: Plan,
    source: PromptSource,
    keeper: KeeperProcess | None,
    await_weights: bool,
) -> Restored:
    """The ledger, the gate and the updates as the state has them.

    Args:
        await_weights: the gate waits for the first update of the weights.
        keeper: whose run is attached to: versions that it has heard of are never used again.

    Raises:
        ConfigError: another format, a state of other data, or older than one that was confirmed to the keeper.
    """
    try:
        saved, fingerprint, minted, updates = (
            state["ledger"], state["source"], int(state["minted"]), int(state["updates"])
        )  # fmt: skip
        recycled = {int(ticket): count for ticket, count in state["recycled"].items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"state: expected what state_dict() returned; got {state!r:.200} ({error!r})") from error
    if fingerprint != source.fingerprint:
        raise ConfigError(
            f"state: made over source {fingerprint!r}, this engine has {source.fingerprint!r}; "
            "the same rows, order seed and row count are needed"
        )
    ledger = Ledger.from_state(saved)
    gate = Gate(msgspec.structs.replace(config.gate, await_weights=await_weights), plan.max_live_groups, plan.spare)
    if keeper is None:
        return Restored(ledger, gate, Updates(config, gate, minted, base=updates), recycled)
    assert keeper.booted is not None
    if ledger.resolved < keeper.booted.confirmed:
        raise ConfigError(
            f"attach: the state holds {ledger.resolved} resolved tickets, a newer one with {keeper.booted.confirmed} "
            "was confirmed: load the newer checkpoint, or start a new engine from the older one"
        )
    minted = max(minted, keeper.booted.highest_version)
    return Restored(ledger, gate, Updates(config, gate, minted, keeper.updates, updates), recycled)


def resolved_tickets(state: dict[str, Any]) -> int:
    """How many tickets a state holds as resolved."""
    return Ledger.from_state(state["ledger"]).resolved


def with_rows(config: EngineConfig, rows: Any) -> EngineConfig:
    """An attached run's config, its rows given again where they were a Python object.

    Raises:
        ConfigError: they were, and are not given.
    """
    if config.source.path != "-":
        return config
    if rows is None:
        raise ConfigError(
            "attach: the run's rows were a Python object; give them again: attach(run_dir, state, rows=...)"
        )
    source: SourceConfig = msgspec.structs.replace(config.source, path=None, rows=rows)
    return msgspec.structs.replace(config, source=source)
