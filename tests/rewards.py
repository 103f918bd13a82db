"""Reward, filter and rollout functions of tests. Every worker and reward process of theirs imports this module, so it imports next to nothing."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import mprollout as mp

if TYPE_CHECKING:
    from mprollout.rollout import Session
    from mprollout.source import Prompt


def length(sample: mp.RewardInput) -> float:
    return float(len(sample.token_ids))


async def length_on_the_loop(sample: mp.RewardInput) -> float:
    return length(sample)


def broken(sample: mp.RewardInput) -> float:
    raise ZeroDivisionError("this reward is broken for good")


def broken_for_row_3(sample: mp.RewardInput) -> float:
    if sample.prompt.row == 3:
        raise LookupError("row 3 is poison")
    return 1.0


def pathological_for_row_3(sample: mp.RewardInput) -> float:
    """A verifier that backtracks for ever, in C, with the GIL held."""
    import re

    re.search(r"(a+)+$", "a" * 60 + "b" if sample.prompt.row == 3 else "aaa")
    return 1.0


def nan_for_row_3(sample: mp.RewardInput) -> float:
    return float("nan") if sample.prompt.row == 3 and sample.index == 1 else 1.0


def one_reward_too_many(samples: list[mp.RewardInput]) -> list[float]:
    return [1.0] * (len(samples) + 1)


def rank(samples: list[mp.RewardInput]) -> list[float]:
    return [float(sample.index) for sample in samples]


async def async_index(sample: mp.RewardInput) -> float:
    return float(sample.index)


outage_calls = 0


async def down_twice(sample: mp.RewardInput) -> float:
    """Raises in its calls 1 to 15 and 41 to 55 in this process."""
    global outage_calls
    outage_calls += 1
    if (outage_calls - 1) % 40 < 15 and outage_calls < 60:
        raise ConnectionError(f"the judge is down in call {outage_calls}")
    return 1.0


async def poisonous_row_0(session: Session, prompt: Prompt) -> None:
    """Ends its worker, a moment after it started, for row 0."""
    import asyncio

    if prompt.row == 0:
        await asyncio.sleep(0.05)
        os._exit(13)
    await session.generate()


def with_a_process(sample: mp.RewardInput) -> float:
    """Leaves a process of its own running, as a sandbox or a compiler may be."""
    import subprocess

    subprocess.Popen(["sleep", "60"])
    return 1.0


def judge_group(samples: list[mp.RewardInput]) -> list[float]:
    """The index of each sample in its group; no verdict for rows that say so."""
    if samples[0].prompt.fields.get("judge") == "absent":
        raise LookupError("there is no judge for this row")
    return rank(samples)


async def echo(session: Session, prompt: Prompt) -> None:
    """Samples, then repeats the prompt as the engine rendered it."""
    await session.generate()
    session.append(session.prompt_ids)


async def with_an_image(session: Session, prompt: Prompt) -> None:
    """An extra field of two by two numbers."""
    import numpy as np

    await session.generate()
    session.sample.extra["image"] = np.full((2, 2), prompt.row)


def act(sample: mp.RewardInput) -> Any:
    """Does what the sample's text says."""
    match sample.text.split(maxsplit=1):
        case ["raise"]:
            raise KeyError("the judge is broken")
        case ["exit"]:
            sys.exit(3)
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["hang"]:
            while True:
                try:
                    time.sleep(1000)
                except BaseException:  # deaf to everything but SIGKILL
                    continue
        case ["work", seconds]:
            time.sleep(float(seconds))
        case ["meet", fifo]:  # two calls meet at a pipe: each waits until the other is there
            with open(fifo, "rb" if sample.index == 0 else "wb"):
                pass
        case ["hold", fifo]:  # says that it is at work, and stays so until it is told to go on
            with open(fifo, "wb"), open(f"{fifo}.go", "rb"):
                pass
        case ["pid"]:
            return os.getpid()
    return 1.0


def value(sample: mp.RewardInput) -> Any:
    import numpy as np

    return eval(sample.text, {"math": math, "np": np})


def group_value(samples: list[mp.RewardInput]) -> Any:
    import numpy as np

    return eval(samples[0].text, {"math": math, "np": np, "samples": samples})


def scaled(sample: mp.RewardInput, *, by: float) -> float:
    return len(sample.text) * by


async def judge(sample: mp.RewardInput) -> Any:
    import asyncio

    match sample.text:
        case "hang":
            await asyncio.Event().wait()
        case "raise":
            raise KeyError("the judge is broken")
        case "own timeout":
            raise TimeoutError("the judge's own")
    return 0.5


class Judge:
    async def __call__(self, samples: list[mp.RewardInput]) -> list[float]:
        return [float(one.index) for one in samples]


def by_row(samples: list[mp.RewardInput], rewards: list[float], easy: int = 3) -> str | None:
    """Rejects rows 0 and 1 of 5, breaks on row 13."""
    assert len(samples) == len(rewards) == 4 and rewards == [float(len(s.token_ids)) for s in samples]
    row = samples[0].prompt.row
    if row == 13:
        raise LookupError("row 13 breaks the filter")
    return {0: "too_easy", 1: "too_hard"}.get(row % 5)


def everything(samples: list[mp.RewardInput], rewards: list[float]) -> str | None:
    return "rejected"


def unknown(samples: list[mp.RewardInput], rewards: list[float]) -> str | None:
    return "because"


async def later(samples: list[mp.RewardInput], rewards: list[float]) -> str | None:
    return None


def same(sample: mp.RewardInput) -> float:
    return 1.0 if sample.prompt.row % 2 else float(sample.index)
