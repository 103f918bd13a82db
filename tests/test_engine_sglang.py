"""The whole path on the real engine: two SGLang workers on the tiny model, one engine for all tests of this file.

What one SGLang engine does by itself is in test_sglang_generator.py; here is what only the path shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from conftest import session_processes
from engines import descendants, until
from rewards import length

import mprollout as mp
from mprollout import record
from mprollout.cli import main
from mprollout.record import Recorder
from mprollout.verify import VerifyArgs, run_verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 160


@pytest.fixture(scope="module")
def engine(tiny_model):
    config = mp.EngineConfig(
        source=mp.SourceConfig(rows=[{"prompt": f"Q: what is {i} + {i + 1}?"} for i in range(64)], answer_field=None),
        generator=mp.SGLangConfig(model=str(tiny_model), device="cpu", dtype="float32"),
        sampling=mp.SamplingConfig(group_size=4, max_new_tokens=TOKENS, ignore_eos=True),
        reward=mp.RewardConfig(length),
        workers=mp.WorkerConfig(devices=["cpu", "cpu"], max_running_samples=16, placement="colocated"),
        gate=mp.GateConfig(max_live_groups=12),
        weights=mp.WeightsConfig(begin_timeout_s=8.0),
    )
    with mp.RolloutEngine(config) as engine:
        owned = {engine._keeper.pid}
        session_processes.update(owned)
        yield engine
    session_processes.difference_update(owned)


@pytest.fixture(scope="module")
def models(tiny_model):
    """Version -> the transformers model with those weights."""
    from transformers import AutoModelForCausalLM

    return {0: AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()}


def until_busy(engine) -> int:
    """Take groups until eight samples run, since behind a full gate all come to their ends; how many were taken."""
    taken = 0
    while engine.stats().running_samples < 8:
        engine.get(1, timeout=120).release()
        taken += 1
    return taken


def perturbed(model, seed):
    import copy

    import torch

    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return other


def recomputed(model, prompt_ids, token_ids):
    import torch

    with torch.no_grad():
        ids = torch.tensor([[*prompt_ids, *token_ids]])
        logprobs = model(ids).logits[0].log_softmax(-1)
        at = torch.arange(len(prompt_ids) - 1, ids.shape[1] - 1)
        return logprobs[at, ids[0, len(prompt_ids) :]].numpy()


def check_group(group, models):
    """Every token's logprob is that of the weights whose version it carries."""
    prompt_ids = group.prompt_ids.tolist()
    for sample in group.samples:
        ids, got = sample.token_ids.tolist(), sample.logprobs
        want = np.empty(len(ids), np.float32)
        for version, start, end, _ in sample.versions:
            want[start:end] = recomputed(models[version], prompt_ids, ids)[start:end]
        np.testing.assert_allclose(got, want, atol=1e-4)
        del got


def test_delivered_logprobs_are_those_of_transformers(engine, models):
    with engine.get(4, timeout=120) as batch:
        assert all(len(group) == 4 and group.rewards.tolist() == [TOKENS] * 4 for group in batch)
        for group in batch:
            check_group(group, models)


def test_both_workers_generate_and_draw_different_samples(engine):
    completions, workers = set(), set()
    for _ in range(8):
        with engine.get(4, timeout=120) as batch:
            for group in batch:
                workers.add(group.worker)
                completions |= {tuple(sample.token_ids.tolist()) for sample in group.samples}
    assert workers == {0, 1} and len(completions) == 8 * 4 * 4


def test_a_long_request_spans_two_versions_instead_of_being_drained(engine, models):
    """vllm#54443: new weights reach running requests; each token's logprob matches the version it is stamped with."""
    until_busy(engine)
    version = engine.policy_version + 1
    models[version] = perturbed(models[engine.policy_version], seed=version)
    finished = engine.stats().taken
    assert engine.update_weights(models[version].state_dict()) == version
    mixed = 0
    while engine.stats().taken < finished + 24:
        with engine.get(4, timeout=120) as batch:
            for group in batch:
                check_group(group, models)
                mixed += sum(len(sample.versions) == 2 for sample in group.samples)
    assert mixed > 0
    with engine.get(4, timeout=120) as batch:
        assert all((group.token_versions == version).all() for group in batch), (
            "all new tokens come from the new weights"
        )


