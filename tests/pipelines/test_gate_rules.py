"""Every content rule is broken by a row, is held by the row beside it, and is never broken by absence."""

from typing import Any

import pyarrow as pa
import pytest

from pipelines.gate import RULES, Gate, by_precedence, rules_for
from schemas.tables import TABLES

NAN, INF = float("nan"), float("inf")
HASH = "0123456789abcdef" * 4
EXTRA = {
    "steps": [pa.field("_check_prefix_ok", pa.bool_()), pa.field("_check_mask_ok", pa.bool_())],
}

GOOD: dict[str, dict[str, Any]] = {
    "steps": {
        "trajectory_id": "t", "split": "train", "role": "policy", "finish_reason": "stop",
        "prompt_token_ids": [1, 2], "response_token_ids": [3, 4, 0], "loss_mask": [True, True, False],
        "logprobs": [-0.5, 0.0, -700.0], "temperature": 0.0, "top_p": 1.0, "top_k": -1,
        "policy_version_runs": [{"version": 0, "length": 2}, {"version": 3, "length": 1}], "min_policy_version": 0,
        "prefix_sha256": HASH, "step_reward": -1.0, "llm_ms": 0.0, "env_ms": 3.5,
        "_check_prefix_ok": True, "_check_mask_ok": True,
    },
    "trajectories": {
        "trajectory_id": "t", "status": "completed", "split": "eval", "terminated": True, "truncated": False,
        "reward": 0.25, "env_return": -3.0, "reward_outcome": "fail", "group_size": 4, "sample_idx": 3,
        "min_policy_version": 1, "max_policy_version": 1, "task_sha256": HASH, "final_observation_ids": [0, 7],
    },
    "scores": {
        "verifier_id": "v", "outcome": "pass", "score": 1.0, "duration_ms": 1.0, "tests_sha256": HASH,
        "expected_tests": ["a", "b"], "seen_tests": ["c", "b", "a"], "passed_tests": ["b", "a"],
    },
    "policies": {"policy_id": "p", "version": 0, "sha256": HASH},
    "consumption": {
        "phase": "consumed", "learner_id": "l", "train_step": 0, "policy_version": 0, "trajectory_ids": ["t", "u"],
        "row_sha256s": [HASH, HASH], "advantages": [0.5, -0.5],
    },
}  # fmt: skip

