"""The policy protocol: what plays. One contract suite: `tests/rollout/policy_contract.py`."""

import asyncio
from typing import Protocol

from msgspec import Struct

from schemas.events import Action, ModelCall, Observation
from schemas.records import PolicyVersion, Task


class Context(Struct, frozen=True, kw_only=True):
    """What a policy knows when it is asked for a move."""

    trajectory_id: str
    attempt: int
    task: Task
    observations: tuple[Observation, ...]
    """All so far, the prompt first; one more than there are calls."""
    calls: tuple[ModelCall, ...] = ()
    """All so far."""
    seed: int = 0
    """Of the trajectory; together with the turn it fixes what is sampled."""

    @property
    def turn(self) -> int:
        """Moves so far."""
        return len(self.calls)


class Move(Struct, frozen=True, kw_only=True):
    """A policy's answer."""

    call: ModelCall
    """The call that was made, with exact tokens where they are known."""
    action: Action | None
    """What to do; None to answer nothing, which ends the trajectory."""


class Policy(Protocol):
    """Gives moves. `act` is called from one event loop, concurrently for many trajectories."""

    @property
    def model_id(self) -> str | None:
        """Name of the model, for `trajectory_started`."""

    @property
    def tokenizer_sha256(self) -> str | None:
        """Hex digest of the tokenizer; null where unknown."""

    @property
    def version(self) -> int | None:
        """Version that answers now; null for a policy without versions."""

    async def act(self, context: Context, partial: ModelCall | None, stop: asyncio.Event) -> Move:
        """The next move.

        Args:
            context: the trajectory so far.
            partial: a call that was interrupted; its tokens are kept and continued.
            stop: once set, the call returns soon with the tokens so far, finish reason `abort`, and no action.

        Raises:
            PolicyError: no move can be given.
        """

    def encode(self, observation: Observation) -> list[int] | None:
        """Token ids of an observation as `act` would read it; null where unknown."""

    async def load(self, version: PolicyVersion) -> None:
        """Answer with this version from the next call on; calls under way end with the old one."""
