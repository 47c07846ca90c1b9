"""OpenAI chat JSONL: one conversation a line, plain or gzipped.

    {"messages": […], "tools": […], "reward": 1.0, "id": "…", "model": "…", "created": 1700000000, "metadata": {…}}

Only `messages` is needed. `reward` (or `score`) becomes a score by `import:openai-chat`; without one the trajectory
has no reward. Conversations that begin with the same messages have the same task key, unless an `id` names it.
"""

import math
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from ingest.importers._chat import bodies_of
from ingest.importers._derive import digest_of
from ingest.importers._source import CHUNK_BYTES, BadRecord, Conversation, SourceFile, opened
from schemas.events import Body, Score, TrajectoryFinished, TrajectoryStarted

NAME = "openai-chat"
SCORER = f"import:{NAME}"
VERSION = "1"
MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longer lines are bad records, so that memory stays bounded; this much of them is kept."""
_BOM = b"\xef\xbb\xbf"


class _Line(Struct, frozen=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    reward: float | None = None
    score: float | None = None
    id: str | int | None = None
    model: str | None = None
    created: float | None = None
    metadata: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Line)


def conversations(source: SourceFile) -> Iterator[tuple[Conversation | BadRecord, int]]:
    """(conversation or bad record, bytes read of the file), one line in memory at a time; empty lines are passed over.

    Raises:
        ValueError: if the file can't be read.
    """
    with opened(source) as (stream, file):
        for index, (line, is_whole) in enumerate(_lines(stream)):
            text = line.removeprefix(_BOM) if index == 0 else line
            if text.strip():
                yield _conversation(source, index, text) if is_whole else _too_long(index, text), file.tell()


def _lines(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """(line, whether that is all of it)."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        is_whole = len(line) <= MAX_LINE_BYTES or line.endswith(b"\n")
        yield line, is_whole
        while not is_whole:
            rest = stream.readline(CHUNK_BYTES)
            is_whole = not rest or rest.endswith(b"\n")


def _too_long(index: int, line: bytes) -> BadRecord:
    detail = f"over {MAX_LINE_BYTES} bytes; only these are kept"
    return BadRecord(index=index, reason="line too long", detail=detail, raw=line)


def _conversation(source: SourceFile, index: int, line: bytes) -> Conversation | BadRecord:
    raw = line.strip()
    try:
        parsed = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        return BadRecord(index=index, reason="wrong shape", detail=str(error), raw=raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return BadRecord(index=index, reason="not JSON", detail=str(error), raw=raw)
    try:
        bodies: list[Body] = list(bodies_of(parsed.messages))
    except ValueError as error:
        return BadRecord(index=index, reason="wrong shape", detail=str(error), raw=raw)
    reward = parsed.score if parsed.reward is None else parsed.reward
    started = TrajectoryStarted(
        task_key=f"{NAME}/{_task(parsed)}",
        domain=NAME,
        primary_scorer=None if reward is None else SCORER,
        tool_definitions=parsed.tools,
        model_id=parsed.model,
        source=f"{NAME}:{source.label}#{index}",
    )
    return Conversation(
        index=index,
        ts_ns=_ts_ns(parsed.created),
        started=started,
        bodies=[*bodies, TrajectoryFinished(status="completed")],
        score=None if reward is None else _score(reward, parsed.metadata),
    )


def _task(line: _Line) -> str:
    if line.id is not None:
        return str(line.id)
    prompt = []
    for message in line.messages:
        if message.get("role") == "assistant":
            break
        prompt.append(message)
    return f"prompt-{digest_of(msgspec.json.encode(prompt, order='sorted')).hex()[:16]}"


def _ts_ns(created: float | None) -> int:
    """Nanoseconds of a UNIX time in seconds; 0 where it is unknown or out of range."""
    if created is None or not math.isfinite(created) or not 0 <= created < 1 << 33:
        return 0
    return int(created) * 1_000_000_000


def _score(reward: float, metadata: dict[str, Any] | None) -> Score:
    return Score(
        verifier_id=SCORER,
        verifier_version=VERSION,
        outcome="pass" if reward >= 1.0 else "fail",
        score=reward,
        evidence=metadata,
    )
