import threading

import pytest

from domains.unwrap import UnwrapEnvironment
from ingest.recorder import Recorder
from rollout.actor import Actor, Assignment
from rollout.errors import PolicyError, RolloutStoppedError
from rollout.scripted import EmptyPolicy, ReferencePolicy
from sandbox.open import open_sandbox
from sandbox.port import SandboxError, SandboxUnavailableError
from storage.blobs import BlobStore


def assignment_of(task, **fields):
    return Assignment(task=task, group_id="g", group_size=4, sample_idx=2, trajectory_id="t", seed=5, **fields)


@pytest.fixture
def play(home, loop, stop):
    """Play one attempt; everything is durable when it returns."""

    def run(domain, policy, assignment, **parts):
        with Recorder(home.log, home.blobs, run_id="run", producer_id="actor") as recorder:
            options = {"open_sandbox": open_sandbox, "stop": stop, "image_digest": "sha256:x"} | parts
            blobs = options.pop("blobs", home.blobs)
            return Actor(domain, policy, loop, recorder, blobs, **options).play(assignment)

    return run


def test_everything_that_happens_is_an_event_in_order(home, play, unwrap, new_policy):
    task = unwrap.tasks("train")[0]
    policy = new_policy()
    played = play(unwrap, policy, assignment_of(task))
    events = home.streams()["t/0"]
    types = [event.envelope.type for event in events]
    turns = ["model_call", "action", "observation"] * played.num_turns
    assert types == ["trajectory_started", "observation", *turns, "trajectory_finished"]
    started, finished = events[0].body, events[-1].body
    assert started.task_sha256 == task.sha256
    assert (started.group_id, started.group_size, started.sample_idx, started.seed) == ("g", 4, 2, 5)
    assert (started.primary_scorer, started.env_version, started.sandbox_image_digest) == ("unwrap", "1", "sha256:x")
    assert started.tokenizer_sha256 == unwrap.vocabulary.sha256
    assert started.model_id == "tiny-transformer-2x32"
    assert [tool["function"]["name"] for tool in started.tool_definitions] == list(unwrap.vocabulary.outputs)
    assert finished == played.finished
    assert finished.final_observation_ids == policy.encode(events[-2].body)
    assert home.blobs.get(finished.workspace_ref)
    calls, actions, observations = (events[start:-1:3] for start in (2, 3, 4))
    for call, action, observation in zip(calls, actions, observations, strict=True):
        assert action.body.call_id == observation.body.call_id == call.body.call_id
        assert observation.body.action_id == action.body.action_id
        assert observation.body.duration_ms > 0


def test_equal_seeds_play_equal_trajectories(play, unwrap, new_policy):
    task = unwrap.tasks("train")[3]
    first = play(unwrap, new_policy(), assignment_of(task))
    again = play(unwrap, new_policy(), assignment_of(task, attempt=1))
    assert first.finished.workspace_ref == again.finished.workspace_ref


def test_the_reference_is_terminated_and_the_empty_policy_ends_at_once(home, play, unwrap):
    task = unwrap.tasks("eval")[0]
    solved = play(unwrap, ReferencePolicy(unwrap), assignment_of(task)).finished
    assert (solved.status, solved.terminated) == ("completed", True)
    empty = play(unwrap, EmptyPolicy(), assignment_of(task, attempt=1)).finished
    assert (empty.status, empty.terminated, empty.stop_reason) == ("completed", False, "no_action")
    assert empty.workspace_ref is not None
    call = home.bodies("t/1")[2]
    assert (call.response_token_ids, call.logprobs) == (None, None)


def test_a_sandbox_that_cant_start_is_an_infra_failure_and_never_a_reward(home, play, unwrap):
    def unavailable():
        raise SandboxUnavailableError("no user namespaces here")

    finished = play(unwrap, EmptyPolicy(), assignment_of(unwrap.tasks("eval")[0]), open_sandbox=unavailable).finished
    assert (finished.status, finished.failure_class) == ("failed", "infra")
    assert "no user namespaces here" in finished.error
    assert [event.envelope.type for event in home.events()] == ["trajectory_started", "trajectory_finished"]


def test_a_sandbox_that_breaks_midway_is_an_infra_failure(home, play, unwrap, monkeypatch):
    def broken(self, action):
        raise SandboxError("the shell ended")

    monkeypatch.setattr(UnwrapEnvironment, "step", broken)
    finished = play(unwrap, ReferencePolicy(unwrap), assignment_of(unwrap.tasks("eval")[0])).finished
    assert finished.failure_class == "infra"
    assert finished.workspace_ref is None


