"""`Recorder`: the SDK with which an actor, a verifier or any other code records events.

    with Recorder(log, blobs, producer_id="actor-1") as recorder:
        with recorder.trajectory(TrajectoryStarted(task_key="t", domain="d")) as attempt:
            attempt.record(Observation(content="…"))
            attempt.record(ModelCall(call_id="0"))
            attempt.finish(TrajectoryFinished(status="completed"))

`record` only encodes and queues; a thread chains events, and appends those of all streams together. An event is
acknowledged, that is durable, once a later `flush()` has returned. An attempt that leaves its block without a finish,
by an exception, Ctrl-C or a forgotten line, ends as `attempt_aborted` in its own stream.

Leaves out: leases of attempts (`rollout.scheduler`) and aborting other processes' attempts, which is an `emit`.
"""

import os
import socket
import threading
import time
import weakref
from collections import OrderedDict
from types import TracebackType
from typing import Self

import uuid_utils

from ingest._payload import INLINE_BYTES, PayloadUnavailableError, encode_claim_checked, type_name_of
from ingest._writer import Entry, Stream, Writer
from ingest.port import EventLog, LogError, RecordTooLargeError
from ingest.streams import StreamPosition, last_of_stream
from schemas.events import (
    Action,
    AttemptAborted,
    Body,
    ContextRewritten,
    Envelope,
    ModelCall,
    Observation,
    Reward,
    TrajectoryFinished,
    TrajectoryStarted,
    stream_of_attempt,
)
from schemas.wire import WireError, decode_envelope, encode_envelope
from storage.blobs import BlobStore

__all__ = [
    "Attempt",
    "AttemptClosedError",
    "AttemptOpenError",
    "PayloadUnavailableError",
    "Recorder",
    "StreamPosition",
    "StreamWriter",
    "last_of_stream",
]

MAX_BUFFER_BYTES = 32 * 1024 * 1024
MAX_BUFFER_RECORDS = 20_000
RETRY_SECONDS = 60.0
MAX_STREAMS = 100_000
_ENVELOPE_BYTES = 16 * 1024
"""An envelope and its salt are smaller than this: its names are limited to 512 characters."""
_REMEMBERED_ATTEMPTS = 100_000
_MAX_REASON = 2_000

_OWN_TYPES = (ModelCall, Action, Observation, ContextRewritten, Reward)


class AttemptClosedError(LogError):
    """The attempt was finished or aborted: it takes no more events."""


class AttemptOpenError(LogError):
    """This process has opened this attempt of this trajectory before."""


