"""The event union: everything that happens in a run, as frozen wire types.

An event is an `Envelope` (who, where, when, in which stream) and a body whose class is chosen by the
envelope's `type`. Bodies form one tagged union (`EventBody`). How both become bytes is in `schemas.wire`.

A published type is never changed. New meaning means a new `schema_version` and an upcast in
`schemas.upcast`; `tests/data/events_v1.jsonl` holds one golden event of every type of version 1.

Leaves out: any I/O, and any judgement about whether an event makes sense (see `pipelines.assemble`).
"""

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

SCHEMA_VERSION = 1
"""The version that this code writes. Older ones are upcast on reading, newer ones are quarantined."""

Sha256 = Annotated[bytes, Meta(min_length=32, max_length=32)]
# Integers are bounded as the columns of `schemas.tables` are, so that whatever decodes fits into its table.
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NonNegative32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]

Split = Literal["train", "eval", "probe"]
Role = Literal["policy", "user_simulator", "summariser", "judge"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
Status = Literal["completed", "truncated", "aborted", "failed"]
FailureClass = Literal["infra", "policy"]
Outcome = Literal["pass", "fail", "infra_error", "timeout", "oom", "tampered"]


class Envelope(Struct, frozen=True, kw_only=True):
    """Identity, order and integrity of one event. `(stream, seq)` is the identity.

    Example:
        >>> Envelope(event_id="0198…", run_id="demo", trajectory_id="0198…", attempt=0,
        ...          stream="0198…/0", seq=0, producer_id="actor-1", ts_ns=1, prev_sha256=None,
        ...          body_sha256=b"…", type="trajectory_started")  # doctest: +SKIP
    """

    schema_version: NonNegative32 = SCHEMA_VERSION
    event_id: Name
    """Time-ordered UUIDv7, or derived from the source for imports."""
    run_id: Name
    trajectory_id: Name | None
    """Null for events of a run as a whole (policies, consumption)."""
    attempt: NonNegative32 | None
    stream: Name
    """`{trajectory_id}/{attempt}` for an attempt's own events; see `stream_of_attempt`."""
    seq: NonNegative
    """Dense from 0 within the stream."""
    producer_id: Name
    ts_ns: Int64
    """Producer's wall clock, nanoseconds since the epoch. Informs, never orders. 0 where unknown."""
    prev_sha256: Sha256 | None
    """SHA-256 of the stored envelope bytes of the stream's previous event; null at seq 0."""
    body_sha256: Sha256
    """SHA-256 of salt + stored body bytes."""
    type: Name

    @property
    def key(self) -> str:
        """Partitioning key: all that concerns one trajectory lies in one partition, in order."""
        return self.trajectory_id or self.stream

    @property
    def is_own(self) -> bool:
        """True for an event of an attempt's own stream."""
        return (
            self.trajectory_id is not None
            and self.attempt is not None
            and self.stream == stream_of_attempt(self.trajectory_id, self.attempt)
        )


def stream_of_attempt(trajectory_id: str, attempt: int) -> str:
    """Name of the stream that holds an attempt's own events."""
    return f"{trajectory_id}/{attempt}"


def stream_of_score(verifier: str, version: str, trajectory_id: str, attempt: int) -> str:
    """Name of a verifier's stream about one attempt; its `seq` is the try, so reruns are duplicates."""
    return f"{verifier}@{version}/{trajectory_id}/{attempt}"


def stream_of_policy(run_id: str, policy_id: str) -> str:
    """Name of the stream that holds a policy's published versions."""
    return f"{run_id}/policy/{policy_id}"


def stream_of_learner(run_id: str, learner_id: str) -> str:
    """Name of the stream that holds what a learner consumed and trained."""
    return f"{run_id}/learner/{learner_id}"


def stream_of_abort(producer_id: str, trajectory_id: str, attempt: int) -> str:
    """Name of the stream in which a producer gives up an attempt that is not its own."""
    return f"{producer_id}/abort/{trajectory_id}/{attempt}"


class Body(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all event bodies."""


class BlobRef(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A payload kept in the blob store: durable before the event that names it."""

    sha256: str
    """Hex digest, also the blob's name."""
    size: NonNegative
    """Bytes."""
    preview: str = ""
    """The first characters, for people."""


class TrajectoryStarted(Body, frozen=True, kw_only=True, tag="trajectory_started"):
    """The first event of every attempt."""

    task_key: Name
    task_sha256: str | None = None
    domain: Name
    split: Split = "train"
    group_id: str | None = None
    group_size: Int32 | None = None
    sample_idx: Int32 | None = None
    parent_trajectory_id: str | None = None
    env_version: str | None = None
    sandbox_image_digest: str | None = None
    primary_scorer: Name | None = None
    """Verifier id whose score is the reward (`humaneval`, `env:return`, `import:tau-bench`). Null: the
    trajectory settles at its finish, with a null reward."""
    tool_definitions: list[dict[str, Any]] | None = None
    model_id: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    seed: Int64 | None = None
    source: str | None = None
    """Where an imported trajectory came from: `FORMAT:file#index`."""


class ModelCall(Body, frozen=True, kw_only=True, tag="model_call"):
    """One call of a model: exact tokens where they are known, null where not.

    The full prompt is: parent call's prompt + parent's response + `prompt_token_ids`. With no parent the
    delta is the whole prompt.
    """

    call_id: Name
    parent_call_id: str | None = None
    agent: str = "main"
    role: Role = "policy"
    trainable: bool = True
    prompt_token_ids: list[Int32] | None = None
    """Delta to the parent call, so a long trajectory costs O(N)."""
    response_token_ids: list[Int32] | None = None
    sampled_run_lengths: list[Int32] | None = None
    """Alternating run lengths over the response, sampled first: [5, 2, 3] is 5 sampled, 2 injected,
    3 sampled tokens. The loss mask's only source."""
    logprobs: list[float] | None = None
    """Sampler log-probability per response token, same length. Null, never 0, where unknown."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """`processed`: after temperature, top-p, top-k and penalties (verl#6240)."""
    prefix_sha256: str | None = None
    """Hex SHA-256 over the full prompt as little-endian int32; proves the delta chain."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    policy_id: str | None = None
    policy_version_runs: list[tuple[Int64, Int32]] | None = None
    """(version, number of response tokens) runs; they add up to the response (AReaL PR1408)."""
    finish_reason: FinishReason | None = None
    image_refs: list[dict[str, Any]] | None = None
    routed_experts: BlobRef | None = None
    messages: list[dict[str, Any]] | None = None
    """A view for people; never re-tokenised (trl#5224)."""
    messages_ref: BlobRef | None = None
    usage: dict[str, Any] | None = None
    llm_ms: float | None = None


class Action(Body, frozen=True, kw_only=True, tag="action"):
    """What the agent did: a tool call or a move."""

    action_id: Name
    call_id: str | None = None
    name: str
    arguments: dict[str, Any] | None = None
    arguments_ref: BlobRef | None = None


class Observation(Body, frozen=True, kw_only=True, tag="observation"):
    """What came back."""

    action_id: str | None = None
    call_id: str | None = None
    content: str | None = None
    content_ref: BlobRef | None = None
    exit_code: Int64 | None = None
    outcome: str | None = None
    state_change: dict[str, Any] | None = None
    truncated: bool = False
    duration_ms: float | None = None


class ContextRewritten(Body, frozen=True, kw_only=True, tag="context_rewritten"):
    """Compaction or stripping of the context: a broken prefix as a fact, not a surprise."""

    reason: str
    call_id: str | None = None
    """The first call that sees the rewritten context; it has no parent call."""
    dropped_calls: list[str] | None = None


class Reward(Body, frozen=True, kw_only=True, tag="reward"):
    """Environment reward of one step."""

    value: float
    source: str = "env"
    call_id: str | None = None


class TrajectoryFinished(Body, frozen=True, kw_only=True, tag="trajectory_finished"):
    """The last event of an attempt that ended by itself."""

    status: Status
    terminated: bool = False
    truncated: bool = False
    final_observation_ids: list[Int32] | None = None
    stop_reason: str | None = None
    failure_class: FailureClass | None = None
    """`infra`: this attempt never wins and never trains."""
    error: str | None = None
    workspace_ref: BlobRef | None = None
    """Content-addressed diff of the workspace, taken before the sandbox closed: what is graded."""


class AttemptAborted(Body, frozen=True, kw_only=True, tag="attempt_aborted"):
    """An attempt that was given up.

    By itself in its own stream, or by the holder of a dead actor's lease in a stream of its own.
    """

    reason: str
    by: str
    failure_class: FailureClass | None = "infra"


class Score(Body, frozen=True, kw_only=True, tag="score"):
    """One verdict of one verifier about one attempt."""

    verifier_id: Name
    verifier_version: Name
    outcome: Outcome
    score: float | None
    """Null for every outcome that says nothing about the policy (infra_error)."""
    expected_tests: list[str] | None = None
    seen_tests: list[str] | None = None
    passed_tests: list[str] | None = None
    tests_sha256: str | None = None
    sandbox_image_digest: str | None = None
    reason: str | None = None
    evidence: dict[str, Any] | None = None
    duration_ms: float | None = None


class VerificationAbandoned(Body, frozen=True, kw_only=True, tag="verification_abandoned"):
    """Infra errors outlasted the tries: the reward stays null, by name."""

    verifier_id: Name
    verifier_version: Name
    tries: NonNegative
    reason: str


class GroupClosed(Body, frozen=True, kw_only=True, tag="group_closed"):
    """Members of a group that will never come, so that its completeness can be decided."""

    group_id: Name
    given_up: list[Int32]
    """Sample indices."""
    reason: str | None = None


class LeaseGranted(Body, frozen=True, kw_only=True, tag="lease_granted"):
    """A task given to a holder for a time."""

    task_key: Name
    holder: Name
    expires_ns: Int64


class Annotation(Body, frozen=True, kw_only=True, tag="annotation"):
    """An append-only judgement, tag, release or correction."""

    kind: Name
    author: Name
    reason: str | None = None
    subject: str | None = None
    value: dict[str, Any] | None = None


class PolicyPublished(Body, frozen=True, kw_only=True, tag="policy_published"):
    """A new version of a policy that actors may load."""

    policy_id: Name
    version: NonNegative
    checkpoint_uri: Name
    sha256: str
    """Hex digest of the checkpoint file."""
    metadata: dict[str, Any] | None = None


class Consumed(Body, frozen=True, kw_only=True, tag="consumed"):
    """Written before a training step: the exact rows it is about to see, in order."""

    learner_id: Name
    train_step: NonNegative
    policy_id: Name
    policy_version: NonNegative
    """The version being updated."""
    trajectory_ids: list[str]
    row_sha256s: list[str]
    """Hex, same order: over what is trained on (see `learner.dataset`)."""
    advantages: list[float]
    masked: dict[str, str] | None = None
    """trajectory_id → why it gives no gradient."""
    baseline_members: dict[str, list[str]] | None = None
    """group_id → trajectories that made its baseline."""
    table_versions: dict[str, Int64] | None = None
    """Hints: Delta versions that were read."""


class StepTrained(Body, frozen=True, kw_only=True, tag="step_trained"):
    """Written after the step that `consumed` announced."""

    learner_id: Name
    train_step: NonNegative
    policy_id: Name
    policy_version: NonNegative
    statistics: dict[str, float | None]
    """Loss, KL, clip fraction, staleness…; null where not finite."""


EventBody = (
    TrajectoryStarted
    | ModelCall
    | Action
    | Observation
    | ContextRewritten
    | Reward
    | TrajectoryFinished
    | AttemptAborted
    | Score
    | VerificationAbandoned
    | GroupClosed
    | LeaseGranted
    | Annotation
    | PolicyPublished
    | Consumed
    | StepTrained
)

BODY_TYPES: dict[str, type[Body]] = {str(cls.__struct_config__.tag): cls for cls in get_args(EventBody)}
"""Event type name → body class."""

CLOSING_TYPES = frozenset({"trajectory_finished", "attempt_aborted", "score", "verification_abandoned"})
"""Types at which an attempt or a trajectory may be decided; the only ones that need its history."""


class Event(Struct, frozen=True):
    """An envelope with its decoded body."""

    envelope: Envelope
    body: EventBody
