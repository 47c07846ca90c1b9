"""From rows of `trajectories` and `steps` to batches of complete groups: the pure half of the learner's input.

What a learner may train on: rows of split `train` that are trainable, of its own run and policy, sampled at
temperature 1, and not older than the staleness bound. A row that may not is dropped and counted by its reason; a group
whose rewards are all equal is kept, consumed and masked, since it is no failure but has nothing to teach.

`row_sha256` pins exactly what a row contributes: token ids, mask, sampler log-probabilities and reward.

A group is complete when every planned member came, was dropped, or was given up (`group_closed`). Waiting groups are
bounded: those whose rows got too old are dropped as `stale`, and beyond `max_waiting_groups` the oldest goes as
`incomplete_group`.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from learner.grpo import group_advantages

TRAJECTORY_COLUMNS = (
    "trajectory_id",
    "run_id",
    "split",
    "trainable",
    "not_trainable_reason",
    "group_id",
    "group_size",
    "sample_idx",
    "reward",
    "policy_id",
    "min_policy_version",
)
"""What is read of `trajectories`."""
STEP_COLUMNS = (
    "trajectory_id",
    "step_idx",
    "call_id",
    "parent_call_id",
    "trainable",
    "prompt_token_ids",
    "response_token_ids",
    "loss_mask",
    "logprobs",
    "temperature",
)
"""What is read of `steps`."""
ANNOTATION_COLUMNS = ("kind", "run_id", "subject", "value")
"""What is read of `annotations`."""
MAX_WAITING_GROUPS = 4096


class Segment(Struct, frozen=True):
    """One unbroken token sequence of a trajectory; all three lists have its length."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """True where the policy sampled the token."""
    logprobs: tuple[float, ...]
    """Of the sampler; 0 outside the mask."""


class TrainingRow(Struct, frozen=True, kw_only=True):
    """A trajectory as it is trained on."""

    trajectory_id: str
    group_id: str
    group_size: int
    reward: float
    min_policy_version: int
    segments: tuple[Segment, ...]
    """One, or one more after each rewritten context."""

    @property
    def row_sha256(self) -> str:
        """Hex digest over ids (int32), mask (bytes), logprobs and reward (float64), little-endian, lengths first."""
        digest = hashlib.sha256(struct.pack("<dq", self.reward, len(self.segments)))
        for segment in self.segments:
            digest.update(struct.pack("<q", len(segment.ids)))
            digest.update(np.asarray(segment.ids, "<i4").tobytes())
            digest.update(np.asarray(segment.mask, "u1").tobytes())
            digest.update(np.asarray(segment.logprobs, "<f8").tobytes())
        return digest.hexdigest()


class Batch(Struct, frozen=True, kw_only=True):
    """What one training step is about to see, in order; the four lists have equal length."""

    rows: list[TrainingRow]
    row_sha256s: list[str]
    advantages: list[float]
    """0 where the row is masked."""
    masked: dict[str, str]
    """trajectory_id → why it gives no gradient."""
    baseline_members: dict[str, list[str]]
    """group_id → trajectories whose rewards made its baseline."""


class _Group(Struct):
    size: int
    rows: dict[int, TrainingRow]
    """By sample_idx."""
    gone: set[int]
    """Members that came and were dropped, or will never come."""

    @property
    def is_complete(self) -> bool:
        return len(self.rows.keys() | self.gone) >= self.size


class GroupBuilder:
    """Collects rows into groups, and complete groups into batches.

    Args:
        run_id: only this run's rows are taken.
        policy_id: only rows that this policy alone sampled.
        max_staleness: see `LearnerConfig.max_staleness`.
        consumed: trajectories that were consumed before; they are passed over.
        max_waiting_groups: bound on groups in memory.
    """

    def __init__(
        self,
        *,
        run_id: str,
        policy_id: str,
        max_staleness: int,
        consumed: Iterable[str] = (),
        max_waiting_groups: int = MAX_WAITING_GROUPS,
    ) -> None:
        self._run_id, self._policy_id, self._max_staleness = run_id, policy_id, max_staleness
        self._consumed = set(consumed)
        self._max_waiting = max_waiting_groups
        self._groups: dict[str, _Group] = {}
        self._waiting: set[str] = set()
        self._given_up: dict[str, set[int]] = {}
        self._dropped: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Groups in memory, complete or not."""
        return len(self._groups)

    def pop_dropped(self) -> dict[str, int]:
        """Rows dropped since the last call, by reason."""
        dropped = dict(self._dropped)
        self._dropped.clear()
        return dropped

    def wanted(self, trajectories: pa.Table) -> list[dict[str, Any]]:
        """Rows of this run's training split that are new here; the rest is none of this learner's business."""
        return [
            row
            for row in trajectories.select(TRAJECTORY_COLUMNS).to_pylist()
            if row["run_id"] == self._run_id
            and row["split"] == "train"
            and row["trajectory_id"] not in self._consumed
            and row["trajectory_id"] not in self._waiting  # a rebuilt table delivers its rows again
        ]

    def add(self, trajectories: Iterable[Mapping[str, Any]], steps: pa.Table) -> None:
        """Take rows that `wanted` gave, with their steps; those that can't be trained on are dropped and counted."""
        by_trajectory = _steps_by_trajectory(steps)
        for row in trajectories:
            if row["group_id"] is None or row["group_size"] is None or row["sample_idx"] is None:
                self._drop("no_group")
                continue
            group = self._group(row["group_id"], row["group_size"])
            if row["sample_idx"] in group.rows:
                self._drop("second_member")  # the first one stays, so that nothing changes what a batch may hold
                continue
            training_row = self._training_row(row, by_trajectory.get(row["trajectory_id"], []))
            if isinstance(training_row, str):
                self._drop(training_row)
                group.gone.add(row["sample_idx"])
            else:
                group.rows[row["sample_idx"]] = training_row
                self._waiting.add(training_row.trajectory_id)
        self._bound_waiting()

    def close_groups(self, annotations: pa.Table) -> None:
        """Take `group_closed` rows: members that will never come. They may come before the others do."""
        for row in annotations.select(ANNOTATION_COLUMNS).to_pylist():
            if row["kind"] != "group_closed" or row["run_id"] != self._run_id:
                continue
            given_up = set(json.loads(row["value"] or "{}").get("given_up", []))
            if row["subject"] in self._groups:
                self._groups[row["subject"]].gone |= given_up
            else:
                self._given_up.setdefault(row["subject"], set()).update(given_up)
                while len(self._given_up) > self._max_waiting:
                    del self._given_up[next(iter(self._given_up))]

    def take(self, num_groups: int, policy_version: int) -> Batch | None:
        """The next batch of complete groups, oldest first; None while there are too few.

        Args:
            num_groups: groups in a batch.
            policy_version: the version about to be updated, from which staleness counts.
        """
        self._drop_stale(policy_version)
        complete = [group_id for group_id, group in self._groups.items() if group.is_complete and group.rows]
        if len(complete) < num_groups:
            return None
        chosen = {group_id: self._groups.pop(group_id).rows for group_id in complete[:num_groups]}
        batch = make_batch({group_id: [rows[index] for index in sorted(rows)] for group_id, rows in chosen.items()})
        ids = {row.trajectory_id for row in batch.rows}
        self._consumed |= ids
        self._waiting -= ids
        return batch

    def _group(self, group_id: str, size: int) -> _Group:
        if group_id not in self._groups:
            self._groups[group_id] = _Group(size, {}, self._given_up.pop(group_id, set()))
        return self._groups[group_id]

    def _drop(self, reason: str, rows: Collection[TrainingRow] | None = None) -> None:
        """Count one row, or these, as dropped."""
        self._dropped[reason] += 1 if rows is None else len(rows)
        self._waiting.difference_update(row.trajectory_id for row in rows or ())

    def _training_row(self, row: Mapping[str, Any], steps: list[dict[str, Any]]) -> TrainingRow | str:
        """The row, or the reason why it can't be trained on."""
        refusal = _refusal(row, steps, self._policy_id)
        segments = join_steps(steps)
        if refusal is not None or segments is None:
            return refusal or "branched_calls"
        if not any(any(segment.mask) for segment in segments):
            return "no_sampled_tokens"
        return TrainingRow(
            trajectory_id=row["trajectory_id"],
            group_id=row["group_id"],
            group_size=row["group_size"],
            reward=row["reward"],
            min_policy_version=row["min_policy_version"],
            segments=segments,
        )

    def _drop_stale(self, policy_version: int) -> None:
        oldest = policy_version - self._max_staleness
        for group_id, group in list(self._groups.items()):
            stale = {index: row for index, row in group.rows.items() if row.min_policy_version < oldest}
            if stale:
                self._drop("stale", stale.values())
                group.rows = {index: row for index, row in group.rows.items() if index not in stale}
                group.gone.update(stale)
            if not group.rows and (stale or group.is_complete):
                del self._groups[group_id]

    def _bound_waiting(self) -> None:
        while len(self._groups) > self._max_waiting:
            oldest = self._groups.pop(next(iter(self._groups)))
            self._drop("incomplete_group", oldest.rows.values())


