"""What a domain is: a named set of tasks with an environment and, where the outcome can be checked, a verifier.

Domains register under the entry point group `trajlake.domains`, so users add theirs without touching this code.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from schemas.events import Action, Observation, Split
from schemas.records import StepResult, Task, Workspace
from verify.port import Runtime, Verifier


class Environment(Protocol):
    """Gymnasium's five values, over tasks."""

    version: str

    def reset(self, task: Task, runtime: Runtime) -> Observation:
        """Begin a task; the first observation is the prompt."""

    def step(self, action: Action) -> StepResult:
        """One move."""

    def workspace(self) -> Workspace | None:
        """Snapshot of what is to be graded; null where the domain has no workspace."""

    def close(self) -> None:
        """Free everything; idempotent."""


class Domain(Protocol):
    """A set of tasks and what acts on them."""

    name: str

    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split, in a fixed order."""

    def task(self, key: str) -> Task:
        """One task.

        Raises:
            KeyError: unknown key.
        """

    def environment(self) -> Environment:
        """A new environment; one per trajectory."""

    def verifier(self) -> Verifier | None:
        """The primary scorer, or None: the environment's return is the reward (`env:return`)."""


@runtime_checkable
class HasReferences(Protocol):
    """The optional part of a domain: it knows how its tasks are solved, so the loop can be tried without a model."""

    def reference_actions(self, task: Task) -> Sequence[Action]:
        """Actions that solve a task, in order.

        Raises:
            KeyError: not a task of this domain.
        """
