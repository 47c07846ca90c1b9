"""Plays one attempt at one trajectory and records everything that happens. Blocking; one thread a trajectory.

    trajectory_started → observation (the prompt) → (model_call → action → observation → reward?)* → trajectory_finished

How an attempt can end otherwise than by itself:

- the sandbox or the blob store fails: `trajectory_finished`, failed, failure class `infra`; no reward ever comes of it.
- the policy fails: `trajectory_finished`, failed, failure class `policy`; its workspace is graded like any other.
- the run is stopped, or the code is wrong: `attempt_aborted`, by the recorder.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from domains.port import Domain, Environment
from ingest.recorder import Attempt, Recorder
from rollout.errors import PolicyError, RolloutStoppedError
from rollout.port import Context, Move, Policy
from sandbox.port import Sandbox, SandboxError
from schemas.events import (
    Action,
    Body,
    ModelCall,
    Observation,
    Reward,
    Score,
    TrajectoryFinished,
    TrajectoryStarted,
    VerificationAbandoned,
    stream_of_score,
)
from schemas.records import StepResult, Task
from storage.blobs import BlobError, BlobStore
from verify.port import Runtime
from verify.runtime import SandboxRuntime

ENV_RETURN = "env:return"
"""Scorer of domains without a verifier: the sum of the environment's rewards."""
_ENV_RETURN_VERSION = "1"


class Assignment(Struct, frozen=True, kw_only=True):
    """A member of a group to be played: the slot (group_id, sample_idx) of its run."""

    task: Task
    group_id: str
    group_size: int
    sample_idx: int
    trajectory_id: str
    attempt: int = 0
    seed: int = 0