def test_a_blob_store_that_fails_is_an_infra_failure(play, unwrap, tmp_path):
    blobs = BlobStore(tmp_path / "full")
    (tmp_path / "full").rmdir()
    (tmp_path / "full").write_text("a file where the folder was")
    finished = play(unwrap, EmptyPolicy(), assignment_of(unwrap.tasks("eval")[0]), blobs=blobs).finished
    assert finished.failure_class == "infra"


@pytest.mark.parametrize("error", [PolicyError("no answer"), RuntimeError("no answer")])
def test_a_policy_that_fails_is_a_policy_failure_with_a_workspace_to_grade(play, unwrap, error):
    class Failing(EmptyPolicy):
        async def act(self, context, partial, stop):
            raise error

    finished = play(unwrap, Failing(), assignment_of(unwrap.tasks("eval")[0])).finished
    assert (finished.status, finished.failure_class, finished.stop_reason) == ("failed", "policy", "policy")
    assert "no answer" in finished.error
    assert finished.workspace_ref is not None


def test_a_stop_in_mid_trajectory_ends_the_attempt_as_aborted(home, play, counting, stop):
    class Stopping(ReferencePolicy):
        async def act(self, context, partial, stop_call):
            stop.set()
            return await super().act(context, partial, stop_call)

    with pytest.raises(RolloutStoppedError):
        play(counting, Stopping(counting), assignment_of(counting.tasks("train")[0]))
    last = home.bodies("t/0")[-1]
    assert type(last).__name__ == "AttemptAborted"
    assert last.by == "actor"


def test_code_that_is_wrong_is_no_failure_of_policy_or_infrastructure(home, play, counting):
    class Broken(type(counting.environment())):
        def step(self, action):
            raise ZeroDivisionError("a bug in the domain")

    counting.environment = lambda: Broken(rewards=True)
    with pytest.raises(ZeroDivisionError):
        play(counting, ReferencePolicy(counting), assignment_of(counting.tasks("train")[0]))
    last = home.bodies("t/0")[-1]
    assert "a bug in the domain" in last.reason


def test_without_a_verifier_the_return_is_the_score(home, play, counting):
    play(counting, ReferencePolicy(counting), assignment_of(counting.tasks("train")[0]))
    assert home.bodies("t/0")[0].primary_scorer == "env:return"
    (score,) = home.bodies("env:return@1/t/0")
    types = [event.envelope.type for event in home.events()]
    assert types[-2:] == ["score", "trajectory_finished"]  # a kill between them leaves an attempt that is played again
    assert (score.score, score.outcome) == (1.5, "pass")
    rewards = [event.body.value for event in home.streams()["t/0"] if event.envelope.type == "reward"]
    assert rewards == [0.5, 0.5, 0.5]


def test_without_verifier_and_rewards_the_score_is_abandoned_and_not_zero(home, play, counting_without_rewards):
    domain = counting_without_rewards
    play(domain, ReferencePolicy(domain), assignment_of(domain.tasks("train")[0]))
    (abandoned,) = home.bodies("env:return@1/t/0")
    assert type(abandoned).__name__ == "VerificationAbandoned"


def test_turns_are_bounded(play, counting):
    finished = play(
        counting, ReferencePolicy(counting), assignment_of(counting.tasks("train")[0]), max_turns=2
    ).finished
    assert (finished.status, finished.truncated, finished.stop_reason) == ("truncated", True, "max_turns")


def test_concurrent_trajectories_share_batches(home, loop, stop, unwrap, new_policy):
    policy = new_policy(batch_wait_ms=20)
    sizes = []
    sample = policy._sample

    def counted(batch):
        sizes.append(len(batch))
        return sample(batch)

    policy._sample = counted
    with Recorder(home.log, home.blobs, run_id="run") as recorder:
        actor = Actor(unwrap, policy, loop, recorder, home.blobs, open_sandbox=open_sandbox, stop=stop)
        tasks = unwrap.tasks("train")[:6]
        threads = [
            threading.Thread(
                target=actor.play,
                args=(Assignment(task=t, group_id="g", group_size=1, sample_idx=0, trajectory_id=t.key),),
            )
            for t in tasks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(sizes) == 18
    assert max(sizes) > 1
