"""Rebuild: the projections again from `events`, equal row for row, with versions that go on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lake.content import content_hash
from lake.table import Progress
from pipelines.lease import LeaseHeldError, lease
from pipelines.project import project_epoch, write_shard
from pipelines.rebuild import rebuild
from schemas.config.pipelines import PipelineConfig
from schemas.tables import PROJECT_TABLES, PROJECTIONS

MakeHome = Callable[..., Any]


def versions(home: Any) -> dict[str, int]:
    return {name: home.lake.table(name).refresh() for name in PROJECTIONS}


@pytest.mark.parametrize("compacts", [False, True])
def test_rebuild_and_rebuild_again_give_the_live_content(eventful_home: Any, tmp_path: Path, compacts: bool):
    home = eventful_home.copy(tmp_path / "home")
    home.run(max_epoch_records=100, compact_min_files=2 if compacts else 100)
    before = versions(home)
    for size in (70, 10_000):
        rows = rebuild(home.urls.lake, PipelineConfig(max_epoch_records=size))
        assert home.hashes() == eventful_home.hashes()
        assert home.projections() == eventful_home.projections()
        assert rows == {name: len(home.rows(name)) for name in PROJECTIONS}
        assert home.reconciliation() == eventful_home.reconciliation()
    after = versions(home)
    assert all(after[name] == before[name] + 2 for name in PROJECTIONS)
    table = home.lake.table("trajectories")
    assert content_hash(table, before["trajectories"]) == content_hash(table)
    if compacts:
        home.run(only=["compact"], compact_min_files=2)
        assert home.hashes() == eventful_home.hashes()


def test_a_rebuild_brings_back_what_was_damaged(eventful_home: Any, tmp_path: Path):
    home = eventful_home.copy(tmp_path / "home")
    home.run()
    for name in PROJECTIONS:
        table = home.lake.table(name)
        table.refresh()
        table.commit([], remove=table.data_files())
    assert home.hashes() != eventful_home.hashes()
    rebuild(home.urls.lake)
    assert home.hashes() == eventful_home.hashes()


def test_a_rebuild_in_the_middle_goes_on_afterwards(eventful_home: Any, tmp_path: Path):
    home = eventful_home.copy(tmp_path / "home")
    home.run(only=["ingest"], max_epoch_records=120)
    project_epoch(home.urls.lake, home.log.log_id, [0, 1], PipelineConfig(max_epoch_records=120))
    half = home.hashes()
    rebuild(home.urls.lake)
    assert home.hashes() == half
    home.run()
    assert home.hashes() == eventful_home.hashes()
    assert home.reconciliation() == eventful_home.reconciliation()


@pytest.mark.parametrize("num_done", [1, 5, 8])
def test_a_rebuild_finishes_an_epoch_that_was_begun_first(new_home: MakeHome, kit: Any, tmp_path: Path, num_done: int):
    """Tables that are ahead of `trajectories` would otherwise lose the rows that they are ahead by."""
    home = new_home(kit.eventful(num_whole=2), partitions=1)
    undisturbed = home.copy(tmp_path / "undisturbed")
    home.run(only=["ingest"])
    log_id, ranges = home.log.log_id, {0: (0, 90)}
    [shard] = write_shard(home.lake, log_id, ranges)
    for name in PROJECT_TABLES[:num_done]:
        home.lake.table(name).refresh()
        home.lake.table(name).commit(shard.files.get(name, []), progress=Progress("project", log_id, ranges))
    rebuild(home.urls.lake)
    home.run()
    undisturbed.run()
    assert home.hashes() == undisturbed.hashes()
    assert home.projections() == undisturbed.projections()


def test_nothing_projected_is_nothing_to_rebuild(new_home: MakeHome, tape: Any):
    tape.whole("t")
    home = new_home(tape.records)
    assert rebuild(home.urls.lake) == dict.fromkeys(PROJECTIONS, 0)
    home.run(only=["ingest"])
    assert rebuild(home.urls.lake) == dict.fromkeys(PROJECTIONS, 0)
    home.run()
    assert len(home.rows("trajectories")) == 1


def test_a_rebuild_waits_for_no_pipeline_but_refuses(new_home: MakeHome):
    home = new_home()
    with lease(home.urls.lake, ("verify",)), pytest.raises(LeaseHeldError, match="'verify'"):
        rebuild(home.urls.lake)
