"""Arrow schemas of every table, with one sentence per column.

The sentences travel as Arrow field metadata (`comment`), fill `docs/data-model.md`, and a test fails when one is
missing. Which events make which row is in `pipelines.assemble`.

Conventions: ids and hex digests are strings; digests that only machines compare are binary; `*_ns` are nanoseconds
since the epoch, `*_ms` milliseconds; free-form values are JSON text in columns whose comment says JSON. What can't be
known is null.
"""

from collections.abc import Sequence

import pyarrow as pa

STRING, INT64, INT32, FLOAT64, BOOL, BINARY = (
    pa.string(),
    pa.int64(),
    pa.int32(),
    pa.float64(),
    pa.bool_(),
    pa.binary(),
)
STRINGS = pa.list_(STRING)
TOKENS = pa.list_(INT32)
VERSION_RUNS = pa.list_(pa.struct([pa.field("version", INT64), pa.field("length", INT32)]))

Column = tuple[str, pa.DataType, str]

_LOG_POSITION: Sequence[Column] = (
    ("log_id", STRING, "Log that holds the deciding record."),
    ("partition", INT32, "Partition of that record."),
    ("offset", INT64, "Offset of that record: the one at which this row came to be."),
)
_STREAM: Sequence[Column] = (
    ("stream", STRING, "Stream of the event."),
    ("seq", INT64, "Sequence number in the stream; (stream, seq) is the event's identity."),
    ("producer_id", STRING, "Who wrote the event."),
    ("ts_ns", INT64, "Producer's clock."),
)


def _schema(*columns: Column) -> pa.Schema:
    return pa.schema([pa.field(name, kind, metadata={"comment": comment}) for name, kind, comment in columns])


EVENTS = _schema(
    ("log_id", STRING, "Log that the record came from."),
    ("partition", INT32, "Partition of the log."),
    ("offset", INT64, "Offset in the partition; never reused, may have holes."),
    ("type", STRING, "Event type; null where the envelope can't be decoded."),
    ("schema_version", INT32, "Version of the event's schema."),
    ("event_id", STRING, "Producer's id of the event."),
    ("run_id", STRING, "Run."),
    ("trajectory_id", STRING, "Trajectory; null for events of a run as a whole."),
    ("attempt", INT32, "Attempt at the trajectory's task, from 0."),
    ("stream", STRING, "Stream; `{trajectory_id}/{attempt}` for an attempt's own events."),
    ("seq", INT64, "Dense from 0 within the stream."),
    ("producer_id", STRING, "Who wrote the event."),
    ("ts_ns", INT64, "Producer's clock. Informs, never orders."),
    ("prev_sha256", BINARY, "Digest of the previous envelope of the stream."),
    ("body_sha256", BINARY, "Digest of salt and body."),
    ("envelope_sha256", BINARY, "Digest of this record's stored envelope: the next event's prev_sha256."),
    ("is_closing", BOOL, "True for types at which an attempt or trajectory may be decided."),
    ("run_stream", STRING, "The stream, for events of a run as a whole; null otherwise. Prunes look-ups."),
    ("run_seq", INT64, "The seq, for events of a run as a whole; null otherwise. Prunes look-ups."),
    ("value", BINARY, "The record's bytes, exactly as the log holds them."),
)