class _Fence:
    """Attempts that this process has opened, so that none is written by two of its parts. The latest ones only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def claim(self, log_id: str, stream: str) -> None:
        with self._lock:
            if (log_id, stream) in self._seen:
                raise AttemptOpenError(f"attempt {stream} was opened by this process before; take the next number")
            self._seen[(log_id, stream)] = None
            if len(self._seen) > _REMEMBERED_ATTEMPTS:
                self._seen.popitem(last=False)


_fence = _Fence()


class Recorder:
    """Records events into a log; safe to use from several threads, one per process.

    Args:
        log: where events go; the recorder doesn't close it.
        blobs: where payloads above `inline_bytes` go; None keeps them in the events.
        run_id: the run that events belong to; a new UUIDv7 by default.
        producer_id: who records; host and process by default.
        inline_bytes: payloads up to this size stay inside their event.
        max_buffer_bytes: bound on what is recorded and not yet durable; `record` waits when it is reached. Each
            thread may exceed it by one event.
        max_buffer_records: the same, in events.
        retry_seconds: how long an append is retried while the log is unavailable, before that is an error.

    Raises:
        ValueError: if run_id or producer_id is no name.
    """

    def __init__(  # noqa: PLR0913 - identity and bounds, all with defaults
        self,
        log: EventLog,
        blobs: BlobStore | None = None,
        *,
        run_id: str | None = None,
        producer_id: str | None = None,
        inline_bytes: int = INLINE_BYTES,
        max_buffer_bytes: int = MAX_BUFFER_BYTES,
        max_buffer_records: int = MAX_BUFFER_RECORDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.log = log
        self.run_id = run_id if run_id is not None else str(uuid_utils.uuid7())
        self.producer_id = producer_id if producer_id is not None else f"{socket.gethostname()}-{os.getpid()}"
        self._blobs = blobs
        self._inline_bytes = inline_bytes
        self._max_body_bytes = log.max_record_bytes - _ENVELOPE_BYTES
        self._streams: dict[str, StreamWriter] = {}
        self._streams_lock = threading.Lock()
        self._new_stream("check", None, None)
        self._writer = Writer(log, max_buffer_bytes, max_buffer_records, retry_seconds)
        # Also runs at the interpreter's exit, for code that never closes.
        self._finalizer = weakref.finalize(self, self._writer.close)

    @property
    def acknowledged(self) -> int:
        """Number of events that are durable in the log."""
        return self._writer.acknowledged

    @property
    def unacknowledged(self) -> int:
        """Number of events that were recorded and are not known to be durable."""
        return self._writer.unacknowledged

    def trajectory(self, started: TrajectoryStarted, trajectory_id: str | None = None, attempt: int = 0) -> "Attempt":
        """Begin an attempt, recording its first event; use the result in a `with` block.

        Args:
            started: the first event.
            trajectory_id: as issued with the task; a new UUIDv7 by default.
            attempt: number of the attempt at this trajectory.

        Raises:
            AttemptOpenError: if this process has opened this attempt before.
            ValueError: if an id or a field is malformed.
            LogError: if events can no longer be written.
        """
        if not isinstance(started, TrajectoryStarted):
            raise ValueError(f"an attempt begins with TrajectoryStarted, not {type(started).__name__}")
        trajectory_id = str(uuid_utils.uuid7()) if trajectory_id is None else trajectory_id
        stream = self._new_stream(stream_of_attempt(trajectory_id, attempt), trajectory_id, attempt, is_own=True)
        body = self._encode(started)
        _fence.claim(self.log.log_id, stream.name)
        self._writer.submit(Entry(stream, "trajectory_started", body, time.time_ns()))
        return Attempt(self, stream, trajectory_id, attempt)

    def stream(
        self,
        stream: str,
        *,
        trajectory_id: str | None = None,
        attempt: int | None = None,
        after: StreamPosition | None = None,
    ) -> "StreamWriter":
        """Writer of a stream that is no attempt's own, going on after a known position.

        A producer that comes back under a stream's name must pass `after=last_of_stream(log, stream, key)`: events
        that begin at 0 again count as duplicates of the old ones.

        Raises:
            ValueError: if a name is malformed or the stream is an attempt's own.
        """
        position = after or StreamPosition()
        state = self._new_stream(
            stream, trajectory_id, attempt, seq=position.seq, prev=position.prev_sha256 if position.seq else None
        )
        if trajectory_id is not None and attempt is not None and stream == stream_of_attempt(trajectory_id, attempt):
            raise ValueError(f"{stream} is an attempt's own stream; record through Recorder.trajectory")
        return StreamWriter(self, state)

    def emit(
        self,
        body: Body,
        *,
        stream: str,
        trajectory_id: str | None = None,
        attempt: int | None = None,
        seq: int | None = None,
        prev_sha256: bytes | None = None,
    ) -> None:
        """Record one event into a stream that is no attempt's own: scores, annotations, policies, consumption.

        Without `seq` it is the stream's next one in this recorder, beginning at 0, and the position is remembered.
        With `seq` nothing is remembered: the way for streams of one or a few events, such as a score's tries.

        Raises:
            ValueError: if a field is malformed.
            RecordTooLargeError: if the log doesn't take events of this size.
            LogError: if events can no longer be written.
        """
        if seq is not None:
            after = StreamPosition(seq, prev_sha256)
            self.stream(stream, trajectory_id=trajectory_id, attempt=attempt, after=after).record(body)
            return
        with self._streams_lock:
            writer = self._streams.get(stream)
            if writer is None:
                if len(self._streams) >= MAX_STREAMS:
                    raise ValueError(f"over {MAX_STREAMS} streams whose position is remembered: pass seq")
                writer = self.stream(stream, trajectory_id=trajectory_id, attempt=attempt)
                self._streams[stream] = writer
        writer.record(body)

    def flush(self) -> None:
        """Return once everything recorded before, by any thread, is durable.

        Raises:
            LogError: the first error since the recorder was opened; its events may not be in the log.
        """
        self._writer.flush()

    def close(self) -> None:
        """Abort attempts that are still open, flush, and end the writer thread; idempotent.

        Raises:
            LogError: if events could not be written.
        """
        try:
            self._writer.close()
        except LogError:
            self._finalizer.detach()
            raise
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except LogError as log_error:
            if error is None:
                raise
            error.add_note(f"trajlake: {log_error}")

    def _encode(self, body: Body) -> bytes:
        data = encode_claim_checked(body, self._blobs, self._inline_bytes)
        if len(data) > self._max_body_bytes:
            raise RecordTooLargeError(f"{type(body).__name__}: {len(data)} bytes; at most {self._max_body_bytes}")
        return data

    def _new_stream(
        self,
        name: str,
        trajectory_id: str | None,
        attempt: int | None,
        *,
        is_own: bool = False,
        seq: int = 0,
        prev: bytes | None = None,
    ) -> Stream:
        """Check names once per stream, by a trip through the wire format, and not once per event."""
        stream = Stream(
            run_id=self.run_id,
            producer_id=self.producer_id,
            name=name,
            trajectory_id=trajectory_id,
            attempt=attempt,
            is_own=is_own,
            seq=seq,
            prev=prev,
        )
        envelope = Envelope(
            event_id="check",
            run_id=stream.run_id,
            trajectory_id=trajectory_id,
            attempt=attempt,
            stream=name,
            seq=seq,
            producer_id=stream.producer_id,
            ts_ns=0,
            prev_sha256=prev,
            body_sha256=bytes(32),
            type="check",
        )
        try:
            decode_envelope(encode_envelope(envelope))
        except (WireError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"stream {name!r}: {error}") from error
        return stream


class StreamWriter:
    """Writes one stream that is no attempt's own. Made by `Recorder.stream`."""

    def __init__(self, recorder: Recorder, stream: Stream) -> None:
        self._recorder = recorder
        self._stream = stream

    def record(self, body: Body) -> None:
        """Record the stream's next event.

        Raises:
            ValueError: if a field has a wrong type.
            RecordTooLargeError: if the log doesn't take events of this size.
            LogError: if events can no longer be written.
        """
        recorder = self._recorder
        data = recorder._encode(body)
        recorder._writer.submit(Entry(self._stream, type_name_of(body), data, time.time_ns()))


