"""`SimulatedGenerator`: deterministic in the seed, paced by the clock, versions and aborts as the real engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mprollout.config import SamplingConfig, SimulatedConfig
from mprollout.errors import ConfigError
from mprollout.generator import GenerateRequest, Generation
from mprollout.simulated import SimulatedGenerator
from mprollout.simulation import VirtualLoop

WEIGHTS: Any = SimpleNamespace(names=["a", "b"], shapes={"a": (2, 3), "b": (4,)})


def request(seed: int = 0, n: int = 1000, prompt: int = 4, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{seed}", prompt_ids=[1] * prompt, max_new_tokens=n, sampling=SamplingConfig(**sampling), seed=seed
    )


def run(scenario: Callable[[SimulatedGenerator], Awaitable[Any]], **config: Any) -> Any:
    async def main() -> Any:
        generator = SimulatedGenerator(SimulatedConfig(**config))
        await generator.start()
        try:
            return await scenario(generator)
        finally:
            await generator.close()

    return asyncio.run(main())


def one(seed: int = 0, n: int = 1000, config: dict[str, Any] | None = None, **sampling: Any) -> Generation:
    return run(lambda generator: generator.generate(request(seed, n, **sampling)), **(config or {}))


def test_same_seed_same_completion_whatever_the_speed() -> None:
    slow, fast = one(3, config={"tokens_per_s": 1000.0}), one(3)
    assert (slow.token_ids, slow.logprobs, slow.finish_reason) == (fast.token_ids, fast.logprobs, fast.finish_reason)
    assert one(4).token_ids != fast.token_ids
    assert one(3, config={"seed": 1}).token_ids != fast.token_ids


def test_types_are_plain_python() -> None:
    generation = one()
    assert {type(i) for i in generation.token_ids} == {int}
    assert {type(p) for p in generation.logprobs} == {float}
    assert all(p <= 0 for p in generation.logprobs)


def test_stop_ends_with_eos_and_length_has_none() -> None:
    stopped, cut = one(0), one(0, n=5)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == stopped.matched_stop == 256
    assert 256 not in stopped.token_ids[:-1]
    assert cut.finish_reason == "length"
    assert cut.token_ids == stopped.token_ids[:5]
    assert cut.matched_stop is None


def test_mean_length_is_the_configured_one() -> None:
    async def lengths(generator: SimulatedGenerator) -> list[int]:
        return [len((await generator.generate(request(seed, n=10000))).token_ids) for seed in range(500)]

    found = run(lengths, mean_tokens=50.0, sigma=0.5)
    assert 45 < sum(found) / len(found) < 55
    assert set(run(lengths, mean_tokens=50.0, sigma=0.0)) == {50}


def test_ignore_eos_and_stop_token_ids() -> None:
    assert len(one(n=200, ignore_eos=True).token_ids) == 200
    whole = one()
    token = whole.token_ids[10]
    stopped = one(stop_token_ids=[token])
    assert stopped.matched_stop == token
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_tokens_per_s_paces() -> None:
    start = time.monotonic()
    generation = one(config={"tokens_per_s": 500.0, "prefill_s": 0.05, "mean_tokens": 100.0, "sigma": 0.0})
    assert len(generation.token_ids) == 100
    assert 0.25 <= time.monotonic() - start < 5


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_update_midway_splits_the_versions(pause: Any) -> None:
    """vllm#54443"""

    async def scenario(generator: SimulatedGenerator) -> tuple[float, Generation]:
        task = asyncio.create_task(generator.generate(request(n=128, ignore_eos=True)))
        await asyncio.sleep(0)
        start = time.monotonic()
        await asyncio.sleep(0.2)
        ran_s = time.monotonic() - start
        await generator.update_weights(WEIGHTS, 7, pause)
        return ran_s, await task

    ran_s, generation = run(scenario, tokens_per_s=300.0, update_s=0.05)
    first, second = generation.versions
    assert (first.version, second.version, second.end) == (0, 7, 128)
    assert abs(first.end - ran_s * 300) <= 10
    assert generation.token_ids == one(n=128, ignore_eos=True).token_ids


