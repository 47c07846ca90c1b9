"""Delta source and sink on a real runner: one commit, progress kept, nothing left behind by a loser."""

from pathlib import Path

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from lake.errors import CommitConflictError
from lake.open import Lake
from lake.table import Progress, overlaps
from pipelines.io.delta import Commit, ReadFromDelta, WriteToDelta, commit_or_discard
from schemas.tables import TABLES

SCHEMA = TABLES["steps"]


def steps(numbers):
    columns = {"step_idx": list(numbers), "offset": list(numbers), "trajectory_id": [f"t{n:04d}" for n in numbers]}
    nulls = [None] * len(numbers)
    return pa.table({name: columns.get(name, nulls) for name in SCHEMA.names}, schema=SCHEMA)


@pytest.fixture
def lake_url(tmp_path):
    Lake(str(tmp_path / "lake")).create()
    return str(tmp_path / "lake")


def write(lake_url, tables, progress=None):
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        return (
            pipeline
            | "Tables" >> beam.Create(tables, reshuffle=False)
            | "Write" >> WriteToDelta(lake_url, "steps", progress, {"epoch": "7"})
        )


def fresh_table(lake_url):
    return Lake(lake_url).table("steps")


def parquet_files(lake_url):
    return list(Path(lake_url, "steps").glob("*.parquet"))


def test_all_tables_land_in_one_commit(lake_url):
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        commits = (
            pipeline
            | "Tables" >> beam.Create([steps(range(5)), steps(range(5, 12)), steps([])])
            | "Write" >> WriteToDelta(lake_url, "steps", Progress("project", "log", {0: (0, 12)}), {"epoch": "7"})
        )
        assert_that(commits, equal_to([Commit("steps", 1, 12, 2)]))
    table = fresh_table(lake_url)
    assert table.version == 1
    assert table.progress("project", "log", [0]) == {0: 12}
    assert sorted(table.read_files(table.data_files(), ["step_idx"])["step_idx"].to_pylist()) == list(range(12))
    assert [a["commitInfo"]["epoch"] for a in table.log_actions(1) if "commitInfo" in a] == ["7"]


def test_progress_is_recorded_where_there_are_no_rows(lake_url):
    write(lake_url, [], Progress("project", "log", {0: (0, 9)}))
    assert fresh_table(lake_url).progress("project", "log", [0]) == {0: 9}
    assert parquet_files(lake_url) == []


def test_nothing_to_say_makes_no_commit(lake_url):
    write(lake_url, [])
    assert fresh_table(lake_url).version == 0


def test_a_conflict_fails_the_pipeline_and_leaves_no_file(lake_url):
    write(lake_url, [steps(range(3))], Progress("project", "log", {0: (0, 3)}))
    with pytest.raises(CommitConflictError, match=r"stands at.*while running .Write/Commit"):
        write(lake_url, [steps(range(3)), steps(range(3))], Progress("project", "log", {0: (0, 3)}))
    table = fresh_table(lake_url)
    assert table.version == 1
    assert [Path(file.path).name for file in table.data_files()] == [path.name for path in parquet_files(lake_url)]


def test_an_error_that_is_no_conflict_deletes_nothing(lake_url, monkeypatch):
    table = fresh_table(lake_url)
    file = table.write_file(steps(range(3)))
    # What a lost connection after the commit looks like: the commit is there, and the caller hears an error.
    commit = table.commit

    def commit_then_fail(files, **arguments):
        commit(files, **arguments)
        raise ConnectionError("lost")

    monkeypatch.setattr(table, "commit", commit_then_fail)
    with pytest.raises(ConnectionError):
        commit_or_discard(table, [file], None, {})
    assert fresh_table(lake_url).read_files([file]).num_rows == 3


def test_commit_or_discard_deletes_the_files_of_a_loser(lake_url):
    table = fresh_table(lake_url)
    file = table.write_file(steps(range(3)))
    with pytest.raises(CommitConflictError):
        commit_or_discard(table, [file], Progress("project", "log", {0: (5, 9)}), {})
    assert parquet_files(lake_url) == []


def test_reading_gives_back_what_was_written(lake_url):
    write(lake_url, [steps(range(5)), steps(range(5, 12))])
    write(lake_url, [steps(range(12, 20))])

    def idxs(table):
        return table.column("step_idx").to_pylist()

    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        everything = pipeline | "All" >> ReadFromDelta(lake_url, "steps") | "All idx" >> beam.FlatMap(idxs)
        assert_that(everything, equal_to(list(range(20))), label="all")
        first = pipeline | "First" >> ReadFromDelta(lake_url, "steps", ["step_idx"], version=1)
        assert_that(first | "First idx" >> beam.FlatMap(idxs), equal_to(list(range(12))), label="first")
        some = pipeline | "Some" >> ReadFromDelta(lake_url, "steps", ["step_idx"], pc.field("offset") >= 11)
        assert_that(some | "Some idx" >> beam.FlatMap(idxs), equal_to(list(range(11, 20))), label="some")


def test_files_that_can_not_match_are_not_opened(lake_url):
    write(lake_url, [steps(range(5)), steps(range(5, 12))])
    table = fresh_table(lake_url)
    for file in table.data_files():
        if file.high["offset"] < 5:
            Path(table.url, file.path).unlink()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        tables = pipeline | "Read" >> ReadFromDelta(lake_url, "steps", ["offset"], covering=overlaps("offset", 5, 99))
        assert_that(tables | "Rows" >> beam.Map(lambda table: table.num_rows), equal_to([7]))
