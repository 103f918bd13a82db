"""`mprollout calibrate CONFIG`: how fast a model is at each concurrency, measured, as the settings of a simulated one.

    one engine of the config's --c lanes of samples, one after the other--> tokens and time --fit--> SimulatedConfig --> a TOML file

The model of the simulation is `prefill_s + tokens / (speed(running) / running)` for one sample. So: samples of one token, alone, against whole
ones say what comes before the first token; then at each concurrency the tokens of all lanes over their time are the speed of as
many samples as are not in their prefill. What a real run pays besides (refills that interrupt, the worker's own work) is in it, as the lanes pay it, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tyro

from mprollout.config import EngineConfig, SamplingConfig, SGLangConfig, SimulatedConfig
from mprollout.errors import ConfigError
from mprollout.generator import Generator
from mprollout.rollout import Session, load_rollout
from mprollout.sampler import derive_seed
from mprollout.source import Prompt, PromptSource, render

ALONE = 5
UPDATES = 3
"""Samples, one after the other, that the prefill is taken from, and weight updates; of each the median."""
MOST_LENGTHS = 20_000


@dataclasses.dataclass(kw_only=True)
class CalibrateArgs:
    """Measure a model's speed as a function of concurrency, and write it as the settings of a simulated one.

    Example: `mprollout calibrate run.toml --out speeds.toml`, then `mprollout simulate run.toml --settings speeds.toml`.

    Starts one engine of the config's generator on its first device, and samples the config's own prompts with its own sampling settings
    at 1, 2, 4, ... samples at once, up to `workers.max_running_samples`. Run it on an otherwise idle machine. Exit codes: 0 written; 2 the
    config cannot be used, or the model cannot be started.
    """

    config: tyro.conf.Positional[Path]
    """An engine's config, TOML."""
    out: Path
    """The file to write."""
    seconds: float = 10.0
    """Measured at each concurrency."""
    json: bool = False
    """Print what was measured as one JSON object."""


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    generator: SimulatedConfig


def run_calibrate(args: CalibrateArgs) -> None:
    """Measure and write."""
    if not args.seconds > 0:
        raise ConfigError(f"--seconds must be > 0; got {args.seconds:g}")
    if not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: its folder is not there")
    config = EngineConfig.from_toml(args.config)
    measured = asyncio.run(calibrate(config, args.seconds, lambda line: print(line, file=sys.stderr, flush=True)))
    args.out.write_text(to_toml(measured, f"mprollout calibrate {args.config}"))
    print(json.dumps(msgspec.to_builtins(measured)) if args.json else f"{args.out}")


async def calibrate(
    config: EngineConfig, seconds: float, say: Callable[[str], None] = lambda line: None
) -> SimulatedConfig:
    """Start the config's generator here, measure, end it. On the main thread; takes about `seconds` a concurrency, and the start.

    Raises:
        ConfigError: no sample has a token.
        Exception: what the generator's start raises.
    """
    from mprollout.worker_process import make_generator

    generator = make_generator(config, 0)
    try:
        await generator.start()
        say("the engine runs; samples one by one")
        lanes = _Lanes(generator, config)
        short = await lanes.alone(msgspec.structs.replace(config.sampling, max_new_tokens=1))
        long = await lanes.alone(config.sampling)
        a_token_s = max(0.0, long.seconds - short.seconds) / max(1, long.tokens - short.tokens)
        prefill_s = max(0.0, short.seconds - short.tokens * a_token_s)
        points: list[tuple[float, float]] = []
        sample_s, most = long.seconds, config.workers.max_running_samples
        counts = [*itertools.takewhile(lambda c: c < most, (1 << i for i in range(20))), most]
        for running in counts:
            decoding, speed, sample_s = await lanes.together(running, max(2, math.ceil(seconds / sample_s)), prefill_s)
            points.append((decoding, speed))
            say(f"{running} at once: {speed:,.0f} tokens/s")
        return SimulatedConfig(
            speeds=_at_whole(counts, points),
            prefill_s=prefill_s,
            update_s=await _update_s(generator, config),
            lengths=lanes.lengths,
            context_length=generator.context_length,
        )
    finally:
        await generator.close()


