"""Rows of the projections, made from decoded events. Pure; columns are described in `schemas.tables`."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pyarrow as pa

from pipelines.machine import LogEvent, Settled
from schemas.events import (
    Action,
    Annotation,
    Body,
    Consumed,
    GroupClosed,
    LeaseGranted,
    ModelCall,
    Observation,
    PolicyPublished,
    Reward,
    Score,
    StepTrained,
    TrajectoryFinished,
    TrajectoryStarted,
    VerificationAbandoned,
)

Row = dict[str, Any]


class Columns:
    """Rows gathered column by column, so that Arrow gets whole lists."""

    def __init__(self, schema: pa.Schema, extra: Iterable[pa.Field] = ()) -> None:
        self.schema = pa.schema([*schema, *extra])
        self._lists: dict[str, list[Any]] = {name: [] for name in self.schema.names}

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row; what it doesn't name is null."""
        get = row.get
        for name, values in self._lists.items():
            values.append(get(name))

    def __len__(self) -> int:
        return len(next(iter(self._lists.values())))

    def table(self) -> pa.Table:
        """Take the rows out, as Arrow; column by column, so that they are not held twice."""
        arrays = []
        for field in self.schema:
            arrays.append(pa.array(self._lists[field.name], type=field.type))
            self._lists[field.name] = []
        return pa.Table.from_arrays(arrays, schema=self.schema)


def to_json(value: Any) -> str | None:
    """JSON text, null for null. Deterministic: keys keep the order in which they were recorded."""
    return None if value is None else msgspec.json.encode(value).decode()


def position(event: LogEvent) -> Row:
    """Columns that name a stream's event."""
    envelope = event.envelope
    return {
        "offset": event.offset,
        "run_id": envelope.run_id,
        "trajectory_id": envelope.trajectory_id,
        "attempt": envelope.attempt,
        "stream": envelope.stream,
        "seq": envelope.seq,
        "producer_id": envelope.producer_id,
        "ts_ns": envelope.ts_ns,
    }


def stream_row(event: LogEvent) -> tuple[str, Row]:
    """(table, row) of an event that makes a row by itself."""
    table, content = _CONTENT[type(event.body)](event.body)
    return table, {**position(event), **content}


def score_columns(body: Score) -> Row:
    """Columns of `scores` that a score's body fills."""
    row = {name: getattr(body, name) for name in body.__struct_fields__}
    row["evidence"] = to_json(body.evidence)
    return row


def _score(body: Score) -> tuple[str, Row]:
    return "scores", score_columns(body)


def _abandoned(body: VerificationAbandoned) -> tuple[str, Row]:
    return "scores", {
        "verifier_id": body.verifier_id,
        "verifier_version": body.verifier_version,
        "outcome": "abandoned",
        "reason": f"{body.reason} ({body.tries} tries)",
    }


def _annotation(body: Annotation) -> tuple[str, Row]:
    return "annotations", {
        "kind": body.kind,
        "author": body.author,
        "reason": body.reason,
        "subject": body.subject,
        "value": to_json(body.value),
    }


def _group_closed(body: GroupClosed) -> tuple[str, Row]:
    value = to_json({"given_up": body.given_up})
    return "annotations", {"kind": "group_closed", "subject": body.group_id, "reason": body.reason, "value": value}


def _lease(body: LeaseGranted) -> tuple[str, Row]:
    value = to_json({"expires_ns": body.expires_ns})
    return "annotations", {"kind": "lease_granted", "author": body.holder, "subject": body.task_key, "value": value}


def _policy(body: PolicyPublished) -> tuple[str, Row]:
    return "policies", {
        "policy_id": body.policy_id,
        "version": body.version,
        "checkpoint_uri": body.checkpoint_uri,
        "sha256": body.sha256,
        "metadata": to_json(body.metadata),
    }


def _consumed(body: Consumed) -> tuple[str, Row]:
    return "consumption", {
        "phase": "consumed",
        "learner_id": body.learner_id,
        "train_step": body.train_step,
        "policy_id": body.policy_id,
        "policy_version": body.policy_version,
        "trajectory_ids": body.trajectory_ids,
        "row_sha256s": body.row_sha256s,
        "advantages": body.advantages,
        "masked": to_json(body.masked),
        "baseline_members": to_json(body.baseline_members),
        "table_versions": to_json(body.table_versions),
    }


