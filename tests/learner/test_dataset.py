import json

import pyarrow as pa
import pytest

from learner.dataset import GroupBuilder, TrainingRow, join_steps
from schemas.tables import ANNOTATIONS, STEPS, TRAJECTORIES


def table(schema, rows):
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)


def new_builder(**options):
    return GroupBuilder(**{"run_id": "run", "policy_id": "policy-0", "max_staleness": 2} | options)


def feed(builder, pairs):
    wanted = builder.wanted(table(TRAJECTORIES, [row for row, _ in pairs]))
    builder.add(wanted, table(STEPS, [step for _, steps in pairs for step in steps]))
    return wanted


def ids_of(batch):
    return [row.trajectory_id for row in batch.rows]


def test_only_complete_groups_make_a_batch_oldest_first(sample, sample_group):
    builder = new_builder()
    feed(builder, [sample("late", n) for n in range(3)])
    feed(builder, sample_group("b") + sample_group("a"))
    assert builder.take(3, 0) is None
    batch = builder.take(2, 0)
    assert ids_of(batch) == [f"b-{n}" for n in range(4)] + [f"a-{n}" for n in range(4)]
    assert batch.baseline_members == {"b": [f"b-{n}" for n in range(4)], "a": [f"a-{n}" for n in range(4)]}
    feed(builder, [sample("late", 3)])
    assert ids_of(builder.take(1, 0)) == [f"late-{n}" for n in range(4)]
    assert builder.num_waiting == 0


def test_only_the_training_split_of_its_own_run_is_seen(sample):
    builder = new_builder()
    wanted = feed(
        builder,
        [sample("g", 0, split="eval"), sample("g", 1, split="probe"), sample("g", 2, run_id="other"), sample("g", 3)],
    )
    assert [row["trajectory_id"] for row in wanted] == ["g-3"]
    assert builder.pop_dropped() == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainable": False, "not_trainable_reason": "no_logprobs"}, "not_trainable:no_logprobs"),
        ({"reward": None}, "no_reward"),
        ({"policy_id": None}, "other_policy"),
        ({"policy_id": "policy-1"}, "other_policy"),
        ({"min_policy_version": None}, "other_policy"),
    ],
)
def test_what_may_not_be_trained_on_is_dropped_by_reason_and_out_of_the_baseline(sample, changes, reason):
    builder = new_builder()
    feed(builder, [sample("g", 0, reward=1.0), sample("g", 1, reward=0.0), sample("g", 2, reward=1.0)])
    feed(builder, [sample("g", 3, **changes)])
    batch = builder.take(1, 0)
    assert ids_of(batch) == ["g-0", "g-1", "g-2"]
    assert batch.baseline_members == {"g": ["g-0", "g-1", "g-2"]}
    assert builder.pop_dropped() == {reason: 1}
    assert builder.pop_dropped() == {}


def test_tokens_of_another_temperature_are_dropped(sample):
    row, steps = sample("g", 0, group_size=1)
    builder = new_builder()
    feed(builder, [(row, [steps[0], steps[1] | {"temperature": 0.7}])])
    assert builder.take(1, 0) is None
    assert builder.pop_dropped() == {"temperature": 1}


def test_a_row_without_a_group_is_dropped(sample):
    builder = new_builder()
    feed(builder, [sample("g", 0, group_id=None)])
    assert builder.pop_dropped() == {"no_group": 1}


def test_a_second_trajectory_in_a_members_place_is_dropped_by_name(sample):
    builder = new_builder()
    row, steps = sample("g", 0, group_size=1)
    other = row | {"trajectory_id": "other"}, [step | {"trajectory_id": "other"} for step in steps]
    feed(builder, [(row, steps), other])
    assert builder.pop_dropped() == {"second_member": 1}
    assert ids_of(builder.take(1, 0)) == ["g-0"]


def test_rows_beyond_the_staleness_bound_are_dropped_and_those_at_it_are_not(sample):
    builder = new_builder()
    feed(builder, [sample("g", n, min_policy_version=version) for n, version in enumerate((2, 3, 4, 5))])
    batch = builder.take(1, 5)
    assert ids_of(batch) == ["g-1", "g-2", "g-3"]
    assert builder.pop_dropped() == {"stale": 1}


def test_groups_that_never_complete_leave_memory_when_they_are_stale(sample):
    builder = new_builder()
    feed(builder, [sample("g", n) for n in range(2)])
    assert (builder.take(1, 3), builder.num_waiting) == (None, 0)
    assert builder.pop_dropped() == {"stale": 2}


def test_the_number_of_waiting_groups_is_bounded(sample):
    builder = new_builder(max_waiting_groups=3)
    for n in range(5):
        feed(builder, [sample(f"g{n}", 0)])
    assert builder.num_waiting == 3
    assert builder.pop_dropped() == {"incomplete_group": 2}


