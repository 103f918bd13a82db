"""Every setting, its unit, its check. The same tree is a TOML file: `EngineConfig.from_toml(path)`.

Invariant: a config object that exists is valid on its own; what depends on the machine (memory, devices, the model's
context length) is checked at start. `__post_init__` of each part guarantees the first, `ring.plan` and the worker's start the second.
Unknown keys fail (msgspec's `forbid_unknown_fields`); a failed check names field, rule and value.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from mprollout.errors import BiasedLogprobs, ConfigError
from mprollout.schema import Field, stored

MAX_SUPPORT = 2048
"""Largest `top_k` whose samples' true logprobs the engine returns; SGLang's own bound of 4096 leaves room for ties."""


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shared behaviour of every part: types are checked by msgspec, from Python as from TOML; `_require` is for rules."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, os.PathLike):
                msgspec.structs.force_setattr(self, field.name, os.fspath(value))
            elif field.type is not Any:
                try:
                    converted = msgspec.convert(value, field.type)
                except msgspec.ValidationError as error:
                    raise ConfigError(f"{type(self).__name__}.{field.name}: {error}; got {value!r:.200}") from None
                if isinstance(converted, _Config):  # a mapping, as in TOML, is made the part that it describes
                    msgspec.structs.force_setattr(self, field.name, converted)
        self._check()

    def _check(self) -> None:
        """The rules of this part."""

    def _require(self, field: str, ok: bool, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{type(self).__name__}.{field} must be {rule}; got {getattr(self, field)!r}")

    def _require_int(self, field: str, least: int, optional: bool = False) -> None:
        value = getattr(self, field)
        if value is None and optional:
            return
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
        self._require(field, ok, f"an integer >= {least}" + (" or None" if optional else ""))

    def _require_seconds(self, field: str, optional: bool = False) -> None:
        value = getattr(self, field)
        if value is None and optional:
            return
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        self._require(field, ok, "a finite number of seconds > 0" + (" or None" if optional else ""))


class SourceConfig(_Config, frozen=True, kw_only=True):
    """Where prompts come from. Exactly one of `path`, `rows`, `reasoning_gym`.

    A prompt is a string (rendered with the chat template as one user message when the model has one and `chat` allows),
    a list of messages (`{"role": ..., "content": ...}`), or a list of token ids (used as they are).
    """

    path: str | None = None
    """A .jsonl or .parquet file, one row a line."""
    rows: Any = None
    """A Python sequence of mappings, or a Hugging Face dataset object (anything with `__len__` and `__getitem__`)."""
    reasoning_gym: str | None = None
    """Name of a data set of the package reasoning-gym; its own scorer is the per-row scorer."""
    reasoning_gym_args: dict[str, Any] = {}
    """Arguments of that data set, `size` and `seed` among them."""
    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    """Field handed to the reward as `answer`; `a.b` is field b of the mapping in field a. None or absent in a row: the reward gets None."""
    limit: int | None = None
    """Only so many rows, the first ones; None: all."""
    sampling_field: str | None = "sampling"
    """Field with the row's own settings of `SamplingConfig`, `{"max_new_tokens": 64, "stop": ["\\n"]}`, all but `group_size` and
    `allow_biased_logprobs`. A row whose settings are refused ends FAILED (reason `prompt`). An evaluation samples by its own settings alone."""
    system_prompt: str | None = None
    chat: bool | None = None
    """Render strings with the chat template: True, False, or None (if the tokenizer has one)."""
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    max_prompt_tokens: int | None = None
    """Longest prompt; None: the model's context length minus `max_new_tokens`."""
    over_long: Literal["filter", "refuse"] = "filter"
    """A longer prompt is filtered (counted, replaced) or refused (a permanent fault naming the row)."""
    epochs: int | None = None
    """Passes over the rows; None: for ever."""
    shuffle_seed: int | None = None
    """Seed of the order inside each epoch; None: file order."""

    def _check(self) -> None:
        given = [name for name in ("path", "rows", "reasoning_gym") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"SourceConfig needs exactly one of path, rows, reasoning_gym; got {given or 'none'}")
        self._require("prompt_field", bool(self.prompt_field), "a field name")
        self._require_int("epochs", 1, optional=True)
        self._require_int("limit", 1, optional=True)
        self._require_int("max_prompt_tokens", 1, optional=True)


