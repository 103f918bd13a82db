"""`mprollout verify RUN`: were the delivered logprobs those of the weights that their versions name? Recomputed with transformers, token by token.

    RUN/record --sampled groups--> (prompt, tokens, logprobs, versions)   -- |delivered - recomputed| -->  by version, worker and position
    RUN/weights/<version>, or --weights VERSION=FOLDER --> transformers model of each version

A token counts where its loss mask is 1 (what a rollout function appended was sampled by nobody) and its version's weights are there; the
report says how many were left out and why. Under `pause="in_place"` tokens after an update rest on older KV entries, and no single version's
weights give their logprobs again: how far theirs are is reported apart (`in_place`) and held against no tolerance. Temperature, top-k, top-p and
min-p are the group's own (`Group.sampled`); under penalties nothing is recomputed.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import tyro

from mprollout import record
from mprollout.batch import Group, Sample
from mprollout.errors import ConfigError
from mprollout.schema import Sampled
from mprollout.weight_files import WEIGHTS_FOLDER

if TYPE_CHECKING:
    import torch


_LOGITS_BYTES = 256 << 20
"""Most that the logits of one forward pass may take, unless one sample alone takes more."""


@dataclasses.dataclass(kw_only=True)
class VerifyArgs:
    """Recompute delivered logprobs with transformers at each policy version, and report how far they are from the recorded ones.

    The run must have been recorded (`EngineConfig.record`), and the weights of its versions kept (`WeightsConfig.keep_versions`) or given here.

    Example: `mprollout verify runs/7 --sample 1%`, or `mprollout verify runs/7 --json` for one JSON object.

    Exit codes: 0 within the tolerance; 1 beyond it; 2 nothing to verify.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder (`EngineConfig.run_dir`), or a recording."""
    sample: str = "1%"
    """Share of the recorded groups, drawn by `--seed`: `1%`, `100%`; or a number of groups."""
    tolerance: float = 1e-3
    """Largest |difference| of logprobs (natural log) that passes; 1e-4 is usual for float32, some 1e-2 for bfloat16."""
    weights: Annotated[list[str], tyro.conf.UseAppendAction] = dataclasses.field(default_factory=list)
    """VERSION=FOLDER, a Hugging Face checkpoint of that version; may be given several times."""
    seed: int = 0
    device: str = "cpu"
    """Where transformers computes."""
    json: bool = False
    """One JSON object instead of tables."""


class Deviations:
    """|delivered - recomputed| of many tokens under one heading."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.float32]] = []

    def add(self, differences: npt.NDArray[np.float32]) -> None:
        self._parts.append(differences)

    def numbers(self) -> dict[str, float]:
        """Tokens, mean, 99th percentile and maximum."""
        values = np.concatenate(self._parts or [np.zeros(1, np.float32)])
        return {
            "tokens": len(values) if self._parts else 0,
            "mean": float(values.mean()),
            "p99": float(np.quantile(values, 0.99)),
            "max": float(values.max()),
        }


@dataclasses.dataclass
class Report:
    """What `verify` found; every table is heading -> numbers."""

    groups: int
    samples: int
    skipped_tokens: dict[str, int]
    overall: dict[str, float]
    """Of all tokens but those of `in_place`."""
    in_place: dict[str, float]
    """Of the tokens on key-value entries of older weights."""
    by_span: dict[str, dict[str, float]]
    """`version 7, span 0`: the span's place in its sample; later spans began in the middle of it. `version 8, span 1, in_place`: on older entries."""
    by_worker: dict[str, dict[str, float]]
    by_position: dict[str, dict[str, float]]
    worst: dict[str, Any]