def _refusal(row: Mapping[str, Any], steps: Iterable[Mapping[str, Any]], policy_id: str) -> str | None:
    """Why a row may not be trained on, by what it says of itself."""
    if not row["trainable"]:
        return f"not_trainable:{row['not_trainable_reason']}"
    if row["reward"] is None:
        return "no_reward"
    if row["policy_id"] != policy_id or row["min_policy_version"] is None:
        return "other_policy"
    if any(step["trainable"] and step["temperature"] not in (None, 1.0) for step in steps):
        return "temperature"
    return None


def make_batch(groups: Mapping[str, list[TrainingRow]]) -> Batch:
    """Rows of complete groups in order, with advantages against their own group's baseline."""
    rows: list[TrainingRow] = []
    advantages: list[float] = []
    masked: dict[str, str] = {}
    for members in groups.values():
        of_group = group_advantages([row.reward for row in members])
        rows.extend(members)
        advantages.extend(of_group or [0.0] * len(members))
        if of_group is None:
            masked.update((row.trajectory_id, "zero_variance") for row in members)
    return Batch(
        rows=rows,
        row_sha256s=[row.row_sha256 for row in rows],
        advantages=advantages,
        masked=masked,
        baseline_members={group_id: [row.trajectory_id for row in members] for group_id, members in groups.items()},
    )


