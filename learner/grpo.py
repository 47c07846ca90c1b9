r"""Group-relative policy optimisation with clipped importance ratios.

Advantages (GRPO, arXiv 2402.03300, §4.1.2, outcome supervision), with rewards r_1…r_G of the G trajectories of a task:

    A_i = (r_i - mean(r)) / (std(r) + ε)            population std, one A_i for all tokens of trajectory i

Loss (PPO's clipped surrogate, arXiv 1707.06347 eq. 7, per token as in GRPO; asymmetric bounds and the average over all
tokens of the batch, not first per trajectory, as in DAPO, arXiv 2503.14476 eq. 8):

    w_it = exp(log π(o_it) - log μ(o_it))            μ: the sampler, whose log-probabilities came with the trajectory
    L    = - Σ_it m_it · min(w_it A_i, clip(w_it, 1-ε_low, 1+ε_high) A_i)  /  Σ_it m_it  -  c · mean entropy

m is 1 on tokens that the policy sampled. There is no KL term to a reference (DAPO drops it too); `approx_kl` only
reports how far π has moved from μ, by the estimator E[w - 1 - log w] (http://joschu.net/blog/kl-approx.html, k3).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the standard deviation."""


class LossTerms(NamedTuple):
    """The loss and what it says about the update; all scalars."""

    loss: Tensor
    """To be minimised."""
    clip_fraction: Tensor
    """Share of sampled tokens whose gradient was clipped away."""
    approx_kl: Tensor
    """Estimate of KL(sampler ‖ policy) per token."""
    entropy: Tensor
    """Mean over sampled tokens, in nats."""


def group_advantages(rewards: Sequence[float]) -> list[float] | None:
    """Advantages of one group; None where all rewards are equal, so that nothing can be learnt from it.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0])
    [0.999998000004, -0.999998000004, -0.999998000004, 0.999998000004]
    """
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    if max(rewards) == min(rewards):
        return None
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]


def grpo_loss(  # noqa: PLR0913 - the symbols of the formula
    logprobs_bt: Tensor,
    entropy_bt: Tensor,
    sampler_logprobs_bt: Tensor,
    mask_bt: Tensor,
    advantages_b: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    entropy_coefficient: float = 0.0,
) -> LossTerms:
    """The loss of the module's docstring over a batch of B trajectories of T tokens.

    Args:
        logprobs_bt: log π of each token.
        entropy_bt: entropy of the distribution that each token was drawn from.
        sampler_logprobs_bt: log μ of each token; what lies outside the mask is ignored.
        mask_bt: True where the policy sampled the token; at least once.
        advantages_b: one per trajectory.
        clip_low: ε_low.
        clip_high: ε_high.
        entropy_coefficient: c.
    """
    num_tokens = mask_bt.sum()
    log_ratio = torch.where(mask_bt, logprobs_bt - sampler_logprobs_bt, 0.0)
    ratio = log_ratio.exp()
    advantages = advantages_b[:, None]
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages

    def mean(values: Tensor) -> Tensor:
        return torch.where(mask_bt, values, 0.0).sum() / num_tokens

    entropy = mean(entropy_bt)
    return LossTerms(
        loss=-mean(torch.minimum(plain, clipped)) - entropy_coefficient * entropy,
        clip_fraction=mean((clipped < plain).float()).detach(),
        approx_kl=mean(ratio - 1 - log_ratio).detach(),
        entropy=entropy.detach(),
    )
