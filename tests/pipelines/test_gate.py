"""The gate as a part: Great Expectations' failures, sizes, shapes of tables, and what it says and loads."""

import pickle
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from pipelines.gate import Gate, GateError, rules_for
from pipelines.gate.frame import check_frame
from pipelines.gate.suites import row_suite_for, suite_for
from schemas.tables import TABLES

NAN = float("nan")
TABLES_WITH_RULES = [name for name in TABLES if rules_for(name)]


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


def rows_of(name: str, **columns: list[Any]) -> pa.Table:
    num_rows = len(next(iter(columns.values())))
    schema = TABLES[name]
    arrays = [pa.array(columns.get(field.name, [None] * num_rows), field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


@pytest.mark.parametrize("table", TABLES_WITH_RULES)
def test_a_suite_has_one_expectation_per_rule_and_pickles(table: str):
    suite = pickle.loads(pickle.dumps(suite_for(table)))
    assert [expectation.meta["rule"] for expectation in suite.expectations] == [rule.name for rule in rules_for(table)]
    assert suite.name == table


def test_an_expectation_that_raises_stops_the_gate(gate: Gate):
    frame = check_frame("steps", rows_of("steps", temperature=[1.0])).drop(columns=["sampling_parameters"])
    for suite in (suite_for("steps"), row_suite_for("steps", rules_for("steps"))):
        with pytest.raises(GateError, match="raised"):
            gate._validate(suite, frame, rules_for("steps"))


def test_an_expectation_without_a_result_stops_the_gate(gate: Gate):
    frame = check_frame("steps", rows_of("steps", temperature=[1.0]))
    with pytest.raises(GateError, match=r"no result for .*hash_format"):
        gate._validate(row_suite_for("steps", rules_for("steps")[:3]), frame, rules_for("steps"))


def test_no_rows_and_tables_without_rules_need_no_check(gate: Gate):
    for table, schema in TABLES.items():
        result = gate.check(table, schema.empty_table())
        assert (result.violations, result.quality) == ([], [])
    assert gate.check("annotations", rows_of("annotations", kind=["tag"])).quality == []


def test_every_broken_row_is_listed_however_many_there_are(gate: Gate):
    temperatures = [-1.0 if index % 3 else 1.0 for index in range(3000)]
    result = gate.check("steps", rows_of("steps", temperature=temperatures))

    assert [violation.row_index for violation in result.violations] == [i for i in range(3000) if i % 3]
    [failed] = [found for found in result.quality if not found.success]
    assert (failed.rule, failed.num_checked, failed.num_unexpected) == ("sampling_parameters", 3000, 2000)


def test_violations_come_by_row_and_then_by_precedence(gate: Gate):
    table = rows_of(
        "steps",
        temperature=[-1.0, 1.0, -1.0],
        logprobs=[[-1.0], [NAN], [NAN]],
        response_token_ids=[[1], [1, 2], [1]],
    )
    assert [(found.row_index, found.rule) for found in gate.check("steps", table).violations] == [
        (0, "sampling_parameters"),
        (1, "logprobs_length"),
        (1, "logprobs_finite"),
        (2, "logprobs_finite"),
        (2, "sampling_parameters"),
    ]


def test_chunks_and_slices_are_read_like_one_table(gate: Gate):
    whole = rows_of(
        "steps",
        response_token_ids=[[1, 2], None, [3], [], [4, 5, -6], [7]],
        logprobs=[[-1.0, NAN], [-1.0], [NAN], [], [-1.0, -1.0, -1.0], [-1.0, -1.0]],
    )
    expected = gate.check("steps", whole).violations
    assert {found.row_index for found in expected} == {0, 2, 4, 5}
    chunked = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 3), whole.slice(4, 0), whole.slice(4)])

    assert gate.check("steps", chunked).violations == expected
    assert [found.row_index + 2 for found in gate.check("steps", whole.slice(2)).violations] == [2, 4, 5]