def verify(
    recording: Path, kept: dict[int, Path], share: str, seed: int, device: str = "cpu", progress: Any = None
) -> Report:
    """Recompute a share of a recording.

    Args:
        recording: a folder that `Recorder` wrote.
        kept: version -> checkpoint folder, or a `.safetensors` file of weights kept by the run.
        share: as `VerifyArgs.sample`.
        progress: called with each finished group.

    Raises:
        ConfigError: no recording, no weights for any of its tokens, or a share that is none.
    """
    about = record.about(recording)
    if not about.get("model"):
        raise ConfigError(f"{recording}: recorded without a model (simulated): there is nothing to recompute")
    models = _Models(about["model"], {0: Path(about["model"])} | kept, device)
    tables: tuple[dict[str, Deviations], ...] = ({}, {}, {})
    overall, in_place, skipped, worst = Deviations(), Deviations(), dict[str, int](), dict[str, Any]()
    groups = samples = tokens = 0
    for group in _drawn(recording, share, seed):
        groups += 1
        prompt_ids = group.prompt_ids.tolist()
        made = group.samples
        sampled = group.sampled
        if (sampled.repetition_penalty, sampled.presence_penalty, sampled.frequency_penalty) != (1.0, 0.0, 0.0):
            skipped["sampled with penalties"] = skipped.get("sampled with penalties", 0) + int(
                group.field("loss_mask").sum()
            )
            continue
        by_version = {
            version: dict(zip(numbers, _logprobs(model, prompt_ids, [made[i] for i in numbers], sampled), strict=True))
            for version, numbers in _samples_by_version(made).items()
            if (model := models.get(version)) is not None
        }
        for number, sample in enumerate(made):
            samples += 1
            for place, (version, start, end, old_kv) in enumerate(sample.versions):
                asked = sample.loss_mask[start:end] == 1
                if version not in by_version:
                    why = f"no weights of version {version}"
                    skipped[why] = skipped.get(why, 0) + int(asked.sum())
                    continue
                if not asked.any():
                    continue
                want = by_version[version][number][start:end]
                differences = np.abs(sample.logprobs[start:end] - want)[asked]
                positions = np.arange(start, end)[asked]
                tokens += len(differences)
                heading = f"version {version}, span {place}" + (", in_place" if old_kv else "")
                tables[0].setdefault(heading, Deviations()).add(differences)
                if old_kv:
                    in_place.add(differences)
                    continue
                overall.add(differences)
                tables[1].setdefault(f"worker {group.worker}", Deviations()).add(differences)
                for low in sorted({_bucket(int(position)) for position in positions}):
                    inside = (positions >= low) & (positions < max(1, 2 * low))
                    heading = f"tokens {low} to {max(1, 2 * low) - 1}"
                    tables[2].setdefault(heading, Deviations()).add(differences[inside])
                at = int(differences.argmax())
                if float(differences[at]) >= worst.get("difference", 0.0):
                    worst = {
                        "difference": float(differences[at]), "ticket": group.ticket, "sample": number, "worker": group.worker,
                        "position": int(positions[at]), "version": version, "span": place,
                    }  # fmt: skip
        if progress is not None:
            progress(group)
    if tokens == 0:
        raise ConfigError(
            f"{recording}: of {groups} groups drawn ({share}) no token could be recomputed: {skipped or 'none was recorded'}; keep "
            "weights (WeightsConfig.keep_versions), or give them: --weights VERSION=FOLDER"
        )
    spans, workers, places = ({heading: table[heading].numbers() for heading in table} for table in tables)
    return Report(groups, samples, skipped, overall.numbers(), in_place.numbers(), spans, workers, places, worst)


def _samples_by_version(samples: list[Sample]) -> dict[int, list[int]]:
    numbers: dict[int, list[int]] = {}
    for number, sample in enumerate(samples):
        for version in {span.version for span in sample.versions}:
            numbers.setdefault(version, []).append(number)
    return numbers


def _bucket(position: int) -> int:
    return 0 if position == 0 else 1 << (position.bit_length() - 1)


def _drawn(recording: Path, share: str, seed: int) -> Iterator[Group]:
    """Every group with the same probability, or exactly so many of them (by one pass over the tickets first)."""
    try:
        percent = float(share.removesuffix("%")) / 100 if share.endswith("%") else None
        count = None if percent is not None else int(share)
    except ValueError as error:
        raise ConfigError(f"--sample {share}: expected a share (`1%`) or a number of groups") from error
    rng = random.Random(seed)
    source = record.ReplaySource(recording)
    total = record.count(recording)
    wanted = set(
        rng.sample(range(total), min(total, count if count is not None else max(1, round(total * (percent or 0)))))
    )
    for i, row in enumerate(record.read(recording)):
        if i in wanted:
            yield source.group(row)


class _Models:
    """transformers models by version; one is held at a time with the one before it (versions come nearly in order)."""

    def __init__(self, base: str, folders: dict[int, Path], device: str) -> None:
        self._base, self._folders, self._device = base, folders, device
        self._held: dict[int, Any] = {}

    def get(self, version: int) -> Any:
        """None: the weights of that version are not there."""
        if version not in self._folders:
            return None
        if version not in self._held:
            while len(self._held) > 1:
                del self._held[next(iter(self._held))]
            self._held[version] = self._load(self._folders[version])
        return self._held[version]

    def _load(self, path: Path) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        folder = path if path.is_dir() else Path(self._base)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if not path.is_dir():
            from safetensors.torch import load_file

            missing, unknown = model.load_state_dict(load_file(path), strict=False)
            tied = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set()
            if unknown or set(missing) - tied:
                raise ConfigError(
                    f"{path}: not the weights of {self._base}: missing {missing[:5]}, unknown {unknown[:5]}"
                )
        return model.eval().to(self._device)