class Attempt:
    """One open attempt. Made by `Recorder.trajectory`; may be shared by threads."""

    def __init__(self, recorder: Recorder, stream: Stream, trajectory_id: str, attempt: int) -> None:
        self.trajectory_id = trajectory_id
        self.attempt = attempt
        self._recorder = recorder
        self._stream = stream
        self._lock = threading.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the attempt was finished or aborted."""
        return self._closed

    def record(self, body: Body) -> None:
        """Record a model call, action, observation, reward or rewritten context.

        Raises:
            AttemptClosedError: after `finish` or `abort`.
            ValueError: if the type doesn't belong here or a field has a wrong type.
            RecordTooLargeError: if the log doesn't take events of this size.
            LogError: if events can no longer be written.
        """
        if not isinstance(body, _OWN_TYPES):
            raise ValueError(f"{type(body).__name__} doesn't belong inside an attempt; use finish, abort or emit")
        self._submit(body, closes=False)

    def finish(self, body: TrajectoryFinished) -> None:
        """Record the attempt's last event.

        Raises:
            AttemptClosedError: if it was finished or aborted before.
            ValueError: if a field has a wrong type.
            LogError: if events can no longer be written.
        """
        if not isinstance(body, TrajectoryFinished):
            raise ValueError(f"an attempt ends with TrajectoryFinished, not {type(body).__name__}")
        self._submit(body, closes=True)

    def abort(self, reason: str) -> None:
        """Give the attempt up: it never wins and never trains.

        Raises:
            AttemptClosedError: if it was finished or aborted before.
            LogError: if events can no longer be written.
        """
        body = AttemptAborted(reason=reason[:_MAX_REASON], by=self._recorder.producer_id)
        self._submit(body, closes=True, wait=False)

    def _submit(self, body: Body, closes: bool, wait: bool = True) -> None:
        recorder = self._recorder
        data = recorder._encode(body)
        entry = Entry(self._stream, type_name_of(body), data, time.time_ns(), closes)
        with self._lock:
            if self._closed:
                raise AttemptClosedError(f"attempt {self._stream.name} takes no more events: it has ended")
            recorder._writer.submit(entry, wait)
            self._closed = closes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._closed:
            return
        reason = "left without a finish" if error is None else f"{type(error).__name__}: {error}"
        try:
            self.abort(reason)
        except LogError as log_error:
            if error is None:
                raise
            error.add_note(f"trajlake: {log_error}")
