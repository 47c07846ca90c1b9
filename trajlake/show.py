"""One trajectory for people: where it stands, and what happened in it, step by step.

A settled trajectory is shown from the projections. One that is open or was quarantined is shown from `events`.

Leaves out: how queries run (a function is passed in) and where lines go.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import Struct

from schemas.wire import WireError, decode_event

Query = Callable[[str], pa.Table]
Row = Mapping[str, Any]
Line = tuple[str, str]
"""(style, text); styles are `title`, `step`, `action`, `observation`, `note`, `bad` and `plain`."""

MAX_CANDIDATES = 10
MAX_EVENTS = 10_000
"""Events of an open or quarantined trajectory that are shown at most."""
PREVIEW_CHARS = 300


class UnknownTrajectoryError(ValueError):
    """No trajectory has this id, or several begin with it."""


class Shown(Struct, kw_only=True, frozen=True):
    """All that the tables say of one trajectory."""

    trajectory_id: str
    state: str
    """settled, quarantined or open."""
    trajectory: dict[str, Any] | None
    steps: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    quarantine: list[dict[str, Any]]
    events: list[dict[str, Any]]
    """For trajectories that are not settled."""


def quoted(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def find_trajectory(query: Query, prefix: str) -> str:
    """The id that begins with `prefix`.

    Raises:
        UnknownTrajectoryError: none or several do; the message lists them.
    """
    if not prefix:
        raise UnknownTrajectoryError("an empty id; name a trajectory, or the beginning of its id")
    # A range and not LIKE: file statistics then leave out most files.
    where = f"trajectory_id >= {quoted(prefix)} AND trajectory_id <= {quoted(prefix + chr(0x10FFFF))}"
    sql = f"SELECT DISTINCT trajectory_id FROM events WHERE {where} ORDER BY trajectory_id"  # noqa: S608 - quoted above
    ids: list[str] = query(f"{sql} LIMIT {MAX_CANDIDATES + 1}").column("trajectory_id").to_pylist()
    if prefix in ids or len(ids) == 1:
        return prefix if prefix in ids else ids[0]
    if ids:
        listed = "\n  ".join(ids[:MAX_CANDIDATES]) + ("\n  …" if len(ids) > MAX_CANDIDATES else "")
        raise UnknownTrajectoryError(f"several trajectories begin with {prefix!r}:\n  {listed}")
    raise UnknownTrajectoryError(
        f"no trajectory in the tables begins with {prefix!r}; what waits in the log comes in by `trajlake pipeline run`"
    )


def load(query: Query, trajectory_id: str) -> Shown:
    """Read everything about one trajectory."""
    where = f"trajectory_id = {quoted(trajectory_id)}"

    def rows(table: str, order: str, limit: int = MAX_EVENTS) -> list[dict[str, Any]]:
        sql = f"SELECT * FROM {table} WHERE {where} ORDER BY {order} LIMIT {limit}"  # noqa: S608 - quoted above
        found: list[dict[str, Any]] = query(sql).to_pylist()
        return found

    trajectories = rows("trajectories", "attempt", 1)
    quarantine = rows("quarantine", '"offset"')
    events = [] if trajectories else [_decoded(row) for row in rows("events", '"offset"')]
    refused = {row["attempt"] for row in quarantine if row["scope"] != "record"}
    is_refused = {event["attempt"] for event in events} <= refused
    return Shown(
        trajectory_id=trajectory_id,
        state="settled" if trajectories else "quarantined" if is_refused else "open",
        trajectory=trajectories[0] if trajectories else None,
        steps=rows("steps", "step_idx"),
        scores=rows("scores", '"offset"'),
        quarantine=quarantine,
        events=events,
    )


def _decoded(row: Row) -> dict[str, Any]:
    shown = {name: row[name] for name in ("partition", "offset", "type", "attempt", "seq", "producer_id")}
    try:
        body = msgspec.to_builtins(decode_event(row["value"]).body)
    except WireError as error:
        return {**shown, "body": None, "error": str(error)}
    body.pop("type")
    return {**shown, "body": body, "error": None}


def lines(shown: Shown, full: bool = False) -> Iterator[Line]:
    """The view, line by line.

    Args:
        shown: From `load`.
        full: Whole payloads instead of their beginnings.
    """
    limit = None if full else PREVIEW_CHARS
    yield "title", f"{shown.trajectory_id}  {shown.state}"
    if shown.trajectory is not None:
        yield from _summary(shown.trajectory)
    for step in shown.steps:
        yield from _step(step, limit)
    for event in shown.events:
        yield from _event(event, limit)
    for score in shown.scores:
        yield from _score(score)
    for row in shown.quarantine:
        what = f"attempt {row['attempt']}" if row["attempt"] is not None else row["scope"]
        yield "bad", f"quarantined ({what}): {row['rule']}: {row['reason']}"


def _given(row: Row, *names: str) -> str:
    return "  ".join(f"{name} {_short(row[name])}" for name in names if row[name] is not None)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _summary(row: Row) -> Iterator[Line]:
    yield "plain", _given(row, "domain", "task_key", "split", "group_id", "sample_idx")
    yield "plain", _given(row, "run_id", "attempt", "model_id", "policy_id", "max_policy_version", "source")
    reward = "null" if row["reward"] is None else _short(row["reward"])
    yield "plain", f"reward {reward}  " + _given(row, "reward_outcome", "reward_source", "env_return")
    yield "plain", _given(row, "status", "stop_reason", "num_steps", "num_tokens", "num_sampled_tokens", "num_events")
    if row["error"]:
        yield "bad", f"error: {row['error']}"
    if not row["trainable"]:
        yield "note", f"not trainable: {row['not_trainable_reason']}"


def _step(row: Row, limit: int | None) -> Iterator[Line]:
    facts = _given(row, "role", "policy_id", "min_policy_version", "finish_reason", "step_reward", "llm_ms")
    count = None if row["response_token_ids"] is None else len(row["response_token_ids"])
    tokens = "" if count is None else f"  {count} token{'s' * (count != 1)}"
    yield "step", f"step {row['step_idx']}  {facts}{tokens}"
    happened = [("action", item) for item in _parsed(row["actions"])]
    happened += [("observation", item) for item in _parsed(row["observations"])]
    happened.append(("speech", {"seq": row["seq"], "content": _speech(row["messages"])}))
    # In order of the stream: the prompt was observed before the first call.
    for kind, item in sorted(happened, key=lambda pair: pair[1]["seq"]):
        yield from _happening(kind, item, limit)


def _speech(messages: str | None) -> str:
    """What the model said in words: its last message, where the messages are known."""
    last = (json.loads(messages) or [{}])[-1] if messages else {}
    content = last.get("content")
    return content.strip() if last.get("role") == "assistant" and isinstance(content, str) else ""


def _parsed(text: str | None) -> list[dict[str, Any]]:
    return json.loads(text) if text else []


def _happening(kind: str, item: Row, limit: int | None) -> Iterator[Line]:
    if kind == "speech":
        for line in _cut(item["content"], limit).splitlines():
            yield "plain", f"    {line}"
        return
    if kind == "action":
        arguments = item.get("arguments") if item.get("arguments") is not None else _blob(item, "arguments_ref")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield "action", f"  → {item['name']} {_cut(text, limit)}".rstrip()
        return
    marks = [f"exit {item['exit_code']}"] if item.get("exit_code") is not None else []
    marks += ["truncated"] if item.get("truncated") else []
    content: str = item["content"] if item.get("content") is not None else _blob(item, "content_ref")
    first, *rest = _cut(content, limit).splitlines() or [""]
    yield "observation", f"  ← {first}" + (f"  [{', '.join(marks)}]" if marks else "")
    for line in rest:
        yield "observation", f"    {line}"


def _blob(item: Row, name: str) -> str:
    ref = item.get(name)
    return f"{ref.get('preview', '')}… [{ref['size']:,} bytes in blob {ref['sha256'][:12]}]" if ref else ""


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else f"{text[:limit]}… [{len(text) - limit:,} more characters]"


def _event(row: Row, limit: int | None) -> Iterator[Line]:
    yield "step", f"{row['partition']}:{row['offset']}  {row['type'] or 'unreadable'}  " + _given(row, "attempt", "seq")
    if row["error"]:
        yield "bad", f"  {row['error']}"
    elif row["type"] in ("action", "observation"):
        yield from _happening(row["type"], row["body"], limit)
    else:
        yield "plain", "  " + _cut(json.dumps(row["body"], ensure_ascii=False, default=_hex), limit)


def _hex(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _score(row: Row) -> Iterator[Line]:
    value = "null" if row["score"] is None else _short(row["score"])
    tests = ""
    if row["expected_tests"] is not None:
        tests = f"  {len(row['passed_tests'] or [])} of {len(row['expected_tests'])} tests passed"
    reason = f"  {row['reason']}" if row["reason"] else ""
    yield "note", f"score {value}  {row['outcome']} by {row['verifier_id']}@{row['verifier_version']}{tests}{reason}"
