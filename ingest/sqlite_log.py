"""The embedded event log: one SQLite file in WAL mode, many producer processes, no server.

A partition is a table of its own. Its next offset follows the last record, and lies at the partition's floor or above,
which retention raises, so offsets are dense, ordered and never used twice; the transaction that inserts records also
looks that up. (A counter that every append updates would cost each commit one more page.) `synchronous=FULL` makes a
commit durable before `append` returns. The file must lie on a local disk: WAL needs shared memory.

Leaves out: erasure of single records.
"""

import os
import sqlite3
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import uuid_utils

from ingest.port import (
    RECORD_SCHEMA,
    LogError,
    LogExistsError,
    LogFormatError,
    LogNotFoundError,
    LogUnavailableError,
    OffsetTruncatedError,
    RecordTooLargeError,
)
from schemas.records import Bounds, ProducerRecord

SCHEME = "sqlite://"
APPLICATION_ID = 0x74726C6B
"""`trlk`: marks an SQLite file as an event log."""
FORMAT_VERSION = 1
MAX_RECORD_BYTES = 16 * 1024 * 1024
MAX_PARTITIONS = 64
PAGE_BYTES = 16_384
"""Events are 1 to 3 KB: with SQLite's default of 4 KiB a third of every page stays empty."""
BUSY_SECONDS = 30.0
_INSERT_ROWS = 1024
"""Rows per INSERT. Python gives up its lock for each statement, so row by row a busy thread starves a writer."""
_DELETE_OFFSETS = 5_000
"""Offsets per transaction of retention, so that producers get their turn."""

_DAMAGED = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})

_META = "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
_PARTITIONS = 'CREATE TABLE partitions (id INTEGER PRIMARY KEY, "first" INTEGER NOT NULL, floor INTEGER NOT NULL)'
_RECORDS = 'CREATE TABLE records_{} ("offset" INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB NOT NULL)'


def log_path(path_or_url: str | Path) -> Path:
    """File of a `sqlite:///abs/path` URL or a plain path.

    Raises:
        ValueError: for a URL of another scheme or one without an absolute path.
    """
    text = str(path_or_url)
    if text.startswith(SCHEME):
        path = Path(text.removeprefix(SCHEME))
        if not path.is_absolute():
            raise ValueError(f"{text}: an SQLite URL has three slashes and an absolute path: sqlite:///data/log.sqlite")
        return path
    if "://" in text:
        raise ValueError(f"{text}: not an SQLite log; its URL starts with sqlite:///")
    return Path(text).absolute()


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into the port's, once, here."""
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise LogError(f"{path}: the log is closed: {error}") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            raise LogFormatError(f"{path}: not an event log, or damaged: {error}") from error
        raise LogUnavailableError(f"{path}: {error}") from error


