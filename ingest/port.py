"""The event log port. Backends: `ingest.sqlite_log` (embedded default), Kafka later.

Every backend passes `tests/ingest/eventlog_contract.py` unchanged.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import pyarrow as pa

from schemas.records import Bounds, ProducerRecord

RECORD_SCHEMA = pa.schema([("offset", pa.int64()), ("key", pa.string()), ("value", pa.binary())])
"""Schema of the batches that `read` gives."""


class LogError(Exception):
    """Base of event log errors."""


class LogUnavailableError(LogError):
    """The log can't be reached, is locked or has no space left; a later try may work."""


class LogNotFoundError(LogError):
    """There is no log at the URL; `trajlake init` creates one."""


class LogExistsError(LogError):
    """There already is a log at the URL; it is left as it is."""


class LogFormatError(LogError):
    """What is at the URL is no log, a damaged one, or one of another version of trajlake."""


class OffsetTruncatedError(LogError):
    """A read begins before the first retained offset: its records are gone, which must not look like a hole."""


class RecordTooLargeError(LogError):
    """A record exceeds the log's limit; its payload belongs in the blob store."""


class EventLog(Protocol):
    """An append-only, partitioned log of records."""

    @property
    def log_id(self) -> str:
        """Identity of this log; a log that was recreated has another."""

    @property
    def max_record_bytes(self) -> int:
        """Largest value that `append` takes."""

    def append(self, records: Sequence[ProducerRecord]) -> None:
        """Append in order; records of one key keep their order. Returns once durable; a retry may append twice.

        Raises:
            RecordTooLargeError: nothing was appended.
            LogUnavailableError: the records may or may not have been appended.
        """

    def partitions(self) -> Sequence[int]:
        """Partition numbers, fixed when the log was created."""

    def partition_of(self, key: str) -> int:
        """Partition that holds a key's records."""

    def bounds(self, partition: int) -> Bounds:
        """First retained offset and next offset."""

    def read(self, partition: int, start: int, end: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """Records with start ≤ offset < end, in order, as batches (`RECORD_SCHEMA`) of about `max_bytes` at most.

        Offsets may have holes. A batch holds at least one record, whatever its size.

        Raises:
            OffsetTruncatedError: `start`, or a later offset still to be read, lies below the first retained one.
        """

    def truncate_before(self, partition: int, offset: int) -> None:
        """Retention: forget records below `offset`. Offsets are never reused."""

    def close(self) -> None:
        """Free what the log holds; idempotent. Use after it raises `LogError`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """Close."""
