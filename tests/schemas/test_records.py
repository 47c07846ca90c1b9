"""Records that rooms hand to each other."""

import pytest

from schemas.records import Task, Workspace

TASK = Task(key="HumanEval/0", domain="humaneval", prompt="Write f.", data={"b": [1, {"y": 2, "x": None}], "a": "é"})


def test_a_task_keeps_its_digest_for_ever():
    assert TASK.sha256 == "758e470e5d1cde1ab27e7213095f8e07aa34445b4c33fd941220c4dd9c3cbca2"


def test_a_tasks_digest_does_not_depend_on_split_difficulty_or_order_of_keys():
    same = Task(
        key="HumanEval/0",
        domain="humaneval",
        split="eval",
        difficulty=0.5,
        prompt="Write f.",
        data={"a": "é", "b": [1, {"x": None, "y": 2}]},
    )
    assert same.sha256 == TASK.sha256


@pytest.mark.parametrize(
    "change", [{"key": "HumanEval/1"}, {"domain": "other"}, {"prompt": "Write g."}, {"data": {"b": [1]}}]
)
def test_a_tasks_digest_depends_on_its_content(change: dict):
    fields = {"key": TASK.key, "domain": TASK.domain, "prompt": TASK.prompt, "data": TASK.data}
    assert Task(**{**fields, **change}).sha256 != TASK.sha256


def test_a_workspace_is_named_by_its_digest_and_size():
    ref = Workspace(sha256="ab" * 32, data=b"12345").ref
    assert (ref.sha256, ref.size, ref.preview) == ("ab" * 32, 5, "")
