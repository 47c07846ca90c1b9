"""SQL: read-only whatever is asked, helpful when wrong, and able to look back."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from lake.errors import QueryError, VersionGoneError
from lake.sql import run_sql, stream_sql
from schemas.tables import TABLES


def append(lake, name, rows):
    return lake.table(name).commit([lake.table(name).write_file(rows)])


@pytest.fixture
def trajectories(lake, rows_of):
    """Three commits of one trajectory each, two milliseconds apart or more."""
    for number in range(3):
        rows = {"trajectory_id": [f"t{number}"], "partition": [0], "offset": [number], "reward": [float(number)]}
        append(lake, "trajectories", rows_of("trajectories", {**rows, "final_observation_ids": [[1, 2]]}))
        time.sleep(0.005)
    return lake


def test_every_table_and_view_can_be_queried(lake):
    for name in (*TABLES, "trainable", "trainable_groups", "latest_scores"):
        assert run_sql(lake, f"SELECT count(*) AS n FROM {name}").to_pydict() == {"n": [0]}
        schema = run_sql(lake, f"SELECT * FROM {name}").schema
        if name in TABLES:
            assert schema.names == TABLES[name].names
            assert [field.type for field in schema] == [field.type for field in TABLES[name]]


def test_nothing_can_be_sorted_too(trajectories):
    assert run_sql(trajectories, "SELECT rule FROM quarantine ORDER BY rule LIMIT 5").num_rows == 0
    query = "SELECT reward FROM trajectories WHERE trajectory_id = 'none' ORDER BY reward LIMIT 5"
    assert run_sql(trajectories, query).num_rows == 0


def test_rows_come_back_as_they_went_in(trajectories):
    found = run_sql(trajectories, "SELECT trajectory_id, reward, final_observation_ids FROM trajectories ORDER BY 1")
    assert found.to_pydict() == {
        "trajectory_id": ["t0", "t1", "t2"],
        "reward": [0.0, 1.0, 2.0],
        "final_observation_ids": [[1, 2]] * 3,
    }
    assert run_sql(trajectories, "SELECT * FROM trajectories", limit=2).num_rows == 2
    schema, batches = stream_sql(trajectories, "SELECT reward FROM trajectories")
    assert pa.Table.from_batches(batches, schema).num_rows == 3


@pytest.mark.parametrize(
    "query",
    [
        "COPY trajectories TO '{path}.csv'",
        "COPY (SELECT 1) TO '{path}' STORED AS CSV",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{path}' STORED AS CSV",
        "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '/etc/passwd'",
        "CREATE TABLE t AS SELECT 1",
        "CREATE VIEW v AS SELECT 1",
        "CREATE OR REPLACE VIEW trainable AS SELECT 1",
        "CREATE DATABASE d",
        "CREATE SCHEMA s",
        "CREATE FUNCTION f(DOUBLE) RETURNS DOUBLE RETURN $1",
        "INSERT INTO trajectories SELECT * FROM trajectories",
        "UPDATE trajectories SET reward = 1",
        "DELETE FROM trajectories",
        "TRUNCATE TABLE trajectories",
        "DROP TABLE trajectories",
        "DROP VIEW trainable",
        "SET datafusion.execution.batch_size = 1",
        "RESET datafusion.execution.batch_size",
        "PREPARE p AS SELECT 1",
        "BEGIN",
        "SELECT 1; DROP TABLE trajectories",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM 'file:///etc/passwd'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_parquet('/etc/passwd')",
        "VACUUM trajectories",
        "",
    ],
)
def test_everything_but_reading_is_refused(trajectories, query, tmp_path):
    target = tmp_path / "out"
    before = {name: trajectories.table(name).refresh() for name in TABLES}
    with pytest.raises(QueryError, match=r"."):
        run_sql(trajectories, query.format(path=target))
    assert not list(tmp_path.glob("out*"))
    assert {name: trajectories.table(name).refresh() for name in TABLES} == before


def test_a_refusal_says_what_is_refused(lake):
    with pytest.raises(QueryError, match="only read-only queries are allowed; DropTable is refused"):
        run_sql(lake, "DROP TABLE trajectories")
    with pytest.raises(QueryError, match="one statement at a time"):
        run_sql(lake, "SELECT 1; SELECT 2")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT * FROM trajectory", "no table 'trajectory'; did you mean trajectories"),
        ("SELECT * FROM trainabel", "no table 'trainabel'; did you mean trainable"),
        ("SELECT * FROM zzz", "no table 'zzz'; there are events, trajectories"),
        ("SELECT rewards FROM trajectories", "no column 'rewards'; did you mean reward"),
        ("SELECT t.rewrd FROM trajectories t", "no column 'rewrd'; did you mean reward"),
        ("SELEC 1", "Expected: an SQL statement, found: SELEC"),
    ],
)
def test_unknown_names_come_with_the_nearest_known(lake, query, message):
    with pytest.raises(QueryError, match=message):
        run_sql(lake, query)


def test_a_query_that_fails_while_it_runs_is_a_query_error(trajectories):
    with pytest.raises(QueryError, match="Divide by zero"):
        run_sql(trajectories, 'SELECT 1 / ("offset" - "offset") FROM trajectories')


@pytest.mark.parametrize("query", ["SELECT CAST('x' AS INT)", "SELECT * FROM trajectories LIMIT -1"])
def test_a_query_that_fails_while_it_is_planned_is_a_query_error(lake, query):
    with pytest.raises(QueryError, match=r"Cannot cast|LIMIT must be"):
        run_sql(lake, query)


def test_a_version_whose_files_were_cleaned_up_is_named(trajectories):
    table = trajectories.table("trajectories")
    table.refresh()
    lost = table.data_files()[0].path
    (Path(table.url) / lost).unlink()
    with pytest.raises(VersionGoneError, match=lost):
        run_sql(trajectories, "SELECT * FROM trajectories", at=3)


def test_filters_open_only_files_that_may_match(trajectories):
    table = trajectories.table("trajectories")
    table.refresh()
    for file in table.data_files():
        if file.low["offset"] != 1:
            (Path(table.url) / file.path).unlink()
    found = run_sql(trajectories, "SELECT reward FROM trajectories WHERE \"offset\" = 1 AND trajectory_id = 't1'")
    assert found.to_pydict() == {"reward": [1.0]}


def test_looking_back_by_version_and_by_time(trajectories, rows_of):
    count = "SELECT count(*) AS n FROM trajectories"
    assert [run_sql(trajectories, count, at=v)["n"][0].as_py() for v in (0, 1, 3)] == [0, 1, 3]
    assert run_sql(trajectories, count, at="2")["n"][0].as_py() == 2
    now = datetime.now(UTC)
    time.sleep(0.01)
    append(trajectories, "trajectories", rows_of("trajectories", {"trajectory_id": ["late"]}))
    assert run_sql(trajectories, count, at=now)["n"][0].as_py() == 3
    assert run_sql(trajectories, count, at=now.isoformat())["n"][0].as_py() == 3
    assert run_sql(trajectories, count)["n"][0].as_py() == 4


def test_a_version_of_trajectories_brings_the_other_tables_to_its_time(lake, rows_of):
    for number in range(3):
        append(lake, "steps", rows_of("steps", {"trajectory_id": [f"t{number}"]}))
        append(lake, "trajectories", rows_of("trajectories", {"trajectory_id": [f"t{number}"]}))
        time.sleep(0.005)
    for version in (1, 2, 3):
        assert run_sql(lake, "SELECT count(*) AS n FROM steps", at=version)["n"][0].as_py() == version


def test_what_can_not_be_looked_back_to_is_named(trajectories):
    with pytest.raises(VersionGoneError, match="trajectories has versions 0 to 3, not 9"):
        run_sql(trajectories, "SELECT 1", at=9)
    with pytest.raises(VersionGoneError, match="no lake yet at 1999"):
        run_sql(trajectories, "SELECT 1", at="1999-01-01")
    with pytest.raises(QueryError, match="--at takes a version number or an ISO time"):
        run_sql(trajectories, "SELECT 1", at="yesterday")


def member(group, idx, size, trainable=True, split="train"):
    return {
        "trajectory_id": f"{group}-{idx}",
        "group_id": group,
        "sample_idx": idx,
        "group_size": size,
        "trainable": trainable,
        "split": split,
    }


def test_trainable_groups_are_complete_or_closed(lake, rows_of):
    members = [
        *(member("whole", idx, 2) for idx in range(2)),
        member("lacking", 0, 2),
        *(member("closed", idx, 4, trainable=idx != 1) for idx in range(2)),
        *(member("eval", idx, 2, split="eval") for idx in range(2)),
        {**member("none", 0, 1), "group_id": None},
    ]
    columns = {key: [m[key] for m in members] for key in members[0]}
    append(lake, "trajectories", rows_of("trajectories", columns))
    closed = {"kind": ["group_closed"], "subject": ["closed"], "value": [json.dumps({"given_up": [2, 3]})]}
    half_closed = {"kind": ["group_closed"], "subject": ["lacking"], "value": ['{"given_up":[]}']}
    for rows in (closed, half_closed):
        append(lake, "annotations", rows_of("annotations", rows))
    found = run_sql(lake, "SELECT trajectory_id FROM trainable_groups ORDER BY 1").to_pydict()
    assert found == {"trajectory_id": ["closed-0", "whole-0", "whole-1"]}
    trainable = run_sql(lake, "SELECT trajectory_id FROM trainable ORDER BY 1").to_pydict()["trajectory_id"]
    assert trainable == ["closed-0", "lacking-0", "none-0", "whole-0", "whole-1"]


def test_latest_scores_keep_one_row_per_scorer(lake, rows_of):
    rows = {
        "trajectory_id": ["t", "t", "t", "u"],
        "attempt": [0, 0, 0, 0],
        "verifier_id": ["a", "a", "b", "a"],
        "verifier_version": ["1", "2", "1", "1"],
        "log_id": ["log"] * 4,
        "partition": [0] * 4,
        "offset": [1, 7, 3, 4],
        "score": [0.0, 1.0, 0.5, 0.25],
    }
    append(lake, "scores", rows_of("scores", rows))
    found = run_sql(lake, "SELECT trajectory_id, verifier_id, score FROM latest_scores ORDER BY 1, 2").to_pydict()
    assert found == {"trajectory_id": ["t", "t", "u"], "verifier_id": ["a", "b", "a"], "score": [1.0, 0.5, 0.25]}
