"""Assembly in memory: every record gets one outcome, whatever the cuts; and what becomes of it is the right thing."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings

from pipelines.assemble import RECORD_COLUMNS, Candidates, assemble
from pipelines.gate.frame import check_frame
from pipelines.gate.gate import Violation
from pipelines.sift import Sifted, sift
from schemas.events import Annotation, ModelCall, PolicyPublished, TrajectoryFinished
from schemas.tables import PROJECTIONS

Project = Callable[..., Sifted]


def check(name: str, table: pa.Table) -> list[Violation]:
    """The gate's rules without Great Expectations, which finds the same (tests of the gate) and takes longer."""
    frame = check_frame(name, table)
    return [
        Violation(row, rule, "broken") for row in range(table.num_rows) for rule in frame.columns if frame[rule][row]
    ]


@pytest.fixture(scope="module")
def project(kit: Any) -> Project:
    """Projects values of one partition, in ranges that end at the cuts."""

    def run(values: Sequence[bytes], cuts: Sequence[int] = ()) -> Sifted:
        events = kit.table_of_events(values)
        edges = sorted({0, len(values), *cuts})
        parts = []
        for start, end in itertools.pairwise(edges):
            candidates = Candidates("log")
            offsets = events.column("offset")
            inside = pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end))
            records = events.filter(inside).select(RECORD_COLUMNS)
            assemble(candidates, 0, records.to_batches(), kit.MemoryHistory(events, start))
            parts.append(sift(candidates, check))
        tables = {name: pa.concat_tables([part.tables[name] for part in parts]) for name in PROJECTIONS}
        sums = {
            name: sum(getattr(part, name) for part in parts) for name in Sifted.__struct_fields__ if name != "tables"
        }
        return Sifted(tables, **sums)

    return run


def rows(sifted: Sifted, table: str) -> list[dict[str, Any]]:
    return sifted.tables[table].to_pylist()


def rules(sifted: Sifted) -> list[tuple[str, str]]:
    return [(row["rule"], row["scope"]) for row in rows(sifted, "quarantine")]


def values_of(tape: Any) -> list[bytes]:
    return [record.value for record in tape.records]


@settings(max_examples=12, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_any_cuts_give_the_same_rows(project: Project, kit: Any, data: st.DataObject, seed: int):
    values = [record.value for record in kit.eventful(num_whole=4, seed=seed)]
    cuts = data.draw(st.lists(st.integers(1, len(values) - 1), max_size=6))
    whole, cut = project(values), project(values, cuts)
    for name in PROJECTIONS:
        assert kit.comparable(rows(cut, name)) == kit.comparable(rows(whole, name)), name
    assert (cut.accepted, cut.quarantined, cut.duplicates) == (whole.accepted, whole.quarantined, whole.duplicates)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_damage_is_accounted_for_whatever_the_cuts(project: Project, kit: Any, data: st.DataObject):
    values = [record.value for record in kit.eventful(num_whole=3, seed=1)]
    for index in data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=25)):
        value = bytearray(values[index] or b"x")
        if data.draw(st.booleans()):
            value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del value[data.draw(st.integers(0, len(value) - 1)) :]
        values[index] = bytes(value)
    cuts = data.draw(st.lists(st.integers(1, len(values) - 1), max_size=4))
    whole, cut = project(values), project(values, cuts)
    for name in PROJECTIONS:
        assert kit.comparable(rows(cut, name)) == kit.comparable(rows(whole, name)), name
    for found in (whole, cut):
        units = sum(len(rows(found, name)) for name in ("scores", "policies", "consumption", "annotations"))
        assert found.accepted == units + sum(row["num_events"] for row in rows(found, "trajectories"))
        assert found.quarantined == sum(row["num_events"] for row in rows(found, "quarantine"))
        assert found.num_records == len(values) >= found.accepted + found.quarantined + found.duplicates
    assert (cut.accepted, cut.quarantined, cut.duplicates) == (whole.accepted, whole.quarantined, whole.duplicates)


