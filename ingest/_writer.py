"""The recorder's writer thread: chains events, and appends those of many streams in one commit.

Sequence numbers and the hash chain are made here and not where events are recorded, because a Ctrl-C can hit the
recording thread between any two steps, and this thread never: an event is either queued or it is not. For the same
reason nothing here waits on a `threading.Condition`, whose lock an interrupt can leave locked.
"""

import os
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import uuid_utils

from ingest.port import EventLog, LogError, LogUnavailableError
from schemas.events import AttemptAborted, Envelope
from schemas.records import ProducerRecord
from schemas.wire import SALT_BYTES, encode_body, encode_envelope, encode_record

BATCH_BYTES = 4 * 1024 * 1024
BATCH_RECORDS = 2_000
LINGER_SECONDS = 0.005
"""How long a batch that could be larger waits for more; a flush ends the wait."""
OVERHEAD_BYTES = 600
"""Envelope, key and Python objects of a queued event, for the bound on memory."""
_IDLE_LOOKS = 200
"""Lingers without an event after which the thread sleeps until it is woken: a second."""
_SALTS = 256
_FIRST_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 2.0
_LOOK_SECONDS = 0.1
"""Waiters look again this often, should a wake-up be missed."""


class Stream:
    """A stream's identity and, owned by the writer thread, its position."""

    __slots__ = ("attempt", "closed", "is_own", "key", "name", "prev", "producer_id", "run_id", "seq", "trajectory_id")

    def __init__(  # noqa: PLR0913 - the columns of an envelope
        self,
        *,
        run_id: str,
        producer_id: str,
        name: str,
        trajectory_id: str | None,
        attempt: int | None,
        is_own: bool = False,
        seq: int = 0,
        prev: bytes | None = None,
    ) -> None:
        self.run_id = run_id
        self.producer_id = producer_id
        self.name = name
        self.trajectory_id = trajectory_id
        self.attempt = attempt
        self.key = trajectory_id or name
        self.is_own = is_own
        self.seq = seq
        self.prev = prev
        self.closed = False


class Entry(msgspec.Struct, gc=False):
    """An event on its way: everything but its place in the chain."""

    stream: Stream
    type_name: str
    body: bytes
    ts_ns: int
    closes: bool = False


class _Barrier:
    """Released once everything queued before it was appended, or will never be."""

    __slots__ = ("lock", "stops")

    def __init__(self, stops: bool) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()  # released by the writer thread
        self.stops = stops


