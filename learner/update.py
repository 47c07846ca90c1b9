"""One policy update: epochs of minibatches over a batch of trajectories."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from learner.dataset import Batch, Segment
from learner.grpo import LossTerms, grpo_loss
from models.logprobs import pad, token_logprobs
from models.transformer import TinyTransformer
from schemas.config.learner import LearnerConfig


class Tensors:
    """The segments of a batch that give a gradient, padded: ids, mask and sampler logprobs [B, T], advantages [B]."""

    def __init__(self, batch: Batch) -> None:
        pairs = list(_trained(batch))
        self.num_segments = len(pairs)
        segments = [segment for segment, _ in pairs]
        longest = max((len(segment.ids) for segment in segments), default=0)
        self.ids_bt = pad([segment.ids for segment in segments]) if segments else torch.zeros(0, 0, dtype=torch.long)
        self.mask_bt = torch.zeros(len(segments), longest, dtype=torch.bool)
        self.sampler_logprobs_bt = torch.zeros(len(segments), longest)
        for index, segment in enumerate(segments):
            self.mask_bt[index, : len(segment.mask)] = torch.tensor(segment.mask)
            self.sampler_logprobs_bt[index, : len(segment.logprobs)] = torch.tensor(segment.logprobs)
        self.advantages_b = torch.tensor([advantage for _, advantage in pairs])


def _trained(batch: Batch) -> Iterator[tuple[Segment, float]]:
    for row, advantage in zip(batch.rows, batch.advantages, strict=True):
        if row.trajectory_id not in batch.masked:
            for segment in row.segments:
                if any(segment.mask):
                    yield segment, advantage


def update_policy(
    model: TinyTransformer, optimizer: torch.optim.Optimizer, batch: Batch, config: LearnerConfig, train_step: int
) -> dict[str, float | None]:
    """Train on a batch in place; a minibatch whose loss or gradient is not finite is skipped and counted.

    The order of minibatches depends on the configuration's seed and the step only.

    Returns:
        Statistics; null where there was nothing to measure or it was not finite. `sampler_gap` is the largest
        difference between the sampler's log-probabilities and those recomputed before the update, over rows that the
        current weights sampled or not: 0 up to rounding where nothing is stale.
    """
    tensors = Tensors(batch)
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + train_step)
    history: list[tuple[LossTerms, Tensor]] = []
    num_skipped = 0
    gap = _sampler_gap(model, tensors)
    model.train()
    for _ in range(config.num_epochs):
        order = torch.randperm(tensors.num_segments, generator=generator)
        for start in range(0, tensors.num_segments, config.minibatch_size):
            terms, norm = _descend(model, optimizer, tensors, order[start : start + config.minibatch_size], config)
            if torch.isfinite(terms.loss) and torch.isfinite(norm):
                history.append((terms, norm))
            else:
                num_skipped += 1
    model.eval()
    return {
        **_means(history),
        "sampler_gap": gap,
        "num_minibatches": float(len(history)),
        "num_minibatches_skipped": float(num_skipped),
        "num_segments": float(tensors.num_segments),
        "num_sampled_tokens": float(tensors.mask_bt.sum()),
    }


def _descend(
    model: TinyTransformer,
    optimizer: torch.optim.Optimizer,
    tensors: Tensors,
    chosen: Tensor,
    config: LearnerConfig,
) -> tuple[LossTerms, Tensor]:
    """One minibatch: loss, gradient and, where both are finite, an optimizer step."""
    mask_bt = tensors.mask_bt[chosen]
    logprobs_bt, entropy_bt = token_logprobs(model, tensors.ids_bt[chosen], mask_bt)
    terms = grpo_loss(
        logprobs_bt,
        entropy_bt,
        tensors.sampler_logprobs_bt[chosen],
        mask_bt,
        tensors.advantages_b[chosen],
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        entropy_coefficient=config.entropy_coefficient,
    )
    optimizer.zero_grad(set_to_none=True)
    terms.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)
    if torch.isfinite(terms.loss) and torch.isfinite(norm):
        optimizer.step()
    return terms, norm


@torch.inference_mode()
def _sampler_gap(model: TinyTransformer, tensors: Tensors) -> float | None:
    if not tensors.num_segments:
        return None
    logprobs_bt, _ = token_logprobs(model, tensors.ids_bt, tensors.mask_bt)
    difference = torch.where(tensors.mask_bt, logprobs_bt - tensors.sampler_logprobs_bt, 0.0)
    return finite(difference.abs().max().item())


def _means(history: list[tuple[LossTerms, Tensor]]) -> dict[str, float | None]:
    columns = {name: [getattr(terms, name).item() for terms, _ in history] for name in LossTerms._fields}
    columns["gradient_norm"] = [norm.item() for _, norm in history]
    return {name: finite(sum(values) / len(values)) if values else None for name, values in columns.items()}


def finite(value: float) -> float | None:
    """The value, or null where it is NaN or infinite."""
    return value if math.isfinite(value) else None
