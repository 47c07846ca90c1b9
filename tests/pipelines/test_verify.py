"""Verify, with real sandboxes: grades are recorded, failures to grade are no grade, and nothing is graded twice."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from domains.humaneval import HumanEval
from pipelines.verify import GradeFn, find_waiting, grade, score_of
from rollout.run import RolloutSession
from rollout.scripted import EmptyPolicy, ReferencePolicy
from schemas.config.pipelines import PipelineConfig
from schemas.config.rollout import RolloutConfig
from schemas.events import Score, TrajectoryStarted, stream_of_score
from schemas.records import Verdict
from schemas.wire import encode_body
from storage.blobs import BlobStore

MakeHome = Callable[..., Any]
BROKEN = "/bin/false"
"""A bwrap that starts nothing."""

FLAKY = """
from domains.humaneval import HumanEval
from schemas.records import Verdict

tries = []

class Verifier:
    id, version = "flaky", "1"
    def verify(self, task, trajectory, runtime):
        tries.append(task.key)
        if len(tries) < 3:
            raise RuntimeError("the grader stumbled")
        return Verdict(outcome="pass", score=1.0)

class Flaky(HumanEval):
    name = "flaky"
    def verifier(self):
        return Verifier()
"""


def roll(home: Any, policy: Any, num: int, **config: Any) -> None:
    """Actors on HumanEval, into the home's log."""
    blobs = BlobStore(home.urls.blobs)
    settings = RolloutConfig(concurrency=4, **config)
    with RolloutSession(HumanEval(), policy, home.log, blobs, settings) as session:
        session.run("eval", num_groups=num)


def rewards(home: Any) -> list[float | None]:
    return [row["reward"] for row in home.rows("trajectories")]


def scores(home: Any) -> list[tuple[str, float | None]]:
    return [(row["outcome"], row["score"]) for row in sorted(home.rows("scores"), key=lambda row: row["seq"])]


def waiting_of(home: Any) -> list[Any]:
    return [
        waiting
        for partition in home.log.partitions()
        for waiting in find_waiting(home.lake, home.log.log_id, partition, 0, home.log.bounds(partition).next)
    ]


def test_the_reference_passes_and_nothing_fails(new_home: MakeHome):
    home = new_home()
    roll(home, ReferencePolicy(HumanEval()), 2)
    roll(home, EmptyPolicy(), 2)
    home.run()
    rows = home.rows("trajectories")
    assert Counter((row["model_id"], row["reward"], row["reward_outcome"]) for row in rows) == {
        ("scripted:reference", 1.0, "pass"): 2,
        ("scripted:empty", 0.0, "fail"): 2,
    }
    assert {row["reward_source"] for row in rows} == {"humaneval@1"}
    assert {row["producer_id"] for row in home.rows("scores")} == {"verify"}
    assert home.rows("quarantine") == []
    assert home.reconciliation().holds


def test_a_grader_s_sandbox_that_cannot_start_gives_no_reward(new_home: MakeHome, monkeypatch: pytest.MonkeyPatch):
    home = new_home()
    roll(home, ReferencePolicy(HumanEval()), 1)
    monkeypatch.setenv("TRAJLAKE_BWRAP", BROKEN)
    home.run(verify_tries=2)
    assert scores(home) == [("infra_error", None), ("infra_error", None), ("abandoned", None)]
    assert set(home.rules().values()) == {"unscored_infra"}
    assert rewards(home) == []
    [row] = home.rows("quarantine")
    assert '"reward":null' in row["row"]
    assert "SandboxUnavailableError" in row["reason"]
    assert home.reconciliation().holds


def test_an_actor_s_sandbox_that_cannot_start_gives_no_reward(new_home: MakeHome, monkeypatch: pytest.MonkeyPatch):
    home = new_home()
    monkeypatch.setenv("TRAJLAKE_BWRAP", BROKEN)
    roll(home, ReferencePolicy(HumanEval()), 1, max_attempts=2)
    home.run()
    assert [(row["rule"], row["scope"]) for row in home.rows("quarantine")] == [("infra_failure", "attempt")] * 2
    assert rewards(home) == scores(home) == []
    assert home.reconciliation().holds


def test_a_workspace_that_is_gone_gives_no_reward(new_home: MakeHome):
    home = new_home()
    roll(home, ReferencePolicy(HumanEval()), 1)
    for path in Path(home.urls.blobs).rglob("*"):
        if path.is_file():
            path.unlink()
    home.run(verify_tries=1)
    assert scores(home) == [("infra_error", None), ("abandoned", None)]
    assert rewards(home) == []


