import gzip
from collections import Counter

import pytest

from domains.registry import load_domain
from domains.unwrap import PLAIN, TOOLS, Unwrap, layers
from models.tokenizer import WordTokenizer
from sandbox.open import open_sandbox
from sandbox.port import SandboxUnavailableError
from schemas.events import Action, BlobRef, TrajectoryFinished, TrajectoryStarted
from schemas.records import Trajectory
from storage.blobs import BlobStore
from verify.runtime import SandboxRuntime

DOMAIN = Unwrap()
WRONG = {name: next(other for other in TOOLS if other != name) for name in TOOLS}


@pytest.fixture
def blobs(tmp_path):
    return BlobStore(tmp_path / "blobs")


def play(task, names, blobs):
    """Observations, results and the workspace's reference after playing some tools."""
    environment = DOMAIN.environment()
    try:
        seen = [environment.reset(task, SandboxRuntime(blobs))]
        results = [environment.step(Action(action_id=str(turn), name=name)) for turn, name in enumerate(names)]
        return [*seen, *(result.observation for result in results)], results, blobs.put(environment.workspace().data)
    finally:
        environment.close()


def grade(task, ref, runtime):
    trajectory = Trajectory(
        trajectory_id="t",
        run_id="r",
        attempt=0,
        started=TrajectoryStarted(task_key=task.key, domain="unwrap"),
        finished=TrajectoryFinished(status="completed", workspace_ref=ref),
    )
    return DOMAIN.verifier().verify(task, trajectory, runtime)


@pytest.mark.parametrize("task", DOMAIN.tasks("eval")[:10], ids=lambda task: task.key)
def test_the_reference_solves_a_task_and_every_layer_is_verified(task, blobs):
    names = [action.name for action in DOMAIN.reference_actions(task)]
    observations, results, ref = play(task, names, blobs)
    assert observations[0].content == f"layer 0: {TOOLS[names[0]].kind}"
    assert observations[-1].content == f"done\nlayer 3: {PLAIN}"
    assert [result.terminated for result in results] == [False, False, True]
    assert not any(result.truncated for result in results)
    verdict = grade(task, ref, SandboxRuntime(blobs))
    assert (verdict.outcome, verdict.score) == ("pass", 1.0)
    assert verdict.passed_tests == verdict.expected_tests == ("layer.1", "layer.2", "layer.3")


def test_a_wrong_tool_fails_changes_nothing_and_costs_a_turn(blobs):
    task = DOMAIN.tasks("train")[0]
    first, second, _ = task.data["tools"]
    observations, results, ref = play(task, [first, WRONG[second], second], blobs)
    assert observations[2].exit_code == 1
    assert observations[2].content == f"failed: not {TOOLS[WRONG[second]].kind}\nlayer 1: {TOOLS[second].kind}"
    assert results[-1].truncated
    assert not results[-1].terminated
    verdict = grade(task, ref, SandboxRuntime(blobs))
    assert (verdict.outcome, verdict.score) == ("fail", pytest.approx(2 / 3))
    assert verdict.seen_tests == verdict.passed_tests == ("layer.1", "layer.2")


def test_an_unknown_tool_runs_nothing(blobs):
    task = DOMAIN.tasks("train")[0]
    observations, _, ref = play(task, ["rm -rf .; touch layer.1; true"], blobs)
    assert observations[1].content.startswith("failed: no such tool\nlayer 0:")
    assert grade(task, ref, SandboxRuntime(blobs)).score == 0.0


def test_equal_moves_give_equal_observations_and_workspaces(blobs):
    task = DOMAIN.tasks("train")[5]
    first, again = (play(task, task.data["tools"][:2], blobs) for _ in range(2))
    assert [seen.content for seen in first[0]] == [seen.content for seen in again[0]]
    assert first[2] == again[2]


def test_a_forged_layer_earns_nothing(blobs):
    task = DOMAIN.tasks("train")[0]
    with open_sandbox() as sandbox:
        contents = layers(task)
        sandbox.write({"layer.1": contents[1], "layer.2": b"forged", "layer.3": contents[2]})
        ref = blobs.put(sandbox.snapshot().data)
    verdict = grade(task, ref, SandboxRuntime(blobs))
    assert verdict.seen_tests == ("layer.1", "layer.2", "layer.3")
    assert verdict.passed_tests == ("layer.1",)
    assert verdict.score == pytest.approx(1 / 3)


def test_what_says_nothing_about_the_policy_gives_no_score(blobs):
    task = DOMAIN.tasks("train")[0]

    def unavailable():
        raise SandboxUnavailableError("user namespaces are forbidden")

    _, _, ref = play(task, [], blobs)
    missing = grade(task, BlobRef(sha256="0" * 64, size=1), SandboxRuntime(blobs))
    no_sandbox = grade(task, ref, SandboxRuntime(blobs, unavailable))
    assert [(v.outcome, v.score) for v in (missing, no_sandbox)] == [("infra_error", None)] * 2
    assert "user namespaces are forbidden" in no_sandbox.reason


def test_no_workspace_means_no_layer(blobs):
    assert grade(DOMAIN.tasks("train")[0], None, SandboxRuntime(blobs)).score == 0.0


def test_splits_are_disjoint_and_every_tool_is_at_every_depth_of_the_training_split():
    keys = {split: {task.key for task in DOMAIN.tasks(split)} for split in ("train", "eval", "probe")}
    assert {split: len(of) for split, of in keys.items()} == {"train": 384, "eval": 64, "probe": 64}
    assert len(set.union(*keys.values())) == 512
    for depth in range(3):
        assert set(Counter(task.data["tools"][depth] for task in DOMAIN.tasks("train"))) == set(TOOLS)


def test_tasks_are_the_same_in_every_process():
    again = load_domain("unwrap")
    assert [task.sha256 for task in again.tasks("eval")] == [task.sha256 for task in DOMAIN.tasks("eval")]
    assert again.task(DOMAIN.tasks("probe")[0].key) == DOMAIN.tasks("probe")[0]
    with pytest.raises(KeyError):
        again.task("unwrap/none")


def test_the_vocabulary_covers_all_that_can_be_observed(blobs):
    tokenizer = WordTokenizer(DOMAIN.vocabulary)
    lines = [f"layer {n}: {kind}" for n in range(4) for kind in (*(tool.kind for tool in TOOLS.values()), PLAIN)]
    lines += [f"failed: not {tool.kind}" for tool in TOOLS.values()] + ["done"]
    assert tokenizer.unknown_id not in [index for line in lines for index in tokenizer.encode(line)]
    assert tokenizer.encode(" ".join(TOOLS)) == list(range(len(TOOLS)))


def test_the_gzip_layer_is_real_gzip():
    assert gzip.decompress(TOOLS["gunzip"].wrap(b"some bytes\n" * 99)) == b"some bytes\n" * 99
