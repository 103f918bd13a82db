"""Rewards: what a reward function sees and may return, the scorers that come with the package, from a setting to a function.

    RewardConfig --check--> refused in the trainer before anything starts
                 --resolve--> function(sample) --checked_numbers--> finite floats          (`reward_pool` runs it)

A reward function has one signature, `def reward(sample: RewardInput) -> float`; with `RewardConfig.per == "group"` it is
`def reward(samples: list[RewardInput]) -> list[float]`. Either may be `async def`. `RewardConfig.kwargs` are passed on.

Invariant: what leaves here is as many finite floats as there are samples, or a typed error; never a NaN, never a default.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import math
import numbers
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mprollout.config import RewardConfig
from mprollout.errors import ConfigError, MprolloutError, RewardError
from mprollout.functions import check_arguments, check_function, load_function
from mprollout.generator import FinishReason
from mprollout.source import Prompt, gym_dataset


class RewardInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward function sees of one sample."""

    prompt: Prompt
    text: str
    """The completion without special tokens."""
    token_ids: list[int]
    finish_reason: FinishReason
    index: int
    """Of the sample in its group, from 0."""

    @property
    def answer(self) -> Any:
        """The row's answer; None if it has none."""
        return self.prompt.answer


class RewardTimeout(MprolloutError, TimeoutError):
    """A reward function exceeded `RewardConfig.timeout_s` and was killed (async: cancelled); names ticket and sample."""


class RewardRaised(MprolloutError, RuntimeError):
    """A reward function raised, or its process died; `traceback_text` is its own traceback ("" if it died)."""

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(
            message + (f"\n--- traceback of the reward function ---\n{traceback_text}" if traceback_text else "")
        )
        self.traceback_text = traceback_text


class FilterFailed(RewardRaised):
    """A filter function raised, its process died, or it returned what is no reason; `traceback_text` as for a reward."""


# --- the scorers -------------------------------------------------------------------------------------------------------


def _answer(sample: RewardInput) -> str:
    if sample.answer is None:
        raise RewardError(f"{where([sample])}: the row has no answer to compare with (SourceConfig.answer_field)")
    return str(sample.answer)


def _exact(sample: RewardInput) -> float:
    """1.0 if the stripped text is the stripped answer."""
    return float(sample.text.strip() == _answer(sample).strip())


def _regex(sample: RewardInput, *, pattern: str) -> float:
    """1.0 if the pattern's last match (its first group, if it has one) is the answer; without an answer, if it matches."""
    found = list(re.finditer(pattern, sample.text, re.DOTALL))
    if not found or sample.answer is None:
        return float(bool(found))
    got = found[-1].group(1 if found[-1].re.groups else 0)
    return float(got is not None and got.strip() == _answer(sample).strip())


def _math(sample: RewardInput) -> float:
    r"""1.0 if math-verify finds the answer's value in the text: in the last \boxed{}, in all boxes as a set, or else in
    the last LaTeX or plain number.

    What sympy cannot settle within math-verify's own 5 s alarms counts as not verified (0.0); the alarms work because a
    reward process runs its function in its main thread. What ignores them is killed at `timeout_s`.
    """
    from math_verify import parse, verify

    answer = _answer(sample).rsplit("####", 1)[-1].strip()  # GSM8K's answers end so
    gold = parse(answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}")
    last = sample.text[max(sample.text.rfind("\\boxed"), 0) :]  # of several boxes math-verify makes a set
    return float(any(verify(gold, parse(text)) for text in dict.fromkeys([last, sample.text])))


async def unscored(sample: RewardInput) -> float:
    """For who wants samples and no scores: 0.0, on the worker's loop, without a process."""
    return 0.0


def _row(sample: RewardInput) -> float:
    """reasoning-gym's own score, in [0, 1], of what stands between the last <answer> tags, or else of the whole text."""
    if sample.prompt.scorer is None:
        raise RewardError(
            f'{where([sample])}: the reward "row" needs rows that bring a scorer: set SourceConfig.reasoning_gym'
        )
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(sample.text)
    entry = _gym_entry(sample.prompt.scorer, sample.prompt.row)
    return float(
        gym_dataset(sample.prompt.scorer).score_answer(sample.text.strip() if answer is None else answer, entry)
    )


@functools.lru_cache(maxsize=64)
def _gym_entry(scorer: str, row: int) -> Any:
    # made again rather than read from `prompt.fields`: msgpack makes lists of tuples, and some scorers compare tuples
    return gym_dataset(scorer)[row]


_BUILTIN: dict[str, Callable[..., float]] = {"exact": _exact, "math": _math, "regex": _regex, "row": _row}
_FIELD = "RewardConfig.function"
_NEEDS = {"math": ("math_verify", "math-verify"), "row": ("reasoning_gym", "reasoning-gym")}


# --- from a setting to a function --------------------------------------------------------------------------------------