def _logprobs(
    model: Any, prompt_ids: list[int], samples: list[Sample], sampled: Sampled
) -> list[npt.NDArray[np.float32]]:
    """float32 [num_tokens] a sample: of each of its tokens, all before it given, in the distribution that was sampled from."""
    import torch

    lengths = [len(sample.token_ids) for sample in samples]
    ids = torch.zeros(
        (len(samples), len(prompt_ids) + max(lengths)), dtype=torch.int64
    )  # padded right: causal, so unseen
    ids[:, : len(prompt_ids)] = torch.tensor(prompt_ids)
    for row, sample in zip(ids, samples, strict=True):
        row[len(prompt_ids) : len(prompt_ids) + len(sample.token_ids)] = torch.from_numpy(sample.token_ids.copy())
    first, found = len(prompt_ids) - 1, []
    at_once = max(1, _LOGITS_BYTES // (4 * ids.shape[1] * model.config.vocab_size))
    for part in ids.to(model.device).split(at_once):
        with torch.inference_mode():
            logits: torch.Tensor = model(part).logits[:, first:-1].float() / (sampled.temperature or 1.0)
            if (sampled.top_p, sampled.top_k, sampled.min_p) != (1.0, -1, 0.0):
                logits = logits.masked_fill(~_kept(logits.softmax(2), sampled), -torch.inf)
            chosen = logits.gather(2, part[:, first + 1 :, None])[:, :, 0] - logits.logsumexp(2)
        found += list(chosen.cpu().numpy())
    return [row[:n] for row, n in zip(found, lengths, strict=True)]


def _kept(probs: torch.Tensor, sampled: Sampled) -> torch.Tensor:
    """bool, of the shape of `probs` [samples, tokens, vocabulary]: what top-k, top-p and min-p leave, as SGLang applies them."""
    import torch

    descending, order = probs.sort(dim=-1, descending=True)
    before = descending.cumsum(-1) - descending
    kept = (before <= sampled.top_p) & (descending >= descending[..., :1] * sampled.min_p)
    if sampled.top_k > 0:
        kept[..., int(sampled.top_k) :] = False
    return torch.zeros_like(kept).scatter(-1, order, kept)


def run_verify(args: VerifyArgs) -> int:
    """The command; returns its exit code."""
    from rich.console import Console
    from rich.progress import Progress

    recording = record.recording_of(args.run)
    kept = {int(path.stem): path for path in (args.run / WEIGHTS_FOLDER).glob("*.safetensors")}
    for given in args.weights:
        version, _, folder = given.partition("=")
        if not version.isdigit() or not Path(folder).is_dir():
            raise ConfigError(f"--weights {given}: expected VERSION=FOLDER, a number and a checkpoint's folder")
        kept[int(version)] = Path(folder)
    console = Console()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=args.json or not errors.is_terminal) as bar:
        task = bar.add_task("groups recomputed", total=None)
        report = verify(recording, kept, args.sample, args.seed, args.device, lambda _: bar.advance(task))
    within = report.overall["max"] <= args.tolerance
    if args.json:
        print(json.dumps(dataclasses.asdict(report) | {"tolerance": args.tolerance, "within": within}))
    else:
        _show(console, report)
        word = "within" if within else "BEYOND"
        console.print(
            f"largest difference {report.overall['max']:.2e}: {word} the tolerance of {args.tolerance:g}; {report.worst}"
        )
    return 0 if within else 1


def _show(console: Any, report: Report) -> None:
    from rich.table import Table

    table = Table("|delivered - recomputed|", "tokens", "mean", "p99", "max")
    headings = (
        {"all": report.overall}
        | ({"in_place": report.in_place} if report.in_place["tokens"] else {})
        | report.by_span
        | report.by_worker
        | report.by_position
    )
    for heading, numbers in headings.items():
        table.add_row(heading, f"{numbers['tokens']:,}", *(f"{numbers[key]:.2e}" for key in ("mean", "p99", "max")))
    console.print(f"{report.groups:,} groups, {report.samples:,} samples recomputed")
    console.print(table)
    for why, tokens in report.skipped_tokens.items():
        console.print(f"left out: {tokens:,} tokens, {why}")
