"""Check frames: per candidate row and content rule, how many times the row breaks the rule. Pure and vectorised.

A frame has one int64 column per rule of its table, named after the rule, 0 where the row holds. Counts instead of
flags, so that a reason can say how many. Nulls count as 0: what is absent breaks nothing.

Candidate tables may hold more columns than their schema. `_check_prefix_ok` and `_check_mask_ok` (bool, null where
it can't be known) are results that only the assembler can compute; they are never written.

List columns are looked at through their flat values and offsets; no Python loop runs over rows.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.gate.columns import Counts, Lists, Mask, Rows, dense, flags
from pipelines.gate.rules import rules_for
from schemas import events

if TYPE_CHECKING:
    import pandas as pd

LOGPROB_TOLERANCE = 1e-6
"""How far above 0 a log-probability may lie: rounding of a log-softmax in single precision."""

_HEX_SHA256 = r"\A[0-9a-f]{64}\z"


def _not_finite(rows: Rows, *names: str) -> Counts:
    total = np.zeros(len(rows), np.int64)
    for name in names:
        values, present = rows.floats(name)
        total += present & ~np.isfinite(values)
    return total


def _token_ids(*names: str) -> Callable[[Rows], Counts]:
    def count(rows: Rows) -> Counts:
        total = np.zeros(len(rows), np.int64)
        for name in names:
            tokens = rows.lists(name)
            total += tokens.count(dense(tokens.values, -1) < 0)
        return total

    return count


def _logprobs_length(rows: Rows) -> Counts:
    logprobs, response = rows.lists("logprobs"), rows.lists("response_token_ids")
    both = logprobs.valid & response.valid
    return np.where(both, np.abs(logprobs.lengths - response.lengths), 0)


def _logprobs_finite(rows: Rows) -> Counts:
    logprobs = rows.lists("logprobs")
    return logprobs.count(~np.isfinite(dense(logprobs.values, np.nan)))


def _logprobs_positive(rows: Rows) -> Counts:
    logprobs = rows.lists("logprobs")
    values = dense(logprobs.values, np.nan)
    return logprobs.count((values > LOGPROB_TOLERANCE) & np.isfinite(values))


def _loss_mask_length(rows: Rows) -> Counts:
    mask, response = rows.lists("loss_mask"), rows.lists("response_token_ids")
    both = mask.valid & response.valid
    counts = np.where(both, np.abs(mask.lengths - response.lengths), 0)
    return counts + rows.false("_check_mask_ok") if rows.has("_check_mask_ok") else counts


def _version_runs(rows: Rows) -> tuple[Lists, Counts, Counts]:
    runs = rows.lists("policy_version_runs")
    version = dense(runs.values.field("version"), -1).astype(np.int64)
    return runs, version, dense(runs.values.field("length"), 0).astype(np.int64)


def _version_runs_length(rows: Rows) -> Counts:
    runs, _, length = _version_runs(rows)
    response = rows.lists("response_token_ids")
    both = runs.valid & response.valid
    return runs.count(length <= 0) + np.where(both, np.abs(runs.sums(length) - response.lengths), 0)


def _step_policy_version(rows: Rows) -> Counts:
    runs, version, _ = _version_runs(rows)
    return runs.count(version < 0)


def _trajectory_policy_version(rows: Rows) -> Counts:
    oldest, has_oldest = rows.integers("min_policy_version")
    newest, has_newest = rows.integers("max_policy_version")
    swapped = has_oldest & has_newest & (oldest > newest)
    return np.asarray((oldest < 0).astype(np.int64) + (newest < 0) + swapped)


def _prefix_mismatch(rows: Rows) -> Counts:
    if not rows.has("_check_prefix_ok"):
        return np.zeros(len(rows), np.int64)
    return rows.false("_check_prefix_ok").astype(np.int64)


def _sampling_parameters(rows: Rows) -> Counts:
    temperature, _ = rows.floats("temperature")
    top_p, _ = rows.floats("top_p")
    top_k, _ = rows.integers("top_k")
    bad_temperature = ~(np.isfinite(temperature) & (temperature >= 0))
    bad_top_p = ~((top_p >= 0) & (top_p <= 1))
    return bad_temperature.astype(np.int64) + bad_top_p + (top_k < -1)


def _durations(*names: str) -> Callable[[Rows], Counts]:
    def count(rows: Rows) -> Counts:
        total = np.zeros(len(rows), np.int64)
        for name in names:
            values, _ = rows.floats(name)
            total += ~(np.isfinite(values) & (values >= 0))
        return total

    return count


def _finite(*names: str) -> Callable[[Rows], Counts]:
    return lambda rows: _not_finite(rows, *names)


def _outcome_score(outcome: str, score: str) -> Callable[[Rows], Counts]:
    def count(rows: Rows) -> Counts:
        scored = rows.present(score)
        ungraded = rows.among(outcome, ("infra_error", "abandoned"))
        graded = rows.among(outcome, ("pass", "fail"))
        return np.asarray((ungraded & scored) | (graded & ~scored), dtype=np.int64)

    return count


def _missing(rows: Rows, wanted: str, there: str) -> Counts:
    """Per row, how many strings of one list column the other lacks; 0 where either is null."""
    left, right = rows.lists(wanted), rows.lists(there)
    codes = pa.concat_arrays([left.values, right.values]).dictionary_encode().indices
    code = dense(codes, -1).astype(np.int64)
    width = np.int64(code.max(initial=0) + 2)
    row = np.arange(len(rows), dtype=np.int64)
    left_keys = np.repeat(row, left.lengths) * width + code[: len(left.values)]
    right_keys = np.repeat(row, right.lengths) * width + code[len(left.values) :]
    return np.where(left.valid & right.valid, left.count(~np.isin(left_keys, right_keys)), 0)


def _tests_consistency(rows: Rows) -> Counts:
    not_passed = np.where(rows.among("outcome", ("pass",)), _missing(rows, "expected_tests", "passed_tests"), 0)
    return not_passed + _missing(rows, "passed_tests", "seen_tests")


def _truncated_not_completed(rows: Rows) -> Counts:
    truncated, terminated = rows.true("truncated"), rows.true("terminated")
    completed, says_truncated = rows.among("status", ("completed",)), rows.among("status", ("truncated",))
    broken = (truncated & completed).astype(np.int64) + (says_truncated & rows.false("truncated"))
    return np.asarray(broken + (truncated & terminated))


def _known_values(**known: tuple[str, ...]) -> Callable[[Rows], Counts]:
    def count(rows: Rows) -> Counts:
        total = np.zeros(len(rows), np.int64)
        for name, values in known.items():
            total += rows.present(name) & ~rows.among(name, values)
        return total

    return count


def _group_index(rows: Rows) -> Counts:
    size, has_size = rows.integers("group_size")
    index, has_index = rows.integers("sample_idx")
    outside = (index < 0) | (has_index & has_size & (index >= size))
    return (has_size & (size < 1)).astype(np.int64) + outside


def _hash_format(*names: str) -> Callable[[Rows], Counts]:
    def count(rows: Rows) -> Counts:
        total = np.zeros(len(rows), np.int64)
        for name in names:
            total += rows.present(name) & ~_is_sha256(rows.strings(name))
        return total

    return count


def _is_sha256(values: Any) -> Mask:
    return flags(pc.match_substring_regex(values, _HEX_SHA256))


def _batch_hashes(rows: Rows) -> Counts:
    hashes = rows.lists("row_sha256s")
    return hashes.count(~_is_sha256(hashes.values))


def _batch_aligned(rows: Rows) -> Counts:
    ids, hashes, advantages = (rows.lists(name) for name in ("trajectory_ids", "row_sha256s", "advantages"))
    apart = np.abs(ids.lengths - hashes.lengths) + np.abs(ids.lengths - advantages.lengths)
    return np.where(ids.valid & hashes.valid & advantages.valid, apart, 0)


def _advantages_finite(rows: Rows) -> Counts:
    advantages = rows.lists("advantages")
    return advantages.count(~np.isfinite(dense(advantages.values, np.nan)))


def _negative(*names: str) -> Callable[[Rows], Counts]:
    def count(rows: Rows) -> Counts:
        total = np.zeros(len(rows), np.int64)
        for name in names:
            total += rows.integers(name)[0] < 0
        return total

    return count


_OUTCOMES = get_args(events.Outcome)

CHECKS: dict[tuple[str, str], Callable[[Rows], Counts]] = {
    ("steps", "token_ids_valid"): _token_ids("prompt_token_ids", "response_token_ids"),
    ("steps", "logprobs_length"): _logprobs_length,
    ("steps", "logprobs_finite"): _logprobs_finite,
    ("steps", "logprobs_positive"): _logprobs_positive,
    ("steps", "loss_mask_length"): _loss_mask_length,
    ("steps", "version_runs_length"): _version_runs_length,
    ("steps", "policy_version_valid"): _step_policy_version,
    ("steps", "prefix_mismatch"): _prefix_mismatch,
    ("steps", "sampling_parameters"): _sampling_parameters,
    ("steps", "reward_finite"): _finite("step_reward"),
    ("steps", "known_values"): _known_values(
        split=get_args(events.Split), role=get_args(events.Role), finish_reason=get_args(events.FinishReason)
    ),
    ("steps", "durations_valid"): _durations("llm_ms", "env_ms"),
    ("steps", "hash_format"): _hash_format("prefix_sha256"),
    ("trajectories", "token_ids_valid"): _token_ids("final_observation_ids"),
    ("trajectories", "policy_version_valid"): _trajectory_policy_version,
    ("trajectories", "reward_finite"): _finite("reward", "env_return"),
    ("trajectories", "outcome_score_consistency"): _outcome_score("reward_outcome", "reward"),
    ("trajectories", "truncated_not_completed"): _truncated_not_completed,
    ("trajectories", "known_values"): _known_values(
        status=get_args(events.Status),
        split=get_args(events.Split),
        failure_class=get_args(events.FailureClass),
        reward_outcome=(*_OUTCOMES, "abandoned"),
    ),
    ("trajectories", "group_index"): _group_index,
    ("trajectories", "hash_format"): _hash_format(
        "task_sha256", "tokenizer_sha256", "chat_template_sha256", "workspace_sha256"
    ),
    ("scores", "score_finite"): _finite("score"),
    ("scores", "outcome_score_consistency"): _outcome_score("outcome", "score"),
    ("scores", "tests_consistency"): _tests_consistency,
    ("scores", "known_values"): _known_values(outcome=(*_OUTCOMES, "abandoned")),
    ("scores", "durations_valid"): _durations("duration_ms"),
    ("scores", "hash_format"): _hash_format("tests_sha256"),
    ("policies", "hash_format"): _hash_format("sha256"),
    ("policies", "version_valid"): _negative("version"),
    ("consumption", "known_values"): _known_values(phase=("consumed", "trained")),
    ("consumption", "hash_format"): _batch_hashes,
    ("consumption", "batch_aligned"): _batch_aligned,
    ("consumption", "advantages_finite"): _advantages_finite,
    ("consumption", "version_valid"): _negative("policy_version", "train_step"),
}
"""(table, rule) → counter of violations per row."""


def check_frame(table_name: str, candidates: pa.Table) -> "pd.DataFrame":
    """Violations per row and rule.

    Args:
        table_name: Table that the rows are meant for.
        candidates: Rows with at least the table's columns that are checked; `_check_` columns are optional.

    Returns:
        One int64 column per rule of the table, in precedence order; index = row number from 0.
    """
    import pandas as pd  # noqa: PLC0415 - heavy, and the command line's help doesn't need it

    rows = Rows(candidates)
    counts = {rule.name: CHECKS[table_name, rule.name](rows) for rule in rules_for(table_name)}
    return pd.DataFrame(counts, index=pd.RangeIndex(len(rows)), dtype=np.int64)
