"""Follow a table: rows in commit order, each commit once, from a position that can be kept.

A tail reads the Delta log and then only the files that a commit added. Rewrites of the same rows (compaction) add
nothing new and are skipped; the files they replaced stay readable until they are vacuumed, so compaction behind a
tail's back takes nothing away from it.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from lake.errors import VersionGoneError
from lake.table import LakeTable

FILES_PER_SCAN = 32
"""Files opened for one scan, so that small files are read ahead."""


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """What a tail delivers next. Only meaningful with the same table and row filter.

    Example:
        >>> Position(version=8)  # everything that was committed after version 7
        Position(version=8, file_idx=0, row=0)
    """

    version: int
    file_idx: int = 0
    """Position of the file among those that the commit added."""
    row: int = 0
    """Rows of that file that were delivered, after the filter."""


@dataclass(frozen=True, slots=True)
class TailBatch:
    """Rows of one commit."""

    rows: pa.RecordBatch
    version: int
    replaces: bool
    """True where the commit replaced the whole table (`rebuild`): its rows may have been delivered before."""
    next: Position
    """Where a tail that has dealt with these rows goes on."""


@dataclass(frozen=True, slots=True)
class _Added:
    version: int
    file_idx: int
    path: str
    replaces: bool


class Tail:
    """Reads what is appended to a table.

    Args:
        table: The table; the tail refreshes its handle.
        position: Where to begin: `Position(version=v + 1)` for what comes after version v, `Position(0)` for all.
        columns: Columns to deliver, all by default.
        row_filter: Rows to deliver, all by default.
        batch_rows: Rows of a batch at most.
    """

    def __init__(
        self,
        table: LakeTable,
        position: Position,
        *,
        columns: Sequence[str] | None = None,
        row_filter: pc.Expression | None = None,
        batch_rows: int = 8192,
    ) -> None:
        self._table, self.position = table, position
        self._columns, self._row_filter, self._batch_rows = columns, row_filter, batch_rows

    def poll(self) -> Iterator[TailBatch]:
        """Batches of everything committed up to now; `position` follows each batch once the next is asked for.

        Raises:
            VersionGoneError: the log entry or a file of an unread version was cleaned up.
        """
        newest = self._table.refresh()
        start, pending = self.position, list[_Added]()
        for version in range(start.version, newest + 1):
            pending += [f for f in self._added(version) if (f.version, f.file_idx) >= (start.version, start.file_idx)]
            if len(pending) >= FILES_PER_SCAN or version == newest:
                yield from self._read(pending)
                pending = []
                self.position = max(self.position, Position(version + 1))

    def _added(self, version: int) -> list[_Added]:
        """Files that one commit added as new data."""
        try:
            actions = self._table.log_actions(version)
        except VersionGoneError as error:
            raise VersionGoneError(self._gone(version, "its log entry was cleaned up")) from error
        replaces = any("remove" in action and action["remove"]["dataChange"] for action in actions)
        adds = [action["add"]["path"] for action in actions if "add" in action and action["add"]["dataChange"]]
        return [_Added(version, idx, path, replaces) for idx, path in enumerate(adds)]

    def _read(self, files: Sequence[_Added]) -> Iterator[TailBatch]:
        by_path = {file.path: file for file in files}
        for path, group in groupby(self._scan(files), key=lambda item: item[0]):
            file = by_path[path]
            is_partly_read = (file.version, file.file_idx) == (self.position.version, self.position.file_idx)
            skip = self.position.row if is_partly_read else 0
            row = 0
            for _, batch in group:
                fresh = batch.slice(max(0, skip - row))
                row += batch.num_rows
                if fresh.num_rows:
                    following = Position(file.version, file.file_idx, row)
                    yield TailBatch(fresh, file.version, file.replaces, following)
                    self.position = following

    def _scan(self, files: Sequence[_Added]) -> Iterator[tuple[str, pa.RecordBatch]]:
        dataset = self._table.dataset([file.path for file in files])
        columns = list(self._columns) if self._columns is not None else None
        scanner = dataset.scanner(
            columns=columns,
            filter=self._row_filter,
            batch_size=self._batch_rows,
            batch_readahead=4,
            fragment_readahead=4,
        )
        try:
            for tagged in scanner.scan_batches():
                yield tagged.fragment.path, tagged.record_batch
        except FileNotFoundError as error:
            missing = next((f for f in files if os.path.basename(f.path) in str(error)), files[0])  # noqa: PTH119 - a key, not a path
            raise VersionGoneError(self._gone(missing.version, f"its file {missing.path} was cleaned up")) from error

    def _gone(self, version: int, why: str) -> str:
        return (
            f"{self._table.name}: can't read versions {version} to {self._table.version}: {why}. "
            f"Read version {self._table.version} as a whole and tail from {self._table.version + 1}"
        )