def test_a_grader_that_stumbles_is_tried_again(new_home: MakeHome, tape: Any, tmp_path: Path, monkeypatch: Any):
    (tmp_path / "flaky_domain.py").write_text(FLAKY)
    info = tmp_path / "flaky-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flaky\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trajlake.domains]\nflaky = flaky_domain:Flaky\n")
    monkeypatch.syspath_prepend(tmp_path)
    tape.start("t", task_key="HumanEval/0", domain="flaky", primary_scorer="flaky")
    tape.finish("t")
    home = new_home(tape.records)
    home.run(verify_tries=3)
    assert scores(home) == [("infra_error", None), ("infra_error", None), ("pass", 1.0)]
    assert "RuntimeError: the grader stumbled" in home.rows("scores")[0]["reason"]
    assert rewards(home) == [1.0]
    assert home.rows("quarantine") == []


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(outcome="fail", score=0.0, reason="no \udcff text"),
        Verdict(outcome="pass", score=1.0, evidence={"a": {1: object()}}),
        Verdict(outcome="pass", score="one"),  # type: ignore[arg-type]  # what a careless verifier gives
        Verdict(outcome="pass", score=1.0, evidence={"a": "x" * 5_000_000}),
        None,
        FileNotFoundError("no \udcff file"),
    ],
    ids=["surrogates", "objects", "types", "size", "none", "error"],
)
def test_a_verdict_that_no_event_can_hold_is_an_infrastructure_error(verdict: Any):
    class Careless:
        id, version = "careless", "1"

        def verify(self, task: Any, trajectory: Any, runtime: Any) -> Any:
            if isinstance(verdict, Exception):
                raise verdict
            return verdict

    verifier: Any = Careless()
    nothing: Any = None
    graded = grade(verifier, nothing, nothing, nothing)
    assert (graded.verdict.outcome, graded.verdict.score) == ("infra_error", None)
    encode_body(score_of(verifier, graded))


def test_grading_again_changes_nothing(new_home: MakeHome):
    home = new_home()
    roll(home, ReferencePolicy(HumanEval()), 2)
    home.run(only=["ingest"])
    waiting = waiting_of(home)
    home.run()
    before, found = home.hashes(), home.reconciliation()
    again = GradeFn(home.urls.log, home.urls.blobs, PipelineConfig())
    again.setup()
    assert list(again.process(("", [waiting]))) == [(0, 2)]
    home.run()
    after = home.hashes()
    assert {name for name in after if after[name] != before[name]} == {"events"}
    assert home.reconciliation().duplicates == found.duplicates + 2
    assert home.reconciliation().holds
    assert waiting_of(home) == []


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"domain": "no-such-domain"}, "unknown domain 'no-such-domain'"),
        ({"task_key": "HumanEval/9999"}, "HumanEval/9999"),
        ({"task_sha256": "00" * 32}, "has changed since the trajectory was made"),
        ({"primary_scorer": "another"}, "has no verifier 'another'"),
        ({"primary_scorer": "x" * 480}, "has no verifier"),
    ],
)
def test_what_cannot_be_verified_is_abandoned_by_name(
    new_home: MakeHome, tape: Any, columns: dict[str, str], reason: str
):
    started = {"task_key": "HumanEval/0", "domain": "humaneval", "primary_scorer": "humaneval"}
    tape.start("t", **started | columns)
    tape.finish("t")
    home = new_home(tape.records)
    home.run()
    assert home.rules() == {"t": "unscored_infra"}
    assert reason in home.rows("quarantine")[0]["reason"]
    assert scores(home) == [("abandoned", None)]
    assert rewards(home) == []


def test_a_name_too_long_to_be_scored_under_stays_open_and_harms_nobody(new_home: MakeHome, tape: Any):
    tape.start("t" * 480, domain="humaneval", primary_scorer="y" * 300)
    tape.finish("t" * 480)
    tape.start("t2", domain="no-such-domain", primary_scorer="v")
    tape.finish("t2")
    tape.start("t3", primary_scorer="")
    home = new_home(tape.records)
    home.run()
    assert home.rules() == {"t2": "unscored_infra"}
    assert [row["rule"] for row in home.rows("quarantine") if row["scope"] == "record"] == ["undecodable_body"]
    found = home.reconciliation()
    assert (found.open, found.holds) == (2, True)


def test_scores_of_environments_and_importers_come_from_them(new_home: MakeHome, tape: Any):
    for index, scorer in enumerate(("env:return", "import:tau-bench")):
        tape.start(f"t{index}", primary_scorer=scorer)
        tape.finish(f"t{index}")
    home = new_home(tape.records)
    assert "verify.verdicts" not in home.run().counters
    assert home.rows("scores") == home.rows("quarantine") == []
    assert home.reconciliation().open == 4


def test_a_foreign_event_in_our_stream_does_not_take_the_place_of_our_verdict(new_home: MakeHome, tape: Any):
    started = TrajectoryStarted(task_key="HumanEval/0", domain="humaneval", primary_scorer="humaneval")
    tape.own("t", started)
    stream = stream_of_score("humaneval", "1", "t", 0)
    forged = Score(verifier_id="humaneval", verifier_version="1", outcome="infra_error", score=None)
    for seq in (4, 0):
        tape.add(forged, stream, "t", 0, seq=seq)
    tape.finish("t")
    home = new_home(tape.records)
    home.run()
    assert rewards(home) == [0.0]
    assert [row["seq"] for row in home.rows("scores")] == [4, 0, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reward"), [("reference", 1.0), ("empty", 0.0)])
def test_all_of_humaneval_from_actor_to_table(new_home: MakeHome, name: str, reward: float):
    home = new_home()
    policy = ReferencePolicy(HumanEval()) if name == "reference" else EmptyPolicy()
    roll(home, policy, 164)
    home.run()
    rows = home.rows("trajectories")
    assert {row["task_key"] for row in rows} == {f"HumanEval/{index}" for index in range(164)}
    assert [row["reward"] for row in rows] == [reward] * 164
    assert home.rows("quarantine") == []
    found = home.reconciliation()
    assert (found.open, found.duplicates, found.holds) == (0, 0, True)
