"""All stages in one process, several processes on one lake, and follow."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.lease import LeaseHeldError, lease
from pipelines.run import STAGES, ConflictError, Pipelines, Totals
from schemas.config.pipelines import PipelineConfig

MakeHome = Callable[..., Any]
SMALL = {"max_epoch_records": 60}


def test_two_processes_at_once_double_nothing_and_the_loser_says_why(zygote: Any, eventful_home: Any, tmp_path: Path):
    home = eventful_home.copy(tmp_path / "home")
    ended = zygote.run(home.order(config=SMALL), home.order(config=SMALL))
    assert sorted(one["status"] for one in ended) == [0, 1]
    [loser] = [one for one in ended if one["status"] == 1]
    assert loser["error"].startswith("LeaseHeldError: pipeline ")
    assert "of this lake is being run by pid " in loser["error"]
    assert home.hashes() == eventful_home.hashes()
    assert home.reconciliation() == eventful_home.reconciliation()


def test_without_any_lease_the_commit_protocol_alone_prevents_doubles(zygote: Any, eventful_home: Any, tmp_path: Path):
    home = eventful_home.copy(tmp_path / "home")
    home.run(only=["ingest"])
    order = home.order(job="project", config=SMALL)
    ended = zygote.run(order, order, order)
    assert [one["status"] for one in ended] == [0, 0, 0], ended
    assert home.hashes() == eventful_home.hashes()
    assert home.reconciliation() == eventful_home.reconciliation()
    num_epochs = len([row for row in home.rows("epochs") if row["pipeline"] == "project"])
    assert sum(one["totals"]["epochs"] for one in ended) > num_epochs, "they did meet"


def test_ingesting_twice_at_once_without_a_lease_doubles_nothing(zygote: Any, eventful_home: Any, tmp_path: Path):
    home = eventful_home.copy(tmp_path / "home")
    order = home.order(job="ingest", config=SMALL)
    ended = zygote.run(order, order)
    assert [one["status"] for one in ended] == [0, 0], ended
    home.run()
    assert home.hashes() == eventful_home.hashes()
    assert home.reconciliation().holds


def test_stages_in_processes_of_their_own_run_side_by_side(zygote: Any, eventful_home: Any, tmp_path: Path):
    home = eventful_home.copy(tmp_path / "home")
    orders = [home.order(only=[stage], config=SMALL) for stage in ("ingest", "project", "verify")]
    ended = zygote.run(*orders)
    assert [one["status"] for one in ended] == [0, 0, 0], ended
    home.run()
    assert home.hashes() == eventful_home.hashes()


def test_a_stage_alone_takes_only_its_lease(new_home: MakeHome, tape: Any):
    tape.whole("t")
    home = new_home(tape.records)
    with lease(home.urls.lake, ("project",)):
        assert home.run(only=["ingest"]).epochs == {"ingest": 1}
        with pytest.raises(LeaseHeldError):
            home.run()
    assert home.run().epochs["project"] == 1


def test_an_unknown_stage_is_named(new_home: MakeHome):
    home = new_home()
    with pytest.raises(ValueError, match="unknown stage 'projekt'; stages are ingest, verify, project, compact"):
        Pipelines(home.urls, only=["projekt"])


def test_totals_add_up(new_home: MakeHome, kit: Any):
    home = new_home(kit.eventful(num_whole=2))
    seen: list[Any] = []
    totals = Pipelines(home.urls, PipelineConfig(max_epoch_records=90), on_epoch=seen.append).run_once()
    again = Totals()
    for done in seen:
        again.add(done)
    assert again == totals
    assert totals.counters["ingest.num_records"] == totals.counters["project.num_records"] == len(home.rows("events"))
    assert all(done.seconds > 0 and done.stage in STAGES for done in seen)


def test_follow_takes_what_comes_and_stops(new_home: MakeHome, kit: Any):
    home = new_home()
    stop, first = threading.Event(), threading.Event()
    config = PipelineConfig(follow_seconds=0.05)
    totals: list[Totals] = []
    pipelines = Pipelines(home.urls, config, on_epoch=lambda done: first.set() if done.stage == "project" else None)
    thread = threading.Thread(target=lambda: totals.append(pipelines.follow(stop)))
    thread.start()
    for index in range(2):
        first.clear()
        tape = kit.Tape()
        tape.whole(f"t{index}")
        home.log.append(tape.records)
        assert first.wait(60)
    stop.set()
    thread.join(60)
    assert totals[0].epochs["project"] >= 2
    assert [row["trajectory_id"] for row in home.rows("trajectories")] == ["t0", "t1"]
    with lease(home.urls.lake, STAGES):
        pass  # follow has given the leases back


def test_losing_for_ever_is_an_error(new_home: MakeHome):
    pipelines = Pipelines(new_home().urls)
    for _ in range(20):
        pipelines._watch_conflicts("project", {"conflicts": 1})
    with pytest.raises(ConflictError, match="21 increments in a row lost"):
        pipelines._watch_conflicts("project", {"conflicts": 1})
    pipelines._watch_conflicts("project", {"num_records": 1})
    pipelines._watch_conflicts("project", {"conflicts": 1})


def test_compaction_changes_files_and_no_row(eventful_home: Any, tmp_path: Path):
    home = eventful_home.copy(tmp_path / "home")
    home.run(only=["ingest", "project"], **SMALL)
    files = sum(len(home.lake.table(name).data_files()) for name in home.hashes())
    totals = home.run(only=["compact"], compact_min_files=2)
    assert totals.counters["compact.files_after"] < totals.counters["compact.files_before"]
    home.lake.table("events").refresh()
    assert home.hashes() == eventful_home.hashes()
    assert sum(len(home.lake.table(name).data_files()) for name in home.hashes()) < files
    assert home.run(only=["ingest", "project"]).epochs == {}
