"""`SGLangGenerator` over a real engine on the CPU: what it returns agrees with transformers, and nothing survives it.

One engine, in a spawned process (`sglang_scenarios.serve`), serves the whole file; the tests run in order, the last ones kill it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import sglang_scenarios
from conftest import session_processes
from tiny_model import make_tiny_model, tiny_qwen2

from mprollout.config import SGLangConfig
from mprollout.sglang_generator import SGLangGenerator
from mprollout.weights import check_parameters

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")


def slow(test: Any) -> Any:
    """Starts real SGLang, whose start on a loaded machine outlasts the ordinary limit of a test."""
    return pytest.mark.slow(pytest.mark.timeout(300)(test))


rng = random.Random(0)
PROMPTS = [[rng.randrange(8, 500) for _ in range(12)] for _ in range(8)]
TOLERANCE = 1e-4


class Server:
    """The process with the engine."""

    def __init__(self, model: Path) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=sglang_scenarios.serve, args=(theirs, str(model)))
        self.process.start()
        theirs.close()
        self.version, self.seed = 0, 0

    def ask(self, scenario: str, **arguments: Any) -> Any:
        self.pipe.send((scenario, arguments))
        assert self.pipe.poll(100), f"{scenario} took more than 100 s"
        result, error = self.pipe.recv()
        if error is not None:
            name, message, trace = error
            raise {"ValueError": ValueError}.get(name, RuntimeError)(message) from RuntimeError(trace)
        return result

    def next_version(self) -> dict[str, int]:
        self.version, self.seed = self.version + 1, self.seed + 1
        return {"version": self.version, "seed": self.seed}

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


@pytest.fixture(scope="module")
def server(tiny_model: Path, private_tmp: Path) -> Iterator[Server]:
    server = Server(tiny_model)
    session_processes.add(server.process.pid or 0)
    assert server.pipe.poll(240), "the engine did not start within 240 s"
    assert server.pipe.recv() == ("started", None)
    yield server
    server.kill()
    session_processes.discard(server.process.pid or 0)


def reference_logprobs(seed: int, prompt: list[int], token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprob of each token under transformers' model of this seed, given all before it."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        logits = tiny_qwen2(seed)(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def assert_logprobs(
    answer: dict[str, Any], seed_of_version: dict[int, int], prompt: list[int], temperature: float = 1.0
) -> None:
    """Every span's logprobs are those of its version's weights."""
    for version, start, end in answer["versions"]:
        expected = reference_logprobs(seed_of_version[version], prompt, answer["token_ids"], temperature)[start:end]
        assert torch.allclose(torch.tensor(answer["logprobs"][start:end]), expected, atol=TOLERANCE), (
            version,
            start,
            end,
        )


# -- without an engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda folder: folder / "absent", lambda folder: folder])
def test_folder_that_is_no_model_is_refused_before_the_engine_starts(tmp_path: Path, make: Any) -> None:
    generator = SGLangGenerator(SGLangConfig(model=str(make(tmp_path))), devices=["cpu"], max_running_samples=1, seed=0)
    with pytest.raises(ValueError, match=r"SGLangConfig.model: .* is no"):
        asyncio.run(generator.start())
    generator.check()
    asyncio.run(generator.close())


def test_tied_embedding_may_be_absent_or_present(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tied=True)
    generator = SGLangGenerator(SGLangConfig(model=str(folder)), devices=["cpu"], max_running_samples=1, seed=0)
    generator._expect_parameters(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny_qwen2(0, tied=True).state_dict().items()}
    assert "lm_head.weight" in shapes
    for given in (shapes, {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}):
        check_parameters(given, generator._expected, generator._optional)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        check_parameters(
            {name: s for name, s in shapes.items() if name != "model.norm.weight"},
            generator._expected,
            generator._optional,
        )


@slow
def test_kill_while_starting_leaves_nothing(tiny_model: Path) -> None:
    """sglang#23627, sglang#16756: SIGKILL of the worker as soon as its scheduler is spawned."""
    server = Server(tiny_model)
    worker = psutil.Process(server.process.pid)
    deadline = time.monotonic() + 240
    while not (children := _children(worker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    server.kill()
    assert children
    _assert_gone(children)


@slow
def test_engine_that_cannot_start_says_so(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"nothing")
    server = Server(folder)
    try:
        assert server.pipe.poll(240)
        kind, message = server.pipe.recv()
    finally:
        server.kill()
    assert kind == "RuntimeError"
    assert "scheduler died during initialization" in message


# -- with an engine ------------------------------------------------------------------------------------------------------


@slow
def test_start_leaves_the_process_as_it_was(server: Server) -> None:
    facts = server.ask("facts")
    assert facts["context_length"] == 2048
    assert facts["chat"] == "user\nhi\nassistant\n"
    assert facts["round_trip"] == "What is 1 + 2?"
    assert facts["sigterm_is_ours"]
    assert facts["log_handlers"] == ["NullHandler"]
    assert facts["loop_policy"] == "asyncio.unix_events"
    assert not [name for name in facts["shm"] if name.startswith(("sglang", "torch"))]


@slow
def test_idle_engine_does_not_spin(server: Server) -> None:
    """vllm#19036: left are the ticks of gloo's nine threads in the scheduler, about 1% of a core together."""
    shares = server.ask("idle_cpu", seconds=4.0)
    assert shares["worker"] + shares["detokenizer"] <= 0.01, shares
    assert shares["scheduler_0"] <= 0.1, shares


@slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_transformers(server: Server, temperature: float) -> None:
    answers = server.ask("generate", prompts=PROMPTS[:4], n=64, temperature=temperature, ignore_eos=True)
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        assert len(answer["token_ids"]) == 64
        assert answer["finish_reason"] == "length"
        assert answer["versions"] == [(0, 0, 64)]
        assert_logprobs(answer, {0: 0}, prompt, temperature)


@slow
def test_every_eos_of_the_generation_config_stops(server: Server) -> None:
    answers = server.ask("generate", prompts=PROMPTS * 4, n=1000)
    assert {answer["matched_stop"] for answer in answers if answer["finish_reason"] == "stop"} == {2, 7}
    for answer in answers:
        if answer["finish_reason"] == "stop":
            assert answer["token_ids"][-1] == answer["matched_stop"]
        assert not {2, 7} & set(answer["token_ids"][:-1])


@slow
def test_stop_strings_and_ids_are_passed_on(server: Server) -> None:
    (stopped,) = server.ask("generate", prompts=PROMPTS[:1], n=1000, stop=["a"], ignore_eos=True)
    assert stopped["finish_reason"] == "stop"
    assert stopped["matched_stop"] == "a"
    (stopped,) = server.ask("generate", prompts=PROMPTS[:1], n=1000, stop_token_ids=list(range(100, 200)))
    assert stopped["finish_reason"] == "stop"
    assert stopped["matched_stop"] == stopped["token_ids"][-1]


@slow
def test_over_long_request_is_a_value_error(server: Server) -> None:
    with pytest.raises(ValueError, match="12 prompt tokens \\+ 2040 new tokens = 2052 exceed the context length 2048"):
        server.ask("generate", prompts=PROMPTS[:1], n=2040)


@slow
@pytest.mark.parametrize("change", [{"drop": "lm_head.weight"}, {"add": "foo.bar"}])
def test_update_of_wrong_coverage_is_refused_and_the_engine_unharmed(server: Server, change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(change.values()))):
        server.ask("update_with", **change)
    (answer,) = server.ask("generate", prompts=PROMPTS[:1], n=8, ignore_eos=True)
    assert_logprobs(answer, {server.version: server.seed}, PROMPTS[0])


@slow
@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_update_changes_what_comes_out_and_no_stale_prefix_is_used(server: Server, pause: str) -> None:
    """RLinf#96: the same prompt, warm in the prefix cache, before and after."""
    server.ask("generate", prompts=PROMPTS[:2], n=8)
    new = server.next_version()
    server.ask("update", pause=pause, **new)
    for prompt, answer in zip(
        PROMPTS, server.ask("generate", prompts=PROMPTS[:2], n=32, ignore_eos=True), strict=False
    ):
        assert answer["versions"] == [(new["version"], 0, 32)]
        assert_logprobs(answer, {new["version"]: new["seed"]}, prompt)


@slow
@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_update_under_eight_running_requests(server: Server, pause: str) -> None:
    """AReaL#140, sglang#12099, sglang#29670: done soon, nothing drained, both versions in a long request, each part by its own weights."""
    old = {server.version: server.seed}
    new = server.next_version()
    took_s, answers = server.ask("update_while_running", prompts=PROMPTS, n=600, pause=pause, after_s=0.3, **new)
    assert took_s < 10
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        if pause == "abort":
            assert answer["finish_reason"] == "abort"
            assert [span[0] for span in answer["versions"]] == list(old)
            assert_logprobs(answer, old, prompt)
            continue
        assert answer["finish_reason"] == "length"
        assert len(answer["token_ids"]) == 600
        assert [span[0] for span in answer["versions"]] == [*old, new["version"]]
        if pause == "retract":
            assert_logprobs(answer, old | {new["version"]: new["seed"]}, prompt)
        else:  # new weights on old key-value entries: the behaviour's logprobs are neither's, those before the update are the old one's
            assert_logprobs(answer | {"versions": answer["versions"][:1]}, old, prompt)
    (after,) = server.ask("generate", prompts=PROMPTS[:1], n=16, ignore_eos=True)
    assert_logprobs(after, {new["version"]: new["seed"]}, PROMPTS[0])


@slow
def test_abort_returns_the_partial_and_spares_others(server: Server) -> None:
    took_s, (aborted, other) = server.ask("abort_one", prompt=PROMPTS[0])
    assert took_s < 2
    assert aborted["finish_reason"] == "abort"
    assert 0 < len(aborted["token_ids"]) < 400
    assert_logprobs(aborted, {server.version: server.seed}, PROMPTS[0])
    assert other["finish_reason"] == "length"
    assert len(other["token_ids"]) == 400


@slow
def test_sleep_keeps_running_requests_and_obeys_aborts(server: Server) -> None:
    running, waiting, survivor = server.ask("abort_in_sleep", prompt=PROMPTS[0])
    assert running["finish_reason"] == waiting["finish_reason"] == "abort"
    assert waiting["token_ids"] == []
    assert_logprobs(running, {server.version: server.seed}, PROMPTS[0])
    assert survivor["finish_reason"] == "length"
    assert len(survivor["token_ids"]) == 300
    assert_logprobs(survivor, {server.version: server.seed}, PROMPTS[0])


@slow
def test_cancelled_call_aborts_the_request(server: Server) -> None:
    held, (answer,) = server.ask("cancel_then_ask", prompt=PROMPTS[0])
    assert held == 0
    assert len(answer["token_ids"]) == 4


@slow
def test_death_of_the_detokenizer_in_an_update_is_loud_at_once(server: Server) -> None:
    took_s, update_said, check_said, waits = server.ask("detokenizer_dies_in_update", prompt=PROMPTS[0])
    assert took_s < 5
    assert "SGLang's detokenizer (pid" in update_said
    assert "ended with exit code -9" in update_said
    assert check_said == update_said
    assert waits, "a request on a broken engine must wait for the worker's end"


@slow
def test_kill_at_work_leaves_nothing(server: Server) -> None:
    """sglang#23627: the scheduler still holds requests."""
    children = _children(psutil.Process(server.process.pid))
    assert children
    server.kill()
    _assert_gone(children)


def _children(worker: psutil.Process) -> list[psutil.Process]:
    """The engine's processes; the resource tracker ends by itself."""
    found = []
    for child in worker.children(recursive=True):
        try:
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _assert_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still alive 10 s after the kill: {alive}"
        time.sleep(0.05)
