"""Project on real tables: the same rows whatever the epochs, and pure parts of its rows one by one."""

import hashlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from lake.table import Progress
from pipelines import assemble
from pipelines.machine import LogEvent
from pipelines.project import commit_epoch, is_begun, plan_epoch, project_epoch, shards_of, write_shard
from pipelines.rows import (
    little_endian,
    loss_mask,
    prefix_checks,
    reference_violations,
    split_steps,
    step_not_trainable,
)
from schemas.config.pipelines import PipelineConfig
from schemas.events import (
    Action,
    Body,
    ContextRewritten,
    Envelope,
    ModelCall,
    Observation,
    Reward,
    TrajectoryFinished,
    TrajectoryStarted,
)
from schemas.tables import PROJECT_TABLES, PROJECTIONS

MakeHome = Callable[..., Any]


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(20, 290), ingest_size=st.integers(20, 290))
def test_epochs_of_any_size_give_the_same_content(
    eventful_home: Any, tmp_path_factory: pytest.TempPathFactory, size: int, ingest_size: int
):
    home = eventful_home.copy(tmp_path_factory.mktemp("cut") / "home")
    home.run(only=["ingest"], max_epoch_records=ingest_size)
    home.run(only=["project", "compact"], max_epoch_records=size, compact_min_files=3)
    assert home.hashes() == eventful_home.hashes()
    assert home.reconciliation() == eventful_home.reconciliation()


def test_epochs_interleaved_with_ingestion_give_the_same_content(eventful_home: Any, tmp_path: Any):
    home = eventful_home.copy(tmp_path / "home")
    home.run(max_epoch_records=75)
    assert home.hashes() == eventful_home.hashes()
    assert home.projections() == eventful_home.projections()
    epochs = home.rows("epochs")
    assert sum(row["open_delta"] for row in epochs if row["pipeline"] == "project") == home.reconciliation().open


