"""Every rule by which something is quarantined: name, meaning, origin. `docs/quarantine.md` has one entry per rule.

Structural rules are raised while records are decoded and streams put together (`schemas.wire`, `pipelines.machine`,
`pipelines.rows`). Content rules are checked by Great Expectations over candidate rows (`pipelines.gate.suites`).

The order of `RULES` is the precedence: the first rule that something breaks names its quarantine row.
What is absent never breaks a rule: it makes a row untrainable, with the reason.
"""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Scope = Literal["record", "attempt", "trajectory"]


class Rule(Struct, frozen=True, kw_only=True):
    """One way to be quarantined.

    Example:
        >>> RULES["gap"].scope
        'attempt'
    """

    name: str
    doc: str
    """What breaks the rule, in a sentence."""
    origin: str
    """Where the failure was seen, or which invariant of trajlake it guards."""
    scope: Scope
    """What a quarantine row under this rule covers at least."""
    tables: tuple[str, ...] = ()
    """Tables whose candidate rows are checked; empty for structural rules."""
    shown: tuple[str, ...] = ()
    """Scalar columns whose values a reason quotes, where the table has them."""

    @property
    def is_content(self) -> bool:
        """True where Great Expectations checks the rule."""
        return bool(self.tables)


_OWN = "trajlake's own invariant"

_RECORD = (
    Rule(
        name="undecodable",
        doc="The record is no event: its outer map or its envelope can't be decoded.",
        origin=f"{_OWN}: what the log acknowledged is never dropped",
        scope="record",
    ),
    Rule(
        name="unknown_version",
        doc="The event's schema version is newer than this trajlake, or below 1.",
        origin=f"{_OWN}: published event types never change",
        scope="record",
    ),
    Rule(
        name="body_hash_mismatch",
        doc="The body does not have the hash that its envelope names.",
        origin="Relax#171 (replay bundles with hashes); the hash chain",
        scope="record",
    ),
    Rule(
        name="unknown_type",
        doc="The envelope names an event type that does not exist in its schema version.",
        origin=f"{_OWN}: one closed union of events",
        scope="record",
    ),
    Rule(
        name="undecodable_body",
        doc="The body can't be decoded: bad bytes, a wrong type, a missing field, a number out of range.",
        origin="NeMo-RL#2962 (a bad value turned a whole request into an error)",
        scope="record",
    ),
    Rule(
        name="type_mismatch",
        doc="The body is of another type than its envelope says.",
        origin=f"{_OWN}: envelope and body are written together",
        scope="record",
    ),
    Rule(
        name="bad_stream",
        doc="The envelope contradicts itself: a type in a stream, or about a subject, where it can't be.",
        origin="slime#1922 (writers that overwrote each other's streams)",
        scope="record",
    ),
)

_ATTEMPT = (
    Rule(
        name="fork",
        doc="The same (stream, seq) of an attempt's own stream came with two different bodies.",
        origin="miles#2254 (late duplicates that match nothing)",
        scope="attempt",
    ),
    Rule(
        name="gap",
        doc="A sequence number of the attempt's stream is missing: an event was lost.",
        origin="LightningStore's sequence_id; slime#2238 (completed groups dropped)",
        scope="attempt",
    ),
    Rule(
        name="no_start",
        doc="The attempt's first event is not `trajectory_started`.",
        origin=f"{_OWN}: the first event names the task",
        scope="attempt",
    ),
    Rule(
        name="second_start",
        doc="The attempt holds more than one `trajectory_started`.",
        origin="Agent Lightning's enforced state machine",
        scope="attempt",
    ),
    Rule(
        name="chain_broken",
        doc="An event's `prev_sha256` is not the digest of its predecessor's envelope.",
        origin="NeMo-Gym#2872 (hashed custody ledger)",
        scope="attempt",
    ),
    Rule(
        name="bad_reference",
        doc="A parent call, call or action is named that does not exist before it, or a call id is used twice.",
        origin="rllm#352 (trajectories that don't accumulate), slime#1563",
        scope="attempt",
    ),
    Rule(
        name="attempt_aborted",
        doc="The attempt was given up, by itself or by the holder of a dead actor's lease.",
        origin="agentcore-rl-toolkit#122 (a failure without trace trained as a pad token)",
        scope="attempt",
    ),
    Rule(
        name="infra_failure",
        doc="The attempt finished with failure class `infra`: it says nothing about the policy.",
        origin="NeMo-Gym#2552 (1,172 of 1,280 session failures trained as reward 0)",
        scope="attempt",
    ),
    Rule(
        name="late_attempt",
        doc="Another attempt at the same trajectory had finished or settled before.",
        origin="miles#2254; one committed attempt per trajectory",
        scope="attempt",
    ),
    Rule(
        name="late_event",
        doc="The event came after its attempt had ended.",
        origin="miles#2254; a settled row never changes",
        scope="record",
    ),
    Rule(
        name="unscored_infra",
        doc="The primary scorer was abandoned: infrastructure errors outlasted the tries, so the reward stays null.",
        origin="OpenEnv#1025 (missing reward.txt scored 0.0), verifiers#1245",
        scope="trajectory",
    ),
)

