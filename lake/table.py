"""One Delta table through a warm handle: write files, commit them once, find them again.

The commit protocol: a commit carries a Delta `txn` per log partition whose version is the next offset. It goes through
only if the handle's versions equal the plan's starts **on that same handle**; Delta then refuses it if anybody else
moved them since. So a range of the log enters a table once, whoever restarts or races.

Commit cost stays flat over a table's life: checkpoints every `CHECKPOINT_INTERVAL` commits reset the log that a handle
replays, and expired log entries are looked for every `CLEANUP_INTERVAL` versions instead of at every commit.

Leaves out: fsync. A crash of the process loses nothing; of a power cut the file system decides.
"""

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from lake.errors import CommitConflictError, LakeNotFoundError, VersionGoneError
from lake.files import STATS_COLUMNS, DataFile, StatsCollector, coalesce, fresh_name, parquet_writer, rows_per_group
from lake.stats import LiveFile, guarantee, live_files, normalise, overlaps

CHECKPOINT_INTERVAL = 10
"""Commits between checkpoints. A handle replays what lies after the last one at every refresh."""

LISTED_SECONDS = 600.0
"""Longest time between two listings of the log. They cost the more the longer the log is: 2 ms after 500 commits."""

CLEANUP_INTERVAL = 100
"""Versions between looks for expired log entries: each look lists the whole log."""

__all__ = ["CommitConflictError", "DataFile", "LakeTable", "LiveFile", "Progress", "app_id", "overlaps"]

COMMIT_ID = "trajlake.commit_id"
"""Key of the commit's metadata that tells this commit from a competitor's."""

NUM_CACHED_FOOTERS = 128

_REMOVAL = "trajlake/removal"

_FORMAT = pads.ParquetFileFormat()


@dataclass(frozen=True)
class Progress:
    """The ranges of a log that a commit covers.

    Example:
        >>> Progress("ingest", "log-1", {0: (0, 100), 1: (0, 90)}).ends
        {0: 100, 1: 90}
    """

    pipeline: str
    log_id: str
    ranges: Mapping[int, tuple[int, int]]
    """Partition → offsets [start, end)."""

    @property
    def starts(self) -> dict[int, int]:
        """Partition → first offset."""
        return {partition: start for partition, (start, _) in self.ranges.items()}

    @property
    def ends(self) -> dict[int, int]:
        """Partition → next offset."""
        return {partition: end for partition, (_, end) in self.ranges.items()}

    def transactions(self) -> list[Transaction]:
        """Delta `txn` actions that record the ends."""
        return [Transaction(app_id(self.pipeline, self.log_id, p), end) for p, end in sorted(self.ends.items())]


def app_id(pipeline: str, log_id: str, partition: int) -> str:
    """Delta application id of one pipeline's progress in one partition."""
    return f"{pipeline}/{log_id}/{partition}"


