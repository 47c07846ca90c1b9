"""Commits: once per range, conflicts named, statistics right, cost flat."""

import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.compact import compact
from lake.errors import CommitConflictError, LakeNotFoundError, VersionGoneError
from lake.files import MAX_BOUND_CHARS, STATS_COLUMNS, StatsCollector
from lake.open import Lake, open_lake
from lake.table import Progress, overlaps
from schemas.tables import TABLES

FIRST = Progress("ingest", "log", {0: (0, 10)})


def live_rows(table):
    table.refresh()
    return table.read_files(table.data_files()).num_rows


def test_opening_what_is_no_lake_names_the_remedy(tmp_path):
    with pytest.raises(LakeNotFoundError, match="trajlake init"):
        open_lake(str(tmp_path))


def test_creating_twice_changes_nothing(lake):
    before = {name: lake.table(name).version for name in TABLES}
    lake.create()
    assert {name: lake.table(name).refresh() for name in TABLES} == before


def run_at_once(code, *arguments):
    """Run a program in two processes that begin their work together; gives what each printed."""
    code = "import sys\nimport pyarrow as pa\nfrom lake.open import Lake\n" + code
    processes = [
        subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].decode().strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return sorted(outputs)


CREATE = """
print("ready", flush=True)
sys.stdin.readline()
Lake(sys.argv[1]).create()
"""


def test_processes_may_create_one_lake_at_once(tmp_path):
    run_at_once(CREATE, str(tmp_path))
    assert open_lake(str(tmp_path)).exists()


def test_retention_and_comments_are_in_the_table(lake):
    delta = lake.table("events").at(0)
    configuration = delta.metadata().configuration
    assert configuration["delta.logRetentionDuration"] == "interval 30 days"
    assert configuration["delta.deletedFileRetentionDuration"] == "interval 30 days"
    comments = {field.name: field.metadata["comment"] for field in delta.schema().fields}
    assert comments["offset"] == TABLES["events"].field("offset").metadata[b"comment"].decode()


def test_file_urls_and_paths_open_the_same_lake(lake):
    assert open_lake(f"file://{lake.url}").url == lake.url


def test_a_commit_records_progress_and_a_file_that_travels(lake, events_of):
    table = lake.table("events")
    file = pickle.loads(pickle.dumps(table.write_file(events_of(range(10)))))
    assert table.progress("ingest", "log", [0, 1]) == {0: 0, 1: 0}
    version = table.commit([file], progress=FIRST, metadata={"epoch": "1"})
    assert version == table.version == 1
    assert table.progress("ingest", "log", [0, 1]) == {0: 10, 1: 0}
    assert table.read_files(table.data_files()).equals(events_of(range(10)).cast(table.schema.remove_metadata()))
    infos = [action["commitInfo"] for action in table.log_actions(version) if "commitInfo" in action]
    assert infos[0]["epoch"] == "1"


def test_a_range_enters_a_table_once(lake, events_of):
    table = lake.table("events")
    table.commit([table.write_file(events_of(range(10)))], progress=FIRST)
    again = table.write_file(events_of(range(10)))
    with pytest.raises(CommitConflictError, match=r"planned from \{0: 0\}.*stands at \{0: 10\}"):
        table.commit([again], progress=FIRST)
    table.discard([again])
    assert live_rows(table) == 10


def test_a_stale_handle_loses_and_says_so(lake, events_of):
    winner, loser = lake.table("events"), Lake(lake.url).table("events")
    winner.commit([winner.write_file(events_of(range(10)))], progress=FIRST)
    with pytest.raises(CommitConflictError, match="another commit won after version 0"):
        loser.commit([loser.write_file(events_of(range(10)))], progress=FIRST)
    assert live_rows(winner) == live_rows(loser) == 10


def test_appends_from_stale_handles_both_land(lake, rows_of):
    one, two = lake.table("epochs"), Lake(lake.url).table("epochs")
    row = rows_of("epochs", {"pipeline": ["ingest"]})
    assert (one.commit([one.write_file(row)]), two.commit([two.write_file(row)])) == (1, 2)
    assert live_rows(one) == 2


COMMIT_FIRST_RANGE = """
from lake.compact import compact
from lake.errors import CommitConflictError
from lake.table import Progress
table = Lake(sys.argv[1]).table("epochs")
file = table.write_file(pa.table({name: [None] for name in table.schema.names}, schema=table.schema))
print("ready", flush=True)
sys.stdin.readline()
try:
    table.commit([file], progress=Progress("ingest", "log", {0: (0, 10)}))
    print("won")
except CommitConflictError:
    table.discard([file])
    print("lost")
"""


