"""`SGLangGenerator` over a real engine on the CPU: what it returns agrees with transformers, and nothing survives it.

One engine, in a spawned process (`sglang_scenarios.serve`), serves the whole file; the tests run in order, the last ones kill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import sglang_scenarios
from conftest import session_processes
from rigs import Rig
from tiny_model import make_tiny_model, tiny_qwen2

import mprollout as mp
from mprollout import messages
from mprollout.batch import Batch
from mprollout.config import SGLangConfig
from mprollout.generator import VersionSpan
from mprollout.record import Recorder
from mprollout.ring import RolledSample, encode_group
from mprollout.schema import Meta, Sampled, schema_bytes
from mprollout.sglang_generator import SGLangGenerator
from mprollout.transports import Group, Sending, make_transport
from mprollout.verify import VerifyArgs, run_verify
from mprollout.weights import Bucket, StagedWeights, check_parameters

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

    def __init__(self, model: Path, **changes: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        config = SGLangConfig(model=str(model), **changes)
        self.process = context.Process(target=sglang_scenarios.serve, args=(theirs, config))
        self.process.start()
        theirs.close()
        self.version, self.seed = 0, 0

    def ask(self, scenario: str, **arguments: Any) -> Any:
        self.tell(scenario, **arguments)
        return self.hear(scenario)

    def tell(self, scenario: str, **arguments: Any) -> None:
        self.pipe.send((scenario, arguments))

    def hear(self, scenario: str) -> Any:
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


@contextlib.contextmanager
def serving(model: Path, **changes: Any) -> Iterator[Server]:
    server = Server(model, **changes)
    session_processes.add(server.process.pid or 0)
    try:
        assert server.pipe.poll(240), "the engine did not start within 240 s"
        assert server.pipe.recv() == ("started", None)
        yield server
    finally:
        server.kill()
        session_processes.discard(server.process.pid or 0)


@pytest.fixture(scope="module")
def server(tiny_model: Path, private_tmp: Path) -> Iterator[Server]:
    with serving(tiny_model) as server:
        yield server


def reference_logits(seed: int, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """Of transformers' model of this seed, for the place of each token, given all before it."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        return tiny_qwen2(seed)(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].float()


def reference_logprobs(
    seed: int,
    prompt: list[int],
    token_ids: list[int],
    temperature: float = 1.0,
    top_k: int = 512,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """Logprob of each token under transformers' model of this seed, given all before it, within what the settings keep."""
    logits = reference_logits(seed, prompt, token_ids)
    probs, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    kept = (
        (torch.arange(probs.shape[1]) < top_k) & (probs.cumsum(-1) - probs <= top_p) & (probs >= probs[:, :1] * min_p)
    )
    within = (probs * kept / (probs * kept).sum(-1, keepdim=True)).log()
    return within.gather(1, (order == torch.tensor(token_ids)[:, None]).int().argmax(-1, keepdim=True))[:, 0]


def assert_logprobs(answer: dict[str, Any], seed_of_version: dict[int, int], prompt: list[int], **own: float) -> None:
    """Every span's logprobs are those of its version's weights, sampled with these settings."""
    for version, start, end, _ in answer["versions"]:
        expected = reference_logprobs(seed_of_version[version], prompt, answer["token_ids"], **own)[start:end]
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
        assert answer["versions"] == [(0, 0, 64, False)]
        assert_logprobs(answer, {0: 0}, prompt, temperature=temperature)


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
        assert answer["versions"] == [(new["version"], 0, 32, False)]
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
        assert [span[3] for span in answer["versions"]] == [False, pause == "in_place"]
        if pause == "retract":
            assert_logprobs(answer, old | {new["version"]: new["seed"]}, prompt)
        else:  # new weights on old key-value entries: the behaviour's logprobs are neither's, those before the update are the old one's
            assert_logprobs(answer | {"versions": answer["versions"][:1]}, old, prompt)
    (after,) = server.ask("generate", prompts=PROMPTS[:1], n=16, ignore_eos=True)
    assert_logprobs(after, {new["version"]: new["seed"]}, PROMPTS[0])


TRUNCATED = [
    {"top_k": 40},
    {"top_k": 512, "top_p": 0.8},
    {"top_k": 512, "min_p": 0.05},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.01, "temperature": 0.7},
]


