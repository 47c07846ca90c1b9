import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
import torch

import learner.trainer
from learner.dataset import TrainingRow, join_steps, make_batch
from learner.errors import StarvedError
from learner.trainer import Trainer
from learner.update import Tensors, update_policy
from models.checkpoint import load_checkpoint
from models.errors import CheckpointError

LEARNER, POLICY = "run/learner/learner-0", "run/policy/policy-0"


def open_trainer(home, config, vocabulary):
    return Trainer(
        config, run_id="run", log=home.log, lake=home.lake, checkpoints=home.checkpoints, vocabulary=vocabulary
    )


def test_the_first_version_is_published_before_any_row(home, config, vocabulary):
    with open_trainer(home, config, vocabulary) as trainer:
        assert trainer.published.version == 0
    (published,) = home.bodies()[POLICY]
    model, found = load_checkpoint(published.checkpoint_uri, published.sha256)
    assert found == vocabulary
    assert model.config.width == config.model_width


def test_a_step_is_consumed_then_trained_then_published(home, config, vocabulary, sample_group):
    home.write_trajectories(sample_group("a") + sample_group("b"))
    with open_trainer(home, config, vocabulary) as trainer:
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        batch = trainer.next_batch()
        done = trainer.train(batch)
        assert trainer.next_batch() is None
        assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    consumed, trained = home.bodies()[LEARNER]
    assert consumed.trajectory_ids == [row.trajectory_id for row in batch.rows]
    assert consumed.row_sha256s == [row.row_sha256 for row in batch.rows]
    assert (consumed.train_step, consumed.policy_version, trained.train_step) == (0, 0, 0)
    assert consumed.baseline_members == {g: [f"{g}-{n}" for n in range(4)] for g in "ab"}
    assert consumed.table_versions == {"trajectories": 1, "steps": 1}
    assert [body.version for body in home.bodies()[POLICY]] == [0, 1]
    assert done.published.metadata == {"learner_id": "learner-0", "train_step": 0}
    assert trained.statistics == done.statistics
    assert done.statistics["num_trajectories"] == 8
    assert done.statistics["staleness_max"] == 0


def test_the_learner_recomputes_what_the_sampler_said(home, config, vocabulary, sample_group):
    home.write_trajectories(sample_group("a") + sample_group("b"))
    with open_trainer(home, config, vocabulary) as trainer:
        statistics = trainer.train(trainer.next_batch()).statistics
    assert 0 <= statistics["sampler_gap"] <= 1e-5


def test_consumption_is_durable_before_the_update_begins(home, config, vocabulary, sample_group, monkeypatch):
    home.write_trajectories(sample_group("a") + sample_group("b"))
    seen = []

    def look(*args):
        seen.extend(type(body).__name__ for body in home.bodies()[LEARNER])
        raise RuntimeError("the update failed")

    monkeypatch.setattr(learner.trainer, "update_policy", look)
    with open_trainer(home, config, vocabulary) as trainer, pytest.raises(RuntimeError, match="the update failed"):
        trainer.train(trainer.next_batch())
    assert seen == ["Consumed"]


def test_rows_that_come_later_are_found_and_rewritten_files_give_nothing_twice(home, config, vocabulary, sample_group):
    with open_trainer(home, config, vocabulary) as trainer:
        assert trainer.next_batch() is None
        home.write_trajectories(sample_group("a"))
        assert trainer.next_batch() is None
        home.write_trajectories(sample_group("b"))
        assert len(trainer.next_batch().rows) == 8
        table = home.lake.table("trajectories")
        table.replace([table.write_file(table.read_files(table.data_files()))])
        assert trainer.next_batch() is None
        home.write_trajectories(sample_group("c") + sample_group("d"))
        assert {row.group_id for row in trainer.next_batch().rows} == {"c", "d"}


def test_training_raises_the_rewarded_tokens(home, config, vocabulary, sample_group):
    groups = [sample_group(f"g{n}", 8, group_size=8) for n in range(8)]
    home.write_trajectories([pair for group in groups for pair in group])
    with open_trainer(home, config, vocabulary) as trainer:
        steps = trainer.run(4, timeout_seconds=5)
        with torch.inference_mode():
            left = torch.softmax(trainer.model(torch.tensor([[2, 4]]))[0, -1], -1)[0].item()
    assert [step.published.version for step in steps] == [1, 2, 3, 4]
    assert left > 0.52


def test_a_batch_without_a_gradient_is_consumed_and_its_statistics_are_null(home, config, vocabulary, sample_group):
    home.write_trajectories(sample_group("a", reward=0.5) + sample_group("b", reward=0.5))
    with open_trainer(home, config, vocabulary) as trainer:
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        statistics = trainer.train(trainer.next_batch()).statistics
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert (statistics["loss"], statistics["sampler_gap"]) == (None, None)
    assert statistics["num_masked"] == 8
    assert set(home.bodies()[LEARNER][0].masked.values()) == {"zero_variance"}