def test_every_rule_of_the_eventful_log_is_the_right_one(project: Project, kit: Any):
    found = project([record.value for record in kit.eventful()])
    by_trajectory = {row["trajectory_id"]: row for row in rows(found, "quarantine") if row["scope"] == "trajectory"}
    assert {name: row["rule"] for name, row in by_trajectory.items()} == {
        "a-unscored": "unscored_infra",
        "v-nan": "logprobs_finite",
        "v-length": "logprobs_length",
        "v-mask": "loss_mask_length",
        "v-prefix": "prefix_mismatch",
        "v-runs": "version_runs_length",
        "v-fork": "fork",
        "v-gap": "gap",
        "v-chain": "chain_broken",
        "v-reference": "bad_reference",
        "v-start": "second_start",
        "v-nostart": "no_start",
        "v-verdict": "tests_consistency",
        "v-score": "reward_finite",
    }
    attempts = {
        (r["trajectory_id"], r["attempt"], r["rule"]) for r in rows(found, "quarantine") if r["scope"] == "attempt"
    }
    assert attempts == {
        ("a-aborted", 0, "attempt_aborted"),
        ("a-dead", 0, "attempt_aborted"),
        ("a-infra", 0, "infra_failure"),
        ("a-infra", 2, "late_attempt"),
        ("a-loses", 0, "late_attempt"),
    }
    records = [(row["rule"], row["trajectory_id"]) for row in rows(found, "quarantine") if row["scope"] == "record"]
    assert Counter(records) == Counter(
        [
            *[("undecodable", None)] * 3,
            ("body_hash_mismatch", None),
            ("hash_format", None),
            ("body_hash_mismatch", "b-body"),
            ("unknown_version", None),
            ("unknown_type", "b-type"),
            ("type_mismatch", "b-mismatch"),
            ("bad_stream", "b-score"),
            ("bad_stream", "b-score"),
            ("undecodable_body", "b-bytes"),
            ("late_event", "a-aborted"),
            ("late_event", "a-dead"),
            *[("late_event", "a-infra")] * 4,
            ("late_attempt", "a-infra"),
            ("late_event", "a-waits"),
            ("score_finite", "v-score"),
            ("tests_consistency", "v-verdict"),
        ]
    )


def test_a_quarantined_verdict_rewards_nothing_in_whatever_range_it_lies(project: Project, tape: Any):
    tape.start("t")
    tape.score("t", expected_tests=["a", "b"], seen_tests=["a"], passed_tests=["a"])
    tape.finish("t")
    for cuts in ((), (2,)):
        found = project(values_of(tape), cuts)
        assert rules(found) == [("tests_consistency", "record"), ("tests_consistency", "trajectory")]
        assert rows(found, "trajectories") == rows(found, "scores") == []


def test_an_abandoned_verification_is_no_row_with_a_reward(project: Project, tape: Any):
    tape.start("t")
    tape.finish("t")
    tape.score("t", None)
    tape.abandon("t")
    found = project(values_of(tape))
    assert rules(found) == [("unscored_infra", "trajectory")]
    assert rows(found, "trajectories") == []
    assert [(row["outcome"], row["score"]) for row in rows(found, "scores")] == [
        ("infra_error", None),
        ("abandoned", None),
    ]
    assert '"reward":null' in rows(found, "quarantine")[0]["row"]


def test_without_a_scorer_the_reward_is_null_and_nothing_trains_on_it(project: Project, tape: Any):
    tape.start("t", primary_scorer=None)
    tape.turns("t")
    tape.finish("t")
    [row] = rows(project(values_of(tape)), "trajectories")
    assert (row["reward"], row["env_return"], row["trainable"], row["not_trainable_reason"]) == (
        None,
        0.5,
        False,
        "no_reward",
    )


def test_a_zero_is_a_reward(project: Project, tape: Any):
    tape.whole("t", 0.0)
    [row] = rows(project(values_of(tape)), "trajectories")
    assert (row["reward"], row["reward_outcome"], row["trainable"], row["not_trainable_reason"]) == (
        0.0,
        "fail",
        True,
        None,
    )


def test_a_whole_trajectory_has_all_its_columns(project: Project, tape: Any):
    tape.whole("t", num=2, group_id="g", group_size=4, sample_idx=1, seed=7, split="eval")
    found = project(values_of(tape))
    [row] = rows(found, "trajectories")
    assert row["reward_source"] == "env:return@1"
    assert (row["min_policy_version"], row["max_policy_version"], row["policy_id"]) == (3, 4, "p")
    assert (row["num_events"], row["num_steps"], row["num_tokens"], row["num_sampled_tokens"]) == (10, 2, 6, 4)
    assert (row["offset"], row["first_offset"], row["split"], row["group_size"]) == (10, 0, "eval", 4)
    steps = rows(found, "steps")
    assert [step["step_idx"] for step in steps] == [0, 1]
    assert [step["parent_step_idx"] for step in steps] == [None, 0]
    assert [step["loss_mask"] for step in steps] == [[True, True, False]] * 2
    assert [step["step_reward"] for step in steps] == [0.25, 0.25]
    assert [step["env_ms"] for step in steps] == [1.5, 1.5]


