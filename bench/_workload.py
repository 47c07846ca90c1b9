"""Synthetic trajectories for benchmarks: an agent with a tool, events of 2 KB, scored by its environment.

Text is drawn from a pool of random words, so that it compresses like prose; token ids and log-probabilities are random.
"""

import random
from collections.abc import Iterator

from ingest.recorder import Attempt, Recorder
from schemas.events import (
    Action,
    Body,
    ModelCall,
    Observation,
    Score,
    TrajectoryFinished,
    TrajectoryStarted,
    stream_of_score,
)

EVENTS_PER_TRAJECTORY = 21
"""A start, six turns of call, action and observation, a finish, a score."""

_TURNS = 6
_NUM_TOKENS = 64
_TEXT_BYTES = 1_700
_CONCURRENT = 32
"""Attempts that are open at once, as with a pool of actors: their events interleave in the log."""


class Workload:
    """An endless supply of trajectories, the same for the same seed.

    Args:
        seed: Of the random content.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        words = ["".join(self._random.choices("etaoinshrdlucmfw", k=self._random.randint(2, 9))) for _ in range(4000)]
        self._pool = " ".join(self._random.choices(words, k=200_000))
        self._num_started = 0

    def record(self, recorder: Recorder, num_trajectories: int) -> None:
        """Record whole trajectories with their scores, interleaved; durable on return."""
        for first in range(0, num_trajectories, _CONCURRENT):
            self._record_together(recorder, min(_CONCURRENT, num_trajectories - first))
        recorder.flush()

    def record_one(self, recorder: Recorder) -> str:
        """Record one trajectory with its score; gives its id. Not flushed."""
        attempt = recorder.trajectory(self._start())
        for turn in range(_TURNS):
            for body in self._turn(turn):
                attempt.record(body)
        self.finish(recorder, attempt)
        return attempt.trajectory_id

    def _record_together(self, recorder: Recorder, count: int) -> None:
        attempts = [recorder.trajectory(self._start()) for _ in range(count)]
        for turn in range(_TURNS):
            for attempt in attempts:
                for body in self._turn(turn):
                    attempt.record(body)
        for attempt in attempts:
            self.finish(recorder, attempt)

    def finish(self, recorder: Recorder, attempt: Attempt) -> None:
        """Finish an attempt and score it."""
        attempt.finish(TrajectoryFinished(status="completed", terminated=True))
        score = float(self._random.randrange(2))
        body = Score(verifier_id="env:return", verifier_version="1", outcome="pass" if score else "fail", score=score)
        stream = stream_of_score("env:return", "1", attempt.trajectory_id, 0)
        recorder.emit(body, stream=stream, trajectory_id=attempt.trajectory_id, attempt=0, seq=0)

    def _start(self) -> TrajectoryStarted:
        group, sample = divmod(self._num_started, 4)
        self._num_started += 1
        return TrajectoryStarted(
            task_key=f"task-{group}",
            domain="bench",
            primary_scorer="env:return",
            group_id=f"group-{group}",
            group_size=4,
            sample_idx=sample,
        )

    def _turn(self, turn: int) -> Iterator[Body]:
        call, action = f"call-{turn}", f"action-{turn}"
        yield ModelCall(
            call_id=call,
            parent_call_id=f"call-{turn - 1}" if turn else None,
            prompt_token_ids=self._tokens(),
            response_token_ids=self._tokens(),
            sampled_run_lengths=[_NUM_TOKENS],
            logprobs=[-self._random.random() for _ in range(_NUM_TOKENS)],
            policy_id="bench",
            policy_version_runs=[(1, _NUM_TOKENS)],
            messages=[{"role": "assistant", "content": self._text(_TEXT_BYTES // 2)}],
        )
        yield Action(action_id=action, call_id=call, name="sh", arguments={"command": self._text(_TEXT_BYTES)})
        yield Observation(action_id=action, call_id=call, content=self._text(_TEXT_BYTES), duration_ms=12.5)

    def _tokens(self) -> list[int]:
        return self._random.choices(range(50_000), k=_NUM_TOKENS)

    def _text(self, num_bytes: int) -> str:
        start = self._random.randrange(len(self._pool) - num_bytes)
        return self._pool[start : start + num_bytes]
