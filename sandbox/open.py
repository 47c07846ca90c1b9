"""Open a sandbox by its kind."""

from sandbox.bubblewrap import BubblewrapSandbox
from sandbox.port import Sandbox
from schemas.records import Limits

KINDS = ("bubblewrap",)


def open_sandbox(kind: str = "bubblewrap", limits: Limits = Limits()) -> Sandbox:  # noqa: B008 - frozen
    """A fresh, clean sandbox; the caller closes it.

    Raises:
        SandboxUnavailableError: none can run here.
        ValueError: unknown kind.
    """
    if kind != "bubblewrap":
        raise ValueError(f"unknown kind of sandbox {kind!r}; there is {', '.join(KINDS)}")
    return BubblewrapSandbox(limits)
