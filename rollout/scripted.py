"""Policies without a model: `reference` plays a domain's own solution, `empty` answers nothing.

They prove a domain and its verifier: the first has to score 1, the second 0.
"""

import asyncio

import uuid_utils

from domains.port import HasReferences
from rollout.errors import PolicyError
from rollout.port import Context, Move
from schemas.events import ModelCall, Observation
from schemas.records import PolicyVersion


class _Scripted:
    """Without tokens, versions or a tokenizer: readable trajectories that no learner trains on."""

    model_id: str | None = None
    tokenizer_sha256: str | None = None
    version: int | None = None

    def encode(self, observation: Observation) -> list[int] | None:
        """Unknown."""
        return None

    async def load(self, version: PolicyVersion) -> None:
        """A script has no versions."""
        raise PolicyError(f"{self.model_id} is a script and loads no policy; {version.policy_id} was published")


class ReferencePolicy(_Scripted):
    """Plays `reference_actions`, then answers nothing."""

    model_id = "scripted:reference"

    def __init__(self, domain: HasReferences) -> None:
        self._domain = domain

    async def act(self, context: Context, partial: ModelCall | None, stop: asyncio.Event) -> Move:
        """The next action of the domain's solution."""
        actions = self._domain.reference_actions(context.task)
        action = actions[context.turn] if context.turn < len(actions) else None
        return Move(call=_call(context, action.name if action else ""), action=action)


class EmptyPolicy(_Scripted):
    """Answers nothing at all."""

    model_id = "scripted:empty"

    async def act(self, context: Context, partial: ModelCall | None, stop: asyncio.Event) -> Move:
        """No action."""
        return Move(call=_call(context, ""), action=None)


def _call(context: Context, text: str) -> ModelCall:
    messages = [
        {"role": "user", "content": context.observations[-1].content or ""},
        {"role": "assistant", "content": text},
    ]
    return ModelCall(
        call_id=str(uuid_utils.uuid7()),
        parent_call_id=context.calls[-1].call_id if context.calls else None,
        finish_reason="stop",
        messages=messages,
    )
