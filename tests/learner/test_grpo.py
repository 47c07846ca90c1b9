import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.grpo import EPSILON, group_advantages, grpo_loss
from models.logprobs import token_logprobs
from models.transformer import TransformerConfig, new_transformer


def loss_of(logprobs, sampler, advantages, mask=None, entropy=None, **options):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else torch.tensor(mask)
    entropy = torch.zeros_like(logprobs) if entropy is None else torch.tensor(entropy)
    terms = grpo_loss(
        logprobs,
        entropy,
        torch.tensor(sampler),
        mask,
        torch.tensor(advantages),
        **{"clip_low": 0.2, "clip_high": 0.28} | options,
    )
    terms.loss.backward()
    return terms, logprobs.grad


def test_advantages_by_hand():
    """Rewards 0, 0, 1, 1: mean 0.5, population standard deviation 0.5."""
    assert group_advantages([0.0, 0.0, 1.0, 1.0]) == pytest.approx([-1, -1, 1, 1], abs=1e-5)
    """Rewards 0, 1/3, 2/3, 1: mean 1/2, variance (1/4 + 1/36 + 1/36 + 1/4) / 4 = 5/36."""
    deviation = math.sqrt(5) / 6
    expected = [(r - 0.5) / (deviation + EPSILON) for r in (0, 1 / 3, 2 / 3, 1)]
    assert group_advantages([0.0, 1 / 3, 2 / 3, 1.0]) == pytest.approx(expected)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_advantages_are_centred_and_of_unit_scale_or_there_are_none(rewards):
    advantages = group_advantages(rewards)
    if len(set(rewards)) == 1:
        assert advantages is None
    else:
        assert sum(advantages) == pytest.approx(0, abs=1e-4)
        assert max(map(abs, advantages)) <= math.sqrt(len(rewards))


def test_on_policy_the_loss_is_minus_the_mean_advantage_and_its_gradient_the_policy_gradient():
    terms, gradient = loss_of([[-1.0, -2.0], [-0.5, -0.1]], [[-1.0, -2.0], [-0.5, -0.1]], [2.0, -1.0])
    assert terms.loss.item() == pytest.approx(-(2 + 2 - 1 - 1) / 4)
    assert gradient.tolist() == [[-0.5, -0.5], [0.25, 0.25]]
    assert terms.clip_fraction.item() == terms.approx_kl.item() == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "has_gradient"),
    [
        (1.2, 1.0, 1.2, True),  # inside the upper bound 1.28
        (1.5, 1.0, 1.28, False),  # above it, good: clipped
        (1.5, -1.0, -1.5, True),  # above it, bad: pulled back
        (0.9, -1.0, -0.9, True),  # inside the lower bound 0.8
        (0.5, -1.0, -0.8, False),  # below it, bad: clipped
        (0.5, 1.0, 0.5, True),  # below it, good: pulled up
    ],
)
def test_ratios_are_clipped_on_the_side_that_pays(ratio, advantage, surrogate, has_gradient):
    terms, gradient = loss_of([[math.log(ratio)]], [[0.0]], [advantage])
    assert terms.loss.item() == pytest.approx(-surrogate)
    assert (gradient.item() != 0) == has_gradient
    assert terms.clip_fraction.item() == (0 if has_gradient else 1)
    assert terms.approx_kl.item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_masked_tokens_count_for_nothing_even_where_they_are_not_finite():
    mask = [[True, False], [True, False]]
    terms, gradient = loss_of([[-1.0, -7.0], [-1.0, -9.0]], [[-1.0, -math.inf], [-1.0, 50.0]], [1.0, 3.0], mask)
    assert terms.loss.item() == pytest.approx(-2.0)
    assert gradient.tolist() == [[-0.5, 0.0], [-1.5, 0.0]]


def test_the_average_is_over_tokens_and_not_first_over_trajectories():
    mask = [[True, True, True], [True, False, False]]
    terms, _ = loss_of([[0.0] * 3, [0.0] * 3], [[0.0] * 3, [0.0] * 3], [1.0, -1.0], mask)
    assert terms.loss.item() == pytest.approx(-(3 - 1) / 4)


def test_entropy_is_rewarded_by_its_coefficient():
    terms, _ = loss_of([[0.0, 0.0]], [[0.0, 0.0]], [0.0], entropy=[[1.0, 3.0]], entropy_coefficient=0.1)
    assert terms.entropy.item() == pytest.approx(2.0)
    assert terms.loss.item() == pytest.approx(-0.2)


def test_golden_losses_of_a_fixed_model():
    """Three updates of a small model; a change here is a change of the numerics, to be explained."""
    model = new_transformer(TransformerConfig(vocabulary_size=9, num_outputs=4, width=16, num_heads=2), seed=11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, 4, (6, 8), generator=generator)
    mask = torch.rand(6, 8, generator=generator) < 0.5
    mask[:, 0] = False
    advantages = torch.randn(6, generator=generator)
    sampler = token_logprobs(model, ids, mask)[0].detach()
    losses = []
    for _ in range(3):
        logprobs, entropy = token_logprobs(model, ids, mask)
        terms = grpo_loss(logprobs, entropy, sampler, mask, advantages, clip_low=0.2, clip_high=0.28)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        losses.append(terms.loss.item())
    on_policy = -(advantages[:, None] * mask).sum() / mask.sum()
    assert losses[0] == pytest.approx(on_policy.item(), abs=1e-6)
    assert losses == pytest.approx([0.158218756, 0.103164785, 0.080063589], abs=1e-5)
