"""The verifier protocol, and the runtime through which verifiers and environments reach the outside.

A verifier never sees the actor's sandbox: it grades the workspace that `trajectory_finished` refers to, in a sandbox
of its own, with tests that come from the task.
"""

from typing import Protocol

from sandbox.port import Sandbox
from schemas.events import BlobRef, Body
from schemas.records import Task, Trajectory, Verdict, Workspace


class Runtime(Protocol):
    """What an environment or a verifier may use; all of it lazy."""

    def sandbox(self) -> Sandbox:
        """A fresh, clean sandbox; the caller closes it.

        Raises:
            SandboxUnavailableError: an infrastructure error, never a verdict.
        """

    def workspace(self, ref: BlobRef) -> Workspace:
        """Fetch a workspace from the blob store, its digest checked.

        Raises:
            LookupError: if the blob is missing or corrupt; an infrastructure error.
        """

    def record(self, body: Body) -> None:
        """Record an event of the trajectory at hand (environments only)."""


class Verifier(Protocol):
    """Grades one attempt. Deterministic given the task, the trajectory and the version."""

    id: str
    version: str

    def verify(self, task: Task, trajectory: Trajectory, runtime: Runtime) -> Verdict:
        """Grade. Infrastructure failures give outcome `infra_error` and score None, never a score."""
