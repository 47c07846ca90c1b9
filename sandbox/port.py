"""The sandbox protocol. Backends: `sandbox.bubblewrap`; Docker later. One contract suite: `tests/sandbox/`.

Blocking; one thread per sandbox. Everything that comes out of a sandbox is hostile: paths are relative to the
workspace, symlinks are never followed out of it, sizes are bounded.
"""

from collections.abc import Mapping
from typing import Protocol, Self

from schemas.records import Command, ExecutionResult, SandboxState, Workspace


class SandboxError(Exception):
    """Base of sandbox errors: the sandbox failed, not the code in it."""


class SandboxUnavailableError(SandboxError):
    """No sandbox can run here; the message names the remedy."""


class SandboxPathError(SandboxError):
    """A path leaves the workspace or is not a regular file."""


class WorkspaceLimitError(SandboxError):
    """The workspace is too large or too deep to be taken out: the doing of the code in it, not of the sandbox."""


class Process(Protocol):
    """A long-running command in a sandbox."""

    def write(self, data: bytes) -> None:
        """Send bytes to its standard input."""

    def read_until(self, marker: bytes, timeout_seconds: float) -> tuple[bytes, bool]:
        """Bytes of standard output up to and with `marker`; False where the time or the process ended first."""

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""

    def signal(self, number: int) -> None:
        """Send a signal."""

    def wait(self, timeout_seconds: float | None = None) -> ExecutionResult:
        """Wait for the end; over the limits it is killed and the outcome says so."""

    def close(self) -> None:
        """Kill it, with everything that it started; idempotent."""


class Sandbox(Protocol):
    """An isolated workspace in which commands run without network."""

    @property
    def image_digest(self) -> str:
        """What the sandbox's root file system was made from."""

    def execute(self, command: Command) -> ExecutionResult:
        """Run to the end, within the command's limits. Failure of the sandbox itself is outcome `infra_error`."""

    def start(self, command: Command) -> Process:
        """Start a long-running command."""

    def get_state(self) -> SandboxState:
        """File tree of the workspace, with content hashes."""

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, making their folders."""

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read a regular file, at most `max_bytes`.

        Raises:
            SandboxPathError: if it is no regular file inside the workspace or is larger.
        """

    def snapshot(self) -> Workspace:
        """The workspace as a deterministic tar: equal trees give equal digests."""

    def restore(self, workspace: Workspace) -> None:
        """Replace the workspace by a snapshot, made here or elsewhere."""

    def close(self) -> None:
        """Kill everything and remove the workspace; idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
