"""Every kind of sandbox runs the contract: add a kind to `KINDS` and its tests exist."""

from collections.abc import Callable, Iterator

import pytest

from sandbox.open import KINDS, open_sandbox
from sandbox.port import Sandbox
from schemas.records import Command, ExecutionResult, Limits


@pytest.fixture(params=KINDS)
def make_sandbox(request: pytest.FixtureRequest) -> Iterator[Callable[..., Sandbox]]:
    """Opens sandboxes of the kind under test, and closes them."""
    opened: list[Sandbox] = []

    def make(limits: Limits | None = None) -> Sandbox:
        opened.append(open_sandbox(request.param, limits or Limits()))
        return opened[-1]

    yield make
    for sandbox in opened:
        sandbox.close()


@pytest.fixture
def sandbox(make_sandbox: Callable[..., Sandbox]) -> Sandbox:
    return make_sandbox()


@pytest.fixture
def sh(sandbox: Sandbox) -> Callable[..., ExecutionResult]:
    """Runs a shell script in the sandbox."""

    def run(script: str, stdin: bytes = b"", **limits: float) -> ExecutionResult:
        return sandbox.execute(Command(argv=("sh", "-c", script), stdin=stdin, limits=Limits(**limits)))

    return run
