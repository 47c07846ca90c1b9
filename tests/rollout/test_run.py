import signal
import subprocess
import sys
import textwrap
from collections import Counter
from itertools import chain

import pytest

from domains.unwrap import Unwrap
from ingest.recorder import Recorder
from models.checkpoint import save_checkpoint
from rollout.run import RolloutSession, choose_tasks, run_rollout
from rollout.scripted import ReferencePolicy
from sandbox.open import open_sandbox
from sandbox.port import SandboxUnavailableError
from schemas.config.rollout import RolloutConfig
from schemas.events import PolicyPublished, stream_of_policy

CONFIG = RolloutConfig(concurrency=6, group_size=3, policy_poll_seconds=0.001)


def session(home, domain, policy, config=CONFIG, **parts):
    return RolloutSession(domain, policy, home.log, home.blobs, config, **parts)


def attempts_of(home):
    """(trajectory, attempt) → names of the events that closed it, its own and others'."""
    closed = {}
    for event in home.events():
        key = (event.envelope.trajectory_id, event.envelope.attempt)
        if event.envelope.type == "trajectory_started":
            closed.setdefault(key, [])
        elif event.envelope.type in ("trajectory_finished", "attempt_aborted"):
            closed.setdefault(key, []).append(event.envelope.type)
    return closed


def starts_of(home):
    return [event for event in home.events() if event.envelope.type == "trajectory_started"]


def test_a_round_plays_every_member_of_every_group_once(home, counting):
    progress = []
    with session(home, counting, ReferencePolicy(counting)) as running:
        summary = running.run("train", 4, on_progress=lambda done, total: progress.append((done, total)))
    assert (summary.num_trajectories, summary.num_played, summary.statuses) == (12, 12, {"completed": 12})
    assert progress == [(done, 12) for done in range(1, 13)]
    slots = Counter((event.body.group_id, event.body.sample_idx) for event in starts_of(home))
    assert set(slots.values()) == {1}
    groups = Counter(event.body.group_id for event in starts_of(home))
    assert set(groups.values()) == {3}
    by_group = {(event.body.group_id, event.body.task_key) for event in starts_of(home)}
    assert len(by_group) == 4
    assert set(map(tuple, attempts_of(home).values())) == {("trajectory_finished",)}


def test_groups_outside_the_training_split_have_one_member(home, unwrap):
    with session(home, unwrap, ReferencePolicy(unwrap)) as running:
        summary = running.run("eval", 4)
    assert summary.num_trajectories == 4
    assert {event.body.group_size for event in starts_of(home)} == {1}
    assert {event.body.split for event in starts_of(home)} == {"eval"}


def test_a_split_without_tasks_is_refused(home, counting):
    with session(home, counting, ReferencePolicy(counting)) as running, pytest.raises(ValueError, match="no tasks"):
        running.run("eval", 4)


def test_rounds_walk_through_the_split_without_overlap_and_in_a_new_order_each_time():
    tasks = Unwrap().tasks("train")[:12]
    rounds = [[task.key for task in choose_tasks(tasks, 4, n, seed=1)] for n in range(6)]
    first, second = [*chain(*rounds[:3])], [*chain(*rounds[3:])]
    assert sorted(first) == sorted(second) == sorted(task.key for task in tasks)
    assert first != second
    assert rounds[1] == [task.key for task in choose_tasks(tasks, 4, 1, seed=1)]
    assert rounds[0] != [task.key for task in choose_tasks(tasks, 4, 0, seed=2)]


def test_a_round_that_is_done_is_not_played_again(home, counting):
    for num_played in (6, 0):
        with session(home, counting, ReferencePolicy(counting), run_id="run") as running:
            assert running.run("train", 2).num_played == num_played
            assert running.run("train", 2).num_trajectories == 6
    with session(home, counting, ReferencePolicy(counting), run_id="run") as running:
        assert running.run("train", 2, round_idx=1).num_played == 6
        assert running.run("train", 3).num_played == 3


def test_infrastructure_that_comes_back_costs_an_attempt_and_no_trajectory(home, unwrap):
    calls = []

    def shaky():
        calls.append(1)
        if len(calls) in (2, 3):
            raise SandboxUnavailableError("out of memory")
        return open_sandbox()

    config = RolloutConfig(concurrency=1, group_size=1)
    with session(home, unwrap, ReferencePolicy(unwrap), config, open_sandbox=shaky) as running:
        summary = running.run("train", 2)
    assert (summary.num_trajectories, summary.num_played, summary.given_up) == (2, 4, ())
    assert summary.statuses == {"infra": 2, "completed": 2}
    assert sorted(attempt for _, attempt in attempts_of(home)) == [0, 0, 1, 2]


