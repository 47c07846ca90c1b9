"""kill -9 at every named commit point, then a restart: the same projections, row for row, as without."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.failpoints import FAILPOINTS, reach
from pipelines.plan import in_batches

SMALL = {"max_epoch_records": 200, "compact_min_files": 2}
"""Two epochs of every stage."""


def of_stages(*stages: str) -> list[str]:
    return [name for name in FAILPOINTS if name.split(".")[0] in stages]


def assert_same_content(home: Any, undisturbed: Any) -> None:
    assert home.projections() == undisturbed.projections()
    assert home.reconciliation() == undisturbed.reconciliation()
    assert home.reconciliation().holds


COMMITS = of_stages("ingest", "project", "compact")


@pytest.fixture(scope="module")
def restarted(zygote: Any, eventful_home: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Commit point → a home whose pipelines died there in their second epoch and were started again; two at a time."""
    folder = tmp_path_factory.mktemp("deaths")
    homes = {point: eventful_home.copy(folder / point) for point in COMMITS}
    for points in in_batches(COMMITS, 2):
        died = zygote.run(*[homes[point].order(f"{point}:2", config=SMALL) for point in points])
        assert died == [{"status": -signal.SIGKILL}] * len(points), points
        ended = zygote.run(*[homes[point].order(config=SMALL) for point in points])
        assert [one["status"] for one in ended] == [0] * len(points), ended
    return homes


@pytest.mark.parametrize("point", COMMITS)
def test_after_a_death_everything_is_as_without_it(restarted: dict[str, Any], eventful_home: Any, point: str):
    assert_same_content(restarted[point], eventful_home)


def test_death_after_death_changes_nothing(zygote: Any, eventful_home: Any, tmp_path: Path):
    home = eventful_home.copy(tmp_path / "home")
    died = []
    for point in of_stages("ingest", "project"):
        [ended] = zygote.run(home.order(point, config={"max_epoch_records": 60}))
        died.append(ended["status"] == -signal.SIGKILL)
    assert sum(died) > 8
    [restarted] = zygote.run(home.order(config=SMALL))
    assert restarted["status"] == 0, restarted
    assert_same_content(home, eventful_home)


@pytest.mark.parametrize("point", of_stages("rebuild"))
@pytest.mark.parametrize("table", [1, 7])
def test_a_rebuild_that_died_is_made_good_by_the_next(
    zygote: Any, eventful_home: Any, tmp_path: Path, point: str, table: int
):
    home = eventful_home.copy(tmp_path / "home")
    assert zygote.run(home.order(config=SMALL))[0]["status"] == 0
    [died] = zygote.run(home.order(f"{point}:{table}", job="rebuild"))
    assert died == {"status": -signal.SIGKILL}
    assert home.hashes() == eventful_home.hashes(), "a table is replaced by its equal, so readers see no change"
    [again] = zygote.run(home.order(job="rebuild"))
    assert again["status"] == 0, again
    assert_same_content(home, eventful_home)


@pytest.mark.parametrize("point", of_stages("verify"))
def test_a_death_while_verifying_scores_nothing_twice(zygote: Any, new_home: Callable[..., Any], kit: Any, point: str):
    tape = kit.Tape()
    for index in range(6):
        tape.start(f"t{index}", domain="no-such-domain", primary_scorer="no-such-domain")
        tape.finish(f"t{index}")
    homes = [new_home(tape.records, name) for name in ("disturbed", "undisturbed")]
    home, undisturbed = homes
    [died] = zygote.run(home.order(point))
    assert died == {"status": -signal.SIGKILL}
    # Verify goes on before ingest has seen what the dead process appended.
    assert zygote.run(home.order(only=["verify"]))[0]["status"] == 0
    for one in homes:
        [ended] = zygote.run(one.order())
        assert ended["status"] == 0, ended
        assert one.reconciliation().holds
        assert one.rules() == {f"t{index}": "unscored_infra" for index in range(6)}
    assert [score(row) for row in home.rows("scores")] == [score(row) for row in undisturbed.rows("scores")]
    # Appended by the dead process and once more by its successor, if it died between append and commit.
    assert (home.reconciliation().duplicates > 0) == (point == "verify.scores.after_append")


def score(row: dict[str, Any]) -> dict[str, Any]:
    """What of a score doesn't depend on when it was made and in which log."""
    return {name: value for name, value in row.items() if name not in {"ts_ns", "log_id", "offset", "producer_id"}}


def test_every_failpoint_is_tried():
    tried = COMMITS + of_stages("rebuild") + of_stages("verify")
    assert sorted(tried) == sorted(FAILPOINTS)
    assert len(set(FAILPOINTS)) == len(FAILPOINTS) >= 8


def test_a_failpoint_that_is_not_listed_is_a_bug(monkeypatch: pytest.MonkeyPatch):
    reach("no.such.point")
    monkeypatch.setenv("TRAJLAKE_FAILPOINT", "ingest.events.before_commit")
    with pytest.raises(AssertionError, match="not listed"):
        reach("no.such.point")
