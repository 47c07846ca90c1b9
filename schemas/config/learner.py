"""`[learner]`: how rows become policy updates, and the size of the tiny model."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class LearnerConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One learner's training."""

    learner_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "learner-0"
    """Name of the learner within its run; also of its event stream."""
    policy_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "policy-0"
    """Policy that it trains and publishes."""
    groups_per_step: Positive = 16
    """Groups of trajectories in a training step."""
    num_epochs: Positive = 4
    """Passes over a step's trajectories."""
    minibatch_size: Positive = 64
    """Trajectories per optimizer step."""
    learning_rate: PositiveFloat = 2e-3
    """AdamW's step size."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decay."""
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Importance ratios below 1 - this give no gradient where the advantage is negative."""
    clip_high: PositiveFloat = 0.28
    """Importance ratios above 1 + this give no gradient where the advantage is positive (DAPO's clip-higher)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    max_gradient_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    max_staleness: Annotated[int, Meta(ge=0)] = 4
    """Policy versions that a trajectory's oldest token may lie behind the version being updated."""
    seed: int = 0
    """Of the first weights and of the order of minibatches."""
    num_threads: Positive = 1
    """Threads that torch computes with."""
    model_width: Positive = 64
    """Features per token of a new tiny transformer; a multiple of `model_heads`."""
    model_layers: Positive = 2
    """Its blocks of attention and a two-layer network."""
    model_heads: Positive = 4
    """Its attention heads per block."""
    model_max_length: Positive = 64
    """Its longest context in tokens."""
