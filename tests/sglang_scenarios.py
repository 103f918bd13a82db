"""What the tests of `SGLangGenerator` do to one engine, which lives in a spawned process (see `serve`).

Each scenario is a coroutine over the generator and returns plain data; the test that asks for it checks the data against transformers.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from mprollout.config import EngineConfig, RewardConfig, SamplingConfig, SGLangConfig, SourceConfig, WeightsConfig
from mprollout.generator import GenerateRequest, Generation
from mprollout.rollout import Session, single_turn
from mprollout.sampler import Attempt, Sampler
from mprollout.sglang_generator import SGLangGenerator
from mprollout.source import Prompt
from mprollout.staging import stage
from mprollout.weights import StagedWeights

_counter = iter(range(10**9))


def request(prompt: list[int], n: int, request_id: str | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id or f"request-{next(_counter)}",
        prompt_ids=prompt,
        max_new_tokens=n,
        sampling=SamplingConfig(**sampling),
        seed=0,
    )


def plain(generation: Generation) -> dict[str, Any]:
    return msgspec.structs.asdict(generation) | {"versions": [tuple(span) for span in generation.versions]}


def weights(seed: int) -> StagedWeights:
    from tiny_model import tiny_qwen2

    return stage(tiny_qwen2(seed).state_dict())


async def generate(
    generator: SGLangGenerator, prompts: list[list[int]], n: int, **sampling: Any
) -> list[dict[str, Any]]:
    return [plain(g) for g in await asyncio.gather(*[generator.generate(request(p, n, **sampling)) for p in prompts])]


async def generate_each(
    generator: SGLangGenerator, prompts: list[list[int]], n: int, samplings: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """At once, so in one batch of the engine, each with its own settings."""
    requests = [request(p, n, **own) for p, own in zip(prompts, samplings, strict=True)]
    return [plain(g) for g in await asyncio.gather(*map(generator.generate, requests))]


async def update(generator: SGLangGenerator, seed: int, version: int, pause: str) -> float:
    """Seconds that the update took."""
    with weights(seed) as staged:
        start = time.monotonic()
        await generator.update_weights(staged, version, pause)  # type: ignore[arg-type]
        return time.monotonic() - start


async def update_from(generator: SGLangGenerator, pid: int, fd: int, route: Any, version: int, pause: str) -> float:
    """Seconds; the trainer is process `pid`, its staged copy that descriptor of it."""
    with StagedWeights.open(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)) as staged:
        start = time.monotonic()
        await generator.update_weights(staged, version, pause, route)  # type: ignore[arg-type]
        return time.monotonic() - start


def adapter(version: int, r: int, target_modules: list[str]) -> dict[str, Any]:
    """A LoRA adapter of the tiny model; another version has other weights."""
    import torch
    from tiny_model import tiny_qwen2

    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for name, parameter in tiny_qwen2(0).named_parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in target_modules:
            outputs, inputs = parameter.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = 0.1 * torch.randn(r, inputs, generator=generator)
            tensors[f"base_model.model.{module}.lora_B.weight"] = 0.1 * torch.randn(outputs, r, generator=generator)
    return tensors


async def update_adapter_while_running(
    generator: SGLangGenerator, prompt: list[int], version: int, r: int, target_modules: list[str], lora_alpha: int
) -> list[dict[str, Any]]:
    """[a request that the update met, one after it, of the same prompt]."""
    running = asyncio.create_task(generator.generate(request(prompt, 400, ignore_eos=True)))
    await asyncio.sleep(0.2)
    with stage(adapter(version, r, target_modules)) as staged:
        await generator.update_weights(staged, version, "retract")
    after = await generator.generate(request(prompt, 16, ignore_eos=True))
    assert not running.done()
    return [plain(await running), plain(after)]


async def adapters_loaded(generator: SGLangGenerator) -> list[str]:
    """Names of the adapters that SGLang has, when those that nobody uses any more are gone."""
    adapters = generator._adapters
    assert adapters is not None
    await asyncio.gather(*adapters._unloading)
    return sorted(generator._manager.lora_registry.get_all_adapters())


async def update_while_running(
    generator: SGLangGenerator,
    prompts: list[list[int]],
    n: int,
    seed: int,
    version: int,
    pause: str,
    after_s: float,
    **sampling: Any,
) -> tuple[float, list[dict[str, Any]]]:
    """(seconds of the update, what each request gave), the update coming `after_s` after the requests."""
    running = asyncio.gather(*[generator.generate(request(p, n, ignore_eos=True, **sampling)) for p in prompts])
    await asyncio.sleep(after_s)
    took_s = await update(generator, seed, version, pause)
    return took_s, [plain(g) for g in await asyncio.wait_for(running, 60)]


@contextlib.contextmanager
def told_after(generator: SGLangGenerator, tokens: int) -> Iterator[asyncio.Event]:
    """An event that is set when so many tokens of some request have come from the engine."""
    came, engine_request, generate_request = (
        asyncio.Event(),
        generator._engine_request,
        generator._manager.generate_request,
    )

    def streamed(asked: GenerateRequest, adapter: str | None) -> Any:
        made = engine_request(asked, adapter)
        made.stream = True
        return made

    async def listening(*args: Any) -> Any:
        async for answer in generate_request(*args):
            if len(answer["output_ids"]) >= tokens:
                came.set()
            yield answer

    generator._engine_request, generator._manager.generate_request = streamed, listening  # type: ignore[method-assign]
    try:
        yield came
    finally:
        del generator._engine_request, generator._manager.generate_request  # those of their classes again


async def update_after_tokens(
    generator: SGLangGenerator, prompt: list[int], n: int, after: int, seed: int, version: int, pause: str
) -> dict[str, Any]:
    """The update begins when the token of that number has come from the engine."""
    with told_after(generator, after) as came, weights(seed) as staged:
        running = asyncio.create_task(generator.generate(request(prompt, n, ignore_eos=True)))
        await asyncio.wait_for(came.wait(), 60)
        await generator.update_weights(staged, version, pause)  # type: ignore[arg-type]
        return plain(await asyncio.wait_for(running, 60))


async def sample_across_update(
    generator: SGLangGenerator,
    prompt: list[int],
    n: int,
    seed: int,
    version: int,
    partial: bool = False,
    between_turns: bool = False,
    **sampling: Any,
) -> tuple[dict[str, Any], int]:
    """(a sample as a worker's sampler makes it, tokens sampled for it); the update aborts its one turn, or comes between its two."""
    settings = EngineConfig(
        source=SourceConfig(path="-"),
        generator=SGLangConfig(model="-"),
        reward=RewardConfig("exact"),
        weights=WeightsConfig(pause="abort", partial_rollout=partial),
    )
    own = SamplingConfig(group_size=1, max_new_tokens=n, ignore_eos=True, **sampling)

    async def push() -> None:
        with weights(seed) as staged:
            sampler.updates_seen += 1
            await generator.update_weights(staged, version, "abort")

    async def two_turns(session: Session, row: Prompt) -> None:
        await session.generate(max_new_tokens=n // 2)
        session.append([11, 12, 13])
        await push()
        await session.generate()

    words = memoryview(array.array("q", [0] * 64))
    sampler = Sampler(settings, generator, two_turns if between_turns else single_turn, words)
    row = Prompt(ticket=0, row=0, epoch=0, prompt="?", answer="x")
    attempt = Attempt(f"across-{next(_counter)}", 0)
    try:
        with told_after(generator, 40) as came:
            making = asyncio.create_task(sampler.run_group(row, prompt, own, attempt))
            if not between_turns:
                await asyncio.wait_for(came.wait(), 60)
                await push()
            (made,) = await asyncio.wait_for(making, 60)
    finally:
        sampler.close()
    return msgspec.structs.asdict(made.sample) | {"versions": [tuple(s) for s in made.sample.versions]}, attempt.sampled


async def turn(generator: SGLangGenerator, prompt: list[int], n: int, **sampling: Any) -> dict[str, Any]:
    """One turn of a session: what it appended, and its text."""
    session = Session(generator, SamplingConfig(max_new_tokens=n, **sampling), prompt, f"turn-{next(_counter)}", seed=0)
    made = await session.generate()
    return plain(made) | {"loss_mask": list(session.sample.loss_mask), "text": session.text}


async def update_with(
    generator: SGLangGenerator, drop: str | None = None, add: str | None = None, version: int = 99
) -> None:
    import torch
    from tiny_model import tiny_qwen2

    state = dict(tiny_qwen2(0).state_dict())
    if drop:
        del state[drop]
    if add:
        state[add] = torch.zeros(3)
    with stage(state) as staged:
        await generator.update_weights(staged, version, "retract")


async def detokenizer_dies_in_update(generator: SGLangGenerator, prompt: list[int]) -> tuple[float, str, str, bool]:
    """(seconds from the death on, what the update says, what `check` says, whether requests wait); the loading never ends."""
    generator.check()
    running = asyncio.create_task(generator.generate(request(prompt, 1500, ignore_eos=True)))
    await asyncio.sleep(0.1)
    generator._manager.update_weights_from_tensor = lambda *_: asyncio.Event().wait()
    with weights(0) as staged:
        update = asyncio.create_task(generator.update_weights(staged, generator.version + 1, "retract"))
        await asyncio.sleep(0.3)
        start = time.monotonic()
        os.kill(generator._processes["detokenizer"].pid, signal.SIGKILL)
        said = [str(error) for error in await asyncio.gather(update, return_exceptions=True)]
        took_s = time.monotonic() - start
    try:
        generator.check()
    except RuntimeError as error:
        said.append(str(error))
    waiting = asyncio.create_task(generator.generate(request(prompt, 4)))
    done, _ = await asyncio.wait([running, waiting], timeout=0.5)
    return took_s, said[0], said[1], not done


async def abort_one(generator: SGLangGenerator, prompt: list[int]) -> tuple[float, list[dict[str, Any]]]:
    """(seconds from abort to answer, [aborted "id-1", untouched "id-10"])."""
    tasks = [
        asyncio.create_task(generator.generate(request(prompt, 400, request_id=name, ignore_eos=True)))
        for name in ("id-1", "id-10")
    ]
    await asyncio.sleep(0.2)
    start = time.monotonic()
    await generator.abort("id-1")
    first = await tasks[0]
    took_s = time.monotonic() - start
    return took_s, [plain(first), plain(await tasks[1])]


async def abort_in_sleep(generator: SGLangGenerator, prompt: list[int]) -> list[dict[str, Any]]:
    """Asleep: one that waits and one that runs are aborted, another that runs goes on after waking."""
    running = [
        asyncio.create_task(generator.generate(request(prompt, 300, request_id=name, ignore_eos=True)))
        for name in ("a", "b")
    ]
    await asyncio.sleep(0.2)
    await generator.sleep()
    waiting = asyncio.create_task(generator.generate(request(prompt, 300, request_id="c", ignore_eos=True)))
    await asyncio.sleep(0)
    await generator.abort("a")
    await generator.abort("c")
    aborted = [await asyncio.wait_for(running[0], 10), await asyncio.wait_for(waiting, 10)]
    await generator.wake()
    return [plain(g) for g in [*aborted, await asyncio.wait_for(running[1], 60)]]


async def cancel_then_ask(generator: SGLangGenerator, prompt: list[int]) -> tuple[int, list[dict[str, Any]]]:
    """(requests that the engine still holds 5 s after a cancel, a fresh answer)."""
    task = asyncio.create_task(generator.generate(request(prompt, 1500, ignore_eos=True)))
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(500):
        if not generator._manager.rid_to_state:
            break
        await asyncio.sleep(0.01)
    return len(generator._manager.rid_to_state), await generate(generator, [prompt], 4, ignore_eos=True)


async def speed(generator: SGLangGenerator, prompt: list[int], samples: int, n: int) -> float:
    """Tokens per second."""
    start = time.monotonic()
    await generate(generator, [prompt] * samples, n, ignore_eos=True)
    return samples * n / (time.monotonic() - start)


async def idle_cpu(generator: SGLangGenerator, seconds: float) -> dict[str, float]:
    """Share of a core that each process uses while nothing runs: the engine's by their names, and this one's."""
    import psutil

    processes = {name: psutil.Process(process.pid) for name, process in generator._processes.items()}
    processes["worker"] = psutil.Process()
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    await asyncio.sleep(seconds)
    return {name: (sum(process.cpu_times()[:2]) - before[name]) / seconds for name, process in processes.items()}


async def facts(generator: SGLangGenerator) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {
        "context_length": generator.context_length,
        "chat": generator.tokenizer.decode(generator.tokenizer.encode_chat(messages, None, {})),
        "round_trip": generator.tokenizer.decode(generator.tokenizer.encode("What is 1 + 2?")),
        "sigterm_is_ours": signal.getsignal(signal.SIGTERM) is _on_sigterm,
        "log_handlers": [type(h).__name__ for h in logging.getLogger().handlers],
        "loop_policy": type(asyncio.get_event_loop_policy()).__module__,
        "tmp": os.listdir(os.environ["TMPDIR"]),
        "shm": os.listdir("/dev/shm"),
    }


def _on_sigterm(signum: int, frame: Any) -> None:
    os._exit(3)


def serve(pipe: Connection, config: SGLangConfig) -> None:
    """Main function of the process: answers (scenario, arguments) with (result, None) or (None, error)."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    logging.getLogger().addHandler(logging.NullHandler())
    asyncio.run(_serve(pipe, config))


async def _serve(pipe: Connection, config: SGLangConfig) -> None:
    generator = SGLangGenerator(config, devices=["cpu"], max_running_samples=32, seed=1)
    try:
        try:
            await generator.start()
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))
            return
        pipe.send(("started", None))
        while (message := await asyncio.to_thread(pipe.recv)) is not None:
            name, arguments = message
            try:
                pipe.send((await globals()[name](generator, **arguments), None))
            except Exception as error:
                pipe.send((None, (type(error).__name__, str(error), traceback.format_exc())))
    finally:
        await generator.close()