TRAJECTORIES = _schema(
    ("trajectory_id", STRING, "Time-ordered UUIDv7. One row per settled trajectory."),
    ("run_id", STRING, "Run."),
    ("attempt", INT32, "The attempt that won."),
    *_LOG_POSITION,
    ("first_offset", INT64, "Offset of the winning attempt's first record."),
    ("num_events", INT64, "Records of the winning attempt's own stream, duplicates not counted."),
    ("chain_sha256", STRING, "Hex digest of the attempt's last envelope: pins all its events."),
    ("task_key", STRING, "Task."),
    ("task_sha256", STRING, "Hex digest of the task's content."),
    ("domain", STRING, "Domain of tasks."),
    ("split", STRING, "train, eval or probe; learners read train only."),
    ("group_id", STRING, "Group of attempts at one task that share a baseline."),
    ("group_size", INT32, "Planned members of the group."),
    ("sample_idx", INT32, "This member's index in the group."),
    ("parent_trajectory_id", STRING, "Trajectory that this one continues or belongs to."),
    ("env_version", STRING, "Version of the environment."),
    ("sandbox_image_digest", STRING, "Image that the actor's sandbox ran."),
    ("primary_scorer", STRING, "Verifier whose score is the reward."),
    ("tool_definitions", STRING, "JSON list of the tools offered."),
    ("model_id", STRING, "Model."),
    ("tokenizer_sha256", STRING, "Hex digest of the tokenizer."),
    ("chat_template_sha256", STRING, "Hex digest of the chat template."),
    ("seed", INT64, "Seed of the rollout."),
    ("source", STRING, "For imports: FORMAT:file#index."),
    ("status", STRING, "completed, truncated, aborted or failed."),
    ("terminated", BOOL, "The environment ended."),
    ("truncated", BOOL, "A limit ended it; never the same as terminated."),
    ("stop_reason", STRING, "Why the actor stopped."),
    ("failure_class", STRING, "policy, or null."),
    ("error", STRING, "What failed, for people."),
    ("final_observation_ids", TOKENS, "Token ids of the last observation, for bootstrapping."),
    ("workspace_sha256", STRING, "Blob of the workspace that was graded."),
    ("reward", FLOAT64, "Score of the primary scorer; null where none is known. Never 0 for a failure to grade."),
    ("reward_outcome", STRING, "Outcome behind the reward: pass, fail, timeout, oom, tampered."),
    ("reward_source", STRING, "verifier@version behind the reward."),
    ("env_return", FLOAT64, "Sum of the environment's step rewards; null where there were none."),
    ("policy_id", STRING, "Policy that sampled it; null when several or unknown."),
    ("min_policy_version", INT64, "Oldest policy version that sampled a token."),
    ("max_policy_version", INT64, "Newest policy version that sampled a token."),
    ("num_steps", INT32, "Model calls."),
    ("num_tokens", INT64, "Response tokens; null where unknown."),
    ("num_sampled_tokens", INT64, "Response tokens that the policy sampled; null where unknown."),
    ("trainable", BOOL, "Whether a learner may train on it."),
    ("not_trainable_reason", STRING, "The first thing that is absent, where trainable is false."),
    ("started_ns", INT64, "Producer's clock at the start."),
    ("finished_ns", INT64, "Producer's clock at the finish."),
)

STEPS = _schema(
    ("trajectory_id", STRING, "Trajectory. One row per model call of a settled trajectory."),
    ("run_id", STRING, "Run."),
    ("attempt", INT32, "Attempt."),
    ("step_idx", INT32, "Position of the call in the trajectory, from 0."),
    ("seq", INT64, "Sequence number of the call's event in the attempt's stream."),
    *_LOG_POSITION,
    ("group_id", STRING, "Group, as in trajectories."),
    ("split", STRING, "Split, as in trajectories."),
    ("domain", STRING, "Domain, as in trajectories."),
    ("call_id", STRING, "The call."),
    ("parent_call_id", STRING, "The call whose prompt and response are this one's prefix."),
    ("parent_step_idx", INT32, "Its step_idx."),
    ("agent", STRING, "Agent within the trajectory."),
    ("role", STRING, "policy, user_simulator, summariser or judge."),
    ("trainable", BOOL, "Whether a learner may train on this call."),
    ("prompt_token_ids", TOKENS, "Prompt tokens beyond the parent's prompt and response."),
    ("response_token_ids", TOKENS, "Response tokens, exactly as sampled."),
    ("loss_mask", pa.list_(BOOL), "True where the policy sampled the token; same length as the response."),
    ("logprobs", pa.list_(FLOAT64), "Sampler log-probabilities, natural log; same length as the response."),
    ("logprobs_mode", STRING, "raw or processed."),
    ("prefix_sha256", STRING, "Hex digest over the full prompt as little-endian int32."),
    ("temperature", FLOAT64, "Sampling temperature."),
    ("top_p", FLOAT64, "Nucleus bound."),
    ("top_k", INT32, "Top-k bound."),
    ("policy_id", STRING, "Policy."),
    ("policy_version_runs", VERSION_RUNS, "Policy version per token, run-length coded."),
    ("min_policy_version", INT64, "Oldest version in the runs."),
    ("finish_reason", STRING, "stop, length, tool_calls, abort or error."),
    ("messages", STRING, "JSON view of the messages, for people."),
    ("actions", STRING, "JSON list of the actions that followed this call."),
    ("observations", STRING, "JSON list of the observations that followed."),
    ("step_reward", FLOAT64, "Sum of the environment rewards after this call; null where there were none."),
    ("usage", STRING, "JSON: token counts and cost as the model's server gave them."),
    ("image_refs", STRING, "JSON: images with their token spans."),
    ("blob_refs", STRING, "JSON map of large payloads to blob digests."),
    ("llm_ms", FLOAT64, "Duration of the call."),
    ("env_ms", FLOAT64, "Duration of the environment's part."),
)

