"""The demo's own tasks: rows, rewards and the tokenizer of a language of 32 characters.

    S381420=  ->  012348        the answer depends on the prompt, so nothing but reading it raises the reward

Invariant: a held-out prompt is never a training prompt. `training_rows` skips the members of `held_out_rows`, whatever the seed.
Reward functions are at module level, so that a worker can import them; this module loads neither torch nor transformers.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from mprollout.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

    from mprollout.reward import RewardInput

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = {
    token: i for i, token in enumerate((PAD, EOS, "=", *string.digits, *string.ascii_uppercase[:19]))
}  # 32 ids
HELD_OUT = 500


class DigitTask(NamedTuple):
    """A string of digits to transform. The letter tells the model which task it is."""

    letter: str
    digits: int
    solve: Callable[[str], str]

    def row(self, digits: str) -> dict[str, str]:
        return {"prompt": f"{self.letter}{digits}=", "answer": self.solve(digits)}


TASKS = {
    "sort": DigitTask("S", 6, lambda digits: "".join(sorted(digits))),
    "copy": DigitTask("C", 6, lambda digits: digits),
    "reverse": DigitTask("R", 5, lambda digits: digits[::-1]),
}


def digit_task(name: str) -> DigitTask:
    """The task of that name.

    Raises:
        ConfigError: unknown; names the tasks there are.
    """
    if name not in TASKS:
        raise ConfigError(f"task must be one of {', '.join(TASKS)} or reasoning_gym:NAME; got {name!r}")
    return TASKS[name]


def _distinct(task: DigitTask, seed: str) -> Iterator[str]:
    rng, seen = random.Random(seed), set()
    while True:
        digits = "".join(rng.choices(string.digits, k=task.digits))
        if digits not in seen:
            seen.add(digits)
            yield digits


@functools.cache
def _held_out(name: str) -> tuple[str, ...]:
    stream = _distinct(digit_task(name), "held-out")
    return tuple(next(stream) for _ in range(HELD_OUT))


def held_out_rows(name: str) -> list[dict[str, str]]:
    """The 500 prompts on which accuracy is measured: the same for every seed."""
    return [digit_task(name).row(digits) for digits in _held_out(name)]


def training_rows(name: str, seed: int | str, count: int) -> list[dict[str, str]]:
    """`count` distinct rows, none of them held out."""
    task, held_out = digit_task(name), set(_held_out(name))
    most = 10**task.digits - HELD_OUT
    if count > most:
        raise ConfigError(f"task {name!r} has {most} training prompts; got count={count}")
    stream = (digits for digits in _distinct(task, f"train-{seed}") if digits not in held_out)
    return [task.row(next(stream)) for _ in range(count)]


def completion(text: str) -> str:
    """The text up to the end-of-sequence mark, whether or not the decoder kept it."""
    return text.split(EOS, 1)[0]


def score(text: str, answer: str) -> float:
    """Half for the exact answer, half for the fraction of right positions; in [0, 1].

    Positions too many count as wrong: otherwise a longer answer is never worse, and the policy first learns not to stop.
    """
    text = completion(text)
    right = sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))
    return 0.5 * (text == answer) + 0.5 * right


def accuracy(texts: list[str], answers: list[str]) -> float:
    """Fraction of exact answers."""
    return sum(completion(text) == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)


def sort_reward(sample: RewardInput) -> float:
    """The reward of all digit tasks."""
    return score(sample.text, str(sample.answer))


def shuffled_reward(sample: RewardInput, task: str) -> float:
    """A control from which nothing can be learned: the same reward, for the answer to *another* prompt.

    The other prompt is drawn by a hash of the right answer, so a retry of the sample gets the same reward.
    """
    other = next(_distinct(digit_task(task), f"other-{sample.answer}"))
    return score(sample.text, digit_task(task).solve(other))


def make_tokenizer() -> Qwen2Tokenizer:
    """One token a character: byte-level BPE without merges. No chat template, nothing added.

    Of Qwen2's own class, because `AutoTokenizer` takes that class for a Qwen2 checkpoint whatever its files say.
    """
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(vocab=VOCABULARY, merges=[], unk_token=PAD, pad_token=PAD, eos_token=EOS)