@pytest.mark.parametrize("closed_first", [True, False])
def test_members_that_were_given_up_complete_a_group(sample, closed_first):
    builder = new_builder()
    closed = {"kind": "group_closed", "run_id": "run", "subject": "g", "value": json.dumps({"given_up": [1, 3]})}
    other = {"kind": "group_closed", "run_id": "other", "subject": "g", "value": json.dumps({"given_up": [0, 2]})}
    lease = {"kind": "lease_granted", "run_id": "run", "subject": "g", "value": "{}"}
    annotations = table(ANNOTATIONS, [closed, closed, other, lease])
    if closed_first:
        builder.close_groups(annotations)
    feed(builder, [sample("g", 0)])
    if not closed_first:
        builder.close_groups(annotations)
    assert builder.take(1, 0) is None
    feed(builder, [sample("g", 2)])
    assert ids_of(builder.take(1, 0)) == ["g-0", "g-2"]


def test_equal_rewards_are_consumed_and_masked(sample_group):
    builder = new_builder()
    feed(builder, sample_group("same", reward=1 / 3))
    batch = builder.take(1, 0)
    assert batch.masked == {f"same-{n}": "zero_variance" for n in range(4)}
    assert batch.advantages == [0.0] * 4


def test_no_row_comes_twice_whatever_is_delivered_again(sample_group):
    builder = new_builder(consumed=["old-0", "old-1", "old-2", "old-3"])
    assert feed(builder, sample_group("old")) == []
    feed(builder, sample_group("new"))
    assert feed(builder, sample_group("new")) == []  # waiting
    builder.take(1, 0)
    assert feed(builder, sample_group("new")) == []  # consumed
    assert builder.take(1, 0) is None


def test_steps_join_into_one_sequence_with_the_mask_on_what_was_sampled(sample):
    _, steps = sample("g", 0)
    (segment,) = join_steps(steps)
    first, second = (step["response_token_ids"][0] for step in steps)
    assert segment.ids == (2, 4, first, 5, second)
    assert segment.mask == (False, False, True, False, True)
    assert segment.logprobs == (0.0, 0.0, steps[0]["logprobs"][0], 0.0, steps[1]["logprobs"][0])


def test_injected_tokens_and_calls_that_are_not_trainable_are_masked(sample):
    _, steps = sample("g", 0)
    injected = steps[0] | {"response_token_ids": [0, 3], "loss_mask": [True, False], "logprobs": [-0.7, -9.0]}
    other = steps[1] | {"trainable": False, "logprobs": None, "loss_mask": None}
    (segment,) = join_steps([injected, other])
    assert segment.mask == (False, False, True, False, False, False)
    assert segment.logprobs == (0.0, 0.0, -0.7, 0.0, 0.0, 0.0)


def test_logprobs_without_ids_train_nothing(sample):
    _, steps = sample("g", 0)
    absent = {"trainable": False, "response_token_ids": None, "loss_mask": None, "logprobs": [-0.1, -0.2]}
    (segment,) = join_steps([steps[0], steps[1] | absent])
    assert segment.mask == (False, False, True, False)
    assert segment.logprobs[3] == 0.0


def test_a_call_without_a_parent_begins_a_new_sequence(sample):
    _, steps = sample("g", 0)
    segments = join_steps([steps[0], steps[1] | {"parent_call_id": None}])
    assert [len(segment.ids) for segment in segments] == [3, 2]


def test_branched_calls_are_dropped_by_name(sample):
    row, steps = sample("g", 0, group_size=1)
    branch = steps[1] | {"step_idx": 2, "call_id": "c2", "parent_call_id": "c0"}
    assert join_steps([*steps, branch]) is None
    builder = new_builder()
    feed(builder, [(row, [*steps, branch])])
    builder.take(1, 0)
    assert builder.pop_dropped() == {"branched_calls": 1}


def test_steps_that_arrive_in_any_order_are_joined_in_theirs(sample):
    row, steps = sample("g", 0, group_size=1)
    builder = new_builder()
    feed(builder, [(row, steps[::-1])])
    assert builder.take(1, 0).rows[0].segments == join_steps(steps)


def test_the_row_digest_pins_everything_that_is_trained_on(sample):
    _, steps = sample("g", 0)

    def digest(steps=steps, reward=0.5):
        return TrainingRow(
            trajectory_id="t", group_id="g", group_size=1, reward=reward, min_policy_version=0,
            segments=join_steps(steps),
        ).row_sha256  # fmt: skip

    changed = [
        digest(reward=0.25),
        digest([steps[0] | {"response_token_ids": [1 - steps[0]["response_token_ids"][0]]}, steps[1]]),
        digest([steps[0] | {"logprobs": [steps[0]["logprobs"][0] - 1e-12]}, steps[1]]),
        digest([steps[0] | {"loss_mask": [False]}, steps[1]]),
        digest([steps[0], steps[1] | {"parent_call_id": None}]),
    ]
    assert digest() == digest()
    assert len({digest(), *changed}) == 6