SCORES = _schema(
    ("trajectory_id", STRING, "Trajectory. One row per scorer, version and try."),
    ("run_id", STRING, "Run."),
    ("attempt", INT32, "Attempt that was scored."),
    ("verifier_id", STRING, "Scorer."),
    ("verifier_version", STRING, "Its version."),
    ("outcome", STRING, "pass, fail, infra_error, timeout, oom, tampered or abandoned."),
    ("score", FLOAT64, "The score; null where the outcome says nothing about the policy."),
    ("expected_tests", STRINGS, "Tests that had to be seen."),
    ("seen_tests", STRINGS, "Tests that reported."),
    ("passed_tests", STRINGS, "Tests that passed; a missing expected test fails."),
    ("tests_sha256", STRING, "Hex digest of the tests."),
    ("sandbox_image_digest", STRING, "Image that the grader's sandbox ran."),
    ("reason", STRING, "Why, in a sentence."),
    ("evidence", STRING, "JSON: what the verifier saw."),
    ("duration_ms", FLOAT64, "Duration of the verification."),
    *_LOG_POSITION,
    *_STREAM,
)

QUARANTINE = _schema(
    ("rule", STRING, "First rule that was broken; `trajlake` docs/quarantine.md has one entry per rule."),
    ("other_rules", STRINGS, "Further rules that were broken."),
    ("reason", STRING, "What was seen, in a sentence."),
    ("scope", STRING, "record, attempt or trajectory: what this row covers."),
    ("trajectory_id", STRING, "Trajectory, where known."),
    ("run_id", STRING, "Run, where known."),
    ("attempt", INT32, "Attempt, where known."),
    ("type", STRING, "Type of the deciding record, where known."),
    *_LOG_POSITION,
    ("first_offset", INT64, "Offset of the first record that this row covers."),
    ("num_events", INT64, "Records that this row covers, duplicates not counted."),
    ("row", STRING, "JSON: the row that would have been written, or what could be decoded of the record."),
)

POLICIES = _schema(
    ("policy_id", STRING, "Policy. One row per published version."),
    ("version", INT64, "Version, rising."),
    ("run_id", STRING, "Run."),
    ("checkpoint_uri", STRING, "Where the safetensors file lies."),
    ("sha256", STRING, "Hex digest of that file."),
    ("metadata", STRING, "JSON: model configuration and anything else that the publisher said."),
    *_LOG_POSITION,
    *_STREAM,
)