def test_infrastructure_that_stays_away_is_given_up_by_name_and_never_scored(home, unwrap):
    def unavailable():
        raise SandboxUnavailableError("user namespaces are forbidden")

    config = RolloutConfig(concurrency=2, group_size=2, max_attempts=2)
    with session(home, unwrap, ReferencePolicy(unwrap), config, open_sandbox=unavailable) as running:
        summary = running.run("train", 1)
    assert (summary.num_trajectories, summary.num_played, len(summary.given_up)) == (0, 4, 2)
    closed = [event.body for event in home.events() if event.envelope.type == "group_closed"]
    assert sorted(body.given_up[0] for body in closed) == [0, 1]
    assert "user namespaces are forbidden" in closed[0].reason
    assert not [event for event in home.events() if event.envelope.type == "score"]
    run_id = running.run_id
    with session(home, unwrap, ReferencePolicy(unwrap), config, open_sandbox=unavailable, run_id=run_id) as resumed:
        again = resumed.run("train", 1)
    assert (again.num_trajectories, again.num_played, sorted(again.given_up)) == (0, 0, sorted(summary.given_up))
    closed = [event.envelope for event in home.events() if event.envelope.type == "group_closed"]
    # Said again, under the same identities: whoever gave them up may have died before it could.
    assert len(closed) == 4
    assert len({(envelope.stream, envelope.seq) for envelope in closed}) == 2


def test_the_newest_published_policy_is_followed_between_trajectories(home, unwrap, new_policy, tmp_path):
    policy, loaded = new_policy(), []
    saved = save_checkpoint(tmp_path / "p.safetensors", new_policy(seed=8)._loaded.model, unwrap.vocabulary)
    with session(home, unwrap, policy, run_id="run", policy_id="policy-0") as running:
        running.run("train", 1)
        with Recorder(home.log, run_id="run") as learner:
            for version in (1, 2):
                body = PolicyPublished(
                    policy_id="policy-0", version=version, checkpoint_uri=saved.uri, sha256=saved.sha256
                )
                learner.emit(body, stream=stream_of_policy("run", "policy-0"))
        running.run("train", 1, round_idx=1)
        loaded.append(policy.version)
    versions = {event.body.policy_version_runs[0][0] for event in home.events() if event.envelope.type == "model_call"}
    assert loaded == [2]
    assert versions == {0, 2}


PLAY = """
    import os, signal, sys
    from domains.unwrap import Unwrap
    from ingest.open import open_log
    from rollout.run import RolloutSession
    from rollout.scripted import ReferencePolicy
    from schemas.config.rollout import RolloutConfig
    from storage.blobs import BlobStore

    domain = Unwrap()
    log, blobs = open_log(sys.argv[1]), BlobStore(sys.argv[2])
    config = RolloutConfig(concurrency=6, group_size=3)

    def interrupt(done, total):
        if done == 4:
            os.kill(os.getpid(), signal.{signal})

    with RolloutSession(domain, ReferencePolicy(domain), log, blobs, config, run_id="run") as session:
        session.run("train", 12, on_progress=interrupt)
    print("went on to the end")
"""


def play_and_die(home, tmp_path, name):
    script = textwrap.dedent(PLAY).format(signal=name)
    argv = [sys.executable, "-c", script, home.url, str(tmp_path / "blobs")]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_a_killed_rollout_is_taken_up_again_with_one_finish_per_slot(home, tmp_path, unwrap):
    died = play_and_die(home, tmp_path, "SIGKILL")
    assert died.returncode == -signal.SIGKILL
    before = attempts_of(home)
    left_open = {key for key, closed in before.items() if not closed}
    assert left_open, "the kill was meant to hit attempts in flight"

    with session(home, unwrap, ReferencePolicy(unwrap), run_id="run") as running:
        summary = running.run("train", 12)
    assert (summary.num_trajectories, summary.num_aborted) == (36, len(left_open))
    after = attempts_of(home)
    assert all(len(closed) == 1 for closed in after.values())
    for trajectory, attempt in left_open:
        assert after[trajectory, attempt] == ["attempt_aborted"]
        assert after[trajectory, attempt + 1] == ["trajectory_finished"]
    slots = Counter(
        (event.body.group_id, event.body.sample_idx)
        for event in starts_of(home)
        if after[event.envelope.trajectory_id, event.envelope.attempt] == ["trajectory_finished"]
    )
    assert len(slots) == 36
    assert set(slots.values()) == {1}
    assert all(closed == after[key] for key, closed in before.items() if closed)


def test_ctrl_c_closes_every_attempt_as_aborted_and_the_run_can_go_on(home, tmp_path, unwrap):
    died = play_and_die(home, tmp_path, "SIGINT")
    assert "KeyboardInterrupt" in died.stderr
    assert "went on" not in died.stdout
    closed = attempts_of(home)
    assert all(len(ends) == 1 for ends in closed.values())
    assert ["attempt_aborted"] in closed.values()
    summary = run_rollout(
        unwrap, ReferencePolicy(unwrap), home.log, home.blobs, CONFIG, split="train", num_groups=12, run_id="run"
    )
    assert (summary.num_trajectories, summary.num_aborted) == (36, 0)
    finished = [key for key, ends in attempts_of(home).items() if ends == ["trajectory_finished"]]
    assert len({trajectory for trajectory, _ in finished}) == len(finished) == 36