def test_an_epoch_written_piece_by_piece_has_the_same_content(
    eventful_home: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(assemble, "FULL_BYTES", 5_000)
    monkeypatch.setattr(assemble, "_LOOKUP_BYTES", 1)
    home = eventful_home.copy(tmp_path / "home")
    home.run(max_epoch_records=75)
    num_epochs = sum(row["pipeline"] == "project" for row in home.rows("epochs"))
    home.lake.table("steps").refresh()
    assert len(home.lake.table("steps").data_files()) > num_epochs
    assert home.hashes() == eventful_home.hashes()
    assert home.reconciliation() == eventful_home.reconciliation()


def test_quality_and_epochs_say_what_each_commit_saw(eventful_home: Any):
    [epoch] = [row for row in eventful_home.rows("epochs") if row["pipeline"] == "project"]
    found = eventful_home.reconciliation()
    sides = (epoch["accepted"], epoch["quarantined"], epoch["duplicates"], epoch["open_delta"])
    assert sides == (found.accepted, found.quarantined, found.duplicates, found.open)
    failed = {row["rule"] for row in eventful_home.rows("quality") if not row["success"]}
    assert failed >= {"logprobs_finite", "logprobs_length", "prefix_mismatch", "tests_consistency", "score_finite"}


def test_a_reward_is_never_made_up(eventful_home: Any):
    scored = {(row["trajectory_id"], row["score"]) for row in eventful_home.rows("scores") if row["score"] is not None}
    for row in eventful_home.rows("trajectories"):
        if row["reward"] is None:
            assert (row["reward_outcome"], row["trainable"]) == (None, False)
        else:
            assert (row["trajectory_id"], row["reward"]) in scored
    assert {row["trajectory_id"] for row in eventful_home.rows("trajectories") if row["reward"] is None} == {
        "a-imported"
    }


def test_every_step_belongs_to_a_trajectory_that_is_there(eventful_home: Any):
    trajectories = {row["trajectory_id"]: row for row in eventful_home.rows("trajectories")}
    steps: dict[str, int] = {}
    for row in eventful_home.rows("steps"):
        steps[row["trajectory_id"]] = steps.get(row["trajectory_id"], 0) + 1
    assert steps == {name: row["num_steps"] for name, row in trajectories.items() if row["num_steps"]}


@pytest.mark.parametrize("num_done", range(1, len(PROJECT_TABLES)))
def test_an_epoch_that_was_begun_is_finished_before_another_is_planned(new_home: MakeHome, tape: Any, num_done: int):
    tape.whole("t0")
    home = new_home(tape.records, partitions=1)
    home.run(only=["ingest"])
    lake, log_id, end = home.lake, home.log.log_id, len(tape.records)
    progress = Progress("project", log_id, {0: (0, end)})
    [shard] = write_shard(lake, log_id, {0: (0, end)})
    for name in PROJECT_TABLES[:num_done]:
        lake.table(name).refresh()
        lake.table(name).commit(shard.files.get(name, []), progress=progress)
    tape.whole("t1")
    home.log.append(tape.records[end:])
    home.run(only=["ingest"])
    assert is_begun(lake, log_id, [0])
    assert plan_epoch(lake, log_id, [0], PipelineConfig()) == {0: (0, end)}
    project_epoch(home.urls.lake, log_id, [0], PipelineConfig())
    assert not is_begun(lake, log_id, [0])
    assert [row["trajectory_id"] for row in home.rows("trajectories")] == ["t0"]
    assert len(home.rows("scores")) == 1
    project_epoch(home.urls.lake, log_id, [0], PipelineConfig())
    assert [row["trajectory_id"] for row in home.rows("trajectories")] == ["t0", "t1"]


def test_a_slower_committer_finds_the_epoch_done_and_leaves_no_file(new_home: MakeHome, tape: Any):
    tape.whole("t")
    home = new_home(tape.records, partitions=1)
    home.run(only=["ingest"])
    ranges = {0: (0, len(tape.records))}
    progress = Progress("project", home.log.log_id, ranges)
    fast, slow = (write_shard(home.lake, home.log.log_id, ranges) for _ in range(2))
    commit_epoch(home.lake, progress, fast, 0.0)
    hashes = home.hashes()
    assert commit_epoch(home.lake, progress, slow, 0.0) == -1
    assert home.hashes() == hashes
    for name in PROJECTIONS:
        live = {file.path for file in home.lake.table(name).data_files()}
        assert {path.name for path in (home.folder / "lake" / name).glob("*.parquet")} == live


def test_small_epochs_are_one_shard_and_large_ones_one_per_partition():
    assert [shard.ranges for shard in shards_of({0: (0, 5), 1: (3, 3), 2: (1, 4)}, 8)] == [{0: (0, 5), 2: (1, 4)}]
    assert [shard.ranges for shard in shards_of({0: (0, 5), 1: (3, 3), 2: (1, 5)}, 8)] == [{0: (0, 5)}, {2: (1, 5)}]


# ---- rows ----


def events_of(*bodies: Body) -> list[LogEvent]:
    """Events of one attempt, by seq."""
    envelopes = [
        Envelope(
            event_id="e",
            run_id="r",
            trajectory_id="t",
            attempt=0,
            stream="t/0",
            seq=seq,
            producer_id="p",
            ts_ns=seq,
            prev_sha256=None,
            body_sha256=bytes(32),
            type=str(type(body).__struct_config__.tag),
        )
        for seq, body in enumerate(bodies)
    ]
    return [LogEvent(e.seq, e, bytes(32), body) for e, body in zip(envelopes, bodies, strict=True)]


RUNS = st.lists(st.integers(0, 6), max_size=8)


@given(RUNS)
def test_a_mask_alternates_and_is_as_long_as_the_response(runs: list[int]):
    mask, fits = loss_mask(ModelCall(call_id="c", response_token_ids=[0] * sum(runs), sampled_run_lengths=runs))
    assert fits
    assert mask is not None
    assert len(mask) == sum(runs)
    assert sum(mask) == sum(runs[::2])
    position = 0
    for index, length in enumerate(runs):
        assert mask[position : position + length] == [index % 2 == 0] * length
        position += length


@pytest.mark.parametrize(
    ("runs", "response", "expected"),
    [
        (None, [1, 2], (None, None)),
        ([2], None, (None, None)),
        ([1], [1, 2], (None, False)),
        ([3, -1], [1, 2], (None, False)),
        ([], [1], (None, False)),
        ([], [], ([], True)),
        ([0, 2], [1, 2], ([False, False], True)),
    ],
)
def test_a_mask_is_known_wrong_or_unknown(runs: Any, response: Any, expected: Any):
    call = ModelCall(call_id="c", response_token_ids=response, sampled_run_lengths=runs)
    assert loss_mask(call) == expected


WHOLE = ModelCall(
    call_id="c",
    prompt_token_ids=[1],
    response_token_ids=[2],
    logprobs=[-0.5],
    sampled_run_lengths=[1],
    policy_version_runs=[(1, 1)],
)


@pytest.mark.parametrize(
    ("absent", "reason"),
    [
        ({}, None),
        ({"role": "judge"}, "not_policy"),
        ({"trainable": False}, "not_policy"),
        ({"prompt_token_ids": None}, "no_prompt_ids"),
        ({"response_token_ids": None}, "no_response_ids"),
        ({"logprobs": None}, "no_logprobs"),
        ({"sampled_run_lengths": None}, "no_loss_mask"),
        ({"policy_version_runs": None}, "no_policy_version"),
        ({"logprobs": None, "policy_version_runs": None}, "no_logprobs"),
    ],
)
def test_what_is_absent_makes_a_step_untrainable_by_name(absent: dict[str, Any], reason: str | None):
    fields = {name: getattr(WHOLE, name) for name in WHOLE.__struct_fields__} | absent
    call = ModelCall(**fields)
    assert step_not_trainable(call, loss_mask(call)[0]) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "aborted"}, "status_aborted"),
        ({"status": "failed", "failure_class": "policy"}, "status_failed"),
        ({"status": "truncated", "truncated": True, "terminated": False}, None),
    ],
)
def test_a_status_decides_what_is_trained_on(
    eventful_home: Any, new_home: MakeHome, tape: Any, change: Any, reason: Any
):
    tape.start("t")
    tape.turns("t")
    tape.finish("t", **change)
    tape.score("t", 0.0)
    home = new_home(tape.records)
    home.run()
    [row] = home.rows("trajectories")
    assert (row["not_trainable_reason"], row["trainable"], row["reward"]) == (reason, reason is None, 0.0)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_are_hashed_as_little_endian_int32(tokens: list[int]):
    assert little_endian(tokens) == b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def digest(tokens: list[int]) -> str:
    return hashlib.sha256(little_endian(tokens)).hexdigest()


