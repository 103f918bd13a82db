"""`Gate`: how many tickets may be live now, and whether a `get(n)` can ever be met.

    credit  <- take, ending, completed update          spent by: admitting a ticket

Invariants, all guaranteed by `credit` alone (pure arithmetic, no clock, no I/O):
- `live <= max_live_groups`, where live = admitted - taken - ended. It counts groups, never samples (slime#2402).
- with `max_lag` K and `groups_per_update` B, a ticket is admitted only while `taken + live < (updates + K + 1) * B`.
  Delivery is in ticket order, and `check_update` refuses an update that B taken groups do not stand for, so every group's lag
  is at most K: a ticket admitted when `updates = u` has fewer than (u + K + 1) * B unended tickets before it, so at its take at
  most `(taken - 1) // B <= u + K` updates can have completed. Live tickets *behind* the next one (an attached trainer starts at a
  checkpoint; its predecessor had admitted more) do not delay it, so they count neither there nor, up to `spare`, in `max_live_groups`.
"""

from __future__ import annotations

from mprollout.config import GateConfig
from mprollout.errors import ConfigError, GateStarved


def is_strict(config: GateConfig) -> bool:
    """Whether the lag bound holds by admission: then delivery is in ticket order, and nothing is discarded."""
    return config.max_lag is not None and config.lag_policy == "strict"


class Gate:
    """Counts tickets through the gate. Not thread-safe: the engine's lock guards it.

    Example:
        >>> gate = Gate(GateConfig(groups_per_update=2, max_lag=0), max_live_groups=2)
        >>> gate.credit
        2
        >>> gate.admitted += 2; gate.taken += 2
        >>> gate.credit
        0
        >>> gate.updated(); gate.credit
        2
    """

    def __init__(self, config: GateConfig, max_live_groups: int, spare: int = 0) -> None:
        """`spare`: entries beyond `max_live_groups` for the tickets before those that an earlier trainer admitted."""
        self.max_live_groups = max_live_groups
        self.ahead = 0
        """Live tickets behind the one that is admitted next."""
        self._spare = spare
        self.groups_per_update = config.groups_per_update
        self.max_lag = config.max_lag if is_strict(config) else None
        self.awaits_weights = config.await_weights
        self.admitted = 0
        self.taken = 0
        self.ended = 0
        self.updates = 0

    @property
    def live(self) -> int:
        """Groups admitted and not yet taken or ended."""
        return self.admitted - self.taken - self.ended

    @property
    def credit(self) -> int:
        """Tickets that may be admitted now."""
        if self.awaits_weights:
            return 0
        credit = self.max_live_groups + min(self.ahead, self._spare) - self.live
        if self.max_lag is not None:
            assert self.groups_per_update is not None
            bound = (self.updates + self.max_lag + 1) * self.groups_per_update
            credit = min(credit, bound - self.taken - (self.live - self.ahead))
        return max(credit, 0)

    def updated(self) -> None:
        """A weight update was completed by all workers."""
        if self.awaits_weights:
            self.awaits_weights = False
        else:
            self.updates += 1

    def check_update(self) -> None:
        """Refuse an update that would break the lag bound.

        Raises:
            ConfigError: `max_lag` is set and fewer than `groups_per_update` groups were taken since the last update.
        """
        if self.max_lag is None or self.awaits_weights:
            return
        assert self.groups_per_update is not None
        if self.updates + 1 > self.taken // self.groups_per_update:
            raise ConfigError(
                f"update_weights refused: max_lag={self.max_lag} allows one update per groups_per_update={self.groups_per_update} taken "
                f"groups; {self.taken} were taken and {self.updates} updates are done. Take more first, set groups_per_update to what "
                "one update really takes, or set await_weights=True when this is the first push of weights that the workers do not have"
            )

    def check_get(self, n: int, unadmitted: int | None) -> None:
        """Refuse a `get(n)` that no generation can meet; `unadmitted` is what the source still has (None: endless).

        Raises:
            GateStarved: live groups and credit together are fewer than n and only the trainer can change that.
        """
        credit = self.credit if unadmitted is None else min(self.credit, unadmitted)
        if self.live + credit >= n or (unadmitted is not None and self.live + unadmitted < n):
            return  # the second: the source ends first, which is DataExhausted's matter
        if self.awaits_weights:
            why = "the gate waits for the first update_weights (await_weights=True, or a loaded state)"
        elif self.max_live_groups < n:
            why = f"max_live_groups={self.max_live_groups} is below n={n}"
        else:
            why = (
                f"with groups_per_update={self.groups_per_update} and max_lag={self.max_lag}, {self.updates} updates allow "
                f"{(self.updates + (self.max_lag or 0) + 1) * (self.groups_per_update or 0)} tickets, {self.taken} were taken: call update_weights first"
            )
        raise GateStarved(
            f"get({n}) can never be met: {self.live} groups are live and {credit} more may be admitted; {why}"
        )