def test_a_call_whose_context_is_not_known_in_full_trains_nothing(project: Project, tape: Any, kit: Any):
    tape.start("t")
    tape.own("t", kit.call(0))
    tape.own("t", kit.call(1, response_token_ids=None, logprobs=None, sampled_run_lengths=None))
    tape.own("t", kit.call(2))
    tape.own("t", kit.call(3))
    tape.own("t", kit.call(0, call_id="new"))
    tape.finish("t")
    tape.score("t")
    found = project(values_of(tape))
    assert [step["trainable"] for step in rows(found, "steps")] == [True, False, False, False, True]
    assert rows(found, "trajectories")[0]["trainable"]


def test_what_a_user_simulator_samples_says_nothing_about_the_policys_versions(project: Project, tape: Any, kit: Any):
    tape.start("t")
    tape.own("t", kit.call(0, policy_version_runs=[(9, 3)]))
    tape.own("t", kit.call(1, role="user_simulator", policy_id="other", policy_version_runs=[(0, 3)]))
    tape.own("t", kit.call(2, role="judge", sampled_run_lengths=None, policy_version_runs=[(20, 3)]))
    tape.finish("t")
    tape.score("t")
    [row] = rows(project(values_of(tape)), "trajectories")
    assert (row["policy_id"], row["min_policy_version"], row["max_policy_version"]) == ("p", 9, 9)
    assert (row["num_tokens"], row["num_sampled_tokens"]) == (9, 2)


def test_an_annotation_in_a_stream_that_looks_like_an_attempts_is_kept(project: Project, tape: Any):
    tape.start("t")
    tape.add(Annotation(kind="tag", author="me"), "t/notes", "t")
    tape.add(Annotation(kind="tag", author="me"), "t/1", "t", 0)
    for cuts in ((), (1,), (1, 2)):
        found = project(values_of(tape), cuts)
        assert [row["stream"] for row in rows(found, "annotations")] == ["t/notes", "t/1"]
        assert (found.accepted, found.quarantined, found.duplicates) == (2, 0, 0)


def test_a_broken_copy_does_not_take_the_identity_of_a_good_one(project: Project, tape: Any):
    published = PolicyPublished(policy_id="p", version=1, checkpoint_uri="c", sha256="ab" * 32)
    tape.put("s", tape.make(published, "s", seq=0, body_sha256=bytes(32)))
    tape.add(published, "s", seq=0)
    tape.add(published, "s", seq=0)
    for cuts in ((), (1,), (2,), (1, 2)):
        found = project(values_of(tape), cuts)
        assert [row["offset"] for row in rows(found, "policies")] == [1]
        assert (found.accepted, found.quarantined, found.duplicates) == (1, 1, 1)


def test_two_scores_with_one_identity_are_no_fork(project: Project, tape: Any):
    tape.whole("t", 1.0)
    tape.score("t", 0.0)
    second = tape.records.pop()
    tape.records += [second, tape.records[-1]]
    tape.add(TrajectoryFinished(status="completed"), "t/0", "t", 0, seq=9)
    found = project(values_of(tape))
    assert found.duplicates == 1
    assert [row["score"] for row in rows(found, "scores")] == [1.0, 0.0]


def test_the_first_rule_by_precedence_names_the_row(project: Project, tape: Any, kit: Any):
    tape.start("t", group_size=-1)
    tape.own("t", kit.call(0, logprobs=[float("nan")], temperature=-1.0, llm_ms=-1.0))
    tape.finish("t")
    tape.score("t")
    [row] = rows(project(values_of(tape)), "quarantine")
    assert row["rule"] == "logprobs_length"
    assert row["other_rules"] == ["logprobs_finite", "sampling_parameters", "group_index", "durations_valid"]


def test_a_bad_body_comes_before_a_bad_stream(project: Project, tape: Any):
    tape.own("t", ModelCall(call_id="c"), type="no_such_type")
    tape.add(ModelCall(call_id="c"), "elsewhere", "t", 0, body_sha256=bytes(32))
    tape.add(ModelCall(call_id="c"), "elsewhere", "t", 0)
    assert rules(project(values_of(tape))) == [
        (rule, "record") for rule in ("unknown_type", "body_hash_mismatch", "bad_stream")
    ]


@pytest.mark.parametrize("digits", [1, 19, 40, 5000])
def test_huge_integers_of_json_are_kept_or_quarantined(project: Project, kit: Any, digits: int):
    tape = kit.Tape(as_json=True)
    number = "1" * digits
    body = f'{{"type":"annotation","kind":"k","author":"a","value":{{"n":{number}}}}}'
    tape.add(body.encode(), "s", type="annotation")
    found = project(values_of(tape))
    kept = [row["value"] for row in rows(found, "annotations")]
    assert (kept, rules(found)) == (
        ([f'{{"n":{number}}}'], []) if digits < 20 else ([], [("undecodable_body", "record")])
    )