class SGLangConfig(_Config, frozen=True, kw_only=True, tag_field="backend", tag="sglang"):
    """An SGLang engine per worker."""

    model: str
    """A folder with a Hugging Face checkpoint, or a name that SGLang resolves."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: str = "auto"
    engine_args: dict[str, Any] = {}
    """Passed to `sglang.Engine` as they are, over mprollout's own choices."""
    adapter: dict[str, Any] | None = None
    """The policy is a LoRA adapter over the model: PEFT's `adapter_config` (`r`, `lora_alpha`, `target_modules`: a list of names, ...).
    `update_weights` then takes the adapter's tensors, as `peft.get_peft_model_state_dict` names them, and before the first one the policy is the model."""

    def _check(self) -> None:
        if self.adapter is not None:
            targets, rank, alpha = (self.adapter.get(key) for key in ("target_modules", "r", "lora_alpha"))
            named = isinstance(targets, list) and bool(targets) and all(isinstance(name, str) for name in targets)
            self._require(
                "adapter",
                isinstance(rank, int) and isinstance(alpha, (int, float)) and named,
                "with `r` and `lora_alpha`, numbers, and `target_modules`, a list of names",
            )
        if self.engine_args.get("dp_size", 1) != 1:
            raise ConfigError(
                f"SGLangConfig.engine_args: dp_size={self.engine_args['dp_size']!r} is refused: SGLang takes no new weights into data-parallel "
                "replicas of one engine; give each replica a worker of its own (WorkerConfig.devices)"
            )


class SimulatedConfig(_Config, frozen=True, kw_only=True, tag_field="backend", tag="simulated"):
    """A generator without a model: seeded lengths, speeds and tokens; versions and aborts as the real one."""

    seed: int = 0
    vocab_size: int = 1000
    context_length: int = 32768
    mean_tokens: float = 64.0
    """Mean completion length (log-normal, cut at max_new_tokens)."""
    sigma: float = 0.5
    """Log-normal sigma of the length; 0: every completion has `mean_tokens`."""
    lengths: list[int] = []
    """Recorded completion lengths, drawn from by seed instead of the log-normal distribution; empty: not used."""
    tokens_per_s: float = 0.0
    """Decoding speed of one sample; 0: as fast as the event loop turns."""
    max_tokens_per_s: float = 0.0
    """Decoding speed of all samples of a worker together, which they share; 0: no bound."""
    speeds: list[tuple[int, float]] = []
    """Instead of these two, measured: (samples decoding at once, tokens per second of all together), in ascending order. Linear in between and
    below the first, constant beyond the last."""
    prefill_s: float = 0.0
    """Before the first token of each request, and again after an update that retracts it."""
    update_s: float = 0.0
    """Stall of a weight update."""
    start_s: float = 0.0
    """Time that a start takes."""
    faults: dict[str, float] = {}
    """Probability per sample of `exception`, `abort` (by the engine), `swallow` (never answers), `die` (kills the worker's process), `hang`
    (the worker's event loop stands still), `slow` (20 times as long), `short` (a logprob is missing)."""
    die_at_start: bool = False
    """The worker's process ends itself with SIGKILL while starting (a test of restarts)."""

    def _check(self) -> None:
        kinds = ("exception", "abort", "swallow", "die", "hang", "slow", "short")
        self._require("faults", set(self.faults) <= set(kinds), f"of {', '.join(kinds)}")
        self._require("faults", sum(self.faults.values()) <= 1, "probabilities with a sum <= 1")
        running = [0, *(samples for samples, _ in self.speeds)]
        rises = all(a < b for a, b in itertools.pairwise(running)) and all(speed > 0 for _, speed in self.speeds)
        self._require("speeds", rises, "(samples >= 1, tokens/s > 0), in ascending order of samples")
        if self.speeds and (self.tokens_per_s or self.max_tokens_per_s):
            raise ConfigError(
                f"SimulatedConfig.speeds stands instead of tokens_per_s={self.tokens_per_s:g} and "
                f"max_tokens_per_s={self.max_tokens_per_s:g}; give one or the other"
            )