def test_a_loss_that_is_not_finite_moves_nothing_and_is_null(config, vocabulary, sample_group):
    rows = [learner_row(pair) for pair in sample_group("a")]
    model = learner.trainer.new_transformer(learner.trainer.model_config(config, vocabulary), 0)
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    before = [parameter.clone() for parameter in model.parameters()]
    statistics = update_policy(model, torch.optim.AdamW(model.parameters()), make_batch({"a": rows}), config, 0)
    assert all(a.isnan().any() or torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert statistics["loss"] is None
    assert statistics["num_minibatches_skipped"] == 2


def learner_row(pair):
    row, steps = pair
    return TrainingRow(
        trajectory_id=row["trajectory_id"],
        group_id=row["group_id"],
        group_size=4,
        reward=row["reward"],
        min_policy_version=0,
        segments=join_steps(steps),
    )


def test_masked_rows_are_no_part_of_the_tensors(sample_group):
    same = [learner_row(pair) for pair in sample_group("same", reward=1.0)]
    mixed = [learner_row(pair) for pair in sample_group("mixed")]
    assert Tensors(make_batch({"same": same, "mixed": mixed})).ids_bt.shape == (4, 5)


def test_dropped_rows_are_named_in_the_statistics(home, config, vocabulary, sample_group, sample):
    home.write_trajectories(sample_group("a") + sample_group("b", 3) + [sample("b", 3, reward=None)])
    with open_trainer(home, config, vocabulary) as trainer:
        assert trainer.train(trainer.next_batch()).statistics["dropped:no_reward"] == 1


def test_a_learner_that_starves_says_what_is_missing(home, config, vocabulary, sample_group):
    home.write_trajectories(sample_group("a"))
    with (
        open_trainer(home, config, vocabulary) as trainer,
        pytest.raises(StarvedError, match=r"no batch of 2 complete groups within 0\.01 s; 1 groups wait"),
    ):
        trainer.wait_for_batch(0.01)


def test_a_restart_goes_on_bit_by_bit_as_if_nothing_had_happened(home, new_home, config, vocabulary, sample_group):
    pairs = [sample_group(f"g{n}") for n in range(4)]
    other = new_home("other")
    for target in (home, other):
        target.write_trajectories([pair for group in pairs for pair in group])
    with open_trainer(home, config, vocabulary) as trainer:
        trainer.run(2, timeout_seconds=5)
        expected = trainer.published.sha256
    for _ in range(2):
        with open_trainer(other, config, vocabulary) as trainer:
            trainer.run(1, timeout_seconds=5)
            found = trainer.published.sha256
    assert found == expected


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import learner.trainer
    from ingest.open import open_log
    from lake.open import open_lake
    from learner.trainer import Trainer
    from models.tokenizer import Vocabulary
    from schemas.config.learner import LearnerConfig
    import msgspec

    config = msgspec.json.decode(sys.argv[3], type=LearnerConfig)
    vocabulary = msgspec.json.decode(sys.argv[4], type=Vocabulary)

    def die(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    log, lake = open_log(sys.argv[1]), open_lake(sys.argv[2])
    with Trainer(config, run_id="run", log=log, lake=lake, checkpoints=Path(sys.argv[5]), vocabulary=vocabulary) as t:
        t.train(t.next_batch())
        learner.trainer.{victim} = die
        t.train(t.next_batch())
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["update_policy", "save_optimizer", "save_checkpoint"])
def test_after_a_kill_no_row_is_trained_on_twice(home, config, vocabulary, sample_group, victim):
    home.write_trajectories([pair for n in range(6) for pair in sample_group(f"g{n}")])
    argv = [home.url, home.lake.url, msgspec.json.encode(config).decode(), msgspec.json.encode(vocabulary).decode()]
    script = textwrap.dedent(KILLED).format(victim=victim)
    died = subprocess.run(
        [sys.executable, "-c", script, *argv, str(home.checkpoints)], timeout=60, check=False, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    published = home.bodies()[POLICY][-1]
    assert published.version == 1

    with open_trainer(home, config, vocabulary) as trainer:
        assert trainer.published.sha256 == published.sha256
        assert trainer.train_step == 2
        trainer.train(trainer.next_batch())
        assert trainer.next_batch() is None
    bodies = home.bodies()
    consumed = [body for body in bodies[LEARNER] if type(body).__name__ == "Consumed"]
    assert [body.train_step for body in consumed] == [0, 1, 2]
    trained_on = [trajectory for body in consumed for trajectory in body.trajectory_ids]
    assert len(set(trained_on)) == len(trained_on) == 24
    assert [body.version for body in bodies[POLICY]] == [0, 1, 2]


def test_a_checkpoint_that_was_changed_stops_the_restart(home, config, vocabulary):
    with open_trainer(home, config, vocabulary) as trainer:
        uri = trainer.published.checkpoint_uri
    path = Path(uri)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="the file was changed"):
        open_trainer(home, config, vocabulary)