def test_update_stalls_generation_and_new_requests_wait() -> None:
    async def scenario(generator: SimulatedGenerator) -> tuple[float, Generation]:
        update = asyncio.create_task(generator.update_weights(WEIGHTS, 3, "retract"))
        await asyncio.sleep(0)
        start = time.monotonic()
        generation = await generator.generate(request())
        await update
        return time.monotonic() - start, generation

    took_s, generation = run(scenario, update_s=0.2)
    assert took_s >= 0.19
    assert [span.version for span in generation.versions] == [3]


def test_pause_abort_ends_running_requests_under_the_old_version() -> None:
    async def scenario(generator: SimulatedGenerator) -> Generation:
        task = asyncio.create_task(generator.generate(request(n=1000, ignore_eos=True)))
        await asyncio.sleep(0.1)
        await generator.update_weights(WEIGHTS, 1, "abort")
        return await task

    generation = run(scenario, tokens_per_s=100.0)
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.token_ids) < 1000
    assert [span.version for span in generation.versions] == [0]


def test_update_names_what_is_wrong_and_changes_nothing() -> None:
    async def scenario(generator: SimulatedGenerator) -> None:
        await generator.update_weights(WEIGHTS, 1, "retract")
        for shapes, complaint in (
            ({"a": (2, 3)}, "b is missing"),
            ({"a": (2, 3), "b": (4,), "c": (1,)}, "c is unknown"),
            ({"a": (3, 2), "b": (4,)}, r"a has shape \[3, 2\], expected \[2, 3\]"),
        ):
            with pytest.raises(ValueError, match=complaint):
                await generator.update_weights(SimpleNamespace(names=list(shapes), shapes=shapes), 2, "retract")  # type: ignore[arg-type]
        assert generator.version == 1
        assert (await generator.generate(request())).finish_reason == "stop"

    run(scenario)


def test_abort_returns_the_partial_at_once() -> None:
    async def scenario(generator: SimulatedGenerator) -> tuple[float, Generation, Generation]:
        tasks = [asyncio.create_task(generator.generate(request(seed, n=100, ignore_eos=True))) for seed in (1, 2)]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await generator.abort("r1")
        partial = await tasks[0]
        return time.monotonic() - start, partial, await tasks[1]

    took_s, partial, other = run(scenario, tokens_per_s=200.0)
    assert took_s < 0.2
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 100
    assert other.finish_reason == "length"
    assert len(other.token_ids) == 100


def test_sleep_retracts_and_wake_goes_on() -> None:
    async def scenario(generator: SimulatedGenerator) -> tuple[bool, Generation]:
        task = asyncio.create_task(generator.generate(request(n=20, ignore_eos=True)))
        await asyncio.sleep(0.02)
        await generator.sleep()
        await generator.wake(["weights"])
        await asyncio.sleep(0.2)
        slept = not task.done()
        await generator.wake(["kv_cache"])
        return slept, await task

    slept, generation = run(scenario, tokens_per_s=200.0)
    assert slept
    assert len(generation.token_ids) == 20


def test_over_long_request_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="90 prompt tokens \\+ 20 new tokens = 110 exceed the context length 100"):
        run(lambda generator: generator.generate(request(n=20, prompt=90)), context_length=100)


def test_fault_exception_and_abort() -> None:
    with pytest.raises(RuntimeError, match="simulated fault"):
        one(config={"faults": {"exception": 1.0}})
    generation = one(config={"faults": {"abort": 1.0}})
    assert generation.finish_reason == "abort"
    assert len(generation.token_ids) <= len(one().token_ids)


def test_fault_rate_is_the_configured_one() -> None:
    async def scenario(generator: SimulatedGenerator) -> int:
        return sum([(await generator.generate(request(seed))).finish_reason == "abort" for seed in range(500)])

    assert 60 < run(scenario, faults={"abort": 0.2}) < 140


def test_swallowed_completion_returns_only_when_cancelled() -> None:
    async def scenario(generator: SimulatedGenerator) -> None:
        task = asyncio.create_task(generator.generate(request()))
        await asyncio.sleep(0.05)
        await generator.abort()
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not generator._runs

    run(scenario, faults={"swallow": 1.0})