CONSUMPTION = _schema(
    ("run_id", STRING, "Run. One row per phase of a training step."),
    ("learner_id", STRING, "Learner."),
    ("train_step", INT64, "Step."),
    ("phase", STRING, "consumed (before the step) or trained (after it)."),
    ("policy_id", STRING, "Policy being trained."),
    ("policy_version", INT64, "Version being updated."),
    ("trajectory_ids", STRINGS, "Rows of the batch, in order."),
    ("row_sha256s", STRINGS, "Their digests, in the same order."),
    ("advantages", pa.list_(FLOAT64), "Their advantages, in the same order."),
    ("masked", STRING, "JSON map of rows that gave no gradient to the reason."),
    ("baseline_members", STRING, "JSON map of groups to the rows that made their baseline."),
    ("table_versions", STRING, "JSON map of tables to the Delta versions read; a hint."),
    ("statistics", STRING, "JSON: loss and statistics, for phase trained."),
    *_LOG_POSITION,
    *_STREAM,
)

ANNOTATIONS = _schema(
    ("kind", STRING, "Kind of the annotation, or group_closed, lease_granted."),
    ("trajectory_id", STRING, "Trajectory that it is about, or null."),
    ("attempt", INT32, "Attempt that it is about, or null."),
    ("run_id", STRING, "Run."),
    ("author", STRING, "Who."),
    ("reason", STRING, "Why."),
    ("subject", STRING, "What else it is about: a group, a task."),
    ("value", STRING, "JSON: content."),
    *_LOG_POSITION,
    *_STREAM,
)

QUALITY = _schema(
    ("pipeline", STRING, "Pipeline that made the commit."),
    ("table", STRING, "Table that was checked."),
    ("rule", STRING, "Rule."),
    ("expectation", STRING, "Great Expectations type."),
    ("success", BOOL, "Whether every row held."),
    ("num_checked", INT64, "Rows looked at."),
    ("num_unexpected", INT64, "Rows that broke the rule."),
    ("log_id", STRING, "Log of the epoch."),
    ("ranges", STRING, "JSON: offsets [start, end) per partition of the epoch."),
    ("checked_ns", INT64, "When."),
)

EPOCHS = _schema(
    ("pipeline", STRING, "ingest, verify, project or compact."),
    ("log_id", STRING, "Log."),
    ("ranges", STRING, "JSON: offsets [start, end) per partition."),
    ("num_records", INT64, "Log records in the ranges."),
    ("num_bytes", INT64, "Their bytes."),
    ("accepted", INT64, "Records that came to be in tables (project)."),
    ("quarantined", INT64, "Records that quarantine rows cover (project)."),
    ("duplicates", INT64, "Records whose identity was there before (project)."),
    ("open_delta", INT64, "Change in records that wait for their trajectory to settle (project)."),
    ("num_rows", STRING, "JSON map of tables to rows written."),
    ("duration_ms", FLOAT64, "Duration of the epoch."),
    ("note", STRING, "A decision that somebody took, such as an accepted gap."),
    ("committed_ns", INT64, "When."),
)

TABLES: dict[str, pa.Schema] = {
    "events": EVENTS,
    "trajectories": TRAJECTORIES,
    "steps": STEPS,
    "scores": SCORES,
    "quarantine": QUARANTINE,
    "policies": POLICIES,
    "consumption": CONSUMPTION,
    "annotations": ANNOTATIONS,
    "quality": QUALITY,
    "epochs": EPOCHS,
}
"""Every table by name."""

PROJECTIONS = ("quarantine", "annotations", "policies", "consumption", "scores", "steps", "trajectories")
"""Tables owned by project, in commit order: who sees a trajectory finds its steps."""

PROJECT_TABLES = (*PROJECTIONS[:-1], "quality", "epochs", PROJECTIONS[-1])
"""All that one epoch of project commits, in order."""

SORT_KEYS: dict[str, tuple[str, ...]] = {
    "events": ("trajectory_id", "partition", "offset"),
    "trajectories": ("partition", "offset"),
    "steps": ("partition", "offset", "trajectory_id", "step_idx"),
    "scores": ("partition", "offset"),
    "quarantine": ("partition", "offset", "scope", "attempt"),
    "policies": ("partition", "offset"),
    "consumption": ("partition", "offset"),
    "annotations": ("partition", "offset"),
}
"""Order of rows within a file; also the canonical order of content hashes (with log_id before it)."""
