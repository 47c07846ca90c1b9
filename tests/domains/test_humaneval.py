import pytest

from domains.humaneval import HumanEval
from domains.port import HasReferences
from domains.registry import domain_names, load_domain
from schemas.events import Action, TrajectoryFinished, TrajectoryStarted
from schemas.records import Trajectory
from storage.blobs import BlobStore
from verify.runtime import SandboxRuntime

DOMAIN = HumanEval()
TASKS = DOMAIN.tasks("eval")


@pytest.fixture
def blobs(tmp_path):
    return BlobStore(str(tmp_path / "blobs"))


@pytest.fixture
def play(blobs):
    """Plays actions in the environment and grades what they left."""
    runtime = SandboxRuntime(blobs)

    def run(task, actions):
        environment = DOMAIN.environment()
        try:
            environment.reset(task, runtime)
            results = [environment.step(action) for action in actions]
            workspace = environment.workspace()
        finally:
            environment.close()
        finished = TrajectoryFinished(
            status="completed",
            terminated=bool(results) and results[-1].terminated,
            workspace_ref=None if workspace is None else blobs.put(workspace.data),
        )
        started = TrajectoryStarted(task_key=task.key, domain="humaneval")
        trajectory = Trajectory(trajectory_id="t", run_id="r", attempt=0, started=started, finished=finished)
        return DOMAIN.verifier().verify(task, trajectory, runtime)

    return run


def submit(solution):
    return [Action(action_id="a", name="submit", arguments={"solution": solution})]


def test_there_are_164_tasks_all_for_evaluation():
    assert [task.key for task in TASKS] == [f"HumanEval/{number}" for number in range(164)]
    assert DOMAIN.tasks("train") == DOMAIN.tasks("probe") == ()
    assert DOMAIN.task("HumanEval/7") == TASKS[7]
    assert len({task.sha256 for task in TASKS}) == 164
    with pytest.raises(KeyError):
        DOMAIN.task("HumanEval/164")


def test_tasks_do_not_carry_their_solution():
    for task in TASKS:
        assert DOMAIN.reference_solution(task).removeprefix(task.prompt) not in str(task.data)


def test_the_first_observation_is_the_prompt(blobs):
    environment = DOMAIN.environment()
    assert environment.reset(TASKS[0], SandboxRuntime(blobs)).content == TASKS[0].prompt
    assert environment.workspace() is None


def test_handing_in_ends_the_episode_and_leaves_a_workspace(blobs):
    environment = DOMAIN.environment()
    environment.reset(TASKS[0], SandboxRuntime(blobs))
    result = environment.step(submit("x = 1")[0])
    assert (result.terminated, result.truncated, result.reward) == (True, False, None)
    assert environment.workspace() is not None
    environment.close()
    environment.close()
    assert environment.workspace() is None


@pytest.mark.parametrize(
    "action",
    [
        Action(action_id="a", name="shell", arguments={"solution": "x"}),
        Action(action_id="a", name="submit"),
        Action(action_id="a", name="submit", arguments={"solution": 5}),
        Action(action_id="a", name="submit", arguments={"solution": "x" * 1_000_001}),
    ],
)
def test_a_wrong_action_is_answered_not_graded(blobs, action):
    environment = DOMAIN.environment()
    environment.reset(TASKS[0], SandboxRuntime(blobs))
    result = environment.step(action)
    assert (result.terminated, result.observation.outcome) == (False, "error")
    assert environment.workspace() is None


# Problem 32 and others check with a helper that only the prompt defines; 38 and 50 as well.
@pytest.mark.parametrize("number", [0, 10, 32, 38, 50, 81, 108, 132, 148, 163])
def test_reference_solutions_pass(play, number):
    verdict = play(TASKS[number], DOMAIN.reference_actions(TASKS[number]))
    assert (verdict.outcome, verdict.score) == ("pass", 1.0), verdict
    assert verdict.expected_tests == verdict.seen_tests == ("check",)
    assert verdict.tests_sha256
    assert verdict.sandbox_image_digest


@pytest.mark.parametrize("number", [0, 42, 163])
def test_the_bare_prompt_fails(play, number):
    verdict = play(TASKS[number], submit(TASKS[number].prompt + "    pass\n"))
    assert (verdict.outcome, verdict.score) == ("fail", 0.0)


def test_text_that_is_no_valid_unicode_fails_like_any_other(play):
    assert play(TASKS[0], submit("x = '\ud800'")).score == 0.0


@pytest.mark.slow
def test_all_reference_solutions_pass(play):
    scores = {task.key: play(task, DOMAIN.reference_actions(task)).score for task in TASKS}
    assert scores == dict.fromkeys(scores, 1.0)
    assert len(scores) == 164


def test_answering_nothing_scores_zero_on_all(play):
    verdicts = [play(task, []) for task in TASKS]
    assert {(verdict.outcome, verdict.score) for verdict in verdicts} == {("fail", 0.0)}
    assert len(verdicts) == 164


def test_it_is_found_by_name():
    assert "humaneval" in domain_names()
    domain = load_domain("humaneval")
    assert domain.name == "humaneval"
    assert isinstance(domain, HasReferences)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean humaneval"):
        load_domain("human-eval")
    with pytest.raises(ValueError, match=r"there is .*humaneval"):
        load_domain("zzz")