def _trained(body: StepTrained) -> tuple[str, Row]:
    return "consumption", {
        "phase": "trained",
        "learner_id": body.learner_id,
        "train_step": body.train_step,
        "policy_id": body.policy_id,
        "policy_version": body.policy_version,
        "statistics": to_json(body.statistics),
    }


_CONTENT: dict[type[Body], Any] = {
    Score: _score,
    VerificationAbandoned: _abandoned,
    Annotation: _annotation,
    GroupClosed: _group_closed,
    LeaseGranted: _lease,
    PolicyPublished: _policy,
    Consumed: _consumed,
    StepTrained: _trained,
}


class Step:
    """One model call with what followed it."""

    def __init__(self, event: LogEvent, body: ModelCall) -> None:
        self.event = event
        self.call = body
        self.actions: list[Row] = []
        self.observations: list[Row] = []
        self.rewards: list[float] = []
        self.env_ms: list[float] = []
        self.blobs: dict[str, str] = {}

    def take(self, event: LogEvent) -> None:
        """Add an action, an observation or a reward."""
        body = event.body
        if isinstance(body, Action):
            self.actions.append(_view(event, body))
        elif isinstance(body, Observation):
            self.observations.append(_view(event, body))
            if body.duration_ms is not None:
                self.env_ms.append(body.duration_ms)
        elif isinstance(body, Reward):
            self.rewards.append(body.value)


def _view(event: LogEvent, body: Body) -> Row:
    view: Row = msgspec.to_builtins(body)
    del view["type"]
    return {"seq": event.envelope.seq, **view}


def split_steps(events: list[LogEvent]) -> list[Step]:
    """Group an attempt's events by model call: by `call_id` where they name one, else by order.

    What comes before the first call belongs to the first step: it is that call's context.
    """
    steps: list[Step] = []
    by_call: dict[str, Step] = {}
    early: list[LogEvent] = []
    for event in events:
        body = event.body
        if isinstance(body, ModelCall):
            step = Step(event, body)
            steps.append(step)
            by_call.setdefault(body.call_id, step)
        elif isinstance(body, Action | Observation | Reward):
            owner = by_call.get(body.call_id or "") or (steps[-1] if steps else None)
            if owner is None:
                early.append(event)
            else:
                owner.take(event)
    if steps and early:
        _prepend(steps[0], early)
    return steps


def _prepend(step: Step, early: list[LogEvent]) -> None:
    rest = step.actions, step.observations, step.rewards
    step.actions, step.observations, step.rewards = [], [], []
    for event in early:
        step.take(event)
    step.actions += rest[0]
    step.observations += rest[1]
    step.rewards += rest[2]


def reference_violations(events: list[LogEvent]) -> list[tuple[str, str]]:
    """Rule `bad_reference`: ids that name nothing, or two things."""
    calls: set[str] = set()
    actions: set[str] = set()
    for event in events:
        body = event.body
        parent = getattr(body, "parent_call_id", None)
        if isinstance(body, ModelCall):
            if body.call_id in calls:
                return [("bad_reference", f"two model calls are named {body.call_id!r}")]
            if parent is not None and parent not in calls:
                return [("bad_reference", f"call {body.call_id!r} has the unknown parent {parent!r}")]
            calls.add(body.call_id)
        elif isinstance(body, Action | Observation | Reward):
            if body.call_id is not None and body.call_id not in calls:
                return [("bad_reference", f"seq {event.envelope.seq} names the unknown call {body.call_id!r}")]
            if isinstance(body, Action):
                actions.add(body.action_id)
            elif isinstance(body, Observation) and body.action_id is not None and body.action_id not in actions:
                return [("bad_reference", f"seq {event.envelope.seq} names the unknown action {body.action_id!r}")]
    return []


def prefix_checks(steps: list[Step]) -> list[bool | None]:
    """Per step, whether `prefix_sha256` is the digest of the full prompt; null where it can't be known.

    Digests are carried from parent to child, so the cost is that of the deltas (slime#2288, verl#6854).
    """
    contexts: dict[str, Any] = {}
    checks: list[bool | None] = []
    for step in steps:
        call = step.call
        parent = hashlib.sha256() if call.parent_call_id is None else contexts.get(call.parent_call_id)
        if parent is None or call.prompt_token_ids is None:
            checks.append(None)
            continue
        context = parent.copy()
        context.update(little_endian(call.prompt_token_ids))
        checks.append(None if call.prefix_sha256 is None else context.hexdigest() == call.prefix_sha256)
        if call.response_token_ids is not None:
            context.update(little_endian(call.response_token_ids))
            contexts[call.call_id] = context
    return checks


