"""Grades a workspace by running a task's tests on it, in a second and clean sandbox.

The workspace is the one that `trajectory_finished` refers to. Tests and their files come from the task, never from the
workspace, and are laid over it again before every test. Each test is a process of its own; its report carries a nonce
that is fresh per test, so neither an exit code nor printed text passes for one. An expected test without a report is
a failed test.

Leaves out: defence against a candidate that searches its own interpreter for the nonce or patches what the test calls;
that takes tests in a process apart from the candidate.
"""

import hashlib
import json
import posixpath
import secrets
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from sandbox.port import Sandbox, SandboxError, SandboxPathError
from schemas.events import Outcome
from schemas.records import Command, ExecutionResult, Limits, Task, Trajectory, Verdict, Workspace
from verify._harness import HARNESS
from verify.port import Runtime
from verify.runtime import INFRASTRUCTURE_ERRORS

_EVIDENCE_CHARS = 2000
_CANDIDATE_BYTES = 64 * 1024 * 1024
_BWRAP_COULD_NOT_RUN = "bwrap:"


class TestSuite(Struct, frozen=True, kw_only=True):
    """A task's tests, in Python."""

    __test__ = False  # not one of pytest's

    tests: dict[str, str]
    """Name → code. A test passes if its code ends without an exception; it imports the candidate by its module name."""
    candidate: str = "solution.py"
    """The file that must have been handed in."""
    files: dict[str, bytes] = {}
    """Laid over the workspace before every test."""
    limits: Limits = Limits(wall_seconds=10.0, cpu_seconds=10.0)
    """Of each test."""
    python: tuple[str, ...] = ("python3", "-S", "-P")
    """Interpreter and flags. `-S` leaves site-packages out and halves the start time."""

    @property
    def sha256(self) -> str:
        """Hex digest of all that decides a verdict, the harness included."""
        files = {path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()}
        limits = {name: getattr(self.limits, name) for name in Limits.__struct_fields__}
        content = [self.tests, self.candidate, files, limits, self.python, HARNESS]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Report(NamedTuple):
    """What became of one test."""

    seen: bool
    passed: bool
    outcome: Outcome
    detail: str | None


class TestSuiteVerifier:
    """Implements `verify.port.Verifier` over the suite that `suite_of` makes from a task.

    Score: 1.0 if every expected test passed, else 0.0; with `partial`, the share of expected tests that passed.
    """

    __test__ = False

    def __init__(self, id: str, version: str, suite_of: Callable[[Task], TestSuite], *, partial: bool = False) -> None:  # noqa: A002 - the protocol's name
        self.id, self.version = id, version
        self._suite_of, self._partial = suite_of, partial

    def verify(self, task: Task, trajectory: Trajectory, runtime: Runtime) -> Verdict:
        """Grade one attempt; infrastructure failures give outcome `infra_error` and no score."""
        suite = self._suite_of(task)
        ref = trajectory.finished.workspace_ref
        if ref is None:
            return _verdict(suite, "fail", 0.0, reason="nothing handed in: the trajectory has no workspace")
        try:
            workspace = runtime.workspace(ref)
            with runtime.sandbox() as sandbox:
                return self._grade(suite, workspace, sandbox)
        except INFRASTRUCTURE_ERRORS as error:
            return _verdict(suite, "infra_error", None, reason=f"{type(error).__name__}: {error}")

    def _grade(self, suite: TestSuite, workspace: Workspace, sandbox: Sandbox) -> Verdict:
        sandbox.restore(workspace)
        image = sandbox.image_digest
        try:
            sandbox.read(suite.candidate, _CANDIDATE_BYTES)
        except SandboxPathError as error:
            return _verdict(suite, "fail", 0.0, reason=f"nothing handed in: {error}", image=image)
        reports: dict[str, Report] = {}
        for name, code in suite.tests.items():
            reports[name] = report = _run_test(suite, code, sandbox)
            if report.outcome in ("timeout", "oom") and not self._partial:
                break  # decided already, and the next ones would cost as much
        return self._judge(suite, reports, image)

    def _judge(self, suite: TestSuite, reports: dict[str, Report], image: str) -> Verdict:
        passed = [name for name, report in reports.items() if report.passed]
        failed = {name: reports[name] for name in suite.tests if name in reports and not reports[name].passed}
        all_passed = len(passed) == len(suite.tests) > 0
        outcome: Outcome = "pass" if all_passed else next((r.outcome for r in failed.values()), "fail")
        share = len(passed) / len(suite.tests) if suite.tests else 0.0
        return Verdict(
            outcome=outcome,
            score=share if self._partial else float(all_passed),
            expected_tests=tuple(suite.tests),
            seen_tests=tuple(name for name, report in reports.items() if report.seen),
            passed_tests=tuple(passed),
            tests_sha256=suite.sha256,
            sandbox_image_digest=image,
            reason=None if all_passed else _reason(suite, failed),
            evidence={"failures": {name: report.detail for name, report in failed.items()}} if failed else None,
        )


def _run_test(suite: TestSuite, code: str, sandbox: Sandbox) -> Report:
    """Run one test.

    Raises:
        SandboxError: the sandbox failed, so nothing is known of the test.
    """
    nonce = secrets.token_hex(16)
    order = json.dumps({"nonce": nonce, "candidate": suite.candidate, "code": code}) + "\n"
    sandbox.write(suite.files)
    result = sandbox.execute(Command(argv=(*suite.python, "-c", HARNESS), stdin=order.encode(), limits=suite.limits))
    error = result.error or ""
    if result.outcome == "infra_error" or error.startswith(_BWRAP_COULD_NOT_RUN):
        raise SandboxError(error or "the sandbox failed without a word")
    return _read_report(result, nonce)


def _read_report(result: ExecutionResult, nonce: str) -> Report:
    said = result.stdout.decode(errors="replace")
    passed = result.outcome == "ok" and said == f"{nonce} pass"
    seen = passed or (result.outcome == "non_zero" and said == f"{nonce} fail")
    if passed:
        return Report(seen=True, passed=True, outcome="pass", detail=None)
    outcome: Outcome = "fail"
    if result.outcome in ("timeout", "oom"):
        outcome = result.outcome
    detail = result.stderr.decode(errors="replace")[-_EVIDENCE_CHARS:]
    if not seen:
        detail = f"no report ({result.error or result.outcome}) {detail}".strip()
    return Report(seen, passed, outcome, detail)


def _reason(suite: TestSuite, failed: dict[str, Report]) -> str:
    if not suite.tests:
        return "the task has no tests"
    name, report = next(iter(failed.items()))
    last = (report.detail or "").strip().splitlines()
    return f"{posixpath.basename(name)}: {last[-1][:200] if last else report.outcome}"


def _verdict(
    suite: TestSuite, outcome: Outcome, score: float | None, *, reason: str, image: str | None = None
) -> Verdict:
    return Verdict(
        outcome=outcome,
        score=score,
        expected_tests=tuple(suite.tests),
        seen_tests=(),
        passed_tests=(),
        tests_sha256=suite.sha256,
        sandbox_image_digest=image,
        reason=reason,
    )
