"""tau-bench result files: a JSON array of `{task_id, trial, reward, info, traj}`, plain or gzipped.

One element is one trajectory, the trials of one task are a group, the reward becomes a score by
`import:tau-bench`. An element whose run broke down (empty `traj`, `info.error`) becomes an infrastructure failure
and not a reward of 0. How a conversation ended is read off its last message: the user simulator's `###STOP###`, the
transfer to a human, and otherwise the runner's step limit.

Source of the format: github.com/sierra-research/tau-bench, `tau_bench/types.py` and `run.py`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

import ijson
import msgspec
from msgspec import Struct

from ingest.importers._chat import bodies_of
from ingest.importers._derive import derived_uuid, digest_of
from ingest.importers._source import BadRecord, Conversation, SourceFile, opened
from schemas.events import Body, Score, TrajectoryFinished, TrajectoryStarted

NAME = "tau-bench"
SCORER = f"import:{NAME}"
VERSION = "1"

_STOP = "###STOP###"
_TERMINAL_TOOLS = frozenset({"transfer_to_human_agents"})
_POLICY_TITLE = re.compile(r"^# (\w+) agent policy", re.IGNORECASE)


class _Result(Struct, frozen=True):
    task_id: int | str
    reward: float | None
    traj: list[dict[str, Any]]
    info: dict[str, Any]
    trial: int | None = None


def conversations(source: SourceFile) -> Iterator[tuple[Conversation | BadRecord, int]]:
    """(conversation or bad record, bytes read of the file), one element in memory at a time.

    Raises:
        ValueError: if the file is no JSON array; after the elements before the damage.
    """
    group_sizes = _count_tasks(source)
    seen: Counter[str] = Counter()
    with opened(source) as (stream, file):
        for index, element in enumerate(_elements(source, stream, "item")):
            try:
                yield _conversation(source, index, element, group_sizes, seen), file.tell()
            except (ValueError, msgspec.ValidationError) as error:
                raw = json.dumps(element).encode()
                yield BadRecord(index=index, reason="wrong shape", detail=str(error), raw=raw), file.tell()


def _elements(source: SourceFile, stream: BinaryIO, prefix: str) -> Iterator[Any]:
    try:
        yield from ijson.items(stream, prefix, use_float=True)
    except ijson.JSONError as error:
        raise ValueError(f"{source.path}: not a JSON array of tau-bench results: {error}") from error


def _count_tasks(source: SourceFile) -> Counter[str]:
    """Task id → its number of trials: the size of its group."""
    with opened(source) as (stream, _):
        is_array = next(iter(_first_event(source, stream)), None) == "start_array"
    if not is_array:
        raise ValueError(f"{source.path}: not a JSON array of tau-bench results")
    with opened(source) as (stream, _):
        return Counter(str(task_id) for task_id in _elements(source, stream, "item.task_id"))


def _first_event(source: SourceFile, stream: BinaryIO) -> Iterator[str]:
    try:
        for event, _ in ijson.basic_parse(stream):
            yield event
    except ijson.JSONError as error:
        raise ValueError(f"{source.path}: not JSON: {error}") from error


def _conversation(
    source: SourceFile, index: int, element: Any, group_sizes: Counter[str], seen: Counter[str]
) -> Conversation:
    result = msgspec.convert(element, _Result)
    task = str(result.task_id)
    sample_idx = seen[task] if result.trial is None else result.trial
    seen[task] += 1
    domain = _domain(result)
    broke_down = not result.traj and "error" in result.info
    started = TrajectoryStarted(
        task_key=f"{domain}/{task}",
        task_sha256=_task_sha256(result),
        domain=NAME,
        group_id=derived_uuid(0, digest_of(NAME, source.sha256, "group", task)),
        group_size=group_sizes[task],
        sample_idx=sample_idx,
        primary_scorer=None if broke_down or result.reward is None else SCORER,
        source=f"{NAME}:{source.label}#{index}",
    )
    bodies: list[Body] = [] if broke_down else list(bodies_of(result.traj))
    bodies.append(_broken(result) if broke_down else _finish(result))
    score = _score(result) if started.primary_scorer else None
    return Conversation(index=index, started=started, bodies=bodies, score=score)


def _domain(result: _Result) -> str:
    """`airline` or `retail`, from the title of the policy that the agent was given; the file names it nowhere."""
    first = result.traj[0].get("content") if result.traj else None
    match = _POLICY_TITLE.match(first) if isinstance(first, str) else None
    return match.group(1).lower() if match else NAME


def _task_sha256(result: _Result) -> str | None:
    task = result.info.get("task")
    return digest_of(msgspec.json.encode(task, order="sorted")).hex() if task is not None else None


def _finish(result: _Result) -> TrajectoryFinished:
    last = result.traj[-1]
    if last.get("role") == "user" and _STOP in str(last.get("content")):
        return TrajectoryFinished(status="completed", terminated=True, stop_reason="user_stop")
    if last.get("role") == "tool" and last.get("name") in _TERMINAL_TOOLS:
        return TrajectoryFinished(status="completed", terminated=True, stop_reason=str(last["name"]))
    return TrajectoryFinished(status="truncated", truncated=True, stop_reason="max_steps")


def _broken(result: _Result) -> TrajectoryFinished:
    return TrajectoryFinished(status="failed", failure_class="infra", error=str(result.info["error"]))


def _score(result: _Result) -> Score:
    return Score(
        verifier_id=SCORER,
        verifier_version=VERSION,
        outcome="pass" if result.reward is not None and result.reward >= 1.0 else "fail",
        score=result.reward,
        evidence=result.info,
    )
