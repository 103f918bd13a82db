"""Filters: which finished, scored groups are worth training on.

    run_group -> scored group --zero_spread, then function--> kept: published / rejected: FILTERED with its reason, one ticket replaces it

The user's function runs in a reward process, where it is timed and can be killed. It says None to keep a group, or one of the reasons
that `FilterConfig.reasons` declares: so every reason has a code that fits the ticket's word, and no count depends on a message's way.
"""

from __future__ import annotations

from mprollout.config import FilterConfig
from mprollout.errors import ConfigError
from mprollout.functions import check_function, is_async, load_function
from mprollout.reward import Job, Outcome, RewardInput

_FIELD = "FilterConfig.function"
_CALLED_WITH = ("samples", "rewards")


def check_filter(config: FilterConfig) -> None:
    """Refuse in the trainer what cannot work.

    Raises:
        ConfigError: as `check_function`, or an `async def`.
    """
    if config.function is not None:
        check_function(_FIELD, config.function, _CALLED_WITH, config.kwargs)
        _require_sync(config)


def filter_job(config: FilterConfig) -> Job:
    """The filter as a reward process runs it. Raises as `load_function`."""
    function = load_function(_FIELD, config.function, _CALLED_WITH, config.kwargs)
    _require_sync(config)

    def job(samples: list[RewardInput], rewards: list[float]) -> Outcome:
        verdict = function(samples, rewards)
        if verdict is not None and verdict not in config.reasons:
            raise ValueError(
                f"a filter must return None to keep the group, or one of FilterConfig.reasons={config.reasons}; got {verdict!r:.200}"
            )
        return Outcome(rejected=verdict or "")

    return job


def _require_sync(config: FilterConfig) -> None:
    if callable(config.function) and is_async(config.function):
        raise ConfigError(
            f"{_FIELD}: expected a plain `def` (it runs in a process of its own); got {config.function!r}"
        )
