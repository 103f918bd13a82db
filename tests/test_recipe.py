"""The recipe against a naive per-token reference: one sample, one token at a time, in Python floats where it can be."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from mprollout.batch import Padded
from mprollout.demo.recipe import Recipe, Trainer, group_advantages

VOCABULARY = 11


def small_model(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config).double()


torch.set_num_threads(1)
MODEL = small_model()


def make_batch(
    prompts: list[int], lengths: list[int], groups: list[int], rewards: list[float], holes: float, seed: int
) -> Padded:
    """Random tokens; behaviour logprobs near and far from the model's, so that both sides of the clip occur."""
    rng = np.random.default_rng(seed)
    n, longest = len(lengths), max(p + c for p, c in zip(prompts, lengths, strict=True))
    token_ids, logprobs = np.zeros((n, longest), np.int32), np.zeros((n, longest), np.float32)
    loss_mask, attention = np.zeros((n, longest), np.uint8), np.zeros((n, longest), np.uint8)
    versions = np.full((n, longest), -1, np.int64)
    for i, (p, c) in enumerate(zip(prompts, lengths, strict=True)):
        token_ids[i, : p + c] = rng.integers(0, VOCABULARY, p + c)
        attention[i, : p + c] = 1
        loss_mask[i, p : p + c] = rng.random(c) >= holes
        versions[i, p : p + c] = np.sort(rng.integers(3, 5, c))
        with torch.no_grad():
            own = MODEL(torch.tensor(token_ids[i : i + 1, : p + c]).long()).logits[0].log_softmax(-1)
        for t in range(p, p + c):
            logprobs[i, t] = float(own[t - 1, token_ids[i, t]]) + rng.choice([0.0, 0.1, -0.1, 0.5, -0.5])
    return Padded(
        token_ids, logprobs, loss_mask, attention, versions, np.array(rewards, np.float32), np.array(groups, np.int32)
    )


def naive(model: Qwen2ForCausalLM, batch: Padded, recipe: Recipe) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss (with its graph) and metrics, token by token, without padding, from the formulas in the recipe's docstring."""
    members: dict[int, list[float]] = {}
    for group, reward in zip(batch.group_index.tolist(), batch.rewards.tolist(), strict=True):
        members.setdefault(group, []).append(reward)
    terms, ratios, entropies, clipped = [], [], [], 0
    for i in range(len(batch.rewards)):
        rewards = members[int(batch.group_index[i])]
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
        advantage = (float(batch.rewards[i]) - mean) / (std + 1e-6) if len(set(rewards)) > 1 else 0.0
        ids = torch.tensor(batch.token_ids[i][batch.attention_mask[i] == 1]).long()
        logits = model(ids[None]).logits[0] / recipe.temperature
        for t in range(len(ids)):
            if not batch.loss_mask[i, t]:
                continue
            distribution = logits[t - 1].log_softmax(-1)
            ratio = (distribution[ids[t]] - float(batch.logprobs[i, t])).exp()
            plain, bounded = ratio * advantage, ratio.clamp(1 - recipe.clip, 1 + recipe.clip) * advantage
            terms.append(-torch.minimum(plain, bounded))
            clipped += bool(bounded < plain)
            ratios.append(float(ratio.detach()))
            entropies.append(float(-(distribution.exp() * distribution).sum().detach()))
    total = torch.stack(terms).sum() / len(terms) if terms else torch.zeros((), requires_grad=True)
    n = max(1, len(terms))
    return total, {
        "loss": float(total.detach()),
        "kl": sum(r - 1 - math.log(r) for r in ratios) / n,
        "clipped": clipped / n,
        "entropy": sum(entropies) / n,
        "trained_tokens": float(len(terms)),
    }


def gradients(model: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_matches(batch: Padded, recipe: Recipe) -> None:
    MODEL.zero_grad(set_to_none=True)
    loss, expected = naive(MODEL, batch, recipe)
    loss.backward()
    wanted = gradients(MODEL)
    MODEL.zero_grad(set_to_none=True)
    metrics = Trainer(MODEL, recipe).backward(batch.torch(), version=4)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-5), name
    for name, gradient in gradients(MODEL).items():
        torch.testing.assert_close(
            gradient, wanted[name], atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@st.composite
def batches(draw: st.DrawFn) -> Padded:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    prompts = [length for size in sizes for length in [draw(st.integers(1, 3))] * size]
    lengths = draw(st.lists(st.integers(0, 5), min_size=len(groups), max_size=len(groups)))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=len(groups), max_size=len(groups)))
    return make_batch(
        prompts, lengths, groups, rewards, draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.integers(0, 999))
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches(), st.integers(1, 17), st.sampled_from([1.0, 0.7]))
def test_loss_and_gradients_match_the_reference_under_any_split(
    batch: Padded, micro_batch: int, temperature: float
) -> None:
    assert_matches(batch, Recipe(micro_batch_samples=micro_batch, temperature=temperature))


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7, 128])
def test_uneven_groups_with_holes_and_empty_samples_match_the_reference(micro_batch: int) -> None:
    groups, lengths = [0, 0, 0, 0, 0, 1, 1, 2], [5, 0, 3, 1, 4, 2, 0, 3]
    batch = make_batch([3] * 5 + [1] * 2 + [2], lengths, groups, [1.0, 0.0, 0.5, 0.5, 0.0, 1.0, 0.0, 0.7], 0.3, 1)
    assert_matches(batch, Recipe(micro_batch_samples=micro_batch))