FLOATS = st.sampled_from([-1.0, 0.0, 1e-7, 1e-3, NAN, float("inf"), float("-inf")])
OPTIONAL_TOKENS = st.none() | st.lists(st.integers(-2, 5), max_size=4)
STEPS = st.fixed_dictionaries(
    {
        "prompt_token_ids": OPTIONAL_TOKENS,
        "response_token_ids": OPTIONAL_TOKENS,
        "logprobs": st.none() | st.lists(FLOATS, max_size=4),
        "loss_mask": st.none() | st.lists(st.booleans(), max_size=4),
        "policy_version_runs": st.none()
        | st.lists(
            st.fixed_dictionaries({"version": st.integers(-1, 2), "length": st.integers(-1, 3)}),
            max_size=3,
        ),
    }
)


def lengths_apart(left: list[Any] | None, right: list[Any] | None) -> int:
    return 0 if left is None or right is None else abs(len(left) - len(right))


def counted_by_hand(row: dict[str, Any]) -> dict[str, int]:
    """The list rules of a step, row by row: what the vectorised frame must say."""
    response, logprobs, runs = row["response_token_ids"], row["logprobs"], row["policy_version_runs"]
    tokens = [*(row["prompt_token_ids"] or []), *(response or [])]
    total = sum(run["length"] for run in runs or [])
    return {
        "token_ids_valid": sum(token < 0 for token in tokens),
        "logprobs_length": lengths_apart(logprobs, response),
        "logprobs_finite": sum(not np.isfinite(value) for value in logprobs or []),
        "logprobs_positive": sum(1e-6 < value < float("inf") for value in logprobs or []),
        "loss_mask_length": lengths_apart(row["loss_mask"], response),
        "version_runs_length": sum(run["length"] <= 0 for run in runs or [])
        + (abs(total - len(response)) if runs is not None and response is not None else 0),
        "policy_version_valid": sum(run["version"] < 0 for run in runs or []),
    }


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=6), st.integers(0, 5))
def test_the_frame_counts_what_a_loop_over_rows_counts(rows: list[dict[str, Any]], cut: int):
    table = pa.Table.from_pylist(rows, schema=TABLES["steps"])
    cut = min(cut, len(rows) - 1)
    frame = check_frame("steps", table.slice(cut))

    for index, row in enumerate(rows[cut:]):
        expected = counted_by_hand(row)
        assert {rule: int(frame.at[index, rule]) for rule in expected} == expected


TESTS = st.none() | st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["pass", "fail"]), TESTS, TESTS, TESTS), min_size=1, max_size=6))
def test_tests_are_compared_as_sets_within_their_own_row(rows: list[tuple[str, Any, Any, Any]]):
    outcomes, expected, seen, passed = (list(column) for column in zip(*rows, strict=True))
    table = rows_of("scores", outcome=outcomes, expected_tests=expected, seen_tests=seen, passed_tests=passed)
    counts = check_frame("scores", table)["tests_consistency"].tolist()

    for count, (outcome, wanted, reported, good) in zip(counts, rows, strict=True):
        missing = sum(test not in good for test in wanted) if outcome == "pass" and None not in (wanted, good) else 0
        unseen = sum(test not in reported for test in good) if None not in (reported, good) else 0
        assert count == missing + unseen


ALONE = """
import socket, sys
import pipelines.gate
heavy = {"great_expectations", "pandas"} & set(sys.modules)
assert not heavy, heavy
def refuse(*args, **kwargs):
    raise AssertionError("the gate went to the network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
import pyarrow as pa
from schemas.tables import TABLES
table = pa.Table.from_pylist([{"temperature": -1.0}], schema=TABLES["steps"])
assert [found.rule for found in pipelines.gate.Gate().check("steps", table).violations] == ["sampling_parameters"]
"""


def test_the_gate_loads_late_prints_nothing_and_stays_off_the_network():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