class Played(Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    assignment: Assignment
    finished: TrajectoryFinished
    num_turns: int
    seconds: float

    @property
    def is_infra(self) -> bool:
        """True where the infrastructure failed, so that another attempt is due."""
        return self.finished.failure_class == "infra"


class PolicyLoop(Protocol):
    """Runs a policy's coroutines on the one event loop that they belong to."""

    stop: asyncio.Event
    """Given to every call of the policy."""

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Start a coroutine from any thread."""


class Actor:
    """Plays assignments of one domain with one policy. Shared by the threads of a run.

    Args:
        domain: whose tasks are played.
        policy: gives the moves.
        loop: runs the policy.
        recorder: of the run.
        blobs: where workspaces go.
        open_sandbox: gives a fresh sandbox, or raises SandboxError.
        stop: once set, attempts end as aborted at their next turn.
        image_digest: of the sandboxes; null where unknown.
        max_turns: bound on the turns of a trajectory.
    """

    def __init__(  # noqa: PLR0913 - each part is given from outside, so that tests and the demo choose it
        self,
        domain: Domain,
        policy: Policy,
        loop: PolicyLoop,
        recorder: Recorder,
        blobs: BlobStore,
        *,
        open_sandbox: Callable[[], Sandbox],
        stop: threading.Event,
        image_digest: str | None = None,
        max_turns: int = 100,
    ) -> None:
        self._domain, self._policy, self._loop = domain, policy, loop
        self._recorder, self._blobs, self._open_sandbox = recorder, blobs, open_sandbox
        self._stop = stop
        self._image_digest = image_digest
        self._max_turns = max_turns
        verifier = domain.verifier()
        self._primary_scorer = verifier.id if verifier else ENV_RETURN
        self._tool_definitions = _optional(domain, "tool_definitions")

    def play(self, assignment: Assignment) -> Played:
        """Play one attempt to its end.

        Raises:
            RolloutStoppedError: the run was stopped; the attempt ended as aborted.
            LogError: events can no longer be written.
        """
        began = time.perf_counter()
        if self._stop.is_set():
            raise RolloutStoppedError("the run was stopped")
        environment = self._domain.environment()
        started = self._started(assignment, environment.version)
        try:
            with self._recorder.trajectory(started, assignment.trajectory_id, assignment.attempt) as attempt:
                game = _Game(environment, attempt)
                finished = self._finish(game, assignment, attempt)
        finally:
            environment.close()
        return Played(
            assignment=assignment,
            finished=finished,
            num_turns=len(game.calls),
            seconds=time.perf_counter() - began,
        )

    def _started(self, assignment: Assignment, env_version: str) -> TrajectoryStarted:
        task = assignment.task
        return TrajectoryStarted(
            task_key=task.key,
            task_sha256=task.sha256,
            domain=task.domain,
            split=task.split,
            group_id=assignment.group_id,
            group_size=assignment.group_size,
            sample_idx=assignment.sample_idx,
            env_version=env_version,
            sandbox_image_digest=self._image_digest,
            primary_scorer=self._primary_scorer,
            tool_definitions=self._tool_definitions,
            model_id=self._policy.model_id,
            tokenizer_sha256=self._policy.tokenizer_sha256,
            seed=assignment.seed,
        )

    def _finish(self, game: "_Game", assignment: Assignment, attempt: Attempt) -> TrajectoryFinished:
        """Play, store the workspace, score by return, record the finish; known failures become part of it."""
        try:
            finished = self._take_turns(game, assignment)
            workspace = game.environment.workspace()
            ref = None if workspace is None else self._blobs.put(workspace.data)
            finished = replace(
                finished,
                workspace_ref=ref,
                final_observation_ids=self._policy.encode(game.observations[-1]),
            )
        except (SandboxError, BlobError) as error:
            reason = f"{type(error).__name__}: {error}"
            finished = TrajectoryFinished(status="failed", failure_class="infra", stop_reason="infra", error=reason)
        if self._primary_scorer == ENV_RETURN and finished.failure_class != "infra":
            # Before the finish: who dies in between leaves an open attempt, not a finished one that nobody scores.
            self._score_by_return(assignment, game.rewards)
        attempt.finish(finished)
        return finished

    def _take_turns(self, game: "_Game", assignment: Assignment) -> TrajectoryFinished:
        runtime = SandboxRuntime(self._blobs, self._open_sandbox, game.attempt.record)
        game.begin(assignment.task, runtime)
        while True:
            if len(game.calls) >= self._max_turns:
                return TrajectoryFinished(status="truncated", truncated=True, stop_reason="max_turns")
            try:
                move = self._ask(game.context(assignment))
            except PolicyError as error:
                return TrajectoryFinished(
                    status="failed", failure_class="policy", stop_reason="policy", error=str(error)
                )
            result = game.play(move)
            if result is None:
                return TrajectoryFinished(status="completed", stop_reason="no_action")
            if result.terminated:
                return TrajectoryFinished(status="completed", terminated=True, stop_reason="terminated")
            if result.truncated:
                return TrajectoryFinished(status="truncated", truncated=True, stop_reason="environment_limit")

    def _ask(self, context: Context) -> Move:
        """The policy's move.

        Raises:
            PolicyError: the policy's failure, whatever it raised.
            RolloutStoppedError: the run was stopped.
        """
        if self._stop.is_set():
            raise RolloutStoppedError("the run was stopped")
        try:
            move: Move = self._loop.submit(self._policy.act(context, None, self._loop.stop)).result()
        except PolicyError:
            if self._stop.is_set():
                raise RolloutStoppedError("the run was stopped") from None
            raise
        except Exception as error:
            raise PolicyError(f"{type(error).__name__}: {error}") from error
        return move

    def _score_by_return(self, assignment: Assignment, rewards: list[float]) -> None:
        total = sum(rewards)
        body: Body
        if rewards:
            body = Score(
                verifier_id=ENV_RETURN,
                verifier_version=_ENV_RETURN_VERSION,
                outcome="pass" if total > 0 else "fail",
                score=total,
            )
        else:
            reason = "the environment gave no reward"
            body = VerificationAbandoned(
                verifier_id=ENV_RETURN, verifier_version=_ENV_RETURN_VERSION, tries=1, reason=reason
            )
        stream = stream_of_score(ENV_RETURN, _ENV_RETURN_VERSION, assignment.trajectory_id, assignment.attempt)
        self._recorder.emit(
            body, stream=stream, trajectory_id=assignment.trajectory_id, attempt=assignment.attempt, seq=0
        )


class _Game:
    """The state of one attempt: what was seen, said and rewarded; each recorded as it happens."""

    def __init__(self, environment: Environment, attempt: Attempt) -> None:
        self.environment, self.attempt = environment, attempt
        self.observations: list[Observation] = []
        self.calls: list[ModelCall] = []
        self.rewards: list[float] = []

    def begin(self, task: Task, runtime: Runtime) -> None:
        self._observe(self.environment.reset(task, runtime))

    def context(self, assignment: Assignment) -> Context:
        return Context(
            trajectory_id=assignment.trajectory_id,
            attempt=assignment.attempt,
            task=assignment.task,
            observations=tuple(self.observations),
            calls=tuple(self.calls),
            seed=assignment.seed,
        )

    def play(self, move: Move) -> StepResult | None:
        """Record a move and what came of it; None where the policy answered nothing."""
        self.attempt.record(move.call)
        self.calls.append(move.call)
        if move.action is None:
            return None
        action = replace(move.action, call_id=move.call.call_id)
        self.attempt.record(action)
        began = time.perf_counter()
        result = self.environment.step(action)
        self._observe(_completed(result.observation, action, (time.perf_counter() - began) * 1000))
        if result.reward is not None:
            self.rewards.append(result.reward)
            self.attempt.record(Reward(value=result.reward, call_id=move.call.call_id))
        return result

    def _observe(self, observation: Observation) -> None:
        self.attempt.record(observation)
        self.observations.append(observation)


def _completed(observation: Observation, action: Action, duration_ms: float) -> Observation:
    """The observation with what the environment left open."""
    return replace(
        observation,
        action_id=observation.action_id or action.action_id,
        call_id=observation.call_id or action.call_id,
        duration_ms=duration_ms if observation.duration_ms is None else observation.duration_ms,
    )


def _optional(domain: Domain, name: str) -> Any:
    """What a domain offers beyond the protocol, or None."""
    offered = getattr(domain, name, None)
    return offered() if callable(offered) else None