class Writer:
    """A thread that appends queued events to a log. Its methods but `_run` and below are for any other thread."""

    def __init__(self, log: EventLog, max_bytes: int, max_records: int, retry_seconds: float) -> None:
        self._log = log
        self._max_bytes, self._max_records = max_bytes, max_records
        self._retry_seconds = retry_seconds
        self._queue: SimpleQueue[Entry | _Barrier] = SimpleQueue()
        self._count_lock = threading.Lock()
        self._queued_bytes = self._queued = 0
        self._done_bytes = self._done = 0
        self.acknowledged = 0
        self.error: BaseException | None = None
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        self._hurry: SimpleQueue[None] = SimpleQueue()
        self._asleep = False
        self._open: dict[str, Stream] = {}
        self._salts: Iterator[bytes] = iter(())
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="trajlake-recorder", daemon=True)
        self._thread.start()

    @property
    def unacknowledged(self) -> int:
        """Events that were recorded and are not known to be durable."""
        return self._queued - self.acknowledged

    def submit(self, entry: Entry, wait: bool = True) -> None:
        """Queue an event; with `wait`, first wait until the buffer has room.

        Raises:
            LogError: the writer's first error: this event, and `unacknowledged` ones, are not in the log.
        """
        if self._closing or self.error is not None:
            self._check_open()
        while wait and not self._has_room():
            self._wait_for_progress()
        self._queue.put(entry)
        if self._asleep:
            self._hurry.put(None)
        with self._count_lock:
            self._queued_bytes += len(entry.body) + OVERHEAD_BYTES
            self._queued += 1
        if self._ended:  # closed meanwhile by another thread, which may have missed this event
            self._check_open()

    def flush(self) -> None:
        """Return once everything queued before is durable.

        Raises:
            LogError: the first error.
        """
        self._check_open()
        self._pass_barrier(stops=False)
        self._raise_error()

    def close(self) -> None:
        """Abort what is open, flush, end the thread; idempotent.

        Raises:
            LogError: the first error.
        """
        self._closing = True
        if not self._ended:
            self._pass_barrier(stops=True)
        self._raise_error()

    def _pass_barrier(self, stops: bool) -> None:
        barrier = _Barrier(stops)
        self._queue.put(barrier)
        self._hurry.put(None)
        while not barrier.lock.acquire(timeout=_LOOK_SECONDS):
            self._check_alive()

    def _has_room(self) -> bool:
        return self._queued_bytes - self._done_bytes < self._max_bytes and self._queued - self._done < self._max_records

    def _wait_for_progress(self) -> None:
        wake_up = threading.Lock()
        wake_up.acquire()  # released by the writer thread
        self._waiting.put(wake_up)
        if not self._has_room():
            wake_up.acquire(timeout=_LOOK_SECONDS)
        self._check_alive()
        self._raise_error()

    def _check_alive(self) -> None:
        if not self._thread.is_alive():
            raise LogError("the recorder's thread is gone: after a fork, open a recorder in the new process")

    def _check_open(self) -> None:
        self._raise_error()
        if self._closing:
            raise LogError("the recorder is closed")

    def _raise_error(self) -> None:
        if self.error is not None:
            raise LogError(f"{self.unacknowledged} recorded events are not acknowledged: {self.error}") from self.error

    # The writer thread, from here on.

    def _run(self) -> None:
        stops: list[_Barrier] = []
        while not stops:
            stops = [barrier for barrier in self._write_batch() if barrier.stops]
        self._ended = True
        while not self._queue.empty():
            stops += [barrier for barrier in self._write_batch() if barrier.stops]
        self._append(self._abort_open())
        for barrier in stops:
            barrier.lock.release()

    def _write_batch(self) -> list[_Barrier]:
        """Append what is queued, up to a full batch; release the flushes that waited for it, and give all barriers."""
        records, num_bytes, num_entries, barriers = self._collect()
        self._append(records)
        self._done_bytes += num_bytes
        self._done += num_entries
        for barrier in barriers:
            if not barrier.stops:
                barrier.lock.release()
        while not self._waiting.empty():
            self._waiting.get().release()
        return barriers

    def _collect(self) -> tuple[list[ProducerRecord], int, int, list[_Barrier]]:
        """Chained records of what is queued, up to a full batch; the flushes of several threads share a commit."""
        self._wait_for_work()
        records: list[ProducerRecord] = []
        barriers: list[_Barrier] = []
        num_bytes = num_entries = 0
        while num_bytes < BATCH_BYTES and num_entries < BATCH_RECORDS:
            try:
                entry = self._queue.get_nowait()
            except Empty:
                break
            if isinstance(entry, _Barrier):
                barriers.append(entry)
                continue
            num_entries += 1
            num_bytes += len(entry.body) + OVERHEAD_BYTES
            if not entry.stream.closed:  # an abort at the exit of a block that was interrupted just after its finish
                records.append(self._chain(entry))
        return records, num_bytes, num_entries, barriers

    def _wait_for_work(self) -> None:
        """Return when a flush hurries, or when something was queued and has lingered.

        Recording threads don't wake this one for each event: the switches would cost more than the events.
        """
        idle_looks = 0
        while self._queue.qsize() < BATCH_RECORDS:
            if self._is_hurried(LINGER_SECONDS) or not self._queue.empty():
                return
            idle_looks += 1
            if idle_looks >= _IDLE_LOOKS:
                self._sleep_until_recorded()
                idle_looks = 0

    def _is_hurried(self, seconds: float) -> bool:
        try:
            self._hurry.get(timeout=seconds)
        except Empty:
            return False
        return True

    def _sleep_until_recorded(self) -> None:
        self._asleep = True
        # Whoever queues after this look sees that we sleep; whoever queued before it is seen here.
        if self._queue.empty():
            self._hurry.get()
        self._asleep = False

    def _chain(self, entry: Entry) -> ProducerRecord:
        stream, body = entry.stream, entry.body
        salt = self._next_salt()
        envelope = encode_envelope(
            Envelope(
                event_id=str(uuid_utils.uuid7()),
                run_id=stream.run_id,
                trajectory_id=stream.trajectory_id,
                attempt=stream.attempt,
                stream=stream.name,
                seq=stream.seq,
                producer_id=stream.producer_id,
                ts_ns=entry.ts_ns,
                prev_sha256=stream.prev,
                body_sha256=sha256(salt + body).digest(),
                type=entry.type_name,
            )
        )
        stream.prev = sha256(envelope).digest()
        stream.seq += 1
        if entry.closes:
            stream.closed = True
            self._open.pop(stream.name, None)
        elif stream.is_own:
            self._open[stream.name] = stream
        return ProducerRecord(stream.key, encode_record(envelope, salt, body))

    def _next_salt(self) -> bytes:
        """Random bytes, drawn for many events at once: a system call each is dear."""
        salt = next(self._salts, None)
        if salt is None:
            pool = os.urandom(_SALTS * SALT_BYTES)
            self._salts = (pool[start : start + SALT_BYTES] for start in range(0, len(pool), SALT_BYTES))
            salt = next(self._salts)
        return salt

    def _append(self, records: list[ProducerRecord]) -> None:
        if not records or self.error is not None:
            return
        try:
            self._append_with_retries(records)
        except Exception as error:  # noqa: BLE001 - every error must reach the recording thread, which raises it
            self.error = error
        else:
            self.acknowledged += len(records)

    def _append_with_retries(self, records: list[ProducerRecord]) -> None:
        """The same bytes again, for as long as the log may come back: at least once."""
        give_up, delay = time.monotonic() + self._retry_seconds, _FIRST_RETRY_SECONDS
        while True:
            try:
                return self._log.append(records)
            except LogUnavailableError:
                if time.monotonic() + delay > give_up:
                    raise
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_RETRY_SECONDS)

    def _abort_open(self) -> list[ProducerRecord]:
        records = []
        for stream in list(self._open.values()):
            body = AttemptAborted(reason="the recorder was closed while the attempt was open", by=stream.producer_id)
            self._queued += 1
            records.append(
                self._chain(Entry(stream, "attempt_aborted", encode_body(body), time.time_ns(), closes=True))
            )
        return records