def test_of_two_processes_with_the_same_range_exactly_one_wins(lake):
    assert run_at_once(COMMIT_FIRST_RANGE, lake.url) == ["lost", "won"]
    table = lake.table("epochs")
    assert live_rows(table) == 1
    assert len(list(Path(table.url).glob("*.parquet"))) == 1


def test_a_process_killed_between_file_and_commit_leaves_no_rows(lake):
    code = (
        "import os, signal, sys, pyarrow as pa\n"
        "from lake.open import Lake\n"
        "table = Lake(sys.argv[1]).table('epochs')\n"
        "table.write_file(pa.table({n: [None] for n in table.schema.names}, schema=table.schema))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, lake.url], check=False)
    assert killed.returncode == -signal.SIGKILL
    table = lake.table("epochs")
    assert list(Path(table.url).glob("*.parquet"))
    assert live_rows(table) == 0


def test_rows_of_another_shape_are_refused_with_the_columns(lake):
    with pytest.raises(ValueError, match=r"missing columns \['accepted'.*unknown columns \['nope'\]"):
        lake.table("epochs").write_file(pa.table({"nope": [1]}))


def test_replace_takes_all_rows_away_and_versions_go_on(lake, events_of):
    table = lake.table("events")
    for start in (0, 10):
        table.commit([table.write_file(events_of(range(start, start + 10)))])
    version = table.replace([table.write_file(events_of(range(3)))], progress=Progress("ingest", "log", {0: (0, 3)}))
    assert (version, live_rows(table)) == (3, 3)
    assert table.progress("ingest", "log", [0]) == {0: 3}
    assert sum(file.num_records for file in table.data_files(version=2)) == 20


def test_replace_never_lets_a_concurrent_append_survive_unseen(lake, events_of):
    table, stale = lake.table("events"), Lake(lake.url).table("events")
    assert stale.version == 0
    table.commit([table.write_file(events_of(range(10)))])
    with pytest.raises(CommitConflictError):
        stale.replace([stale.write_file(events_of(range(3)))])
    assert live_rows(table) == 10


def test_a_version_that_never_was_is_named(lake):
    with pytest.raises(VersionGoneError, match="events has no version 7"):
        lake.table("events").at(7)


def test_statistics_name_pruning_columns_only(lake, events_of):
    table = lake.table("events")
    file = table.write_file(events_of(range(10)))
    stats = json.loads(file.stats)
    assert stats["numRecords"] == 10
    assert stats["minValues"]["offset"] == 0
    assert stats["maxValues"]["trajectory_id"] == "t000001"
    assert stats["nullCount"]["run_stream"] == 10
    assert set(stats["nullCount"]) == set(STATS_COLUMNS["events"])
    assert "run_stream" not in stats["minValues"]
    footer = pq.read_metadata(Path(table.url) / file.path).row_group(0)
    kept = {footer.column(i).path_in_schema for i in range(footer.num_columns) if footer.column(i).is_stats_set}
    assert kept <= set(STATS_COLUMNS["events"])
    assert "offset" in kept


def test_every_pruning_column_exists_and_is_scalar():
    for name, columns in STATS_COLUMNS.items():
        kinds = [TABLES[name].field(column).type for column in columns]
        assert all(pa.types.is_integer(k) or pa.types.is_string(k) or pa.types.is_boolean(k) for k in kinds)
    assert set(STATS_COLUMNS) == set(TABLES)


@given(st.lists(st.text(max_size=MAX_BOUND_CHARS * 2), min_size=1))
def test_string_bounds_hold_however_long_the_strings_are(values):
    collector = StatsCollector(["name"])
    collector.add(pa.table({"name": values}))
    stats = json.loads(collector.json())
    low, high = stats["minValues"]["name"], stats["maxValues"].get("name")
    assert low <= min(values)
    assert high is None or high >= max(values)
    assert len(low) <= MAX_BOUND_CHARS
    assert len(high or "") <= MAX_BOUND_CHARS


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        ("a" * 200, "a" * (MAX_BOUND_CHARS - 1) + "b"),
        ("a" + "\U0010ffff" * 200, "b"),
        ("\U0010ffff" * 200, None),
        ("\ud7ff" * 200, "\ud7ff" * (MAX_BOUND_CHARS - 1) + "\ue000"),
    ],
)
def test_upper_bounds_step_over_what_has_no_successor(value, bound):
    collector = StatsCollector(["name"])
    collector.add(pa.table({"name": [value]}))
    assert json.loads(collector.json())["maxValues"].get("name") == bound