def test_verify_finds_every_logprob_right_and_the_one_that_was_changed(engine, models, tiny_model, tmp_path, capsys):
    """Recorded groups, some of them across an update; then the same with one logprob shifted by 0.01."""
    from safetensors.torch import save_file

    (tmp_path / "weights").mkdir()

    def keep(version: int) -> None:
        tensors = {name: tensor.clone() for name, tensor in models[version].state_dict().items()}
        save_file(tensors, tmp_path / "weights" / f"{version}.safetensors")

    for version in models:
        keep(version)
    about = {"model": str(tiny_model)}
    recorder = Recorder(tmp_path / "record", (), about, max_bytes=1 << 30)
    version = engine.policy_version + 1
    models[version] = perturbed(models[engine.policy_version], seed=version)
    keep(version)
    until_busy(engine)
    engine.update_weights(models[version].state_dict())
    for _ in range(6):
        with engine.get(4, timeout=120) as batch:
            recorder.add(batch, engine.policy_version)
    recorder.close()
    args = VerifyArgs(run=tmp_path, sample="100%", tolerance=1e-4, json=True)
    assert run_verify(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["groups"] == 24 and report["samples"] == 96 and report["overall"]["tokens"] == 96 * TOKENS
    assert f"version {version}, span 1" in report["by_span"]  # the second part of a sample that an update met
    assert set(report["by_worker"]) == {"worker 0", "worker 1"} and "tokens 128 to 255" in report["by_position"]
    rows = list(record.read(tmp_path / "record"))
    logprobs = rows[3].fields[7]
    logprobs.flags.writeable = True
    logprobs[TOKENS + 5] += 0.01
    changed = Recorder(tmp_path / "changed", (), about, max_bytes=1 << 30)
    changed._buffer = {(row.ticket, row.attempt): row for row in rows}
    changed._batch = rows[-1].batch + 1
    changed.close()
    (tmp_path / "record").rename(tmp_path / "before")
    (tmp_path / "changed").rename(tmp_path / "record")
    assert run_verify(args) == 1
    worst = json.loads(capsys.readouterr().out)["worst"]
    assert (worst["ticket"], worst["sample"], worst["position"]) == (rows[3].ticket, 1, 5)
    (tmp_path / "weights" / f"{version}.safetensors").unlink()
    run_verify(VerifyArgs(run=tmp_path, sample="24", tolerance=1.0))
    assert f"no weights of version {version}" in capsys.readouterr().out
    with pytest.raises(mp.ConfigError, match="expected a share"):
        run_verify(VerifyArgs(run=tmp_path, sample="some"))


def test_greedy_evaluation_uses_the_pushed_weights(engine, models):
    import torch

    greedy = mp.SamplingConfig(
        group_size=1, max_new_tokens=8, temperature=0, allow_biased_logprobs=True, ignore_eos=True
    )
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    result = engine.evaluate([{"prompt": ids} for ids in prompts], greedy, timeout=60)
    assert result.versions == [engine.policy_version]
    for ids, (got,) in zip(prompts, result.token_ids, strict=True):
        with torch.no_grad():
            want = models[engine.policy_version].generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=3
            )
        assert got == want[0, len(ids) :].tolist()


