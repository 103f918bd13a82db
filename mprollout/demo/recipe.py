"""GRPO in plain PyTorch: a `Padded` batch in, one optimizer step and its metrics out.

    A_i  = (r_i - mean of its group) / (std of its group + eps)                        (DeepSeekMath, arXiv:2402.03300, eq. 3)
    L    = - 1/T sum_t min(w_t A, clip(w_t, 1 - c, 1 + c) A),   w_t = pi(t) / mu(t)    (PPO, arXiv:1707.06347, eq. 7)

mu is the *behaviour* policy: the logprobs that the engine returned for the tokens when it sampled them, so lag is corrected for
and no old model is kept. T counts the trained tokens of the whole batch, so the gradient does not depend on how
the batch is split into micro-batches (`tests/test_recipe.py` holds this to 1e-5 against a per-token reference).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from mprollout.batch import Padded

Metrics = dict[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The settings of the update."""

    lr: float = 6e-4
    lr_warmup_steps: int = 10
    """Steps of linear rise to `lr`."""
    clip: float = 0.2
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    """Of the sampling; the engine's logprobs are those of the scaled distribution, so the trainer scales too."""
    micro_batch_samples: int = 128
    """Samples of one forward and backward pass; bounds the memory, does not change the result."""


def group_advantages(rewards: torch.Tensor, group_index: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """How much better each sample is than its siblings, in standard deviations of the group. Groups may differ in size.

    Args:
        rewards: float [num_samples]
        group_index: int [num_samples], which group a sample belongs to

    Returns:
        float32 [num_samples]; exactly 0 in a group whose rewards are all equal (it says nothing about what is better)
    """
    rewards, index = (
        rewards.double(),
        group_index.long(),
    )  # in double a sum of equal float32 is exact: all-equal is exactly 0
    groups = int(index.max()) + 1 if len(index) else 0
    zeros = torch.zeros(groups, dtype=torch.float64, device=rewards.device)
    counts = zeros.index_add(0, index, torch.ones_like(rewards)).clamp(min=1)
    centred = rewards - (zeros.index_add(0, index, rewards) / counts)[index]
    std = (zeros.index_add(0, index, centred**2) / counts).sqrt()[index]
    return (centred / (std + eps)).float()


class TokenLosses(NamedTuple):
    """Per trained token, 1-D."""

    loss: torch.Tensor
    log_ratio: torch.Tensor  # log pi - log mu, detached
    clipped: torch.Tensor  # bool: the clip decides, the token gives no gradient


def clipped_surrogate(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, clip: float
) -> TokenLosses:
    """The clipped objective, negated. All arguments have one entry a trained token."""
    log_ratio = logprobs - behaviour
    ratio = log_ratio.exp()
    plain, bounded = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    return TokenLosses(-torch.minimum(plain, bounded), log_ratio.detach(), bounded < plain)


def trained_logprobs(
    model: Any, token_ids: torch.Tensor, attention_mask: torch.Tensor, trained: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob and entropy at the trained tokens. Only their rows of the vocabulary matrix are computed.

    Args:
        model: a causal language model of transformers
        token_ids: int64 [num_samples, length], padded on the right
        attention_mask: int64 [num_samples, length]
        trained: bool [num_samples, length], never true in column 0

    Returns:
        float [num_trained] logprobs with a gradient, float [num_trained] entropies (nats) without
    """
    hidden = model.base_model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    logits = (
        model.get_output_embeddings()(hidden[:, :-1][trained[:, 1:]]) / temperature
    )  # a token is predicted one place before it
    total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, token_ids[trained][:, None])[:, 0] - total
    with torch.no_grad():
        entropy = total - (logits.softmax(-1) * logits).sum(-1)
    return logprobs, entropy


class Trainer:
    """A model, its optimizer, and how a batch becomes one step of it.

    Example:
        >>> trainer = Trainer(model, Recipe(lr=1e-5))                       # doctest: +SKIP
        >>> with engine.get(16) as batch:
        ...     rows = batch.padded()
        >>> metrics = trainer.step(rows, version)
        >>> version = engine.update_weights(trainer.weights)
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.steps = 0
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=recipe.lr, weight_decay=0.0)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's parameters by name, each once (tied ones have one name). No copy: valid until the next step."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def step(self, batch: Padded, version: int | None) -> Metrics:
        """Train on one batch. A batch without a trained token, or without a difference in reward, moves nothing.

        Args:
            batch: all samples of the step
            version: the engine's policy version with the model's present weights (None: it has none); both sides' logprobs are compared on its tokens

        Returns:
            see `backward`, and `grad_norm` (before clipping), `lr`
        """
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        metrics = self.backward(batch.torch(), version)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.recipe.max_grad_norm))
        lr = self.recipe.lr * min(1.0, (self.steps + 1) / max(1, self.recipe.lr_warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self.steps += 1
        if grad_norm > 0:  # Adam's momentum would move the weights on a batch that says nothing
            self._optimizer.step()
        return metrics | {"grad_norm": grad_norm, "lr": lr}

    def backward(self, batch: Mapping[str, torch.Tensor], version: int | None) -> Metrics:
        """Add the batch's gradient to the parameters'.

        Returns:
            loss; kl: k3 estimate of KL(behaviour || current), nats a token; ess: effective sample size of the token weights, in (0, 1];
            clipped: fraction of tokens; entropy: nats; logprob_diff: mean |engine - trainer| over the tokens that `version` sampled
            (None without any); equal_groups: fraction of groups whose rewards do not differ; trained_tokens
        """
        device = self._parameters[0].device
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        advantages = group_advantages(batch["rewards"], batch["group_index"])
        trained = batch["loss_mask"].bool()
        tokens = int(trained.sum())
        sums = dict.fromkeys(
            ("loss", "kl", "clipped", "entropy", "weight", "weight_squared", "difference", "compared"), 0.0
        )
        for rows in torch.arange(len(trained), device=device).split(self.recipe.micro_batch_samples):
            if not trained[rows].any():
                continue
            longest = int(batch["attention_mask"][rows].sum(-1).max())
            ids, mask, own, behaviour, versions = (
                batch[name][rows, :longest]
                for name in ("token_ids", "attention_mask", "loss_mask", "logprobs", "versions")
            )
            own = own.bool()
            logprobs, entropy = trained_logprobs(self.model, ids.long(), mask.long(), own, self.recipe.temperature)
            weights = advantages[rows][:, None].expand(own.shape)[own]
            losses = clipped_surrogate(logprobs, behaviour[own], weights, self.recipe.clip)
            if weights.any():  # else the gradient is zero, at the price of the others
                (losses.loss.sum() / tokens).backward()
            ratio, fresh = losses.log_ratio.exp(), versions[own] == (-1 if version is None else version)
            for name, values in (
                ("loss", losses.loss.detach()),
                ("kl", ratio - 1 - losses.log_ratio),
                ("clipped", losses.clipped),
                ("entropy", entropy),
                ("weight", ratio),
                ("weight_squared", ratio**2),
                ("difference", losses.log_ratio[fresh].abs()),
                ("compared", fresh),
            ):
                sums[name] += float(values.sum())
        mean = {name: sums[name] / max(1, tokens) for name in ("loss", "kl", "clipped", "entropy")}
        groups = int(batch["group_index"].max()) + 1
        uneven = batch["group_index"][advantages != 0].unique().numel()
        return mean | {
            "ess": sums["weight"] ** 2 / (tokens * sums["weight_squared"]) if tokens else None,
            "logprob_diff": sums["difference"] / sums["compared"] if sums["compared"] else None,
            "equal_groups": 1 - uneven / groups,
            "trained_tokens": float(tokens),
        }
