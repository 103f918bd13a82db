"""The demo's parts: tasks, checkpoints, arguments, the run folder; the whole job on the simulated backend."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from mprollout.config import SimulatedConfig
from mprollout.demo import controls, models, tasks
from mprollout.demo.args import TEXT, TINY, DemoArgs, engine_config
from mprollout.demo.display import Display
from mprollout.demo.run import DemoResult, run_demo
from mprollout.errors import ConfigError, MprolloutError

pytestmark = pytest.mark.timeout(300)  # the warm-up takes 10 s of CPU time, more of the clock on a busy machine


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache_home(demo_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(demo_cache))


@pytest.fixture(scope="session")
def tiny(demo_cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(demo_cache))
        return models.tiny_model("sort", 3, lambda line: None)


# --- tasks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "digits", "prompt", "answer"),
    [
        ("sort", "381420", "S381420=", "012348"),
        ("copy", "381420", "C381420=", "381420"),
        ("reverse", "12345", "R12345=", "54321"),
    ],
)
def test_rows_ask_what_their_answers_solve(task: str, digits: str, prompt: str, answer: str) -> None:
    assert tasks.TASKS[task].row(digits) == {"prompt": prompt, "answer": answer}


@pytest.mark.parametrize("task", list(tasks.TASKS))
def test_held_out_prompts_are_never_trained_on(task: str) -> None:
    held_out = {row["prompt"] for row in tasks.held_out_rows(task)}
    assert len(held_out) == 500
    for seed in (0, 1, "warm-up-0"):
        training = [row["prompt"] for row in tasks.training_rows(task, seed, 20_000)]
        assert len(set(training)) == 20_000
        assert not held_out & set(training)


def test_rows_follow_from_the_seed() -> None:
    assert tasks.training_rows("sort", 5, 50) == tasks.training_rows("sort", 5, 80)[:50]
    assert tasks.training_rows("sort", 5, 50) != tasks.training_rows("sort", 6, 50)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("012348", 1.0),
        ("012348<eos>7", 1.0),
        ("012349", 5 / 12),
        ("0123480", 3 / 7),
        ("01234", 5 / 12),
        ("", 0.0),
        ("999999", 0.0),
    ],
)
def test_reward_is_half_exact_half_right_positions(text: str, reward: float) -> None:
    assert tasks.sort_reward(SimpleNamespace(text=text, answer="012348")) == pytest.approx(reward)  # type: ignore[arg-type]


def test_shuffled_reward_is_that_of_another_prompt_and_repeatable() -> None:
    rows = tasks.training_rows("sort", 0, 2000)
    right = [SimpleNamespace(text=row["answer"], answer=row["answer"]) for row in rows]
    wrong = [SimpleNamespace(text=rows[i - 1]["answer"], answer=row["answer"]) for i, row in enumerate(rows)]
    means = [sum(tasks.shuffled_reward(s, "sort") for s in samples) / len(rows) for samples in (right, wrong)]  # type: ignore[arg-type]
    assert means[0] == pytest.approx(means[1], abs=0.01)  # being right does not pay
    assert tasks.shuffled_reward(right[7], "sort") == tasks.shuffled_reward(right[7], "sort")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_vocabulary_has_32_tokens_and_survives_a_round_trip(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == len(tasks.VOCABULARY) == 32
    assert tokenizer("S381420=")["input_ids"] == [tasks.VOCABULARY[c] for c in "S381420="]
    ids = tokenizer("012348<eos>")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "012348<eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "012348"


def test_reward_functions_load_no_torch() -> None:
    code = "import sys, mprollout.demo.tasks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_warm_up_ends_between_15_and_35_percent(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    record = json.loads((tiny / "warm_up.json").read_text())
    assert record["seconds"] <= 60
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.num_parameters() == 127_552
    assert GenerationConfig.from_pretrained(tiny).eos_token_id == tasks.VOCABULARY[tasks.EOS]
    accuracy = models.greedy_accuracy(model, tasks.make_tokenizer(), tasks.held_out_rows("sort"))
    assert 0.15 <= accuracy <= 0.35


@pytest.mark.slow
def test_greedy_accuracy_is_that_of_greedy_decoding(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), tasks.make_tokenizer()
    rows = tasks.held_out_rows("sort")[:100]
    prompts = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])
    made = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(made[:, prompts.shape[1] :])
    accuracy = tasks.accuracy(texts, [row["answer"] for row in rows])
    assert models.greedy_accuracy(model, tokenizer, rows) == pytest.approx(accuracy)


@pytest.mark.slow
def test_a_checkpoint_is_made_once(tiny: Path) -> None:
    began = time.monotonic()
    assert models.tiny_model("sort", 3, pytest.fail) == tiny
    assert time.monotonic() - began < 5


def test_a_damaged_or_half_made_folder_is_built_anew() -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "weights").write_text("right")

    folder = models.cached("case", build)
    assert models.cached("case", build) == folder
    assert len(built) == 1
    (folder / "weights").write_text("wrong")
    assert (models.cached("case", build) / "weights").read_text() == "right"
    (folder / models.MANIFEST).unlink()
    models.cached("case", build)
    assert len(built) == 3


def test_a_failed_build_leaves_nothing() -> None:
    def build(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.cached("broken", build)
    assert not [path for path in models.cache_dir().iterdir() if "broken" in path.name and path.is_dir()]


def test_a_warm_up_that_takes_too_long_says_so() -> None:
    with pytest.raises(MprolloutError, match=r"accuracy 0\.\d+ after 1 steps"):
        models.warm_up(models.make_tiny_model(0), tasks.make_tokenizer(), "sort", 0, limit_s=0.0)


# --- arguments ---------------------------------------------------------------------------------------------------------


def test_numbers_follow_the_model_and_give_way_to_arguments() -> None:
    assert DemoArgs().scale == TINY
    assert DemoArgs(model="smollm2").scale == TEXT
    assert DemoArgs(model="smollm2", steps=3, task="reasoning_gym:basic_arithmetic").scale == TEXT._replace(
        steps=3, task="reasoning_gym:basic_arithmetic"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be >= 1; got 0"),
        ({"group_size": 0}, "group_size must be >= 1; got 0"),
        ({"lr": 0.0}, "lr must be > 0"),
        ({"task": "divide"}, "task must be one of sort, copy, reverse or reasoning_gym:NAME; got 'divide'"),
        ({"task": "reasoning_gym:chain_sum"}, "needs a model that reads text"),
        ({"model": "smollm2", "task": "sort"}, "--model smollm2 needs --task reasoning_gym:NAME"),
        ({"push": False}, "needs --max-lag None"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        DemoArgs(**arguments)  # type: ignore[arg-type]


def test_a_folder_that_is_no_checkpoint_is_named_and_leaves_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{tmp_path}' has no config.json"):
        run_demo(DemoArgs(model=str(tmp_path), task="sort", out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_engine_is_configured_as_asked(tmp_path: Path) -> None:
    args = DemoArgs(backend="simulated", max_lag=2, workers=3, rewards="shuffled", loggers=("tensorboard",))
    config = engine_config(args, tmp_path, tasks.make_tokenizer(), tmp_path)
    assert isinstance(config.generator, SimulatedConfig)
    assert config.generator.vocab_size == 32
    assert config.loggers == ["tensorboard"]
    assert (config.gate.groups_per_update, config.gate.max_lag, len(config.workers.devices)) == (16, 2, 3)
    assert config.reward.kwargs == {"task": "sort"}


# --- the job, simulated ------------------------------------------------------------------------------------------------


def result(accuracies: list[float], interrupted: bool = False) -> DemoResult:
    return DemoResult(Path("x"), len(accuracies), list(enumerate(accuracies)), [0.1], 1.0, interrupted)


def test_a_lag_is_judged_against_the_noise_between_seeds() -> None:
    assert controls.settled(result([0.1, 0.2, 0.5, 0.6, 0.7])) == pytest.approx(0.6)
    good, rule = controls.alike([0.60, 0.64, 0.62], [0.58, 0.63, 0.59])
    assert good and rule == "difference -0.020, not below -0.038 (two standard errors)"
    assert not controls.alike([0.60, 0.64, 0.62], [0.50, 0.55, 0.52])[0]
    assert controls.alike([0.60, 0.64, 0.62], [0.70, 0.75, 0.72])[0]  # better is no loss
    with pytest.raises(ConfigError, match="--seeds >= 2"):
        controls.LagArgs(seeds=1)


def test_controls_are_judged_by_their_own_rule() -> None:
    assert controls.judge("shuffled rewards", result([0.2, 0.3, 0.0]))[0]
    assert not controls.judge("shuffled rewards", result([0.2, 0.21]))[0]
    assert controls.judge("no pushes", result([0.2, 0.204]))[0]
    assert not controls.judge("no pushes", result([0.2, 0.0]))[0]
    assert not controls.judge("shuffled rewards", result([0.2, 0.0], interrupted=True))[0]


@pytest.mark.slow
def test_the_job_runs_on_the_simulated_backend(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = DemoArgs(
        backend="simulated", model=str(tiny), task="sort", steps=4, groups=4, eval_every=2, out=tmp_path / "run"
    )
    done = run_demo(args)
    assert (done.steps, done.interrupted) == (4, False)
    assert [step for step, _ in done.accuracies] == [0, 2, 4]

    lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert max(line["lag_max"] for line in lines[1:]) <= 1
    assert all(line["trained_tokens"] > 0 and line["grad_norm"] == line["grad_norm"] for line in lines[1:])

    samples = pq.read_table(done.folder / "samples.parquet").to_pylist()
    assert len(samples) == 4 * 4 * 4
    assert {sample["prompt"][0] for sample in samples} == {"S"}
    assert all(sample["versions"] == sorted(sample["versions"]) for sample in samples)
    assert (done.folder / "curve.png").stat().st_size > 10_000
    page = (done.folder / "report.html").read_text()
    assert page.count("Plotly.newPlot") == 8 and page.count("<tr>") == 2 + 1 + 60
    said = capsys.readouterr().out
    assert str(done.folder / "report.html") in said
    assert "done: 4 steps" in said
    assert str(done.folder) in said


def test_the_panel_shows_what_the_trainer_waits_for_and_every_worker() -> None:
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    display = Display("sort", 50, console)
    worker = {"pid": 4711, "state": "ready", "running_samples": 7, "tokens_generated": 900, "version": 3, "restarts": 1}
    stats = SimpleNamespace(waiting_for="16 groups, 12 are there", workers=[SimpleNamespace(worker=0, **worker)])
    display.watch(SimpleNamespace(stats=lambda: stats))  # type: ignore[arg-type]
    display.step({"step": 12, "reward": 0.25, "accuracy": 0.4, "lag_max": 1, "pending": 2, "tokens_per_s": 1234.5})
    with display.doing("waits for 16 groups"), console.capture() as shown:
        console.print(display._render())
    text = shown.get()
    for part in (
        "step 12/50",
        "held-out 0.400",
        "lag 1",
        "pending 2",
        "1234 tokens/s",
        "16 groups, 12 are there",
        "4711",
        "ready",
    ):
        assert part in text


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    from mprollout.demo.recipe import Trainer

    step = Trainer.step

    def interrupted(self: Trainer, *args: object) -> object:
        if self.steps == 2:
            raise KeyboardInterrupt
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", interrupted)
    args = DemoArgs(
        backend="simulated", model=str(tiny), task="sort", steps=9, groups=2, eval_every=0, out=tmp_path / "run"
    )
    done = run_demo(args)
    assert (done.steps, done.interrupted) == (2, True)
    assert len((done.folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert pq.read_table(done.folder / "samples.parquet").num_rows == 3 * 2 * 4  # the third step's were taken
    assert (done.folder / "curve.png").exists()


def test_a_run_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="holds a run already"):
        run_demo(DemoArgs(backend="simulated", out=tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_steps_on_real_input(tmp_path):
    """SmolLM2-135M-Instruct with its chat template, on rows and scorers of reasoning-gym, real SGLang."""
    args = DemoArgs(
        model="smollm2", task="reasoning_gym:chain_sum", steps=3, workers=1, max_new_tokens=32, out=tmp_path / "run"
    )
    result = run_demo(args)
    assert result.steps == 3
    assert not result.interrupted
    samples = pq.read_table(tmp_path / "run" / "samples.parquet").to_pylist()
    assert len(samples) == 3 * 2 * 4
    assert all("<|im_start|>assistant" in sample["prompt"] and sample["text"] for sample in samples)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(step["logprob_diff"] is None or step["logprob_diff"] < 1e-4 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tiny_model_learns_on_the_real_engine(tmp_path):
    """One seed with a loose bound; the README has five and `mprollout demo-seeds` makes them."""
    result = run_demo(DemoArgs(seed=7, steps=160, eval_every=80, out=tmp_path / "run"))
    assert 0.15 <= result.began_at <= 0.35
    assert result.ended_at >= 1.4 * result.began_at
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(step.get("lag_max", 0) for step in steps) == 1
    versions = pq.read_table(tmp_path / "run" / "samples.parquet").column("versions").to_pylist()
    assert any(len(set(spans)) == 2 for spans in versions), "no sample lived through an update"
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
