"""The runtime that verifiers get: fresh sandboxes, and workspaces from the blob store."""

import hashlib
from collections.abc import Callable
from typing import Protocol

from sandbox.open import open_sandbox
from sandbox.port import Sandbox, SandboxError
from schemas.events import BlobRef, Body
from schemas.records import Workspace
from storage.blobs import BlobCorruptError, BlobError, BlobNotFoundError

INFRASTRUCTURE_ERRORS = (SandboxError, BlobError, LookupError, OSError)
"""What says nothing about the policy: the attempt can't be graded now, so it gets no score."""


class Blobs(Protocol):
    """Where workspaces are kept: `storage.blobs.BlobStore`."""

    def get(self, ref: BlobRef | str) -> bytes:
        """Content by reference or digest.

        Raises:
            LookupError: missing or corrupt.
        """


class SandboxRuntime:
    """Implements `verify.port.Runtime`. `record` takes an environment's events; verifiers have none."""

    def __init__(
        self,
        blobs: Blobs,
        sandbox_factory: Callable[[], Sandbox] = open_sandbox,
        record: Callable[[Body], None] | None = None,
    ) -> None:
        self._blobs, self._sandbox_factory, self._record = blobs, sandbox_factory, record

    def sandbox(self) -> Sandbox:
        """A fresh, clean sandbox; the caller closes it.

        Raises:
            SandboxUnavailableError: none can run here.
        """
        return self._sandbox_factory()

    def workspace(self, ref: BlobRef) -> Workspace:
        """Fetch a workspace, its digest checked.

        Raises:
            LookupError: the blob is missing or corrupt, or the reference is none.
        """
        try:
            data = self._blobs.get(ref)
        except ValueError as error:
            raise BlobNotFoundError(f"no workspace has the reference {ref.sha256[:80]!r}: {error}") from error
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise BlobCorruptError(f"workspace {ref.sha256} has other content than its digest says")
        return Workspace(sha256=ref.sha256, data=data)

    def record(self, body: Body) -> None:
        """Record an event of the trajectory at hand.

        Raises:
            ValueError: this runtime belongs to a verifier, which hands back a verdict instead.
        """
        if self._record is None:
            raise ValueError("verifiers record no events: what they find goes into their verdict")
        self._record(body)