def check(config: RewardConfig) -> None:
    """Refuse in the trainer, before anything starts, what cannot work. Imports neither the user's module nor a verifier.

    Raises:
        ConfigError: unknown name (the known ones are listed), missing package or module, arguments that do not fit, or a
            function that another process cannot import.
    """
    if isinstance(config.function, str) and ":" not in config.function:
        _check_builtin(config)
    else:
        check_function(_FIELD, config.function, _called_with(config), config.kwargs)


def _called_with(config: RewardConfig) -> list[str]:
    return ["sample" if config.per == "sample" else "samples"]


def _check_builtin(config: RewardConfig) -> None:
    name = config.function
    if name not in _BUILTIN:
        near = difflib.get_close_matches(name, _BUILTIN, n=1)
        raise ConfigError(
            f'RewardConfig.function must be one of {", ".join(map(repr, _BUILTIN))}, "module:function", or a function; '
            f"got {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    if config.per != "sample":
        raise ConfigError(f'RewardConfig.per must be "sample" with {name!r}; got {config.per!r}')
    module, package = _NEEDS.get(name, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"RewardConfig.function={name!r} needs a package that is not installed: pip install {package}"
        )
    check_arguments(_FIELD, name, _BUILTIN[name], _called_with(config), config.kwargs)
    if name == "regex":
        try:
            re.compile(config.kwargs["pattern"])
        except (re.error, TypeError) as error:
            raise ConfigError(f"RewardConfig.kwargs['pattern']: {error}; got {config.kwargs['pattern']!r}") from error


def resolve(config: RewardConfig) -> Callable[..., Any]:
    """The function that scores, its kwargs bound. Imports the user's module (blocks for as long as that takes).

    Raises:
        ConfigError: as `check`; or the module has no such function.
        Exception: whatever the user's module raises when it is imported.
    """
    check(config)
    function = _BUILTIN.get(config.function, config.function) if isinstance(config.function, str) else config.function
    return load_function(_FIELD, function, _called_with(config), config.kwargs)


# --- the values ---------------------------------------------------------------------------------------------------------


def where(samples: Sequence[RewardInput]) -> str:
    ticket = samples[0].prompt.ticket if samples else "?"
    return f"ticket {ticket}, " + (f"sample {samples[0].index}" if len(samples) == 1 else f"{len(samples)} samples")


def _number(value: Any, sample: RewardInput) -> float:
    got = value
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # scalars of numpy and torch
    if isinstance(value, numbers.Real):  # bool is one: 0 or 1
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise RewardError(f"{where([sample])}: a reward must be a finite number; got {got!r:.200} ({type(got).__name__})")


def checked_numbers(value: Any, samples: Sequence[RewardInput], per: str) -> list[float]:
    if per == "sample":
        return [_number(value, samples[0])]
    if hasattr(value, "tolist"):  # arrays of numpy and torch
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise RewardError(
            f"{where(samples)}: a group function must return a list of numbers; got {type(value).__name__}"
        )
    if len(value) != len(samples):
        raise RewardError(
            f"{where(samples)}: a group function must return one reward a sample; got {len(value)}: {value!r:.200}"
        )
    return [_number(item, sample) for item, sample in zip(value, samples, strict=True)]


class Outcome(msgspec.Struct, array_like=True):
    """What came of a call, as it travels: rewards, a filter's reason, or what `RewardError` or `RewardRaised` is made of."""

    rewards: list[float] = []
    rejected: str = ""
    refused: str = ""
    raised: str = ""
    traceback_text: str = ""

    def check(self, where: str, kind: type[RewardRaised] = RewardRaised) -> Outcome:
        """Itself, unless the call failed."""
        if self.refused:
            raise RewardError(self.refused)
        if self.raised:
            raise kind(f"{where}: {self.raised}", self.traceback_text)
        return self


Job = Callable[[list[RewardInput], list[float]], Outcome]
"""What a reward process can do with samples, and rewards where it has any."""


def reward_job(config: RewardConfig) -> Job:
    """The reward as a reward process runs it: its imports are done here, they are no call's. Raises as `resolve`."""
    if isinstance(config.function, str) and config.function in _NEEDS:
        importlib.import_module(_NEEDS[config.function][0])
    function = resolve(config)

    def job(samples: list[RewardInput], _: list[float]) -> Outcome:
        value = function(samples if config.per == "group" else samples[0])
        return Outcome(rewards=checked_numbers(value, samples, config.per))

    return job


def failure_of(error: BaseException) -> Outcome:
    if isinstance(error, RewardError):
        return Outcome(refused=str(error))
    below = error.__traceback__
    while below is not None and os.path.dirname(below.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        below = below.tb_next  # our own frames say nothing of the user's function
    text = "".join(traceback.format_exception(type(error), error, below))
    return Outcome(raised="".join(traceback.format_exception_only(error)).strip()[:2000], traceback_text=text[-20_000:])