BROKEN: list[tuple[str, str, dict[str, Any]]] = [
    ("steps", "token_ids_valid", {"prompt_token_ids": [1, -1]}),
    ("steps", "token_ids_valid", {"response_token_ids": [3, None, 5]}),
    ("steps", "logprobs_length", {"logprobs": [-0.5, -0.5]}),
    ("steps", "logprobs_length", {"logprobs": []}),
    ("steps", "logprobs_finite", {"logprobs": [-0.5, NAN, -0.5]}),
    ("steps", "logprobs_finite", {"logprobs": [-INF, -0.5, -0.5]}),
    ("steps", "logprobs_finite", {"logprobs": [-0.5, None, -0.5]}),
    ("steps", "logprobs_positive", {"logprobs": [-0.5, -0.5, 1e-5]}),
    ("steps", "loss_mask_length", {"loss_mask": [True, True]}),
    ("steps", "loss_mask_length", {"loss_mask": None, "_check_mask_ok": False}),
    ("steps", "version_runs_length", {"policy_version_runs": [{"version": 1, "length": 2}]}),
    (
        "steps",
        "version_runs_length",
        {"policy_version_runs": [{"version": 1, "length": 4}, {"version": 2, "length": -1}]},
    ),
    (
        "steps",
        "version_runs_length",
        {"policy_version_runs": [{"version": 1, "length": 3}, {"version": 2, "length": 0}]},
    ),
    ("steps", "policy_version_valid", {"policy_version_runs": [{"version": -1, "length": 3}]}),
    ("steps", "prefix_mismatch", {"_check_prefix_ok": False}),
    ("steps", "sampling_parameters", {"temperature": -0.1}),
    ("steps", "sampling_parameters", {"temperature": NAN}),
    ("steps", "sampling_parameters", {"temperature": INF}),
    ("steps", "sampling_parameters", {"top_p": 1.5}),
    ("steps", "sampling_parameters", {"top_p": NAN}),
    ("steps", "sampling_parameters", {"top_k": -2}),
    ("steps", "reward_finite", {"step_reward": NAN}),
    ("steps", "known_values", {"role": "narrator"}),
    ("steps", "known_values", {"finish_reason": "tired"}),
    ("steps", "durations_valid", {"llm_ms": -1.0}),
    ("steps", "durations_valid", {"env_ms": INF}),
    ("steps", "hash_format", {"prefix_sha256": HASH.upper()}),
    ("steps", "hash_format", {"prefix_sha256": HASH + "\n"}),
    ("trajectories", "token_ids_valid", {"final_observation_ids": [-5]}),
    ("trajectories", "policy_version_valid", {"min_policy_version": -1}),
    ("trajectories", "policy_version_valid", {"min_policy_version": 2}),
    ("trajectories", "reward_finite", {"reward": NAN}),
    ("trajectories", "reward_finite", {"env_return": -INF}),
    ("trajectories", "outcome_score_consistency", {"reward_outcome": "infra_error"}),
    ("trajectories", "outcome_score_consistency", {"reward_outcome": "pass", "reward": None}),
    ("trajectories", "truncated_not_completed", {"truncated": True, "terminated": False}),
    ("trajectories", "truncated_not_completed", {"status": "truncated", "terminated": False}),
    ("trajectories", "truncated_not_completed", {"status": "truncated", "truncated": True}),
    ("trajectories", "known_values", {"status": "lost"}),
    ("trajectories", "known_values", {"split": ""}),
    ("trajectories", "group_index", {"sample_idx": 4}),
    ("trajectories", "group_index", {"sample_idx": -1}),
    ("trajectories", "group_index", {"sample_idx": None, "group_size": 0}),
    ("trajectories", "hash_format", {"tokenizer_sha256": "abc"}),
    ("scores", "score_finite", {"score": NAN}),
    ("scores", "score_finite", {"score": INF}),
    ("scores", "outcome_score_consistency", {"outcome": "infra_error", "score": 0.0}),
    ("scores", "outcome_score_consistency", {"outcome": "abandoned", "score": 0.0}),
    ("scores", "outcome_score_consistency", {"score": None}),
    ("scores", "outcome_score_consistency", {"outcome": "fail", "score": None}),
    ("scores", "tests_consistency", {"passed_tests": ["a"]}),
    ("scores", "tests_consistency", {"passed_tests": []}),
    ("scores", "tests_consistency", {"seen_tests": ["a"]}),
    ("scores", "known_values", {"outcome": "maybe"}),
    ("scores", "durations_valid", {"duration_ms": NAN}),
    ("scores", "hash_format", {"tests_sha256": "0" * 63}),
    ("policies", "hash_format", {"sha256": "sha256:" + HASH}),
    ("policies", "version_valid", {"version": -1}),
    ("consumption", "known_values", {"phase": "eaten"}),
    ("consumption", "hash_format", {"row_sha256s": [HASH, ""]}),
    ("consumption", "batch_aligned", {"advantages": [0.5]}),
    ("consumption", "batch_aligned", {"trajectory_ids": ["t", "u", "v"]}),
    ("consumption", "advantages_finite", {"advantages": [0.5, NAN]}),
    ("consumption", "version_valid", {"policy_version": -1}),
    ("consumption", "version_valid", {"train_step": -1}),
]

