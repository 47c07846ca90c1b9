"""Frozen records that rooms hand to each other: tasks, commands, results, verdicts, trajectories. Data only.

What acts on them lives elsewhere: sandboxes in `sandbox`, verifiers in `verify`, environments in `domains`.
"""

import hashlib
from typing import Any, Literal

import msgspec
from msgspec import Struct

from schemas.events import (
    Action,
    BlobRef,
    ModelCall,
    Observation,
    Outcome,
    Split,
    TrajectoryFinished,
    TrajectoryStarted,
)


class Task(Struct, frozen=True, kw_only=True):
    """One task of a domain."""

    key: str
    """Unique in the domain, e.g. `HumanEval/0`."""
    domain: str
    split: Split = "train"
    prompt: str = ""
    data: dict[str, Any] = {}
    """What the domain's environment and verifier need; never shown to the policy as a whole."""
    difficulty: float | None = None

    @property
    def sha256(self) -> str:
        """Hex digest of the task's content, independent of its split."""
        content = {"key": self.key, "domain": self.domain, "prompt": self.prompt, "data": self.data}
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


ExecutionOutcome = Literal[
    "ok", "non_zero", "timeout", "oom", "output_limit", "disk_limit", "process_limit", "killed", "infra_error"
]


class Limits(Struct, frozen=True, kw_only=True):
    """What a sandboxed command may use."""

    wall_seconds: float = 30.0
    cpu_seconds: float = 20.0
    memory_bytes: int = 512 * 1024 * 1024
    """Of all processes of the sandbox together."""
    processes: int = 64
    output_bytes: int = 1024 * 1024
    """Of stdout and of stderr, each."""
    disk_bytes: int = 256 * 1024 * 1024
    """Of the workspace."""


class Command(Struct, frozen=True, kw_only=True):
    """A command to run in a sandbox."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    env: dict[str, str] = {}
    cwd: str = "."
    """Relative to the workspace."""
    limits: Limits = Limits()


class Usage(Struct, frozen=True, kw_only=True):
    """What a command used; null where it couldn't be measured."""

    wall_seconds: float | None = None
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None


class ExecutionResult(Struct, frozen=True, kw_only=True):
    """How a command ended. Partial output is always kept, truncation always marked."""

    outcome: ExecutionOutcome
    exit_code: int | None
    """Null where the command did not exit by itself."""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    usage: Usage = Usage()
    error: str | None = None
    """For people, where the outcome is not ok."""


class FileState(Struct, frozen=True, kw_only=True):
    """One entry of a workspace."""

    kind: Literal["file", "directory", "symlink"]
    size: int
    sha256: str | None
    """Hex, of a file's content; null for others."""
    mode: int
    target: str | None = None
    """Of a symlink; never followed."""


class SandboxState(Struct, frozen=True, kw_only=True):
    """The file tree of a sandbox's workspace: relative path → state."""

    files: dict[str, FileState]


class Workspace(Struct, frozen=True, kw_only=True):
    """A content-addressed snapshot of a workspace: a deterministic tar, so equal trees have equal digests."""

    sha256: str
    data: bytes

    @property
    def ref(self) -> BlobRef:
        """Reference for an event."""
        return BlobRef(sha256=self.sha256, size=len(self.data))


class Verdict(Struct, frozen=True, kw_only=True):
    """What a verifier says of one attempt."""

    outcome: Outcome
    score: float | None
    expected_tests: tuple[str, ...] | None = None
    seen_tests: tuple[str, ...] | None = None
    passed_tests: tuple[str, ...] | None = None
    tests_sha256: str | None = None
    sandbox_image_digest: str | None = None
    reason: str | None = None
    evidence: dict[str, Any] | None = None


class StepResult(Struct, frozen=True, kw_only=True):
    """Gymnasium's five values."""

    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: dict[str, Any] = {}


class Trajectory(Struct, frozen=True, kw_only=True):
    """One finished attempt as a verifier sees it: decoded events, in order."""

    trajectory_id: str
    run_id: str
    attempt: int
    started: TrajectoryStarted
    finished: TrajectoryFinished
    calls: tuple[ModelCall, ...] = ()
    actions: tuple[Action, ...] = ()
    observations: tuple[Observation, ...] = ()
    rewards: tuple[float, ...] = ()


class PolicyVersion(Struct, frozen=True, kw_only=True):
    """A published checkpoint."""

    policy_id: str
    version: int
    checkpoint_uri: str
    sha256: str
    metadata: dict[str, Any] | None = None


class ProducerRecord(Struct, frozen=True):
    """What is appended to an event log."""

    key: str
    """Chooses the partition."""
    value: bytes


class Bounds(Struct, frozen=True):
    """Offsets of a partition: [first retained, next to be written)."""

    first: int
    next: int
