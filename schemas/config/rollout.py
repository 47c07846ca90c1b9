"""`[rollout]`: how actors play."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]


class RolloutConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How tasks become trajectories."""

    group_size: Positive = 8
    """Trajectories of one task that share a baseline. For evaluation a task is played once whatever this says."""
    concurrency: Annotated[int, Meta(ge=1, le=1024)] = 24
    """Trajectories in flight at once; each holds a thread and a sandbox."""
    max_attempts: Positive = 3
    """Tries at a trajectory whose infrastructure fails, before it is left unscored."""
    max_turns: Positive = 100
    """Turns after which a trajectory is cut off as truncated, where its domain sets no lower bound."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Sampling temperature; 0 takes the likeliest token. The learner trains on 1 only."""
    batch_wait_ms: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """How long a policy waits for further calls to put into the same batch."""
    policy_poll_seconds: Annotated[float, Meta(gt=0)] = 1.0
    """How often an actor looks for a newer policy, between trajectories."""
    seed: int = 0
    """Chooses the order of the tasks and every sampled token."""