HELD: list[tuple[str, dict[str, Any]]] = [
    ("steps", {"logprobs": None}),
    ("steps", {"response_token_ids": None}),
    ("steps", {"logprobs": [1e-7, -0.5, -0.5]}),
    ("steps", {"response_token_ids": [], "logprobs": [], "loss_mask": [], "policy_version_runs": []}),
    ("steps", {"response_token_ids": [2**31 - 1] * 3, "prompt_token_ids": []}),
    ("trajectories", {"status": "truncated", "truncated": True, "terminated": False}),
    ("trajectories", {"status": "truncated", "truncated": None, "terminated": None}),
    ("trajectories", {"status": "failed", "terminated": False}),
    ("trajectories", {"reward": None, "reward_outcome": None}),
    ("trajectories", {"reward": None, "reward_outcome": "timeout"}),
    ("trajectories", {"reward": 0.0, "reward_outcome": "timeout"}),
    ("trajectories", {"group_size": None}),
    ("scores", {"outcome": "infra_error", "score": None, "passed_tests": None}),
    ("scores", {"outcome": "fail", "score": 0.5, "passed_tests": ["a"]}),
    ("scores", {"expected_tests": []}),
    ("scores", {"seen_tests": None}),
    ("consumption", {"trajectory_ids": [], "row_sha256s": [], "advantages": []}),
]


def table_of(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    schema = pa.schema([*TABLES[name], *EXTRA.get(name, [])])
    return pa.Table.from_pylist(rows, schema=schema)


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}"[:90])
def test_a_broken_row_is_named_and_its_neighbours_are_not(gate: Gate, case: tuple[str, str, dict[str, Any]]):
    table, rule, change = case
    good = GOOD[table]
    result = gate.check(table, table_of(table, [good, {**good, **change}, good]))

    assert (1, rule) in [(violation.row_index, violation.rule) for violation in result.violations]
    assert {violation.row_index for violation in result.violations} == {1}
    quality = {found.rule: found for found in result.quality}
    assert not quality[rule].success
    assert (quality[rule].num_checked, quality[rule].num_unexpected) == (3, 1)


@pytest.mark.parametrize("case", HELD, ids=lambda case: f"{case[0]}-{case[1]}"[:90])
def test_what_is_absent_or_odd_but_possible_breaks_nothing(gate: Gate, case: tuple[str, dict[str, Any]]):
    table, change = case
    assert gate.check(table, table_of(table, [{**GOOD[table], **change}])).violations == []


@pytest.mark.parametrize("table", TABLES)
def test_rows_of_nulls_break_nothing(gate: Gate, table: str):
    result = gate.check(table, table_of(table, [{}, {}]))
    assert result.violations == []
    assert [found.rule for found in result.quality] == [rule.name for rule in rules_for(table)]
    assert all(found.success for found in result.quality)


def test_every_content_rule_of_every_table_has_a_broken_row_here():
    wanted = {(table, rule.name) for rule in RULES.values() for table in rule.tables}
    assert {(table, rule) for table, rule, _ in BROKEN} == wanted


def test_rules_are_documented_and_named_after_themselves():
    for name, rule in RULES.items():
        assert rule.name == name
        assert rule.doc.endswith(".")
        assert rule.origin
        assert rule.is_content == bool(rule.tables)
        for table in rule.tables:
            assert table in TABLES
        assert set(rule.shown) <= {column for table in rule.tables for column in TABLES[table].names}


def test_precedence_puts_the_stream_before_the_content():
    assert by_precedence(["known_values", "gap", "logprobs_finite", "gap"]) == [
        "gap",
        "logprobs_finite",
        "known_values",
    ]
    with pytest.raises(KeyError):
        by_precedence(["no_such_rule"])


def test_a_reason_says_what_how_often_and_which_values(gate: Gate):
    rows = [{**GOOD["steps"], "temperature": -0.5, "top_p": 7.0}, {**GOOD["steps"], "logprobs": [NAN, INF, -0.5]}]
    reasons = {found.rule: found.reason for found in gate.check("steps", table_of("steps", rows)).violations}

    assert "(2x, temperature=-0.5, top_p=7.0, top_k=-1)" in reasons["sampling_parameters"]
    assert reasons["logprobs_finite"] == "A log-probability is NaN or infinite (2x)"