def _connect(path: Path, mode: str, busy_seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=busy_seconds, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA synchronous=FULL")
    return connection


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class SqliteLog:
    """An event log in one SQLite file. Safe to use from several threads; open it anew in every process.

    Use `SqliteLog.create` and `SqliteLog.open`.
    """

    def __init__(self, path: Path, busy_seconds: float) -> None:
        self.path = path
        self._pid = os.getpid()
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        with _typed_errors(path):
            # Two connections, so that a slow append never holds up a reader of this process.
            self._writer = _connect(path, "rw", busy_seconds)
            self._reader = _connect(path, "rw", busy_seconds)
            self._log_id, self._partitions = _read_meta(path, self._reader)

    @classmethod
    def create(cls, path_or_url: str | Path, partitions: int = 2, busy_seconds: float = BUSY_SECONDS) -> Self:
        """Create a log; the number of partitions is fixed from then on.

        Raises:
            ValueError: for a bad path or number of partitions.
            LogExistsError: if there is one already.
            LogFormatError: if the file is something else.
            LogUnavailableError: if the file can't be written.
        """
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise ValueError(f"partitions: {partitions}; a log has 1 to {MAX_PARTITIONS}")
        path = log_path(path_or_url)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LogUnavailableError(f"{path}: {error}") from error
        with _typed_errors(path):
            connection = _connect(path, "rwc", busy_seconds)
            try:
                _create_tables(path, connection, partitions)
            finally:
                connection.close()
        _sync_folder(path.parent)
        return cls(path, busy_seconds)

    @classmethod
    def open(cls, path_or_url: str | Path, busy_seconds: float = BUSY_SECONDS) -> Self:
        """Open a log that exists.

        Args:
            path_or_url: a path or `sqlite:///abs/path`.
            busy_seconds: how long a call waits for another process's lock before `LogUnavailableError`.

        Raises:
            ValueError: for a bad path.
            LogNotFoundError: if there is no file.
            LogFormatError: if the file is no event log.
            LogUnavailableError: if it can't be read.
        """
        path = log_path(path_or_url)
        if not path.is_file():
            raise LogNotFoundError(f"{path}: no event log; `trajlake init` creates one")
        return cls(path, busy_seconds)

    @property
    def log_id(self) -> str:
        """Identity of this log; a log that was recreated has another."""
        return self._log_id

    @property
    def max_record_bytes(self) -> int:
        """Largest value that `append` takes."""
        return MAX_RECORD_BYTES

    def partitions(self) -> Sequence[int]:
        """Partition numbers, from 0."""
        return range(self._partitions)

    def partition_of(self, key: str) -> int:
        """CRC-32 of the key's UTF-8 bytes, modulo the number of partitions: the same in every process, for ever."""
        return zlib.crc32(key.encode()) % self._partitions

    def append(self, records: Sequence[ProducerRecord]) -> None:
        """Append in one transaction, in order; durable once this returns.

        Raises:
            RecordTooLargeError: nothing was appended.
            LogUnavailableError: locked for too long, disk full…; nothing was appended, or the commit's fate is unknown.
        """
        parameters = self._parameters(records)
        if parameters:
            with self._lock_of(self._write_lock), _transaction(self._writer, "IMMEDIATE"):
                for partition, values in parameters.items():
                    self._insert(partition, values)

    def _parameters(self, records: Sequence[ProducerRecord]) -> dict[int, list[Any]]:
        """Partition → flat (offset to be filled in, key, value) triples."""
        parameters: dict[int, list[Any]] = defaultdict(list)
        last_key, values = None, []
        for record in records:
            if len(record.value) > MAX_RECORD_BYTES:
                raise RecordTooLargeError(
                    f"a record of {len(record.value)} bytes; this log takes {MAX_RECORD_BYTES}: use a blob"
                )
            if record.key != last_key:  # records of one key often come in a row
                last_key, values = record.key, parameters[self.partition_of(record.key)]
            values += (None, record.key, record.value)
        return parameters

    def _insert(self, partition: int, values: list[Any]) -> None:
        """Give the triples of one partition their offsets and insert them."""
        num_rows = len(values) // 3
        first = _bounds(self._writer, partition).next
        values[0::3] = range(first, first + num_rows)
        start = 0
        while start < num_rows:
            # Sizes are powers of two, so that few statements need to be compiled and they stay cached.
            size = min(_INSERT_ROWS, 1 << ((num_rows - start).bit_length() - 1))
            sql = f"INSERT INTO records_{int(partition)} VALUES " + ",".join(["(?,?,?)"] * size)  # noqa: S608 - an int
            self._writer.execute(sql, values[3 * start : 3 * (start + size)])
            start += size

    def bounds(self, partition: int) -> Bounds:
        """First retained offset and next offset.

        Raises:
            ValueError: if there is no such partition.
            LogUnavailableError: if the file can't be read.
        """
        self._check_partition(partition)
        with self._lock_of(self._read_lock):
            return _bounds(self._reader, partition)

    def read(self, partition: int, start: int, end: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """Records with start ≤ offset < end, in order, in batches of at most `max_bytes` of keys and values.

        Every batch is a query of its own: a reader that takes its time holds no snapshot, so the WAL stays short.
        A batch holds at least one record, whatever its size.

        Raises:
            ValueError: if there is no such partition, or max_bytes is not positive.
            OffsetTruncatedError: if retention has passed the next offset to be read.
            LogUnavailableError: if the file can't be read.
        """
        self._check_partition(partition)
        if max_bytes < 1:
            raise ValueError(f"max_bytes: {max_bytes}; at least 1")
        return self._read_batches(partition, start, end, max_bytes)

    def _read_batches(self, partition: int, start: int, end: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        while start < end:
            with self._lock_of(self._read_lock), _transaction(self._reader, "DEFERRED"):
                bounds = _bounds(self._reader, partition)
                if start < bounds.first:
                    raise OffsetTruncatedError(
                        f"{self.path}: partition {partition} begins at {bounds.first}; "
                        f"records [{start}, {min(end, bounds.first)}) are gone"
                    )
                rows = _fetch(self._reader, partition, start, end, max_bytes)
            if not rows:
                return
            offsets, keys, values = zip(*rows, strict=True)
            yield pa.record_batch([pa.array(offsets, pa.int64()), keys, pa.array(values, pa.binary())], RECORD_SCHEMA)
            start = offsets[-1] + 1

    def truncate_before(self, partition: int, offset: int) -> None:
        """Retention: forget records below `offset`. Offsets are never reused; the file's space is.

        Raises:
            ValueError: if there is no such partition, or the offset has not been written yet.
            LogUnavailableError: some records may still be stored, but none is readable; a later call removes them.
        """
        self._check_partition(partition)
        with self._lock_of(self._write_lock), _transaction(self._writer, "IMMEDIATE"):
            bounds = _bounds(self._writer, partition)
            if offset > bounds.next:
                raise ValueError(f"offset {offset} is not in the log; partition {partition} ends at {bounds.next}")
            self._writer.execute(
                'UPDATE partitions SET "first" = ?, floor = ? WHERE id = ?',
                (max(bounds.first, offset), bounds.next, partition),
            )
        while self._delete_some(partition):
            pass

    def _delete_some(self, partition: int) -> int:
        with self._lock_of(self._write_lock), _transaction(self._writer, "IMMEDIATE"):
            table = f"records_{int(partition)}"
            cursor = self._writer.execute(
                f'DELETE FROM {table} WHERE "offset" < (SELECT min("first", (SELECT min("offset") FROM {table}) + ?)'  # noqa: S608 - an int
                " FROM partitions WHERE id = ?)",
                (_DELETE_OFFSETS, partition),
            )
            return cursor.rowcount

    def close(self) -> None:
        """Close both connections; idempotent. Calls after it raise `LogError`."""
        for connection in (self._reader, self._writer):
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_partition(self, partition: int) -> None:
        if not 0 <= partition < self._partitions:
            raise ValueError(f"partition {partition}: {self.path} has 0 to {self._partitions - 1}")

    @contextmanager
    def _lock_of(self, lock: threading.Lock) -> Iterator[None]:
        if os.getpid() != self._pid:
            # SQLite's file locks don't survive a fork; going on would damage the file.
            raise LogError(f"{self.path}: opened before a fork; open the log in the new process")
        with lock, _typed_errors(self.path):
            yield


def _create_tables(path: Path, connection: sqlite3.Connection, partitions: int) -> None:
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
    _check_blank(path, connection)
    connection.execute("PRAGMA journal_mode=WAL")
    with _transaction(connection, "EXCLUSIVE"):
        _check_blank(path, connection)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        connection.execute(_META)
        connection.execute("INSERT INTO meta VALUES ('log_id', ?)", (str(uuid_utils.uuid7()),))
        connection.execute(_PARTITIONS)
        for partition in range(partitions):
            connection.execute("INSERT INTO partitions VALUES (?, 0, 0)", (partition,))
            connection.execute(_RECORDS.format(partition))


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    [(value,)] = connection.execute(f"PRAGMA {name}").fetchall()
    return int(value)


def _check_blank(path: Path, connection: sqlite3.Connection) -> None:
    if _pragma(connection, "application_id") == APPLICATION_ID:
        raise LogExistsError(f"{path}: an event log already")
    if connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall():
        raise LogFormatError(f"{path}: an SQLite file of something else; choose another path")


def _read_meta(path: Path, connection: sqlite3.Connection) -> tuple[str, int]:
    """Log id and number of partitions, after a check that this is a log of our version."""
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise LogFormatError(f"{path}: not an event log; `trajlake init` creates one")
    if (version := _pragma(connection, "user_version")) != FORMAT_VERSION:
        raise LogFormatError(f"{path}: log format {version}; this trajlake reads {FORMAT_VERSION}")
    [(log_id,)] = connection.execute("SELECT value FROM meta WHERE name = 'log_id'").fetchall()
    [(partitions,)] = connection.execute("SELECT count(*) FROM partitions").fetchall()
    return log_id, partitions


def _bounds(connection: sqlite3.Connection, partition: int) -> Bounds:
    after_last = f'SELECT max("offset") + 1 FROM records_{int(partition)}'  # noqa: S608 - an int
    sql = f'SELECT "first", max(floor, coalesce(({after_last}), 0)) FROM partitions WHERE id = ?'  # noqa: S608 - as above
    [row] = connection.execute(sql, (partition,)).fetchall()
    return Bounds(*row)


def _fetch(connection: sqlite3.Connection, partition: int, start: int, end: int, max_bytes: int) -> list[Any]:
    sql = f'SELECT "offset", key, value FROM records_{int(partition)} WHERE "offset" >= ? AND "offset" < ?'  # noqa: S608 - an int
    cursor = connection.execute(sql + ' ORDER BY "offset"', (start, end))
    rows: list[Any] = []
    for row in cursor:
        max_bytes -= len(row[1]) + len(row[2])
        if max_bytes < 0 and rows:
            break
        rows.append(row)
    cursor.close()
    return rows


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
