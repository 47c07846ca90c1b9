"""What a learner has done so far, read from the event log: the record that a restart goes on from."""

from msgspec import Struct, field

from ingest.follow import follow_run
from ingest.port import EventLog
from schemas.events import Consumed, PolicyPublished, stream_of_learner, stream_of_policy
from schemas.records import PolicyVersion


class LearnerState(Struct, kw_only=True):
    """Consumed rows, the next step's number and the newest published version."""

    train_step: int = 0
    """Number of the next step."""
    consumed: set[str] = field(default_factory=set)
    """Trajectories that were consumed, whether or not their step came to its end."""
    newest: PolicyVersion | None = None
    """None before the first version was published."""


def read_state(log: EventLog, run_id: str, learner_id: str, policy_id: str) -> LearnerState:
    """Replay a learner's own events.

    Raises:
        LogUnavailableError: the log can't be read.
    """
    state = LearnerState()
    for stream in (stream_of_learner(run_id, learner_id), stream_of_policy(run_id, policy_id)):
        types = frozenset({"consumed", "policy_published"})
        for event in follow_run(log, log.partition_of(stream), {}, run_id, types):
            if event.envelope.stream == stream:
                _take(state, event.body)
    return state


def _take(state: LearnerState, body: object) -> None:
    if isinstance(body, Consumed):
        state.train_step = max(state.train_step, body.train_step + 1)
        state.consumed.update(body.trajectory_ids)
    elif isinstance(body, PolicyPublished) and (state.newest is None or body.version > state.newest.version):
        state.newest = PolicyVersion(
            policy_id=body.policy_id,
            version=body.version,
            checkpoint_uri=body.checkpoint_uri,
            sha256=body.sha256,
            metadata=body.metadata,
        )