def little_endian(token_ids: list[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    values = array("i", token_ids)
    if values.itemsize != 4 or array("H", [1]).tobytes() != b"\x01\x00":  # pragma: no cover - other machines
        return b"".join(token.to_bytes(4, "little", signed=True) for token in token_ids)
    return values.tobytes()


def loss_mask(call: ModelCall) -> tuple[list[bool] | None, bool | None]:
    """(mask, whether the run lengths fit the response); null where either is absent."""
    runs, response = call.sampled_run_lengths, call.response_token_ids
    if runs is None or response is None:
        return None, None
    if sum(runs) != len(response) or min(runs, default=0) < 0:
        return None, False
    mask: list[bool] = []
    for index, length in enumerate(runs):
        mask += [index % 2 == 0] * length
    return mask, True


def step_not_trainable(call: ModelCall, mask: list[bool] | None) -> str | None:
    """What is absent for training on a call; None where nothing is."""
    absent = {
        "not_policy": call.role != "policy" or not call.trainable,
        "no_prompt_ids": call.prompt_token_ids is None,
        "no_response_ids": call.response_token_ids is None,
        "no_logprobs": call.logprobs is None,
        "no_loss_mask": mask is None,
        "no_policy_version": call.policy_version_runs is None,
    }
    return next((reason for reason, is_absent in absent.items() if is_absent), None)


def unknown_after(steps: list[Step]) -> set[str]:
    """Calls after which the context isn't known in full: its children's prompts are deltas to nothing known."""
    unknown: set[str] = set()
    for call in (step.call for step in steps):
        if call.prompt_token_ids is None or call.response_token_ids is None or call.parent_call_id in unknown:
            unknown.add(call.call_id)
    return unknown


def step_rows(steps: list[Step], common: Row) -> list[Row]:
    """Rows of `steps`, with `_check_` columns for the gate.

    Args:
        steps: The attempt's steps in order.
        common: Columns that all of them share.
    """
    index_of = {step.call.call_id: index for index, step in enumerate(steps)}
    unknown = unknown_after(steps)
    rows = []
    for index, (step, prefix_ok) in enumerate(zip(steps, prefix_checks(steps), strict=True)):
        call = step.call
        mask, mask_ok = loss_mask(call)
        reason = step_not_trainable(call, mask)
        if reason is None and call.parent_call_id in unknown:
            reason = "no_prompt_ids"
        versions = [version for version, _ in call.policy_version_runs or ()]
        row = {
            **common,
            "step_idx": index,
            "seq": step.event.envelope.seq,
            "call_id": call.call_id,
            "parent_call_id": call.parent_call_id,
            "parent_step_idx": index_of.get(call.parent_call_id or ""),
            "agent": call.agent,
            "role": call.role,
            "trainable": reason is None,
            "prompt_token_ids": call.prompt_token_ids,
            "response_token_ids": call.response_token_ids,
            "loss_mask": mask,
            "logprobs": call.logprobs,
            "logprobs_mode": call.logprobs_mode,
            "prefix_sha256": call.prefix_sha256,
            "temperature": call.temperature,
            "top_p": call.top_p,
            "top_k": call.top_k,
            "policy_id": call.policy_id,
            "policy_version_runs": None if call.policy_version_runs is None else _runs(call.policy_version_runs),
            "min_policy_version": min(versions, default=None),
            "finish_reason": call.finish_reason,
            "messages": to_json(call.messages),
            "actions": to_json(step.actions or None),
            "observations": to_json(step.observations or None),
            "step_reward": sum(step.rewards) if step.rewards else None,
            "usage": to_json(call.usage),
            "image_refs": to_json(call.image_refs),
            "blob_refs": to_json(_blob_refs(step) or None),
            "llm_ms": call.llm_ms,
            "env_ms": sum(step.env_ms) if step.env_ms else None,
            "_not_trainable_reason": reason,
            "_check_prefix_ok": prefix_ok,
            "_check_mask_ok": mask_ok,
        }
        rows.append(row)
    return rows


def _runs(runs: list[tuple[int, int]]) -> list[Row]:
    return [{"version": version, "length": length} for version, length in runs]


def _blob_refs(step: Step) -> dict[str, str]:
    refs = {}
    if step.call.messages_ref is not None:
        refs["messages"] = step.call.messages_ref.sha256
    if step.call.routed_experts is not None:
        refs["routed_experts"] = step.call.routed_experts.sha256
    for view in (*step.actions, *step.observations):
        for name in ("arguments_ref", "content_ref"):
            if view.get(name) is not None:
                refs[f"{view['seq']}.{name.removesuffix('_ref')}"] = view[name]["sha256"]
    return refs


def trajectory_row(settled: Settled, steps: list[Row], policy_ids: set[str | None]) -> Row:
    """The row of `trajectories` for a settled attempt whose stream is whole.

    Args:
        settled: The decision.
        steps: Rows from `step_rows`.
        policy_ids: Policies of the steps whose role is policy.
    """
    started = settled.events[0].body
    finished_event = next(event for event in reversed(settled.events) if isinstance(event.body, TrajectoryFinished))
    finished = finished_event.body
    assert isinstance(started, TrajectoryStarted)
    assert isinstance(finished, TrajectoryFinished)
    envelope = settled.events[0].envelope
    reason = _not_trainable(settled, finished, steps)
    rewards = [step["step_reward"] for step in steps if step["step_reward"] is not None]
    return {
        **_task_columns(started),
        **_policy_columns(steps, policy_ids),
        **_reward_columns(settled),
        "trajectory_id": envelope.trajectory_id,
        "run_id": envelope.run_id,
        "attempt": settled.attempt,
        "offset": settled.at.offset,
        "first_offset": settled.first_offset,
        "num_events": settled.num_events,
        "chain_sha256": settled.events[-1].envelope_sha256.hex(),
        "status": finished.status,
        "terminated": finished.terminated,
        "truncated": finished.truncated,
        "stop_reason": finished.stop_reason,
        "failure_class": finished.failure_class,
        "error": finished.error,
        "final_observation_ids": finished.final_observation_ids,
        "workspace_sha256": finished.workspace_ref.sha256 if finished.workspace_ref else None,
        "env_return": sum(rewards) if rewards else None,
        "num_steps": len(steps),
        "trainable": reason is None,
        "not_trainable_reason": reason,
        "started_ns": envelope.ts_ns or None,
        "finished_ns": finished_event.envelope.ts_ns or None,
    }


def _task_columns(started: TrajectoryStarted) -> Row:
    row = {name: getattr(started, name) for name in started.__struct_fields__}
    row["tool_definitions"] = to_json(started.tool_definitions)
    return row


def _policy_columns(steps: list[Row], policy_ids: set[str | None]) -> Row:
    # A user simulator or a judge has versions and sampled tokens of its own, which say nothing about the policy's.
    of_policy = [step for step in steps if step["role"] == "policy"]
    versions = [run["version"] for step in of_policy for run in step["policy_version_runs"] or ()]
    responses = [step["response_token_ids"] for step in steps]
    masks = [step["loss_mask"] for step in of_policy]
    known = bool(steps) and all(response is not None for response in responses)
    masked = bool(of_policy) and all(mask is not None for mask in masks)
    return {
        "policy_id": next(iter(policy_ids)) if len(policy_ids) == 1 else None,
        "min_policy_version": min(versions, default=None),
        "max_policy_version": max(versions, default=None),
        "num_tokens": sum(map(len, responses)) if known else None,
        "num_sampled_tokens": sum(map(sum, masks)) if masked else None,
    }


def _reward_columns(settled: Settled) -> Row:
    verdict = settled.verdict
    if not isinstance(verdict, Score):
        return {"reward": None, "reward_outcome": None, "reward_source": None}
    return {
        "reward": verdict.score,
        "reward_outcome": verdict.outcome,
        "reward_source": f"{verdict.verifier_id}@{verdict.verifier_version}",
    }


def _not_trainable(settled: Settled, finished: TrajectoryFinished, steps: list[Row]) -> str | None:
    if finished.status in ("aborted", "failed"):
        return f"status_{finished.status}"
    if not isinstance(settled.verdict, Score) or settled.verdict.score is None:
        return "no_reward"
    policy_steps = [step for step in steps if step["role"] == "policy"]
    if not policy_steps:
        return "no_policy_calls"
    trainable = [step for step in policy_steps if step["trainable"]]
    if not trainable:
        return str(policy_steps[0]["_not_trainable_reason"])
    return None if any(any(step["loss_mask"]) for step in trainable) else "no_sampled_tokens"