def checks_of(*calls: ModelCall) -> list[bool | None]:
    return prefix_checks(split_steps(events_of(*calls)))


def a_call(name: str, parent: str | None, prompt: list[int] | None, response: list[int] | None, prefix: str | None):
    return ModelCall(
        call_id=name, parent_call_id=parent, prompt_token_ids=prompt, response_token_ids=response, prefix_sha256=prefix
    )


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@given(st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 5)), min_size=1, max_size=6), st.integers(0, 5))
def test_prefixes_are_checked_along_any_tree_of_calls(tree: list[Any], wrong: int):
    calls, contexts = [], []
    for index, (prompt, response, parent) in enumerate(tree):
        parent_index = parent % index if index and parent < 5 else None
        prefix = [*(contexts[parent_index] if parent_index is not None else []), *prompt]
        contexts.append([*prefix, *response])
        claimed = digest([*prefix, 7]) if index == wrong else digest(prefix)
        calls.append(
            a_call(f"c{index}", None if parent_index is None else f"c{parent_index}", prompt, response, claimed)
        )
    assert checks_of(*calls) == [index != wrong for index in range(len(tree))]


def test_a_prefix_that_cannot_be_known_is_unknown_and_so_are_its_children():
    first = a_call("a", None, [1], None, digest([1]))
    assert checks_of(first, a_call("b", "a", [2], [3], digest([1, 2]))) == [True, None]
    assert checks_of(a_call("a", None, None, [1], "x"), a_call("b", "nobody", [1], [1], "x")) == [None, None]
    unclaimed = a_call("a", None, [1], [2], None)
    assert checks_of(unclaimed, a_call("b", "a", [3], [4], digest([1, 2, 3]))) == [None, True]


def test_steps_take_what_names_them_and_what_follows_them():
    start = TrajectoryStarted(task_key="t", domain="d")
    events = events_of(
        start,
        Observation(content="before", duration_ms=1.0),
        Reward(value=0.125),
        ModelCall(call_id="a"),
        Action(action_id="1", name="sh"),
        ModelCall(call_id="b"),
        Observation(action_id="1", call_id="a", content="late answer", duration_ms=2.0),
        ContextRewritten(reason="compaction"),
        Reward(value=1.0, call_id="a"),
        Reward(value=2.0),
        TrajectoryFinished(status="completed"),
    )
    first, second = split_steps(events)
    assert [view["seq"] for view in first.observations] == [1, 6]
    assert [view["seq"] for view in first.actions] == [4]
    assert (first.rewards, second.rewards) == ([0.125, 1.0], [2.0])
    assert (sorted(first.env_ms), second.env_ms) == ([1.0, 2.0], [])
    assert split_steps(events_of(start, Observation(content="x"))) == []


@pytest.mark.parametrize(
    ("bodies", "reason"),
    [
        ([ModelCall(call_id="a"), ModelCall(call_id="b", parent_call_id="a")], None),
        ([ModelCall(call_id="a"), ModelCall(call_id="a")], "two model calls"),
        ([ModelCall(call_id="b", parent_call_id="a"), ModelCall(call_id="a")], "unknown parent"),
        ([ModelCall(call_id="a", parent_call_id="a")], "unknown parent"),
        ([Action(action_id="1", call_id="a", name="sh"), ModelCall(call_id="a")], "unknown call"),
        ([Observation(action_id="1", content="x")], "unknown action"),
        ([Action(action_id="1", name="sh"), Observation(action_id="1", content="x")], None),
        ([Reward(value=1.0, call_id="a")], "unknown call"),
        ([Observation(content="x"), Reward(value=1.0)], None),
    ],
)
def test_references_name_what_came_before(bodies: list[Body], reason: str | None):
    found = reference_violations(events_of(*bodies))
    assert bool(found) == bool(reason)
    for rule, said in found:
        assert rule == "bad_reference"
        assert reason is not None
        assert reason in said