def join_steps(steps: Iterable[Mapping[str, Any]]) -> tuple[Segment, ...] | None:
    """Token sequences of a trajectory's calls: deltas and responses joined; a call without a parent begins a new one.

    Args:
        steps: rows of `steps` of one trajectory, in order of `step_idx`.

    Returns:
        None where two calls go on from the same one, or one goes on from another than the last of its sequence.
    """
    segments: list[tuple[list[int], list[bool], list[float]]] = []
    last_call: str | None = None
    for step in steps:
        if step["parent_call_id"] is None:
            segments.append(([], [], []))
        elif step["parent_call_id"] != last_call:
            return None
        last_call = step["call_id"]
        prompt, response = step["prompt_token_ids"] or [], step["response_token_ids"] or []
        # What isn't trainable may have log-probabilities without ids.
        is_trained = step["trainable"] and step["loss_mask"]
        mask = step["loss_mask"] if is_trained else [False] * len(response)
        logprobs = step["logprobs"] if is_trained else [0.0] * len(response)
        ids, masks, sampled = segments[-1]
        ids.extend((*prompt, *response))
        masks.extend((*[False] * len(prompt), *mask))
        sampled.extend((*[0.0] * len(prompt), *(p if m else 0.0 for p, m in zip(logprobs, mask, strict=True))))
    return tuple(Segment(tuple(ids), tuple(mask), tuple(logprobs)) for ids, mask, logprobs in segments)


def _steps_by_trajectory(steps: pa.Table) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for step in _in_order(steps):
        found.setdefault(step["trajectory_id"], []).append(step)
    return found


def _in_order(steps: pa.Table) -> Iterator[dict[str, Any]]:
    keys = [("trajectory_id", "ascending"), ("step_idx", "ascending")]
    yield from steps.select(STEP_COLUMNS).sort_by(keys).to_pylist()