def test_files_are_found_by_statistics(lake, events_of):
    table = lake.table("events")
    for start in range(0, 50, 10):
        table.commit([table.write_file(events_of(range(start, start + 10)))])
    assert [f.low["offset"] for f in table.data_files(overlaps("offset", 15, 22))] in ([10, 20], [20, 10])
    assert table.data_files(overlaps("trajectory_id", "u", "v")) == []
    assert table.data_files(overlaps("run_seq", 0, 10)) == []
    assert len(table.data_files()) == 5


def test_a_file_without_statistics_is_never_pruned(lake, events_of):
    table = lake.table("events")
    file = table.write_file(events_of(range(10)))
    table.commit([type(file)(file.path, file.size, file.num_records, '{"numRecords":10}', file.modified_ms)])
    assert len(table.data_files(overlaps("offset", 500, 600))) == 1


def replay_log(folder):
    """A second Delta reader, of nothing but Arrow: the newest checkpoint, then the commits after it."""
    log = folder / "_delta_log"
    checkpoints = sorted(log.glob("*.checkpoint.parquet"))
    live = set()
    if checkpoints:
        adds = pq.read_table(checkpoints[-1], columns=["add"]).column("add").to_pylist()
        live = {add["path"] for add in adds if add is not None and add["path"] is not None}
    first = int(checkpoints[-1].name[:20]) + 1 if checkpoints else 0
    for version in range(first, len(list(log.glob("*.json")))):
        actions = [json.loads(line) for line in (log / f"{version:020}.json").read_text().splitlines()]
        live -= {action["remove"]["path"] for action in actions if "remove" in action}
        live |= {action["add"]["path"] for action in actions if "add" in action}
    return [folder / path for path in sorted(live)]


@pytest.mark.parametrize("num_commits", [3, 27])
def test_a_second_reader_finds_the_same_rows(lake, events_of, num_commits):
    table = lake.table("events")
    for start in range(0, num_commits * 5, 5):
        table.commit([table.write_file(events_of(range(start, start + 5)))])
    compact(table, min_files=2 if num_commits == 3 else 8)
    table.commit([table.write_file(events_of(range(1000, 1005)))])
    files = replay_log(Path(table.url))
    ours = table.read_files(table.data_files()).sort_by("offset")
    assert pa.concat_tables(pq.read_table(file) for file in files).sort_by("offset").equals(ours)
    assert table.at(table.version).to_pyarrow_table().sort_by("offset").equals(ours)
    assert ours.num_rows == num_commits * 5 + 5
    assert any(file.num_records > 5 for file in table.data_files())


def test_large_rows_make_small_row_groups(lake, rows_of):
    table = lake.table("events")
    rows = rows_of("events", {"offset": list(range(40)), "value": [os.urandom(1_000_000)] * 40})
    file = table.write_file(rows)
    metadata = pq.read_metadata(Path(table.url) / file.path)
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(sizes) == 40
    assert max(sizes) <= 8


def commit_cost(table, file, epoch):
    start = time.process_time()
    table.commit([file], progress=Progress("ingest", "log", {0: (epoch, epoch + 1)}))
    return time.process_time() - start


@pytest.mark.slow
def test_commits_do_not_slow_down_as_the_log_grows(tmp_path, rows_of):
    row = rows_of("epochs", {"pipeline": ["ingest"], "log_id": ["log"], "committed_ns": [1]})
    tables = []
    for name in ("old", "young"):
        lake = Lake(str(tmp_path / name))
        lake.create()
        tables.append(lake.table("epochs"))
    old, young = tables
    for epoch in range(300):
        commit_cost(old, old.write_file(row), epoch)
        if epoch % 8 == 7:
            compact(old)
    # Side by side, so that a busy machine slows both.
    costs = [
        (commit_cost(old, old.write_file(row), 300 + epoch), commit_cost(young, young.write_file(row), epoch))
        for epoch in range(60)
    ]
    assert statistics.median(cost for cost, _ in costs) < 1.8 * statistics.median(cost for _, cost in costs)