def test_an_update_that_fails_changes_nothing_and_its_number_is_gone(engine, models):
    """C9, C45, C46 (slime#2279): a source that raises at the third tensor, then an update that the engines refuse, while samples run."""
    before = engine.policy_version
    weights = models[before].state_dict()

    def stream():
        for i, pair in enumerate(weights.items()):
            if i == 2:
                raise ConnectionError("the trainer's shard is gone")
            yield pair

    until_busy(engine)
    with pytest.raises(ConnectionError):
        engine.update_weights(stream())
    with pytest.raises(mp.WeightUpdateFailed, match=r"model\.norm\.weight is missing"):
        engine.update_weights({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"})
    assert engine.policy_version == before and [worker.version for worker in engine.stats().workers] == [before] * 2
    for _ in range(4):
        with engine.get(4, timeout=120) as batch:
            for group in batch:
                assert group.token_versions.max() <= before
                check_group(group, models)
    refused = engine.state_dict()["minted"]
    models[refused + 1] = perturbed(models[before], seed=refused + 1)
    assert engine.update_weights(models[refused + 1].state_dict().items()) == refused + 1 == before + 2


def test_an_evaluation_keeps_its_version_on_its_share_while_training_is_updated(engine, models):
    """slime#2339: greedy answers of the version that it began with, from a worker that catches up afterwards."""
    import torch

    greedy = mp.SamplingConfig(
        group_size=1, max_new_tokens=400, temperature=0, allow_biased_logprobs=True, ignore_eos=True
    )
    until(lambda: all(worker.state == "ready" for worker in engine.stats().workers), "both work", 120)
    before, prompts = engine.policy_version, [[5, 6, 7, 8 + i] for i in range(4)]
    evaluation = engine.submit_evaluation([{"prompt": ids} for ids in prompts], greedy, timeout=60, pinned="share")
    until(lambda: engine.stats().workers[1].state == "evaluating", "worker 1 is set aside")
    new = perturbed(models[before], seed=100)
    while not evaluation.done():
        models[engine.update_weights(new.state_dict())] = new
        with engine.get(2, timeout=120) as batch:
            for group in batch:
                check_group(group, models)
    result = evaluation.result()
    assert result.versions == [before] and engine.policy_version > before
    assert result.lengths.tolist() == [[400]] * 4 and result.finish_reasons == [["length"]] * 4
    with torch.no_grad():
        want = models[before].generate(
            torch.tensor(prompts[:1]), do_sample=False, max_new_tokens=16, min_new_tokens=16, pad_token_id=3
        )
    assert result.token_ids[0][0][:16] == want[0, 4:].tolist()
    until(lambda: [worker.version for worker in engine.stats().workers] == [engine.policy_version] * 2, "it catches up")


def test_workers_sleep_are_updated_and_wake_and_their_samples_go_on(engine, models):
    """Retracted, not lost: what ran before the sleep goes on with the weights that came during it, each token's logprob its version's."""
    taken, retried = engine.stats().taken, engine.stats().retried
    taken += until_busy(engine)
    engine.sleep(timeout=30)
    assert [worker.state for worker in engine.stats().workers] == ["asleep", "asleep"]
    version = engine.policy_version + 1
    models[version] = perturbed(models[engine.policy_version], seed=version)
    assert engine.update_weights(models[version].state_dict(), timeout=30) == version
    engine.sleep(timeout=30)  # the weights' memory again
    running = engine.stats().running_samples
    engine.wake(timeout=30)
    mixed = 0
    while engine.stats().taken < taken + 12:
        with engine.get(4, timeout=120) as batch:
            for group in batch:
                check_group(group, models)
                mixed += sum(len(sample.versions) == 2 for sample in group.samples)
    assert running >= 8 and mixed > 0 and engine.stats().retried == retried


def footprint(pid):
    """By process below `pid`, and it: descriptors, and bytes that are its alone."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        found[process.pid] = (process.num_fds(), process.memory_full_info().uss)
    return found


@pytest.mark.parametrize("updates", [60, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_updates_during_generation_leak_nothing(engine, models, updates, private_tmp):
    """Memory, descriptors, temporary files; every update is applied, and in the end every token is of the last version's weights."""
    a, b = models[engine.policy_version], perturbed(models[engine.policy_version], seed=300)

    def push(count):
        for i in range(count):
            new = b if i % 2 == 0 else a
            models[engine.update_weights(new.state_dict())] = new
            if engine.stats().pending >= 2:  # so that the gate never closes for long
                engine.get(2, timeout=120).release()
        until(lambda: engine.stats().pending >= 4, "they generate", 120)
        return footprint(os.getpid()), {path.name for path in private_tmp.rglob("*") if path.is_file()}

    first, files = push(10)
    before = engine.policy_version
    last, files_after = push(updates)
    assert engine.policy_version == before + updates
    assert first.keys() == last.keys() and not files_after - files
    for pid, (descriptors, size) in last.items():
        assert descriptors <= first[pid][0] + 2, psutil.Process(pid).cmdline()
        assert size <= first[pid][1] + updates * 0.4 * 2**20, psutil.Process(pid).cmdline()  # the weights have 0.8 MB
    engine.get(4, timeout=120).release()
    with engine.get(4, timeout=120) as batch:
        for group in batch:
            check_group(group, models)


@pytest.mark.long
def test_a_worker_whose_engine_stands_still_in_an_update_is_named_and_comes_back_with_the_last_good_weights(
    engine, models
):
    """vllm#46611, slime#2279: phase, worker and pid in the error; the other one goes back, its refused tokens by their own weights."""
    model = models[engine.policy_version]
    good = engine.update_weights(model.state_dict())
    models[good], worker = model, engine.stats().workers[0]
    refused = models[good + 1] = perturbed(models[good], seed=400)
    (scheduler,) = descendants(worker.pid, "sglang::scheduler")
    scheduler.suspend()
    says = rf"stays {good}, .*: worker 0 \(pid {worker.pid}\): RuntimeError: phase `begin` took more than WeightsConfig.begin_timeout_s=8"
    with pytest.raises(mp.WeightUpdateFailed, match=says):
        engine.update_weights(refused.state_dict())
    assert engine.policy_version == good
    until(lambda: engine.stats().workers[1].version == good, "worker 1 went back")
    taken = 0
    while (
        engine.stats().workers[0].restarts == worker.restarts or engine.stats().workers[0].state != "ready" or taken < 6
    ):
        with engine.get(4, timeout=120) as batch:
            taken += 1
            for group in batch:
                check_group(group, models)
    assert [one.version for one in engine.stats().workers] == [good, good]
    models[good + 2] = refused
    assert engine.update_weights(refused.state_dict()) == good + 2


def test_a_worker_killed_at_work_leaves_nothing_and_comes_back_with_the_current_weights(engine, models):
    """sglang#23627, sglang#16756, slime#1615: its scheduler and detokenizer end with it; every ticket is delivered once."""
    seen = set()

    def take():
        with engine.get(4, timeout=120) as batch:
            assert seen.isdisjoint(batch.tickets)
            seen.update(batch.tickets)
            for group in batch:
                check_group(group, models)

    while engine.stats().workers[0].running_samples == 0:
        take()  # the gate was full
    victim = psutil.Process(engine.stats().workers[0].pid)
    below = victim.children(recursive=True)
    assert len(below) >= 2, "no scheduler and detokenizer below it"
    victim.kill()
    assert psutil.wait_procs([victim, *below], timeout=10)[1] == []
    tries = 0
    while (state := engine.stats().workers[0]).restarts == 0 or state.state != "ready" or tries < 6:
        take()
        tries += 1
        assert tries < 400, "worker 0 does not come back"
    assert engine.stats().workers[0].version == engine.policy_version > 0


@pytest.mark.timeout(600)
def test_a_dead_scheduler_or_detokenizer_ends_its_worker_which_comes_back(engine, models):
    """sglang#23627, sglang#40723: of worker 0 the scheduler, of worker 1 the detokenizer; their worker ends itself, and nothing of it is left."""
    until(lambda: all(worker.state == "ready" for worker in engine.stats().workers), "both work", 120)
    before = engine.stats().workers
    below: list[psutil.Process] = []
    for worker, name in zip(before, ("scheduler", "detokenizer"), strict=True):
        (victim,) = descendants(worker.pid, f"sglang::{name}")
        below += [psutil.Process(worker.pid), *descendants(worker.pid)]
        victim.kill()
    assert psutil.wait_procs(below, timeout=15)[1] == []
    tickets: list[int] = []
    while not all(
        w.restarts == old.restarts + 1 and w.state == "ready"
        for w, old in zip(engine.stats().workers, before, strict=True)
    ):
        try:
            with engine.get(4, timeout=1) as batch:
                tickets += batch.tickets
        except mp.GetTimeout:
            assert not any(worker.state == "lost" for worker in engine.stats().workers)
    for _ in range(6):
        with engine.get(4, timeout=120) as batch:
            tickets += batch.tickets
            for group in batch:
                check_group(group, models)
    assert len(set(tickets)) == len(tickets)
    assert [worker.version for worker in engine.stats().workers] == [engine.policy_version] * 2


def test_a_trainer_killed_while_its_workers_start_leaves_nothing(tiny_model, tmp_path):
    """sglang#23627: kill -9 at the worst moment, while SGLang's processes are being born."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import mprollout as mp
if __name__ == "__main__":
    mp.RolloutEngine(mp.EngineConfig(
        source=mp.SourceConfig(rows=[{{"prompt": "x", "answer": "y"}}]),
        generator=mp.SGLangConfig(model={str(tiny_model)!r}, device="cpu", dtype="float32"),
        reward=mp.RewardConfig("exact"),
        workers=mp.WorkerConfig(devices=["cpu"]),
    )).start()
"""
    )
    trainer = subprocess.Popen([sys.executable, str(script)])
    # keeper, worker, and at least the scheduler: told by its parent being the worker and its own spawn command
    until(lambda: descendants(trainer.pid, "spawn_main"), "SGLang spawns", 120)
    below = descendants(trainer.pid)
    trainer.kill()
    trainer.wait()
    assert psutil.wait_procs(below, timeout=10)[1] == []


def test_generate_samples_chats_into_a_file(tiny_model, tmp_path, capsys):
    """Messages go through the model's own template; text is what its tokenizer makes of the tokens; the reward saw both; a stop string ends a sample."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chats = [[{"role": "user", "content": f"Q: what is {i} + 1?"}] for i in range(6)]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.parquet"
    rows.write_text("".join(json.dumps({"prompt": chat, "answer": i}) + "\n" for i, chat in enumerate(chats)))
    options = ["--model", str(tiny_model), "--prompts", str(rows), "--reward", "rewards:length", "--json"]
    options += ["--group-size", "3", "--max-new-tokens", "48", "--stop", "e", "--stop", "a", "--out", str(out)]
    assert main(["generate", *options]) == 0
    said, samples = json.loads(capsys.readouterr().out), pq.read_table(out).to_pylist()
    assert sorted((one["row"], one["sample"]) for one in samples) == [(i, k) for i in range(6) for k in range(3)]
    for one in samples:
        chat = tokenizer.apply_chat_template(chats[one["row"]], add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(one["prompt_ids"]) == chat
        assert one["text"] == tokenizer.decode(one["token_ids"], skip_special_tokens=True)
        assert one["reward"] == len(one["token_ids"]) == len(one["logprobs"]) and one["answer"] == str(one["row"])
        before = tokenizer.decode(one["token_ids"][:-1], skip_special_tokens=True)
        assert not set("ea") & set(before), "it went on behind a stop string"
        assert one["finish_reason"] == "stop" or len(one["token_ids"]) == 48
    assert said["samples"] == 18 and said["tokens"] == said["tokens_sampled"] == sum(one["reward"] for one in samples)
    assert any(set("ea") & set(one["text"]) for one in samples)


def test_the_workers_run_within_their_limits(engine):
    stats = engine.stats()
    assert all(worker.peak_running_samples <= 16 for worker in stats.workers) and stats.live <= 12
    assert engine.audit()["taken"] == stats.taken


def test_a_folder_that_is_no_model_is_a_clear_error(tmp_path):
    config = mp.EngineConfig(
        source=mp.SourceConfig(rows=[{"prompt": "x"}]),
        generator=mp.SGLangConfig(model=str(tmp_path), device="cpu"),
        reward=mp.RewardConfig("exact"),
        workers=mp.WorkerConfig(devices=["cpu"]),
    )
    with pytest.raises(mp.WorkerStartError, match=str(tmp_path)), mp.RolloutEngine(config):
        pass
