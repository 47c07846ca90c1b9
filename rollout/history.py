"""What a run has done so far, read from the event log: its slots, their attempts, and the policies it published.

A slot is a member of a group, `(group_id, sample_idx)`. Reading goes on where it stopped, so that following a run
costs as much as what was appended since. Memory holds one small record per slot of the run.
"""

from msgspec import Struct

from ingest.follow import follow_run
from ingest.port import EventLog
from schemas.events import (
    AttemptAborted,
    Event,
    PolicyPublished,
    TrajectoryFinished,
    TrajectoryStarted,
    stream_of_policy,
)
from schemas.records import PolicyVersion

Slot = tuple[str, int]
"""(group_id, sample_idx)."""

_WANTED = frozenset({"trajectory_started", "trajectory_finished", "attempt_aborted"})
_PUBLISHED = frozenset({"policy_published"})


class SlotState(Struct):
    """What became of a slot."""

    trajectory_id: str
    attempt: int
    """The newest attempt."""
    is_open: bool = True
    """The newest attempt has neither finished nor been aborted."""
    is_done: bool = False
    """Some attempt finished without a failure of the infrastructure."""
    infra_failures: int = 0


class RunHistory:
    """A run's slots, as of the last `refresh`."""

    def __init__(self, log: EventLog, run_id: str) -> None:
        self._log, self._run_id = log, run_id
        self._positions: dict[int, int] = {}
        self.slots: dict[Slot, SlotState] = {}
        self._slot_of: dict[str, Slot] = {}

    def refresh(self) -> None:
        """Read what was appended since the last time."""
        for partition in self._log.partitions():
            for event in follow_run(self._log, partition, self._positions, self._run_id, _WANTED):
                self._take(event)

    def _take(self, event: Event) -> None:
        envelope, body = event.envelope, event.body
        trajectory_id, attempt = envelope.trajectory_id, envelope.attempt
        if trajectory_id is None or attempt is None:
            return
        if isinstance(body, TrajectoryStarted):
            self._start(trajectory_id, attempt, body)
        elif trajectory_id in self._slot_of:
            self._end(self.slots[self._slot_of[trajectory_id]], attempt, body)

    def _start(self, trajectory_id: str, attempt: int, body: TrajectoryStarted) -> None:
        if body.group_id is None or body.sample_idx is None:
            return  # not played by a rollout of ours
        slot = self._slot_of.setdefault(trajectory_id, (body.group_id, body.sample_idx))
        state = self.slots.setdefault(slot, SlotState(trajectory_id, attempt))
        if attempt > state.attempt:
            state.attempt, state.is_open = attempt, True

    def _end(self, state: SlotState, attempt: int, body: object) -> None:
        if attempt == state.attempt:
            state.is_open = False
        if isinstance(body, TrajectoryFinished):
            state.is_done = state.is_done or body.failure_class != "infra"
            state.infra_failures += body.failure_class == "infra"
        else:
            assert isinstance(body, AttemptAborted)


class PolicyFeed:
    """The newest version of a policy that a run has published."""

    def __init__(self, log: EventLog, run_id: str, policy_id: str) -> None:
        self._log, self._run_id, self._policy_id = log, run_id, policy_id
        self._partition = log.partition_of(stream_of_policy(run_id, policy_id))
        self._positions: dict[int, int] = {}
        self._newest: PolicyVersion | None = None

    def newest(self) -> PolicyVersion | None:
        """The newest version in the log; None before the first."""
        for event in follow_run(self._log, self._partition, self._positions, self._run_id, _PUBLISHED):
            body = event.body
            assert isinstance(body, PolicyPublished)
            if body.policy_id == self._policy_id and (self._newest is None or body.version > self._newest.version):
                self._newest = PolicyVersion(
                    policy_id=body.policy_id,
                    version=body.version,
                    checkpoint_uri=body.checkpoint_uri,
                    sha256=body.sha256,
                    metadata=body.metadata,
                )
        return self._newest