class SamplingConfig(_Config, frozen=True, kw_only=True):
    """How completions are sampled."""

    group_size: int = 8
    """Samples of one ticket."""
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """The engine counts the tokens of one request since it last computed its prefix; the logprobs are those of the penalized distribution."""
    stop: list[str] = []
    stop_token_ids: list[int] = []
    """Added to the EOS ids of the model's generation config."""
    no_stop_trim: bool = True
    """What matched `stop` or `stop_token_ids` stays in the sample and is trained on. False: tokens, logprobs, mask and versions all end before
    the first token that has something of it. An EOS of the model stays in either case."""
    ignore_eos: bool = False
    """Neither an EOS nor one of `stop_token_ids` ends a completion."""
    max_thinking_tokens: int | None = None
    """So many tokens after the beginning of a turn its thinking is ended, unless `end_of_thinking` has come by itself: its tokens are put there, not
    trained on, and the turn goes on with what is left of `max_new_tokens`, in which they count."""
    end_of_thinking: str = "</think>\n\n"
    """Put there as it stands; recognized without the white space around it."""
    on_truncation: Literal["keep", "mask", "reward"] = "keep"
    """A sample that ended for its length: is kept as it is, has its loss masked, or gets `truncation_reward` instead of its reward."""
    truncation_reward: float = 0.0
    allow_biased_logprobs: bool = False
    """Accept sampling whose true logprobs the engine does not return (greedy; top-p and min-p without a `top_k` of at most MAX_SUPPORT)."""

    @property
    def truncates(self) -> bool:
        """Whether only a part of the vocabulary can be sampled."""
        return (self.top_p, self.top_k, self.min_p) != (1.0, -1, 0.0)

    @property
    def bounded_support(self) -> bool:
        """Whether that part is small enough for the engine to say each token's logprob within it."""
        return self.truncates and 2 <= self.top_k <= MAX_SUPPORT and self.temperature > 0

    @property
    def biased(self) -> list[str]:
        """The settings under which the engine's logprobs are not those of the distribution sampled from."""
        if self.temperature == 0:
            return ["temperature=0 (greedy)"]
        if not self.truncates or self.bounded_support:
            return []
        given = [f"{name}={getattr(self, name)!r}" for name in ("top_p", "top_k", "min_p")]
        return [f"{', '.join(given)} (a top_k from 2 to {MAX_SUPPORT} would bound what they keep)"]

    def of_row(self, given: Mapping[str, Any]) -> SamplingConfig:
        """These settings with those in place that a row brings (`SourceConfig.sampling_field`).

        Raises:
            ConfigError: an unknown one, one that a row cannot set, one that breaks its rule, or more tokens than the ring was planned for.
        """
        if not given:
            return self
        if wrong := sorted(
            set(given) & {"group_size", "allow_biased_logprobs"} | set(given) - set(self.__struct_fields__)
        ):
            raise ConfigError(f"a row's sampling settings: {', '.join(wrong)}: no setting that a row can have")
        row = msgspec.structs.replace(self, **given)
        if row.max_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"a row's sampling settings: max_new_tokens={row.max_new_tokens} is over SamplingConfig.max_new_tokens="
                f"{self.max_new_tokens}, for which the ring was planned"
            )
        return row

    def _check(self) -> None:
        self._require_int("group_size", 1)
        self._require_int("max_new_tokens", 1)
        self._require("temperature", 0 <= self.temperature < math.inf, ">= 0 and finite")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._require("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or >= 1")
        self._require("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._require("repetition_penalty", 0 < self.repetition_penalty <= 2, "in (0, 2]")
        self._require("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        self._require("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        self._require("stop", all(self.stop), "without an empty string")
        self._require_int("max_thinking_tokens", 1, optional=True)
        self._require("end_of_thinking", bool(self.end_of_thinking.strip()), "more than white space")
        self._require("truncation_reward", math.isfinite(self.truncation_reward), "finite")
        if self.biased and not self.allow_biased_logprobs:
            raise BiasedLogprobs(
                f"SamplingConfig: {', '.join(self.biased)} makes the returned logprobs differ from the distribution "
                "sampled from; set allow_biased_logprobs=True if you do not train on them"
            )


class RewardConfig(_Config, frozen=True):
    """How samples are scored. `RewardConfig("math", timeout_s=10)`."""

    function: Any
    """`"math"`, `"exact"`, `"regex"`, `"row"` (the row's own scorer), `"module:function"`, or a function that a worker can import."""
    per: Literal["sample", "group"] = "sample"
    """What one call scores: one sample (returns a number) or all samples of a group (returns a list of numbers)."""
    kwargs: dict[str, Any] = {}
    """Passed to the function with every call (`pattern` for `regex`)."""
    timeout_s: float = 30.0
    """Deadline of one call; a call that exceeds it is killed."""
    workers: int = 1
    """Processes of the reward pool, per worker."""
    max_concurrency: int = 256
    """Async rewards under way at once, per worker."""

    def _check(self) -> None:
        self._require_seconds("timeout_s")
        self._require_int("workers", 1)
        self._require_int("max_concurrency", 1)


class FilterConfig(_Config, frozen=True, kw_only=True):
    """Which finished, scored groups are worth training on. One that is rejected ends FILTERED, and exactly one ticket replaces it."""

    zero_spread: bool = False
    """Reject a group whose rewards are all equal (reason `zero_spread`): it has no advantage to learn from."""
    function: Any = None
    """`"module:function"`, or a function that a worker can import: `def keep(samples: list[RewardInput], rewards: list[float])`.
    It returns None to keep the group, or one of `reasons`. It runs in a reward process, behind `zero_spread`."""
    reasons: list[str] = msgspec.field(default_factory=lambda: ["rejected"])
    """What the function may return; each is counted by itself (`filtered:<reason>`)."""
    kwargs: dict[str, Any] = {}
    """Passed to the function with every call."""
    timeout_s: float = 30.0
    """Deadline of one call; a call that exceeds it is killed, and the attempt fails."""
    max_consecutive: int | None = None
    """So many rejections in a row, with no group published between them, are a permanent fault. None: no bound."""

    def _check(self) -> None:
        named = all(self.reasons)
        self._require(
            "reasons", named and 1 <= len(set(self.reasons)) == len(self.reasons) <= 1024, "1 to 1024 distinct names"
        )
        self._require_seconds("timeout_s")
        self._require_int("max_consecutive", 1, optional=True)


class WorkerConfig(_Config, frozen=True, kw_only=True):
    """The worker processes."""

    devices: list[int | str | list[int]] = msgspec.field(default_factory=lambda: [0])
    """One entry a worker: a GPU number, a list of GPU numbers (tensor parallel), or "cpu"."""
    max_running_samples: int = 256
    """Samples generating at once on one worker."""
    start_timeout_s: float = 900.0
    """Longest start of a worker, CUDA graph capture and JIT included."""
    progress_timeout_s: float = 300.0
    """A worker that runs samples and makes no progress for so long is killed and restarted."""
    max_restarts: int = 3
    """Restarts of one worker in a row, with no group published between them, before it is given up."""
    env: dict[str, str] = {}
    """Environment variables added in the workers, over everything chosen here."""
    placement: Literal["split", "colocated"] = "split"
    """`split`: the GPUs of the workers are theirs alone. `colocated`: the trainer uses them, too, and `RolloutEngine.sleep` and `wake` say
    whose turn it is; a worker's weights are kept in host memory while it sleeps. In both, GPU numbers count those of the process that makes
    the engine (its CUDA_VISIBLE_DEVICES), so under `colocated` worker `[i]` shares this process's `cuda:i`, which the worker sees as `cuda:0`."""

    def _check(self) -> None:
        self._require("devices", 1 <= len(self.devices) <= 64, "a list of 1 to 64 entries")
        gpus = [
            gpu for device in self.devices for gpu in (device if isinstance(device, list) else [device]) if gpu != "cpu"
        ]
        ok = all(isinstance(gpu, int) and gpu >= 0 for gpu in gpus) and [] not in self.devices
        self._require("devices", ok, 'GPU numbers >= 0, lists of them, or "cpu"')
        self._require("devices", len(set(gpus)) == len(gpus), "without a GPU twice")
        self._require_int("max_running_samples", 1)
        self._require_seconds("start_timeout_s")
        self._require_seconds("progress_timeout_s")
        self._require_int("max_restarts", 0)


class GateConfig(_Config, frozen=True, kw_only=True):
    """How many tickets may be live."""

    groups_per_update: int | None = None
    """B: groups the trainer takes per weight update; needed by `max_lag`."""
    max_lag: int | None = None
    """K: most updates between sampling a group's oldest token and its take. None: no bound, publish order."""
    lag_policy: Literal["strict", "mask", "recycle"] = "strict"
    """How `max_lag` is kept. `strict`: by admission; groups come in ticket order, nothing is discarded. `mask`: publish order, a group
    over K at its take has its loss masked. `recycle`: publish order, its tokens are discarded and its prompt is tried again."""
    max_recycles: int = 1
    """Under `recycle`: how often a ticket is sent back; after that it is delivered with its loss masked."""
    max_live_groups: int | None = None
    """Most live groups (admitted, not yet taken or ended). None: (K + 1) * B with `max_lag`, else twice what the workers can run."""

    await_weights: bool = False
    """Keep the gate closed until the first `update_weights`, which then is the baseline and counts as no update
    (the trainer's weights are not those of the model on disk). A loaded state implies it."""

    def _check(self) -> None:
        self._require_int("groups_per_update", 1, optional=True)
        self._require_int("max_lag", 0, optional=True)
        self._require_int("max_live_groups", 1, optional=True)
        self._require_int("max_recycles", 0)
        if self.max_lag is None and self.lag_policy != "strict":
            raise ConfigError(
                f"GateConfig.lag_policy={self.lag_policy!r} needs max_lag, the lag that it acts on; got None"
            )
        if self.max_lag is not None and self.lag_policy == "strict" and self.groups_per_update is None:
            raise ConfigError(
                "GateConfig.max_lag needs groups_per_update (the bound counts groups in updates); got None"
            )


class FaultConfig(_Config, frozen=True, kw_only=True):
    """What happens to a ticket whose attempt fails."""

    max_attempts: int = 3
    """Tries at a ticket before it ends FAILED."""
    max_deaths_per_ticket: int = 5
    """Worker deaths a ticket survives; its own, larger bound, so that storms do not burn innocent prompts. After two deaths
    a ticket runs alone on its worker, so that a poison prompt takes no other with it."""
    episode_timeout_s: float | None = None
    """Deadline of one run of the rollout function: all turns of one sample, without its reward. What an update aborted begins anew, with all of it."""
    sample_timeout_s: float | None = None
    """Deadline of one sample, from the moment it has its place: its episode and, with `RewardConfig.per="sample"`, its reward (whose own
    deadline is `RewardConfig.timeout_s`)."""
    group_timeout_s: float | None = None
    """Deadline of one attempt at a ticket, from its start until the group is scored whole and filtered: all its samples, and their wait for places.

    The three nest, episode in sample in group, and None is no deadline. Whichever passes first ends what it covers: the samples are aborted
    in the engine and the attempt fails with the reason `timeout` (an episode or a sample fails as `on_sample_failure` says), so the
    ticket is tried again, or ends FAILED. Swallowed completions are noticed by any of them."""
    retry_delay_s: float = 0.05
    """Pause before the second attempt, doubled for each further one."""
    on_sample_failure: Literal["retry", "shrink", "fail"] = "retry"
    """One sample failed: retry the group, publish it without the sample (at least 2 must remain), or end it FAILED."""
    max_consecutive_failures: int = 8
    """So many tickets in a row ending FAILED with nothing published between them are a permanent fault."""

    def _check(self) -> None:
        self._require_int("max_attempts", 1)
        self._require("max_attempts", self.max_attempts <= 255, "<= 255")
        self._require_int("max_deaths_per_ticket", 1)
        self._require("retry_delay_s", 0 <= self.retry_delay_s < math.inf, "a finite number of seconds >= 0")
        self._require("max_deaths_per_ticket", self.max_deaths_per_ticket <= 254, "<= 254")
        deadlines = ["episode_timeout_s", "sample_timeout_s", "group_timeout_s"]
        for name in deadlines:
            self._require_seconds(name, optional=True)
        given = [(name, getattr(self, name)) for name in deadlines if getattr(self, name) is not None]
        for (inner, inner_s), (outer, outer_s) in itertools.pairwise(given):
            if inner_s > outer_s:
                raise ConfigError(
                    f"FaultConfig.{inner}={inner_s:g} must be at most {outer}={outer_s:g}, which covers it: it could never be reached"
                )
        self._require_int("max_consecutive_failures", 1)


class WeightsConfig(_Config, frozen=True, kw_only=True):
    """How new weights reach running workers."""

    transport: Literal["shm", "ipc", "distributed", "disk"] = "shm"
    """`shm`: the engines map one staged copy in memory. `ipc`: buckets on a GPU that trainer and worker share. `distributed`: buckets broadcast by
    NCCL (gloo on a CPU). `disk`: a safetensors file in `RUN/weights`, which holds no memory between updates. The first three hold two copies in
    memory: the last good one, for workers that start again, and the one before, which the next update is written over. ipc and distributed have
    not yet run on a GPU."""
    bucket_bytes: int = 512 << 20
    """Of `ipc` and `distributed`: what is sent at once, held once more on each GPU meanwhile."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """`retract`: running requests recompute their prefix under the new weights; `in_place`: they go on with old KV entries; `abort`: they end and are retried."""
    partial_rollout: bool = False
    """What an update aborts (`pause="abort"`) goes on from its tokens, with what is left of its budget; their logprobs and versions stay. False: its
    episode begins anew from its prompt alone. Samples of an evaluation, and those that a deadline, a failure or a death ended, always begin anew."""
    mask_off_policy: bool = False
    """The tokens that such a sample had before the abort are not trained on."""
    rolling: bool = False
    """One worker after another, so that generation never stops everywhere; an update takes as many times longer. Refused with `max_lag=0`, since nothing
    is generated beside an update then, and with the transports `ipc` and `distributed`, by which all workers receive at once."""
    timeout_s: float = 120.0
    """Deadline of one update on one worker. Of its phases, too: """
    pause_timeout_s: float = 60.0
    """the engine stops after the step that runs (`abort`: and every request has ended),"""
    begin_timeout_s: float = 60.0
    """it gets ready for new weights,"""
    update_timeout_s: float = 120.0
    """it loads them,"""
    end_timeout_s: float = 60.0
    """it makes them fit for use,"""
    continue_timeout_s: float = 60.0
    """and generates again. A worker that exceeds one of them is restarted with the last good weights."""
    dtype: str | None = None
    """Floating-point tensors are cast to it before they are staged (`"bfloat16"`, where the trainer keeps float32); None: as they are."""
    rename: dict[str, str] = {}
    """Prefixes of the trainer's parameter names, and what the engine has in their place: `{"module.": ""}`. The longest that fits counts."""
    keep_versions: int = 0
    """So many of the last completed versions are kept as safetensors in `RUN/weights`, for `mprollout verify`; writing one takes the disk's time in `update_weights`."""

    def limit_s(self, timeout: float | None, workers: int) -> float:
        """How long `update_weights(timeout=timeout)` may take, in seconds."""
        return self.timeout_s * (workers if self.rolling else 1) + 30 if timeout is None else timeout

    def _check(self) -> None:
        for phase in ("", "pause_", "begin_", "update_", "end_", "continue_"):
            self._require_seconds(f"{phase}timeout_s")
        if self.partial_rollout and self.pause != "abort":
            raise ConfigError(
                f'WeightsConfig.partial_rollout needs pause="abort", else no update aborts; got {self.pause!r}'
            )
        if self.mask_off_policy and not self.partial_rollout:
            raise ConfigError("WeightsConfig.mask_off_policy needs partial_rollout=True; got False")
        if self.rolling and self.transport in ("ipc", "distributed"):
            raise ConfigError(
                f'WeightsConfig.rolling needs transport="shm" or "disk": with {self.transport!r} all workers receive at once'
            )
        self._require(
            "dtype", self.dtype in (None, "float32", "float16", "bfloat16"), "float32, float16, bfloat16 or None"
        )
        self._require_int("keep_versions", 0)
        self._require_int("bucket_bytes", 1)


class RingConfig(_Config, frozen=True, kw_only=True):
    """Sizes of the shared memory, in bytes; None: computed by `ring.plan` so that n groups always fit."""

    max_group_bytes: int | None = None
    arena_bytes: int | None = None
    """Per worker."""
    max_prompt_bytes: int | None = None
    """Longest encoded row (prompt, answer and all its fields); a longer one counts as over-long."""
    extra_fields: tuple[Field, ...] = ()
    """What your rollout function sets in `session.sample.extra`, per token, per sample, or as many items as a sample has: any number dtype, any shape of an item."""

    @property
    def stored_fields(self) -> tuple[Field, ...]:
        """`extra_fields` as they stand in the segment."""
        return stored(self.extra_fields)

    def _check(self) -> None:
        for extra in self.extra_fields:
            if why := extra.misfit():
                raise ConfigError(f"RingConfig.extra_fields: {why}")
        names = [extra.name for extra in self.stored_fields]
        self._require("extra_fields", len(set(names)) == len(names), "without a name twice")
        for field in ("max_group_bytes", "arena_bytes"):
            self._require_int(field, 4096, optional=True)
        self._require_int("max_prompt_bytes", 256, optional=True)


LOGGERS = ("tensorboard", "wandb", "trackio")


class EngineConfig(_Config, frozen=True, kw_only=True):
    """The whole configuration of a `RolloutEngine`."""

    source: SourceConfig
    generator: SGLangConfig | SimulatedConfig
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig
    filter: FilterConfig = FilterConfig()
    workers: WorkerConfig = WorkerConfig()
    gate: GateConfig = GateConfig()
    fault: FaultConfig = FaultConfig()
    weights: WeightsConfig = WeightsConfig()
    ring: RingConfig = RingConfig()
    rollout: Any = None
    """A rollout function (`"module:function"` or importable); None: the single turn."""
    seed: int = 0
    """Base of all sampling seeds; each worker, sample and attempt derives its own."""
    run_dir: str | None = None
    """Where logs go, the ledger, and the socket by which `mprollout top` and `RolloutEngine.attach` find the run; None: a temporary folder that goes away."""
    record: str | None = None
    """Every delivered group is written there, in Parquet (`mprollout.record`): `mprollout verify` and `ReplaySource` read it. `"run"`: the folder `record` of `run_dir`."""
    record_max_bytes: int = 10 << 30
    """Of the recording; its oldest parts are removed."""
    loggers: list[str] = []
    """Where `RolloutEngine.log` sends its numbers besides the run folder: `"tensorboard"` (to `RUN/tensorboard`), `"wandb"`, `"trackio"`."""
    orphan_timeout_s: float = 0.0
    """How long the workers live on after the trainer's death, admitting nothing, for one that attaches. 0: everything ends with the trainer."""

    def _check(self) -> None:
        self._require("orphan_timeout_s", 0 <= self.orphan_timeout_s < math.inf, "a finite number of seconds >= 0")
        if self.orphan_timeout_s and self.run_dir is None:
            raise ConfigError(
                "EngineConfig.orphan_timeout_s needs run_dir: a new trainer finds the run there; got None"
            )
        self._require_int("record_max_bytes", 1)
        self._require("loggers", set(self.loggers) <= set(LOGGERS), f"a list of {', '.join(LOGGERS)}")
        if "tensorboard" in self.loggers and self.run_dir is None:
            raise ConfigError('EngineConfig.loggers=["tensorboard"] needs run_dir, where its files go; got None')
        if self.weights.rolling and self.gate.max_lag == 0:
            raise ConfigError(
                "WeightsConfig.rolling needs GateConfig.max_lag >= 1 or None: with max_lag=0 nothing is generated beside an update, "
                "and one worker after another would only take longer"
            )
        if self.run_dir is None and (self.record == "run" or self.weights.keep_versions):
            raise ConfigError('EngineConfig.record="run" and WeightsConfig.keep_versions need run_dir; got None')
        if self.run_dir is None and self.weights.transport == "disk":
            raise ConfigError(
                'WeightsConfig.transport="disk" needs EngineConfig.run_dir, where the file is written; got None'
            )
        if isinstance(self.generator, SGLangConfig):
            if self.generator.adapter is not None and self.weights.transport in ("ipc", "distributed"):
                raise ConfigError(
                    f"WeightsConfig.transport={self.weights.transport!r} carries a model's weights; for SGLangConfig.adapter use shm or disk"
                )
            if self.generator.adapter is not None and self.weights.keep_versions:
                raise ConfigError(
                    "WeightsConfig.keep_versions is for `mprollout verify`, which recomputes with a model's weights; SGLangConfig.adapter has none"
                )
            for worker, devices in enumerate(self.workers.devices):
                asked = self.generator.engine_args.get("tp_size")
                if asked is not None and devices != "cpu" and asked != len(self.gpus(worker)):
                    raise ConfigError(
                        f"SGLangConfig.engine_args: tp_size={asked} is not the {len(self.gpus(worker))} GPUs of "
                        f"WorkerConfig.devices[{worker}]={devices!r}; leave it out"
                    )

    def gpus(self, worker: int) -> list[int | None]:
        """The GPU of each of a worker's engine processes (tensor-parallel ranks), as numbered in this process; None: a CPU."""
        devices = self.workers.devices[worker]
        if devices == "cpu":
            ranks = self.generator.engine_args.get("tp_size", 1) if isinstance(self.generator, SGLangConfig) else 1
            return [None] * ranks
        return [int(gpu) for gpu in (devices if isinstance(devices, list) else [devices])]

    @classmethod
    def from_toml(cls, path: str | Path) -> EngineConfig:
        """Read a TOML file with one table a part.

        Raises:
            ConfigError: unreadable, unknown key, wrong type or broken rule; names the file and the key's path.
        """
        try:
            return msgspec.toml.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error