@slow
def test_truncated_sampling_has_the_logprobs_of_what_it_leaves(server: Server) -> None:
    """Top-k, top-p and min-p in one batch with ordinary requests: logprobs are those within what is kept, recomputed and renormalized."""
    samplings: list[dict[str, Any]] = [*TRUNCATED, {}, {"temperature": 0.5}]
    answers = server.ask(
        "generate_each", prompts=PROMPTS[:6], n=64, samplings=[own | {"ignore_eos": True} for own in samplings]
    )
    for prompt, answer, own in zip(PROMPTS, answers, samplings, strict=False):
        assert len(answer["token_ids"]) == len(answer["logprobs"]) == 64
        assert_logprobs(answer, {server.version: server.seed}, prompt, **own)
        whole = reference_logprobs(server.seed, prompt, answer["token_ids"], own.get("temperature", 1.0))
        of_all = torch.allclose(torch.tensor(answer["logprobs"]), whole, atol=0.01)
        assert of_all == (own not in TRUNCATED), "within the whole vocabulary they are others"


@slow
def test_penalized_sampling_has_the_logprobs_of_the_penalized_distribution(server: Server) -> None:
    (answer,) = server.ask(
        "generate",
        prompts=PROMPTS[:1],
        n=64,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        temperature=0.8,
        ignore_eos=True,
    )
    logits = reference_logits(server.seed, PROMPTS[0], answer["token_ids"])
    counts = torch.zeros(logits.shape[1])
    for at, token in enumerate(answer["token_ids"]):
        penalized = ((logits[at] - 1.5 * (counts > 0) - 0.5 * counts) / 0.8).log_softmax(-1)
        assert abs(float(penalized[token]) - answer["logprobs"][at]) < TOLERANCE
        counts[token] += 1


@slow
def test_matched_stops_are_trimmed_with_their_logprobs(server: Server) -> None:
    for settings in ({"stop": ["7"], "ignore_eos": True}, {"stop_token_ids": [2, 7, *range(100, 200)]}):
        kept = server.ask("turn", prompt=PROMPTS[0], n=1000, **settings)
        cut = server.ask("turn", prompt=PROMPTS[0], n=1000, no_stop_trim=False, **settings)
        for made in (kept, cut):
            assert made["finish_reason"] == "stop"
            assert len(made["logprobs"]) == len(made["loss_mask"]) == len(made["token_ids"])
            assert_logprobs(made, {server.version: server.seed}, PROMPTS[0])
        if "stop" in settings:
            assert "7" in kept["text"] and "7" not in cut["text"]
        else:
            assert kept["matched_stop"] == kept["token_ids"][-1]
            assert not set(settings["stop_token_ids"]) & set(cut["token_ids"])


@slow
def test_thinking_is_ended_at_its_budget(server: Server) -> None:
    """What follows was sampled given the tokens put there, which themselves are not trained on."""
    made = server.ask(
        "turn", prompt=PROMPTS[0], n=60, max_thinking_tokens=10, end_of_thinking="</t>\n", ignore_eos=True
    )
    forced = made["loss_mask"].count(0)
    assert made["loss_mask"] == [1] * 10 + [0] * forced + [1] * (50 - forced) and 1 <= forced <= 5
    assert "</t>\n" in made["text"] and made["finish_reason"] == "length"
    expected = reference_logprobs(server.seed, PROMPTS[0], made["token_ids"])
    own = torch.tensor(made["loss_mask"]) == 1
    assert torch.allclose(torch.tensor(made["logprobs"])[own], expected[own], atol=TOLERANCE)
    assert not torch.tensor(made["logprobs"])[~own].any()


