"""Token log-probabilities: one code path for the sampler that draws tokens and the learner that trains on them.

Causal attention lets contexts of unequal length share a batch: they are padded on the right, and no position sees
what follows it. So padding needs no mask, and the sampler's last position and the learner's whole sequence give the
same numbers, up to the order of float32 additions.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.transformer import TinyTransformer


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids of unequal length → [B, T], padded on the right with 0."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=torch.long)
    return padded


def output_logprobs(model: TinyTransformer, ids_bt: Tensor) -> Tensor:
    """[B, T] → natural log-probabilities [B, T, num_outputs] of the token that follows each position."""
    return torch.log_softmax(model(ids_bt), dim=-1)


def next_token_logprobs(model: TinyTransformer, contexts: Sequence[Sequence[int]]) -> Tensor:
    """Log-probabilities [B, num_outputs] of the token that follows each context."""
    last_b = torch.tensor([len(context) - 1 for context in contexts])
    return output_logprobs(model, pad(contexts))[torch.arange(len(contexts)), last_b]


def token_logprobs(model: TinyTransformer, ids_bt: Tensor, mask_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of every masked token given what precedes it, and the entropy where it was drawn.

    Args:
        model: the policy.
        ids_bt: token ids [B, T].
        mask_bt: True where the policy sampled the token; never at position 0, which nothing precedes.

    Returns:
        Log-probabilities and entropies, both [B, T], 0 outside the mask.
    """
    drawn = mask_bt[:, 1:]
    logprobs_bta = output_logprobs(model, ids_bt[:, :-1])
    targets = torch.where(drawn, ids_bt[:, 1:], 0)  # other ids may lie beyond num_outputs
    chosen = logprobs_bta.gather(-1, targets[..., None])[..., 0]
    entropy = -(logprobs_bta.exp() * logprobs_bta).sum(-1)
    zero = torch.zeros_like(ids_bt[:, :1], dtype=chosen.dtype)
    return torch.cat([zero, chosen * drawn], 1), torch.cat([zero, entropy * drawn], 1)


def prefix_sha256(ids: Sequence[int]) -> str:
    """Hex digest over token ids as little-endian int32, as `model_call.prefix_sha256` has it."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()
