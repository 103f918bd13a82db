"""`Batch`, `Group`, `Sample`: what the trainer gets. Views into the ring, packed and padded forms on demand.

    ring extent --Lease.field--> numpy views (Group) --slices--> Sample          no copy
                                                   \\--packed() / padded()       one copy, whole batch

States: leased (from `get` until `release`), released. The memory goes back when `release()` was called *and* the last view
is dead; `Lease` (native) guarantees that a view never changes under its reader. `with engine.get(n) as batch:` releases at the end.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mprollout import _native, schema
from mprollout.errors import BatchReleased
from mprollout.generator import FINISH_REASONS, VersionSpan
from mprollout.schema import Field

if TYPE_CHECKING:
    import torch


class LeaseWarning(ResourceWarning):
    """Views of a released batch are still alive: their memory stays in the ring until they die."""


class Sample(NamedTuple):
    """One completion. Arrays are read-only views into the ring."""

    token_ids: npt.NDArray[np.int32]  # int32 [num_tokens]
    logprobs: npt.NDArray[np.float32]  # float32 [num_tokens], natural log, of the distribution sampled from
    loss_mask: npt.NDArray[np.uint8]  # uint8 [num_tokens], 1 = trained on
    reward: float
    finish_reason: str
    versions: list[VersionSpan]


class Group:
    """The samples of one ticket. Sequence of `Sample`; arrays over all samples are views, concatenated in sample order."""

    def __init__(self, lease: _native.Lease, extra: tuple[Field, ...] = ()) -> None:
        self.lease = lease
        self.ticket: int = lease.ticket
        self.worker: int = lease.worker
        self.attempt: int = lease.attempt
        self.lag: int = 0
        """Completed updates at take minus those when its oldest token was sampled; set by the engine at `get`."""
        self.masked = False
        """Over `max_lag` at its take, under `lag_policy` mask or recycle: its `loss_mask` reads 0 everywhere."""
        self.extra_fields = extra
        """The run's own fields, as stored."""
        self._index = schema.index(extra)
        self._meta: schema.Meta | None = None
        self._released = False

    def field(self, name: str) -> npt.NDArray[Any]:
        """Read-only view of one field of the schema, or of `RingConfig.extra_fields`: [items, *shape of an item]. No copy.

        Raises:
            BatchReleased: the group's memory was given back.
            KeyError: no such field; see `mprollout.schema`.
        """
        if self._released:
            raise BatchReleased(
                f"group of ticket {self.ticket}: released; views must be taken before release() or copied"
            )
        index, field = self._index[name]
        view = self.lease.field(index, field.dtype)
        if self.masked and name == "loss_mask":
            return np.zeros_like(view)
        return view.reshape(-1, *field.shape) if field.shape else view

    @property
    def meta(self) -> schema.Meta:
        """Its row, and when it was claimed, generated, published. A copy, made once."""
        if self._meta is None:
            self._meta = schema.Meta._make(self.field("meta").tolist())
        return self._meta

    @property
    def sampled(self) -> schema.Sampled:
        """How its tokens were sampled: temperature and the like, its row's own where it has some. A copy."""
        return schema.Sampled._make(self.field("sampled").tolist())

    @property
    def row(self) -> int:
        """Number of the data row, from 0."""
        return self.meta.row

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """int32 [num_prompt_tokens], view."""
        return self.field("prompt_ids")

    @property
    def rewards(self) -> npt.NDArray[np.float32]:
        """float32 [num_samples], view."""
        return self.field("rewards")

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Completion lengths in tokens, int32 [num_samples], view."""
        return self.field("lengths")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def samples(self) -> list[Sample]:
        """One `Sample` a completion; arrays are slices of the views."""
        lengths, spans = self.lengths.tolist(), self.field("span_counts").tolist()
        ids, logprobs, mask = self.field("token_ids"), self.field("logprobs"), self.field("loss_mask")
        rewards, reasons = self.rewards.tolist(), self.field("finish_reasons").tolist()
        versions, ends = self.field("span_versions").tolist(), self.field("span_ends").tolist()
        old_kv = self.field("span_old_kv").tolist()
        out, at, span_at = [], 0, 0
        for i, (n, k) in enumerate(zip(lengths, spans, strict=True)):
            window = slice(at, at + n)
            starts = [0, *ends[span_at : span_at + k]]
            own = [
                VersionSpan(versions[j], starts[j - span_at], ends[j], bool(old_kv[j]))
                for j in range(span_at, span_at + k)
            ]
            out.append(Sample(ids[window], logprobs[window], mask[window], rewards[i], FINISH_REASONS[reasons[i]], own))
            at, span_at = at + n, span_at + k
        return out

    @property
    def token_versions(self) -> npt.NDArray[np.int64]:
        """The policy version of every completion token, int64 [num_tokens]. A copy (the ring keeps runs)."""
        ends, counts = self.field("span_ends").astype(np.int64), self.field("span_counts")
        first = np.zeros(len(ends), dtype=bool)
        first[(np.cumsum(counts) - counts)[counts > 0]] = True
        return np.repeat(
            self.field("span_versions"), ends - np.where(first, 0, np.concatenate(([0], ends[:-1]))[: len(ends)])
        )


class Packed(NamedTuple):
    """All samples of a batch one after another, prompt then completion, without padding. Arrays own their memory."""

    token_ids: npt.NDArray[np.int32]  # int32 [total_tokens]
    logprobs: npt.NDArray[np.float32]  # float32 [total_tokens]; 0 on prompt tokens
    loss_mask: npt.NDArray[np.uint8]  # uint8 [total_tokens]; 0 on prompt tokens
    versions: npt.NDArray[np.int64]  # int64 [total_tokens]; -1 on prompt tokens
    cu_seqlens: npt.NDArray[np.int32]  # int32 [num_samples + 1]
    prompt_lengths: npt.NDArray[np.int32]  # int32 [num_samples]
    rewards: npt.NDArray[np.float32]  # float32 [num_samples]
    group_index: npt.NDArray[np.int32]  # int32 [num_samples]; which group of the batch
    extra: dict[str, npt.NDArray[Any]] = {}
    """Your own fields: [total_tokens, *shape] per token (0 on prompt tokens), [num_samples, *shape] per sample, [items, *shape] per item."""

    def torch(self) -> dict[str, torch.Tensor]:
        """The same arrays as torch tensors that share their memory; your own fields beside them, by their names."""
        return _tensors(self._asdict())


class Padded(NamedTuple):
    """All samples of a batch as rows, padded on the right. Arrays own their memory."""

    token_ids: npt.NDArray[np.int32]  # int32 [num_samples, longest]
    logprobs: npt.NDArray[np.float32]  # float32 [num_samples, longest]
    loss_mask: npt.NDArray[np.uint8]  # uint8 [num_samples, longest]
    attention_mask: npt.NDArray[np.uint8]  # uint8 [num_samples, longest]; 0 on padding
    versions: npt.NDArray[np.int64]  # int64 [num_samples, longest]; -1 on prompt and padding
    rewards: npt.NDArray[np.float32]  # float32 [num_samples]
    group_index: npt.NDArray[np.int32]  # int32 [num_samples]
    extra: dict[str, npt.NDArray[Any]] = {}
    """Your own fields: [num_samples, longest, *shape] per token (0 on prompt and padding), the others as packed."""

    def torch(self) -> dict[str, torch.Tensor]:
        """The same arrays as torch tensors that share their memory; your own fields beside them, by their names."""
        return _tensors(self._asdict())


def _tensors(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    extra = arrays.pop("extra")
    return {name: torch.from_numpy(array) for name, array in {**arrays, **extra}.items()}


class Batch(Sequence[Group]):
    """Exactly the n groups that `get(n)` was asked for, in order.

    Example:
        >>> with engine.get(8) as batch:            # doctest: +SKIP
        ...     rows = batch.packed()               # one copy; valid after release
        ...     mean = batch.rewards.mean()
    """

    def __init__(self, leases: Sequence[_native.Lease], make: Callable[[_native.Lease], Group] = Group) -> None:
        self._leases, self._make = list(leases), make
        self.released = False

    @functools.cached_property
    def groups(self) -> list[Group]:
        """Made when they are asked for, which is none of `get`'s business."""
        groups = [self._make(lease) for lease in self._leases]
        for group in groups:
            group._released = self.released
        return groups

    def __len__(self) -> int:
        return len(self._leases)

    def __getitem__(self, index: Any) -> Any:
        return self.groups[index]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def tickets(self) -> list[int]:
        return [lease.ticket for lease in self._leases]

    @property
    def rewards(self) -> npt.NDArray[np.float32]:
        """float32 [num_samples], a copy over all groups."""
        return np.concatenate([group.rewards for group in self.groups])

    def packed(self) -> Packed:
        """Copy into the padding-free form, once, group by group: no more memory than the result."""
        counts = np.array([len(group) for group in self.groups])
        completion = np.concatenate([group.lengths for group in self.groups]).astype(np.int64)
        prompt = np.repeat([len(group.prompt_ids) for group in self.groups], counts)
        bounds = np.concatenate(([0], np.cumsum(prompt + completion)))  # of the samples
        total = int(bounds[-1])
        ids, is_completion = np.empty(total, np.int32), np.ones(total, dtype=bool)
        logprobs, mask = np.zeros(total, np.float32), np.zeros(total, np.uint8)
        versions = np.full(total, -1, np.int64)
        own = self.groups[0].extra_fields
        extra = {f.name: np.zeros((total, *f.shape), f.dtype) for f in own if f.per == "token"}
        at = 0
        for group, n in zip(self.groups, counts, strict=True):
            whole = slice(bounds[at], bounds[at + n])
            prompt_ids = group.prompt_ids
            for start in bounds[at : at + n]:
                window = slice(start, start + len(prompt_ids))
                ids[window] = prompt_ids
                is_completion[window] = False
            del prompt_ids
            inside = is_completion[whole]
            ids[whole][inside] = group.field("token_ids")
            logprobs[whole][inside] = group.field("logprobs")
            mask[whole][inside] = group.field("loss_mask")
            versions[whole][inside] = group.token_versions
            for name, array in extra.items():
                array[whole][inside] = group.field(name)
            at += n
        for field in own:
            if field.per != "token":
                extra[field.name] = np.concatenate([group.field(field.name) for group in self.groups])
        return Packed(
            ids,
            logprobs,
            mask,
            versions,
            bounds.astype(np.int32),
            prompt.astype(np.int32),
            self.rewards,
            np.repeat(np.arange(len(self.groups), dtype=np.int32), counts),
            extra,
        )

    def padded(self, pad_token_id: int = 0) -> Padded:
        """Copy into the padded form (right padding), once."""
        packed = self.packed()
        lengths = np.diff(packed.cu_seqlens)
        attention = np.arange(lengths.max(initial=0))[None, :] < lengths[:, None]

        def spread(values: npt.NDArray[Any], fill: int) -> npt.NDArray[Any]:
            out = np.full((*attention.shape, *values.shape[1:]), fill, dtype=values.dtype)
            out[attention] = values
            return out

        return Padded(
            spread(packed.token_ids, pad_token_id),
            spread(packed.logprobs, 0),
            spread(packed.loss_mask, 0),
            attention.astype(np.uint8),
            spread(packed.versions, -1),
            packed.rewards,
            packed.group_index,
            {
                f.name: spread(packed.extra[f.name], 0) if f.per == "token" else packed.extra[f.name]
                for f in self.groups[0].extra_fields
            },
        )

    def release(self) -> None:
        """Give the memory back. Idempotent. Where views are still alive, theirs stays until they die, and a `LeaseWarning` says so."""
        if self.released:
            return
        self.released = True
        for group in self.__dict__.get("groups", ()):  # those that were made
            group._released = True
        if _native.release(self._leases):
            alive = {lease.ticket: n for lease in self._leases if (n := lease.release())}
            warnings.warn(
                f"batch released while {sum(alive.values())} views of tickets {sorted(alive)[:8]} are alive; "
                "their memory stays in the ring until they die (copy what you keep)",
                LeaseWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