def test_advantages_of_uneven_groups_are_standardised_within_each() -> None:
    rewards, index = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.25, 0.75]), torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.int32)
    advantages = group_advantages(rewards, index)
    torch.testing.assert_close(advantages, torch.tensor([3**0.5, *[-(3**-0.5)] * 3, -1.0, 1.0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 0.7, 1e-8, 12345.678])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_all_equal_rewards_give_exactly_zero_advantage(reward: float, size: int) -> None:
    advantages = group_advantages(torch.full((size + 2,), reward), torch.tensor([0] * size + [1, 2]))
    assert advantages.tolist() == [0.0] * (size + 2)


def test_a_batch_of_equal_groups_does_not_move_the_weights() -> None:
    model = small_model(1)
    trainer = Trainer(model, Recipe(lr=0.1))
    lively = make_batch([2] * 4, [3] * 4, [0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0], 0.0, 2)
    trainer.step(lively, 4)  # Adam has momentum now
    before = {name: weight.clone() for name, weight in trainer.weights.items()}
    metrics = trainer.step(lively._replace(rewards=np.full(4, 0.1, np.float32)), 4)
    assert metrics["equal_groups"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights.items())


def test_a_batch_without_trained_tokens_gives_no_nan() -> None:
    batch = make_batch([2, 2], [0, 0], [0, 0], [1.0, 0.0], 0.0, 0)
    metrics = Trainer(small_model(2), Recipe()).step(batch, 4)
    assert metrics["trained_tokens"] == 0.0
    assert metrics["loss"] == 0.0
    assert metrics["ess"] is None
    assert metrics["logprob_diff"] is None


def test_logprob_difference_is_measured_on_the_current_versions_tokens_only() -> None:
    batch = make_batch([2, 2], [3, 3], [0, 0], [1.0, 0.0], 0.0, 0)
    logprobs, versions = batch.logprobs.copy(), batch.versions.copy()
    versions[:, 2:] = [[6, 6, 7], [6, 6, 7]]
    for i in range(2):
        with torch.no_grad():
            own = MODEL(torch.tensor(batch.token_ids[i : i + 1]).long()).logits[0].log_softmax(-1)
        logprobs[i, 2:] = [float(own[t - 1, batch.token_ids[i, t]]) + (1.0 if t < 4 else 0.25) for t in (2, 3, 4)]
    batch = batch._replace(logprobs=logprobs, versions=versions)
    trainer = Trainer(MODEL, Recipe())
    assert trainer.backward(batch.torch(), version=7)["logprob_diff"] == pytest.approx(0.25, abs=1e-5)
    assert trainer.backward(batch.torch(), version=8)["logprob_diff"] is None
    assert trainer.backward(batch.torch(), version=None)["logprob_diff"] is None


def test_ess_is_one_on_policy_and_falls_with_the_spread_of_the_weights() -> None:
    batch = make_batch([2, 2], [3, 3], [0, 0], [1.0, 0.0], 0.0, 0)
    exact = batch.logprobs.copy()
    for i in range(2):
        with torch.no_grad():
            own = MODEL(torch.tensor(batch.token_ids[i : i + 1]).long()).logits[0].log_softmax(-1)
        exact[i, 2:] = [float(own[t - 1, batch.token_ids[i, t]]) for t in (2, 3, 4)]
    trainer = Trainer(MODEL, Recipe())
    assert trainer.backward(batch._replace(logprobs=exact).torch(), 4)["ess"] == pytest.approx(1.0)
    spread = exact.copy()
    spread[:, 2] -= 1.0
    weights = [math.e, math.e, 1, 1, 1, 1]
    expected = sum(weights) ** 2 / (6 * sum(w * w for w in weights))
    assert trainer.backward(batch._replace(logprobs=spread).torch(), 4)["ess"] == pytest.approx(expected, abs=1e-5)