_CONTENT = (
    Rule(
        name="token_ids_valid",
        doc="A token id is negative; none may be null.",
        origin="NeMo-Gym#1416 (token mismatch between server and actor), agent-lightning#44",
        scope="trajectory",
        tables=("steps", "trajectories"),
    ),
    Rule(
        name="logprobs_length",
        doc="Log-probabilities and response token ids differ in number.",
        origin="trl#6420 (lengths unchecked)",
        scope="trajectory",
        tables=("steps",),
    ),
    Rule(
        name="logprobs_finite",
        doc="A log-probability is NaN or infinite.",
        origin="trl#6166, trl#6693 (garbage logits should raise), NeMo-RL#2962",
        scope="trajectory",
        tables=("steps",),
    ),
    Rule(
        name="logprobs_positive",
        doc="A log-probability is above 0 by more than 1e-6: no probability is above 1.",
        origin="trl#6693; verl#6240 (which logprobs were recorded)",
        scope="trajectory",
        tables=("steps",),
    ),
    Rule(
        name="loss_mask_length",
        doc="The sampled-run lengths are negative or do not add up to the response.",
        origin="slime#1563 (multi-turn mask wrong), SkyRL#758 (injected tokens unmasked), trl#4976",
        scope="trajectory",
        tables=("steps",),
    ),
    Rule(
        name="version_runs_length",
        doc="The policy version runs are empty of tokens or do not add up to the response.",
        origin="AReaL#1408, slime#2092 (one sample spans versions 2/4/6)",
        scope="trajectory",
        tables=("steps",),
    ),
    Rule(
        name="policy_version_valid",
        doc="A policy version is negative, or the oldest is above the newest.",
        origin="AReaL#1408 (dumped head_version always -1)",
        scope="trajectory",
        tables=("steps", "trajectories"),
        shown=("min_policy_version", "max_policy_version"),
    ),
    Rule(
        name="prefix_mismatch",
        doc="`prefix_sha256` is not the digest of the parent's prompt and response plus this call's prompt.",
        origin="trl#5224, verl#3960, verl#6854, verl#5576, slime#2288 (tokens changed between turns)",
        scope="trajectory",
        tables=("steps",),
        shown=("prefix_sha256",),
    ),
    Rule(
        name="sampling_parameters",
        doc="Temperature negative or not finite, top_p outside [0, 1], or top_k below -1.",
        origin="verl#6240 (parameters decide what a logprob means)",
        scope="trajectory",
        tables=("steps",),
        shown=("temperature", "top_p", "top_k"),
    ),
    Rule(
        name="reward_finite",
        doc="A reward, an environment's return or a step's reward is NaN or infinite.",
        origin="NeMo-RL#431, ms-swift#8123 (one bad reward makes a batch's advantages NaN)",
        scope="trajectory",
        tables=("trajectories", "steps"),
        shown=("reward", "env_return", "step_reward"),
    ),
    Rule(
        name="score_finite",
        doc="A score is NaN or infinite: an invalid score is not 0, and is no score.",
        origin="NeMo-RL#431 (invalid rewards marked), NeMo-RL#2207",
        scope="record",
        tables=("scores",),
        shown=("verifier_id", "score"),
    ),
    Rule(
        name="outcome_score_consistency",
        doc="An infrastructure error or an abandoned verification carries a score, or a pass or fail carries none.",
        origin="NeMo-Gym#2552, OpenEnv#1025 (failures to grade trained as reward 0)",
        scope="record",
        tables=("scores", "trajectories"),
        shown=("outcome", "score", "reward_outcome", "reward"),
    ),
    Rule(
        name="tests_consistency",
        doc="A pass although an expected test is not among the passed ones, or a passed test that was never seen.",
        origin="OpenEnv#1025; a missing expected test fails",
        scope="record",
        tables=("scores",),
        shown=("verifier_id", "outcome"),
    ),
    Rule(
        name="truncated_not_completed",
        doc="Truncated contradicts status or terminated: completed though truncated, status truncated without the "
        "flag, or both truncated and terminated.",
        origin="prime-rl#1448, trl#4976; truncated is neither terminated nor failed",
        scope="trajectory",
        tables=("trajectories",),
        shown=("status", "terminated", "truncated"),
    ),
    Rule(
        name="known_values",
        doc="A column of fixed values (status, split, role, outcome, phase and the like) holds another one.",
        origin="Tinker's and slime's closed sets of stop reasons and states",
        scope="trajectory",
        tables=("trajectories", "steps", "scores", "consumption"),
        shown=("status", "split", "failure_class", "reward_outcome", "role", "finish_reason", "outcome", "phase"),
    ),
    Rule(
        name="group_index",
        doc="The group's size is below 1, or the sample's index lies outside it.",
        origin="SkyRL's TrajectoryID; verl#6452 (rejected rows still move a group's baseline)",
        scope="trajectory",
        tables=("trajectories",),
        shown=("sample_idx", "group_size"),
    ),
    Rule(
        name="durations_valid",
        doc="A duration is negative, NaN or infinite.",
        origin="SkyRL's and rLLM's time splits; clocks inform, so they may be absent but not absurd",
        scope="trajectory",
        tables=("steps", "scores"),
        shown=("llm_ms", "env_ms", "duration_ms"),
    ),
    Rule(
        name="hash_format",
        doc="A SHA-256 is not 64 lowercase hexadecimal digits.",
        origin="Relax#171 (fingerprints that can be compared)",
        scope="trajectory",
        tables=("trajectories", "steps", "scores", "policies", "consumption"),
    ),
    Rule(
        name="batch_aligned",
        doc="A consumed batch's rows, digests and advantages differ in number.",
        origin="verl#7579 (a recycled index trains wrong bytes)",
        scope="record",
        tables=("consumption",),
        shown=("learner_id", "train_step"),
    ),
    Rule(
        name="advantages_finite",
        doc="An advantage of a consumed batch is NaN or infinite.",
        origin="ms-swift#8123 (one None reward NaNs the batch's advantages)",
        scope="record",
        tables=("consumption",),
        shown=("learner_id", "train_step"),
    ),
    Rule(
        name="version_valid",
        doc="A published or trained policy's version, or a training step, is negative.",
        origin="AReaL#1408",
        scope="record",
        tables=("policies", "consumption"),
        shown=("policy_id", "version", "policy_version", "train_step"),
    ),
)

RULES: dict[str, Rule] = {rule.name: rule for rule in (*_RECORD, *_ATTEMPT, *_CONTENT)}
"""Every rule by name, in precedence order."""

_RANK = {name: rank for rank, name in enumerate(RULES)}


def rules_for(table: str) -> list[Rule]:
    """Content rules of a table, in precedence order."""
    return [rule for rule in RULES.values() if table in rule.tables]


def by_precedence(names: Iterable[str]) -> list[str]:
    """Distinct rule names, the one that names the quarantine row first.

    Raises:
        KeyError: for a name that is no rule.
    """
    return sorted(set(names), key=_RANK.__getitem__)
