"""Reconciliation: the equation holds at every moment, and fails when a table lost or doubled something."""

from collections.abc import Callable
from typing import Any

import pytest

from lake.table import LakeTable, Progress
from pipelines.bookkeeping import epochs_table
from pipelines.project import plan_epoch, project_epoch, write_shard
from schemas.config.pipelines import PipelineConfig
from schemas.events import Annotation
from schemas.tables import PROJECT_TABLES


def test_every_record_of_the_eventful_log_is_accounted_for(eventful_home: Any):
    found = eventful_home.reconciliation()
    assert found.holds, str(found)
    assert found.log_records == sum(
        bound.next for bound in map(eventful_home.log.bounds, eventful_home.log.partitions())
    )
    waiting = {"a-open": 5, "a-waits": 7}  # own records; the late event is quarantined, its copy waits
    assert found.open == sum(waiting.values())


def test_a_mere_log_is_open(new_home: Callable[..., Any], kit: Any):
    home = new_home(kit.eventful())
    found = home.reconciliation()
    assert found.holds
    assert (found.log_records, found.accepted, found.quarantined, found.duplicates) == (found.open, 0, 0, 0)
    home.run(only=["ingest"])
    assert home.reconciliation() == found


def test_it_holds_after_every_small_epoch(new_home: Callable[..., Any], kit: Any):
    home = new_home(kit.eventful(num_whole=2))
    home.run(only=["ingest"])
    found = [home.reconciliation()]
    while project_epoch(home.urls.lake, home.log.log_id, [0, 1], PipelineConfig(max_epoch_records=60)):
        found.append(home.reconciliation())
    assert len(found) == 4
    assert [str(one) for one in found if not one.holds] == []
    assert [one.open for one in found] == sorted({one.open for one in found}, reverse=True)


@pytest.mark.parametrize("name", ["trajectories", "quarantine", "scores", "annotations", "policies", "consumption"])
def test_a_lost_file_of_a_table_shows(new_home: Callable[..., Any], kit: Any, name: str):
    home = new_home(kit.eventful(num_whole=2))
    home.run()
    assert home.reconciliation().holds
    table: LakeTable = home.lake.table(name)
    table.refresh()
    table.commit([], remove=table.data_files()[:1])
    found = home.reconciliation()
    assert not found.holds
    assert "≠" in str(found)


def test_a_doubled_row_shows(new_home: Callable[..., Any], tape: Any):
    tape.whole("t")
    home = new_home(tape.records)
    home.run()
    table: LakeTable = home.lake.table("scores")
    table.refresh()
    table.commit([table.write_file(table.read_files(table.data_files()))])
    assert not home.reconciliation().holds


def test_names_that_look_like_own_streams_are_not_open(new_home: Callable[..., Any], tape: Any):
    for stream, trajectory_id in (("/", None), ("t/", "t"), ("/0", None)):
        tape.add(Annotation(kind="tag", author="me"), stream, trajectory_id)
    home = new_home(tape.records)
    home.run()
    found = home.reconciliation()
    assert (found.accepted, found.open, found.holds) == (3, 0, True)


@pytest.mark.parametrize("num_done", range(len(PROJECT_TABLES)))
def test_it_holds_between_the_commits_of_an_epoch(new_home: Callable[..., Any], kit: Any, num_done: int):
    home, config = new_home(kit.eventful(num_whole=2)), PipelineConfig(max_epoch_records=120)
    home.run(only=["ingest"])
    project_epoch(home.urls.lake, home.log.log_id, [0, 1], config)
    before = home.reconciliation()
    ranges = plan_epoch(home.lake, home.log.log_id, [0, 1], config)
    [shard] = write_shard(home.lake, home.log.log_id, ranges)
    progress = Progress("project", home.log.log_id, ranges)
    files = shard.files | {
        "quality": [],
        "epochs": [home.lake.table("epochs").write_file(epochs_table(progress, shard.counts, shard.num_rows, 0.0))],
    }
    for name in PROJECT_TABLES[:num_done]:
        home.lake.table(name).refresh()
        home.lake.table(name).commit(files[name], progress=progress)
    assert home.reconciliation() == before
    assert before.holds
    assert before.duplicates > 0
