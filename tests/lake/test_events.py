"""Look-ups in `events` give the right rows and open only files that may hold them."""

from pathlib import Path

import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lake.events import history_files, read_history, read_range, run_event_files, seen_run_events
from lake.open import Lake


@pytest.fixture
def events(lake, events_of):
    """Ten files of ten offsets; trajectory t00000k holds offsets 5k to 5k + 4."""
    table = lake.table("events")
    for start in range(0, 100, 10):
        table.commit([table.write_file(events_of(range(start, start + 10)))])
    return table


def delete_files_that_do_not(table, holds):
    """What is gone from disk can't have been opened."""
    kept = [file for file in table.data_files() if holds(file)]
    for file in table.data_files():
        if file not in kept:
            (Path(table.url) / file.path).unlink()
    return len(kept)


def test_a_range_is_read_in_order_from_the_files_that_cover_it(events):
    assert delete_files_that_do_not(events, lambda f: f.high["offset"] >= 25 and f.low["offset"] < 41) == 3
    found = read_range(events, "log", 0, 25, 41, ["offset", "value"])
    assert found.column("offset").to_pylist() == list(range(25, 41))
    assert found.column("value").to_pylist()[0] == b"value 25"
    assert found.column_names == ["offset", "value"]


@pytest.mark.parametrize(("log_id", "partition", "start", "end"), [("log", 0, 5, 5), ("log", 1, 0, 9), ("x", 0, 0, 9)])
def test_an_empty_range_gives_no_rows_with_the_right_columns(events, log_id, partition, start, end):
    found = read_range(events, log_id, partition, start, end)
    assert (found.num_rows, found.column_names) == (0, events.schema.names)


def test_a_history_opens_only_files_of_its_trajectories(events):
    assert delete_files_that_do_not(events, lambda f: f.low["trajectory_id"] in {"t000002", "t000014"}) == 2
    found = read_history(events, "log", 0, ["t000015", "t000003", "t000015"], 100, ["trajectory_id", "offset"])
    assert found.column("offset").to_pylist() == [15, 16, 17, 18, 19, 75, 76, 77, 78, 79]


def test_a_history_ends_before_its_bound(events):
    assert delete_files_that_do_not(events, lambda f: f.low["offset"] == 10) == 1
    found = read_history(events, "log", 0, ["t000003"], 17, ["offset"])
    assert found.column("offset").to_pylist() == [15, 16]
    assert read_history(events, "log", 0, ["t000003"], 0).num_rows == 0
    assert read_history(events, "log", 0, [], 100).num_rows == 0


def test_closing_events_alone_can_be_asked_for(events):
    found = read_history(events, "log", 0, ["t000003", "t000004"], 100, ["offset"], only=pc.field("is_closing"))
    assert found.column("offset").to_pylist() == [19, 24]


def test_only_row_groups_that_may_hold_a_trajectory_are_decoded(lake, events_of, monkeypatch):
    monkeypatch.setattr("lake.files.MAX_ROW_GROUP_ROWS", 10)
    table = lake.table("events")
    file = table.write_file(events_of(range(200)))
    table.commit([file])
    fragment = table.fragment(file.path)
    groups = [(group.id, group.statistics["trajectory_id"]) for group in fragment.row_groups]
    assert len(groups) == 20
    path = Path(table.url) / file.path
    spoiled = bytearray(path.read_bytes())
    metadata = fragment.metadata
    for idx, statistics in groups:
        if not statistics["min"] <= "t000007" <= statistics["max"]:
            for column in range(metadata.num_columns):
                chunk = metadata.row_group(idx).column(column)
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                spoiled[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    path.write_bytes(spoiled)
    fresh = Lake(lake.url).table("events")
    assert read_history(fresh, "log", 0, ["t000007"], 200, ["offset"]).column("offset").to_pylist() == list(
        range(35, 40)
    )
    with pytest.raises(OSError, match=r"."):
        read_history(fresh, "log", 0, ["t000001"], 200, ["offset"])


def test_seen_run_events_come_from_files_of_their_streams(lake, rows_of, events_of):
    table = lake.table("events")
    for run in range(5):
        table.commit([table.write_file(events_of(range(run * 20, run * 20 + 10)))])
        offsets = list(range(run * 20 + 10, run * 20 + 15))
        rows = {
            "log_id": ["log"] * 5,
            "partition": [0] * 5,
            "offset": offsets,
            "run_stream": [f"run{run}/learner/a"] * 5,
            "run_seq": list(range(5)),
        }
        table.commit([table.write_file(rows_of("events", rows))])
    asked = {"run1/learner/a": (1, 3), "run3/learner/a": (4, 9), "run9/learner/a": (0, 0)}
    wanted = {file.path for file in run_event_files(table, "log", 0, asked, 100)}
    assert delete_files_that_do_not(table, lambda f: f.path in wanted) == 2
    seen = seen_run_events(table, "log", 0, asked, 100)
    assert seen == {("run1/learner/a", 1), ("run1/learner/a", 2), ("run1/learner/a", 3), ("run3/learner/a", 4)}
    assert seen_run_events(table, "log", 0, asked, 33) == {("run1/learner/a", 1), ("run1/learner/a", 2)}
    assert seen_run_events(table, "log", 0, {}, 100) == set()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.sets(st.integers(0, 25)), before=st.integers(0, 120))
def test_pruning_never_loses_a_row(events, events_of, ids, before):
    names = [f"t{number:06d}" for number in ids]
    expected = sorted(offset for offset in range(100) if offset // 5 in ids and offset < before)
    assert read_history(events, "log", 0, names, before, ["offset"]).column("offset").to_pylist() == expected
    assert len(history_files(events, "log", 0, names, before)) <= len({number // 2 for number in ids})