@slow
def test_every_token_around_an_update_carries_the_version_whose_weights_sampled_it(server: Server) -> None:
    """vllm#54443: weights updated after token 57 of 128: [7] * 57 + [8] * 71, give or take what was under way when the token came.

    The versions are checked against nothing that SGLang says: each token's logprob is that of one of the two weights, and not of the other.
    """
    server.version, server.seed = 7, 7
    server.ask("update", seed=7, version=7, pause="retract")
    answer = server.ask("update_after_tokens", prompt=PROMPTS[0], n=128, after=57, seed=8, version=8, pause="retract")
    server.version, server.seed = 8, 8
    got = torch.tensor(answer["logprobs"])
    off = torch.stack([(reference_logprobs(seed, PROMPTS[0], answer["token_ids"]) - got).abs() for seed in (7, 8)])
    assert (off.min(0).values < TOLERANCE).all() and (off.max(0).values > TOLERANCE).sum() > 120
    found = (off.argmin(0) + 7).tolist()
    (_, _, k, _), _ = answer["versions"]
    assert answer["versions"] == [(7, 0, k, False), (8, k, 128, False)] and 57 <= k < 100
    assert found == [7] * k + [8] * (128 - k)


@slow
@pytest.mark.parametrize("own", [{}, TRUNCATED[3]])
def test_a_sample_that_an_update_aborts_goes_on_from_its_tokens(server: Server, own: dict[str, Any]) -> None:
    old = {server.version: server.seed}
    new = server.next_version()
    made, sampled = server.ask("sample_across_update", prompt=PROMPTS[0], n=200, partial=True, **new, **own)
    (first, second) = made["versions"]
    assert first[0] in old and 40 <= first[2] < 200 and second == (new["version"], first[2], 200, False)
    assert len(made["token_ids"]) == sampled == 200 and made["loss_mask"] == b"\1" * 200
    assert made["finish_reason"] == "length"
    assert_logprobs(made, old | {new["version"]: new["seed"]}, PROMPTS[0], **own)


@slow
def test_without_partial_rollout_it_begins_anew(server: Server) -> None:
    """slime#2092: one policy version, and every token sampled given the prompt and its own predecessors alone."""
    new = server.next_version()
    made, sampled = server.ask("sample_across_update", prompt=PROMPTS[0], n=200, **new)
    assert made["versions"] == [(new["version"], 0, 200, False)] and sampled >= 240
    assert_logprobs(made, {new["version"]: new["seed"]}, PROMPTS[0])


@slow
@pytest.mark.parametrize("partial", [False, True])
def test_loss_masks_of_two_turns_survive_an_update_between_them(server: Server, partial: bool) -> None:
    old = {server.version: server.seed}
    new = server.next_version()
    made, _ = server.ask("sample_across_update", prompt=PROMPTS[0], n=64, between_turns=True, partial=partial, **new)
    assert made["token_ids"][32:35] == [11, 12, 13] and len(made["token_ids"]) == 67
    assert made["loss_mask"] == b"\1" * 32 + b"\0" * 3 + b"\1" * 32
    assert [span[:3] for span in made["versions"]] == [(*old, 0, 35), (new["version"], 35, 67)]
    for (version, start, end, _), seed in zip(made["versions"], (*old.values(), new["seed"]), strict=True):
        expected = reference_logprobs(seed, PROMPTS[0], made["token_ids"])
        own = [at for at in range(start, end) if made["loss_mask"][at]]
        assert torch.allclose(torch.tensor(made["logprobs"])[own], expected[own], atol=TOLERANCE), version