class LakeTable:
    """Warm handle of one table; safe to share between threads.

    Args:
        url: The table's folder: a path, `file://…`, or an object store's URL.
        name: One of `schemas.tables.TABLES`.
        schema: Its Arrow schema.
        storage_options: Passed to delta-rs, for object stores.

    Raises:
        LakeNotFoundError: there is no table at `url`.
    """

    def __init__(
        self, url: str, name: str, schema: pa.Schema, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self.url, self.name, self.schema = url, name, schema
        self._options = dict(storage_options) if storage_options else None
        self._lock = threading.RLock()
        try:
            self._delta = DeltaTable(url, storage_options=self._options)
        except TableNotFoundError as error:
            raise LakeNotFoundError(f"no table {name} at {url}: run `trajlake init`") from error
        self.filesystem = filesystem_of(url, self._options)
        self._adds: tuple[int, pa.Table] | None = None
        self._transactions: tuple[int, dict[str, int]] = (-1, {})
        self._listed = time.monotonic()
        self._fragments: dict[str, pads.ParquetFileFragment] = {}

    @property
    def stats_columns(self) -> tuple[str, ...]:
        """Columns that files are pruned by."""
        return STATS_COLUMNS[self.name]

    @property
    def version(self) -> int:
        """Version that this handle sees."""
        return int(self._delta.version())

    def refresh(self) -> int:
        """See what was committed meanwhile; returns the version."""
        with self._lock:
            if self._may_be_behind():
                self._delta.update_incremental()
                self._listed = time.monotonic()
            return self.version

    def _may_be_behind(self) -> bool:
        """Whether the log goes on after the handle's version. Versions are dense, so one look-up tells.

        Not for ever: what follows a handle that was left alone for very long may have been cleaned up.
        """
        if time.monotonic() - self._listed > LISTED_SECONDS:
            return True
        return bool(self.filesystem.get_file_info(_log_entry(self.version + 1)).type != pafs.FileType.NotFound)

    def at(self, version: int) -> DeltaTable:
        """A Delta handle of an older version.

        Raises:
            VersionGoneError: its log entries were cleaned up, or it never was.
        """
        try:
            return DeltaTable(self.url, version=version, storage_options=self._options)
        except DeltaError as error:
            raise VersionGoneError(f"{self.name} has no version {version}: {error}") from error

    def progress(self, pipeline: str, log_id: str, partitions: Sequence[int]) -> dict[int, int]:
        """Next offset per partition that `pipeline` has committed, as this handle sees it; 0 where it has none."""
        with self._lock:
            return {
                partition: self._transaction_version(app_id(pipeline, log_id, partition)) for partition in partitions
            }

    def _transaction_version(self, app: str) -> int:
        """0 where there is none. Kept until the version changes: each look-up replays the log since the checkpoint."""
        if self._transactions[0] != self.version:
            self._transactions = (self.version, {})
        known = self._transactions[1]
        if app not in known:
            known[app] = int(self._delta.transaction_version(app) or 0)
        return known[app]

    # ---- writing ----

    def write_file(self, table: pa.Table) -> DataFile:
        """Write rows, in the order given, as one file that no reader sees until it is committed."""
        return self.write_stream([table])

    def write_stream(self, tables: Iterable[pa.Table]) -> DataFile:
        """Write tables one after the other into one file; holds about a row group of them at a time."""
        path, stats = fresh_name(), StatsCollector(self.stats_columns)
        num_records = 0
        with parquet_writer(self.filesystem, path, self.schema, self.stats_columns) as writer:
            for rows in coalesce(self.conform(table) for table in tables):
                stats.add(rows)
                num_records += rows.num_rows
                writer.write_table(rows, row_group_size=rows_per_group(rows.nbytes, rows.num_rows))
        size = self.filesystem.get_file_info(path).size
        return DataFile(path, size, num_records, stats.json(), int(time.time() * 1000))

    def conform(self, table: pa.Table) -> pa.Table:
        """The table with this lake table's columns in order and types.

        Raises:
            ValueError: columns are missing, unknown, or of another type.
        """
        if set(table.column_names) != set(self.schema.names):
            missing = sorted(set(self.schema.names) - set(table.column_names))
            unknown = sorted(set(table.column_names) - set(self.schema.names))
            raise ValueError(f"rows for {self.name}: missing columns {missing}, unknown columns {unknown}")
        return table.select(self.schema.names).cast(self.schema.remove_metadata())

    def discard(self, files: Sequence[DataFile]) -> None:
        """Delete files that were written and not committed."""
        for file in files:
            self.filesystem.delete_file(file.path)

    def commit(
        self,
        files: Sequence[DataFile],
        *,
        progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
        remove: Sequence[LiveFile] = (),
        data_change: bool = True,
    ) -> int:
        """Make files visible in one Delta commit; returns its version. May be empty: then it records progress.

        Args:
            files: Written by `write_file`; on an error they are still there (see `discard`).
            progress: Ranges of the log that these rows come from.
            metadata: Kept in the commit.
            remove: Live files that this commit takes away.
            data_change: False for rewrites of the same rows, which tails skip.

        Raises:
            CommitConflictError: progress isn't where the ranges begin, or somebody else won. Nothing was committed.
        """
        with self._lock:
            if progress is not None:
                self._require_start(progress)
            now_ms = int(time.time() * 1000)
            actions: list[AddAction | RemoveAction] = [_add(file, data_change) for file in files]
            actions += [RemoveAction(file.path, data_change, now_ms, file.size, {}) for file in remove]
            guards = [self._removal()] if remove else []
            return self._write("append", actions, [*_transactions(progress), *guards], metadata)

    def replace(
        self, files: Sequence[DataFile], *, progress: Progress | None = None, metadata: Mapping[str, str] | None = None
    ) -> int:
        """Take all live files away and add new ones, in one commit: what `rebuild` does. Versions go on.

        `progress` is recorded but its starts are not compared. Raises `CommitConflictError` like `commit`.
        """
        with self._lock:
            actions: list[AddAction | RemoveAction] = [_add(file, data_change=True) for file in files]
            transactions = [*_transactions(progress), self._removal()]
            # No rebase: delta-rs would let rows that were appended since this handle's version survive the overwrite.
            return self._write("overwrite", actions, transactions, metadata, max_retries=0)

    def _removal(self) -> Transaction:
        """A guard: of two commits that remove files of one version, one fails.

        delta-rs sees no conflict between two rewrites of one file without data change, and would keep both results.
        """
        return Transaction(_REMOVAL, int(self._delta.transaction_version(_REMOVAL) or 0) + 1)

    def _require_start(self, progress: Progress) -> None:
        found = self.progress(progress.pipeline, progress.log_id, list(progress.ranges))
        if found != progress.starts:
            raise CommitConflictError(
                f"{self.name}: {progress.pipeline} of log {progress.log_id} planned from {progress.starts}, "
                f"but version {self.version} stands at {found}"
            )

    def _write(
        self,
        mode: str,
        actions: list[AddAction | RemoveAction],
        transactions: list[Transaction],
        metadata: Mapping[str, str] | None,
        max_retries: int | None = None,
    ) -> int:
        commit_id, before = str(uuid.uuid4()), self.version
        properties = CommitProperties(
            app_transactions=transactions or None,
            custom_metadata={**(metadata or {}), COMMIT_ID: commit_id},
            max_commit_retries=max_retries,
        )
        try:
            self._delta.create_write_transaction(
                actions,
                mode,
                self.schema,
                commit_properties=properties,
                # Cleaning at every commit lists the whole log: 3 ms → 12 ms over the first 1,000 commits.
                post_commithook_properties=PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False),
            )
        except DeltaError as error:
            version = self._find_commit(before, commit_id)
            if version is None:
                if isinstance(error, CommitFailedError):
                    raise CommitConflictError(
                        f"{self.name}: another commit won after version {before}: {error}"
                    ) from error
                raise
            return version
        version = self._find_commit(before, commit_id)
        assert version is not None, "a commit that succeeded is in the log"
        if version // CLEANUP_INTERVAL != before // CLEANUP_INTERVAL:
            self._delta.cleanup_metadata()
        return version

    def _find_commit(self, before: int, commit_id: str) -> int | None:
        """Version of our commit among those after `before`, or None."""
        for version in range(before + 1, self.refresh() + 1):
            if any(a.get("commitInfo", {}).get(COMMIT_ID) == commit_id for a in self.log_actions(version)):
                return version
        return None

    def log_actions(self, version: int) -> list[dict[str, Any]]:
        """The Delta actions of one commit.

        Raises:
            VersionGoneError: the log entry was cleaned up.
        """
        try:
            with self.filesystem.open_input_stream(_log_entry(version)) as stream:
                lines = stream.read().splitlines()
        except FileNotFoundError as error:
            raise VersionGoneError(f"{self.name}: the log entry of version {version} was cleaned up") from error
        return [json.loads(line) for line in lines]

    # ---- reading ----

    def file_stats(self) -> pa.Table:
        """Statistics of the handle's live files, see `lake.stats`."""
        with self._lock:
            if self._adds is None or self._adds[0] != self.version:
                self._adds = (self.version, self._stats_of(self._delta))
            return self._adds[1]

    def _stats_of(self, delta: DeltaTable) -> pa.Table:
        adds = pa.table(delta.get_add_actions(flatten=True))
        return normalise(adds, self.schema, self.stats_columns)

    def data_files(self, covering: pc.Expression | None = None, version: int | None = None) -> list[LiveFile]:
        """Live files whose statistics satisfy an expression over `file_stats`, see `overlaps`; all without one.

        Args:
            covering: Which files.
            version: An older version of the table; the handle's by default.

        Raises:
            VersionGoneError: that version can't be had any more.
        """
        stats = self.file_stats() if version is None else self._stats_of(self.at(version))
        return live_files(stats if covering is None else stats.filter(covering), self.stats_columns)

    def snapshot(self, version: int | None = None) -> pads.Dataset:
        """An Arrow dataset of all rows at a version, the handle's by default.

        Filters skip files by the log's statistics, without opening them.

        Raises:
            VersionGoneError: that version can't be had any more.
        """
        stats = self.file_stats() if version is None else self._stats_of(self.at(version))
        return self.dataset_of(
            [
                _FORMAT.make_fragment(row["path"], self.filesystem, guarantee(row, self.stats_columns))
                for row in stats.to_pylist()
            ]
        )

    def dataset(self, paths: Sequence[str]) -> pads.Dataset:
        """An Arrow dataset over files of this table."""
        return self.dataset_of([self.fragment(path) for path in paths])

    def dataset_of(self, fragments: Sequence[pads.ParquetFileFragment]) -> pads.Dataset:
        """An Arrow dataset over fragments: files, or row groups of files."""
        return pads.FileSystemDataset(fragments, self.schema.remove_metadata(), _FORMAT, self.filesystem)

    def fragment(self, path: str) -> pads.ParquetFileFragment:
        """A file's Arrow fragment. The last `NUM_CACHED_FOOTERS` keep their footers, so look-ups don't reread them."""
        with self._lock:
            found = self._fragments.pop(path, None) or _FORMAT.make_fragment(path, filesystem=self.filesystem)
            self._fragments[path] = found
            if len(self._fragments) > NUM_CACHED_FOOTERS:
                del self._fragments[next(iter(self._fragments))]
        return found

    def read_files(
        self,
        files: Sequence[LiveFile | DataFile],
        columns: Sequence[str] | None = None,
        row_filter: pc.Expression | None = None,
    ) -> pa.Table:
        """Rows of some files that satisfy a filter; row groups that can't hold any are skipped."""
        batches = self.scan_files(files, columns, row_filter)
        names = list(columns) if columns is not None else self.schema.names
        return pa.Table.from_batches(batches, pa.schema([self.schema.field(n) for n in names]).remove_metadata())

    def scan_files(
        self,
        files: Sequence[LiveFile | DataFile],
        columns: Sequence[str] | None = None,
        row_filter: pc.Expression | None = None,
        batch_rows: int = 8192,
    ) -> Iterator[pa.RecordBatch]:
        """Like `read_files`, batch by batch, file after file; holds a few batches at a time."""
        names = list(columns) if columns is not None else None
        scanner = self.dataset([file.path for file in files]).scanner(
            columns=names, filter=row_filter, batch_size=batch_rows, batch_readahead=2, fragment_readahead=1
        )
        yield from scanner.to_batches()


def filesystem_of(url: str, storage_options: Mapping[str, str] | None) -> pafs.FileSystem:
    """Arrow file system whose root is the folder at `url`."""
    if "://" not in url or url.startswith("file://"):
        path = url.removeprefix("file://")
        return pafs.SubTreeFileSystem(path, pafs.LocalFileSystem())
    from deltalake.fs import DeltaStorageHandler  # noqa: PLC0415 - object stores only

    return pafs.PyFileSystem(DeltaStorageHandler(url, dict(storage_options or {})))


def _log_entry(version: int) -> str:
    return f"_delta_log/{version:020}.json"


def _transactions(progress: Progress | None) -> list[Transaction]:
    return progress.transactions() if progress else []


def _add(file: DataFile, data_change: bool) -> AddAction:
    return AddAction(file.path, file.size, {}, file.modified_ms, data_change, file.stats)