class _Sample(NamedTuple):
    began: float
    ended: float
    tokens: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class _Lanes:
    """Makes samples of the config's prompts, as a worker does."""

    def __init__(self, generator: Generator, config: EngineConfig) -> None:
        self._generator, self._config = generator, config
        self._rollout = load_rollout(config.rollout)
        self._source = PromptSource(msgspec.structs.replace(config.source, epochs=None))
        self._tickets = itertools.count()
        self.lengths: list[int] = []
        """Tokens of the samples under the config's own settings: as many of each lane, so that no length is favoured."""

    async def alone(self, sampling: SamplingConfig) -> _Sample:
        """The median one of samples while none runs beside them."""
        await self._sample(sampling)  # it pays for what is set up once
        return sorted([await self._sample(sampling) for _ in range(ALONE)], key=lambda sample: sample.seconds)[
            ALONE // 2
        ]

    async def together(self, running: int, rounds: int, prefill_s: float) -> tuple[float, float, float]:
        """So many lanes, over the time in which all of them run: how many decode, the others being in their prefill; tokens a second; mean
        seconds of a sample.
        """

        async def lane() -> list[_Sample]:
            return [await self._sample(self._config.sampling) for _ in range(rounds)]

        lanes = await asyncio.gather(*(lane() for _ in range(running)))
        samples = [sample for made in lanes for sample in made]
        self.lengths += [sample.tokens for sample in samples]
        began, ended = max(made[0].began for made in lanes), min(made[-1].ended for made in lanes)
        shares = [max(0.0, min(s.ended, ended) - max(s.began, began)) / s.seconds for s in samples]
        tokens = sum(share * sample.tokens for share, sample in zip(shares, samples, strict=True))
        if not tokens:
            raise ConfigError(f"calibrate: none of {len(samples)} samples has a token")
        decoding = max(0.01, running - prefill_s * sum(shares) / (ended - began))
        return decoding, tokens / (ended - began), statistics.fmean(sample.seconds for sample in samples)

    async def _sample(self, sampling: SamplingConfig) -> _Sample:
        ticket = next(self._tickets)
        prompt = Prompt.decode(self._source.encode(ticket))
        ids = render(prompt, self._config.source, self._generator.tokenizer)
        began = _now_s()
        session = Session(self._generator, sampling, ids, f"calibrate.{ticket}", derive_seed(self._config.seed, ticket))
        await self._rollout(session, prompt)
        return _Sample(began, _now_s(), session.sampled)


def _at_whole(counts: Sequence[int], points: Sequence[tuple[float, float]]) -> list[tuple[int, float]]:
    """Speeds of so many decoding samples, from those of a few less: along the power law through a point and the one before it."""
    found = [(counts[0], points[0][1] * counts[0] / points[0][0])]
    for running, (before, slower), (decoding, speed) in zip(counts[1:], points[:-1], points[1:], strict=True):
        power = math.log(speed / slower) / math.log(decoding / before) if decoding > before else 0.0
        found.append((running, speed * (running / decoding) ** min(max(power, 0.0), 1.0)))
    return found


async def _update_s(generator: Generator, config: EngineConfig) -> float:
    """Seconds that the engine stands still for new weights: those that it has."""
    import torch

    from mprollout.sglang_setup import checkpoint_folder
    from mprollout.staging import stage

    source: Any = {"w": torch.zeros(1)}
    if isinstance(config.generator, SGLangConfig):
        if config.generator.adapter is not None:
            return 0.0  # an adapter's load stops nobody
        source = checkpoint_folder(config.generator.model)
        if source is None:
            return 0.0  # weights that were not loaded from safetensors
    took = []
    with stage(source, dtype=config.weights.dtype) as staged:
        for version in range(1, UPDATES + 1):
            began = _now_s()
            await generator.update_weights(staged, version, config.weights.pause)
            took.append(_now_s() - began)
    return statistics.median(took)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# -- the file -------------------------------------------------------------------------------------------------------------


def to_toml(measured: SimulatedConfig, by: str) -> str:
    """The settings as `from_toml` reads them; `by`: what wrote them."""
    speeds = json.dumps([[running, round(speed, 2)] for running, speed in measured.speeds])
    return (
        f"# Measured by `{by}`, {time.strftime('%Y-%m-%d %H:%M')}. The [generator] of a simulated engine.\n"
        f'[generator]\nbackend = "simulated"\nspeeds = {speeds}  # samples at once, tokens/s of all together\n'
        f"prefill_s = {measured.prefill_s:.6f}\nupdate_s = {measured.update_s:.6f}\ncontext_length = {measured.context_length}\n"
        f"lengths = {json.dumps(measured.lengths[:MOST_LENGTHS])}\n"
    )


def from_toml(path: Path) -> SimulatedConfig:
    """What `mprollout calibrate` wrote.

    Raises:
        ConfigError: it is no such file; names it.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_Settings).generator
    except (OSError, msgspec.MsgspecError, ConfigError) as error:
        raise ConfigError(f"{path}: expected the [generator] that `mprollout calibrate` writes: {error}") from error