@slow
def test_verify_reports_what_rests_on_old_key_value_entries_apart(
    server: Server, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples that lived through an update in place, and truncated ones through one that retracts, recorded as a run records them."""
    from safetensors.torch import save_file

    (tmp_path / "weights").mkdir()
    prompt = PROMPTS[0]
    kept = {server.version: server.seed}
    new = server.next_version()
    kept[new["version"]] = new["seed"]
    running: dict[str, Any] = {"prompts": [prompt] * 4, "n": 300, "after_s": 0.2}
    _, truncated = server.ask("update_while_running", pause="retract", **running, **new, **TRUNCATED[3])
    new = server.next_version()
    kept[new["version"]] = new["seed"]
    _, in_place = server.ask("update_while_running", pause="in_place", **running, **new)
    for version, seed in kept.items():
        tensors = {name: tensor.clone() for name, tensor in tiny_qwen2(seed).state_dict().items()}
        save_file(tensors, tmp_path / "weights" / f"{version}.safetensors")
    record_groups(tmp_path / "record", tiny_model, prompt, [(in_place, {}), (truncated, TRUNCATED[3])])
    assert run_verify(VerifyArgs(run=tmp_path, sample="100%", tolerance=TOLERANCE, json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    on_old = sum(end - start for answer in in_place for _, start, end, old_kv in answer["versions"] if old_kv)
    assert report["in_place"]["tokens"] == on_old > 100
    assert report["overall"]["tokens"] == 8 * 300 - on_old and report["overall"]["max"] <= TOLERANCE
    assert report["in_place"]["max"] > 100 * TOLERANCE
    assert f"version {new['version']}, span 1, in_place" in report["by_span"]
    print(f"in_place: {report['in_place']}; the others: {report['overall']}")


def record_groups(
    folder: Path, model: Path, prompt: list[int], groups: list[tuple[list[dict[str, Any]], dict[str, Any]]]
) -> None:
    """Through the ring's own encoding, a batch of them."""
    rig = Rig(schema=schema_bytes(), max_group_bytes=1 << 17, arena_bytes=1 << 19)
    leases = []
    for ticket, (answers, sampled) in enumerate(groups):
        samples = [
            RolledSample(
                token_ids=answer["token_ids"],
                logprobs=answer["logprobs"],
                loss_mask=bytearray(b"\1" * len(answer["token_ids"])),
                finish_reason=answer["finish_reason"],
                versions=[VersionSpan(*span) for span in answer["versions"]],
            )
            for answer in answers
        ]
        assert rig.admitter.admit(ticket, b"row")
        meta = Meta(*[0] * len(Meta._fields))
        fields = encode_group(meta, prompt, samples, [1.0] * len(samples), sampled=Sampled(**sampled))
        assert rig.producer.publish(rig.claim(), fields)
        leases.append(rig.take())
    rig.consumer.deliver(leases)
    with Batch(leases) as batch:
        recorder = Recorder(folder, (), {"model": str(model)}, max_bytes=1 << 30)
        recorder.add(batch, 0)
        recorder.close()


class Trainer:
    """The other end of a transport, for the engine of a `Server`."""

    def __init__(self, folder: Path, transport: str, ranks: int = 1) -> None:
        config = mp.EngineConfig(
            source=mp.SourceConfig(rows=[{"prompt": "x"}]),
            generator=SGLangConfig(model=str(folder), engine_args={"tp_size": ranks}),
            reward=mp.RewardConfig("exact"),
            workers=mp.WorkerConfig(devices=["cpu"]),
            weights=mp.WeightsConfig(transport=transport, bucket_bytes=1 << 16),  # type: ignore[arg-type]
            run_dir=str(folder),
        )
        self.transport = make_transport(config)

    def update(self, server: Server, pause: str = "retract") -> str | None:
        """Push the next version. Why its route broke; None: it did not, or there is none."""
        new = server.next_version()
        with sglang_scenarios.weights(new["seed"]) as staged:
            ready = {0: messages.WorkerState(worker=0, pid=server.process.pid or 0, state="ready")}
            carriage = self.transport.prepare(staged, new["version"], ready)
            route = carriage.route.to(0, 0) if carriage.route is not None else None
            fd = {"pid": os.getpid(), "fd": carriage.fd}
            server.tell("update_from", **fd, route=route, version=new["version"], pause=pause)
            try:
                carriage.depart()
                server.hear("update_from")
            finally:
                carriage.end(applied=True)
        broken = isinstance(carriage, Sending) and carriage.group.broken
        return carriage.why if broken else None


@slow
@pytest.mark.parametrize("transport", ["disk", "ipc", "distributed"])
def test_each_transport_brings_the_weights_and_a_broken_route_leaves_no_mixed_ones(
    server: Server, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C46: the trainer fails at the third bucket of many, when two of them are loaded; then the group is made anew."""
    trainer = Trainer(tmp_path, transport)
    routed = transport != "disk"

    def check() -> None:
        (answer,) = server.ask("generate", prompts=PROMPTS[:1], n=16, ignore_eos=True)
        assert answer["versions"] == [(server.version, 0, 16, False)]
        assert_logprobs(answer, {server.version: server.seed}, PROMPTS[0])

    try:
        assert trainer.update(server) is None
        check()
        if routed:
            filled: list[Bucket] = []

            def fail_at_the_third(group: Any, staged: StagedWeights, bucket: Bucket) -> torch.Tensor:
                filled.append(bucket)
                if len(filled) == 3:
                    raise ConnectionError("the trainer's GPU is gone")
                return fill(group, staged, bucket)

            with monkeypatch.context() as patched:
                fill = Group._fill
                patched.setattr(Group, "_fill", fail_at_the_third)
                assert "the trainer's GPU is gone" in (trainer.update(server) or "")
            check()
        assert trainer.update(server) is None
        check()
    finally:
        trainer.transport.close()


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS}


@slow
@pytest.mark.long
def test_tensor_parallel_ranks_each_take_their_slices(tiny_model: Path, tmp_path: Path) -> None:
    """Two ranks on the CPU: one payload a rank, from the staged copy and over a route in which each is a rank of its own."""
    with serving(tiny_model, engine_args={"tp_size": 2}) as server:
        for transport in ("shm", "distributed", "ipc"):
            trainer = Trainer(tmp_path, transport, ranks=2)
            try:
                assert trainer.update(server) is None
            finally:
                trainer.transport.close()
            (answer,) = server.ask("generate", prompts=PROMPTS[:1], n=16, ignore_eos=True)
            assert_logprobs(answer, {server.version: server.seed}, PROMPTS[0])


@slow
def test_adapters_are_updated_under_versions_of_their_own(tiny_model: Path) -> None:
    """The policy is a LoRA adapter: the running request ends with the version it began with, the next ones and their prefixes have the new one."""
    with serving(tiny_model, adapter=ADAPTER) as server:
        with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is unknown to the engine"):
            server.ask("update", seed=0, version=1, pause="retract")
        answers = {0: server.ask("generate", prompts=PROMPTS[:1], n=16, ignore_eos=True)[0]}
        for version in (1, 2, 3):
            running, after = server.ask("update_adapter_while_running", prompt=PROMPTS[0], version=version, **ADAPTER)
            assert running["versions"] == [(version - 1, 0, 400, False)] and after["versions"] == [
                (version, 0, 16, False)
            ]
            answers[version] = after
            for answer in (running, after):
                ((stamped, _, end, _),) = answer["versions"]
                expected = adapted_logprobs(stamped, PROMPTS[0], answer["token_ids"])
                assert torch.allclose(torch.tensor(answer["logprobs"]), expected, atol=TOLERANCE), (version, end)
        assert server.ask("adapters_loaded") == ["version 3"]


def adapted_logprobs(version: int, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """Under the tiny model with that version's adapter merged into it (0: none)."""
    model = tiny_qwen2(0)
    if version:
        adapter = sglang_scenarios.adapter(version, 4, TARGETS)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                module = f"base_model.model.{name.removesuffix('.weight')}"
                if f"{module}.lora_A.weight" in adapter:
                    parameter += 2 * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


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