@pytest.mark.parametrize("config", ["die_at_start=True", "faults={'die': 1.0}"])
def test_die_kills_the_process(config: str) -> None:
    program = (
        "import asyncio; from mprollout.config import *; from mprollout.generator import *; from mprollout.simulated import *\n"
        "import sys; assert not {'torch', 'sglang'} & set(sys.modules)\n"
        f"async def main():\n    g = SimulatedGenerator(SimulatedConfig({config})); await g.start()\n"
        "    await g.generate(GenerateRequest(request_id='r', prompt_ids=[1], max_new_tokens=9, sampling=SamplingConfig(), seed=0))\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr


def test_tokenizer_round_trip_and_chat() -> None:
    tokenizer = SimulatedGenerator(SimulatedConfig()).tokenizer
    assert tokenizer.has_chat_template
    assert tokenizer.decode([*tokenizer.encode("größer"), 999]) == "größer"
    text = tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}], None, {}))
    assert text == "<|user|>\nhi\n<|assistant|>\n"


def test_samples_share_a_workers_speed() -> None:
    """Eight at once at 400 tokens/s together take as long as one after the other would; one alone runs at its own speed."""

    async def scenario(generator: SimulatedGenerator) -> tuple[float, float]:
        start = time.monotonic()
        await asyncio.gather(*(generator.generate(request(seed, n=10, ignore_eos=True)) for seed in range(8)))
        together_s, start = time.monotonic() - start, time.monotonic()
        await generator.generate(request(n=10, ignore_eos=True))
        return together_s, time.monotonic() - start

    together_s, alone_s = run(scenario, tokens_per_s=200.0, max_tokens_per_s=400.0)
    assert 0.19 <= together_s < 1.0
    assert 0.04 <= alone_s < together_s


def test_a_run_that_joins_slows_the_others_from_then_on() -> None:
    async def scenario(generator: SimulatedGenerator) -> tuple[float, float]:
        start = time.monotonic()
        first = asyncio.create_task(generator.generate(request(1, n=30, ignore_eos=True)))
        await asyncio.sleep(0.1)  # 20 of 30 tokens are done
        second = asyncio.create_task(generator.generate(request(2, n=30, ignore_eos=True)))
        await first  # the last 10 at half the speed: 0.1 s
        first_s = time.monotonic() - start
        await second  # 10 done beside the first, 20 alone: 0.1 s more
        return first_s, time.monotonic() - start

    first_s, second_s = run(scenario, max_tokens_per_s=200.0)
    assert 0.15 <= first_s < 0.5
    assert 0.25 <= second_s < 0.9


def test_speed_is_a_measured_function_of_how_many_decode_at_once() -> None:
    """(2 at once: 20 tokens/s together), (6: 40): 4 at once make 30, 1 makes 10, 100 make 40."""
    measured = SimulatedConfig(speeds=[(2, 20.0), (6, 40.0)])

    async def took_s(running: int) -> float:
        generator = SimulatedGenerator(measured)
        await generator.start()
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(generator.generate(request(i, n=60, ignore_eos=True)) for i in range(running)))
        return asyncio.get_running_loop().time() - began

    loop = VirtualLoop()
    try:
        for running, together in ((1, 10), (2, 20), (4, 30), (6, 40), (100, 40)):
            assert loop.run_until_complete(took_s(running)) == pytest.approx(60 * running / together)
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"speeds": [(4, 10.0), (2, 20.0)]}, "in ascending order of samples"),
        ({"speeds": [(0, 10.0)]}, "in ascending order of samples"),
        ({"speeds": [(1, 0.0)]}, "tokens/s > 0"),
        ({"speeds": [(1, 10.0)], "tokens_per_s": 5.0}, "speeds stands instead of tokens_per_s=5"),
    ],
)
def test_speeds_that_are_no_function_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SimulatedConfig(**settings)


def test_lengths_come_from_a_recording() -> None:
    async def lengths(generator: SimulatedGenerator) -> list[int]:
        return [len((await generator.generate(request(seed, n=10000))).token_ids) for seed in range(300)]

    found = run(lengths, lengths=[10] * 19 + [200])
    assert set(found) == {10, 200}
    assert 4 <= found.count(200) <= 30


def test_slow_and_short_faults() -> None:
    start = time.monotonic()
    slow = one(config={"faults": {"slow": 1.0}, "tokens_per_s": 2000.0, "mean_tokens": 10.0, "sigma": 0.0})
    assert len(slow.token_ids) == 10
    assert time.monotonic() - start >= 0.1
    with pytest.raises(ValueError, match="10 token ids but 9 logprobs"):
        one(config={"faults": {"short": 1.0}, "mean_tokens": 10.0, "sigma": 0.0})
