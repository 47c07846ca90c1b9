"""Streaming merge of sorted Parquet files: same rows, sorted, holding about `BUFFER_BYTES` of each file.

Every file has a buffer of its next rows. The smallest of the buffers' last keys is a bound: rows up to it are all in
the buffers, since what follows in any file is no smaller than that file's own last key. They are taken out, sorted
together and handed on, and empty buffers are filled again.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

BUFFER_BYTES = 1024 * 1024
"""Uncompressed bytes of one file's buffer."""

Key = tuple[tuple[bool, Any], ...]


def merge_sorted(
    filesystem: pafs.FileSystem, paths: Sequence[str], schema: pa.Schema, keys: Sequence[str]
) -> Iterator[pa.Table]:
    """Rows of files that are each sorted by `keys` (nulls last), as tables in that order.

    A file that is not sorted loses no row; the result is then not sorted either.
    """
    sources = [_Source(filesystem, path, schema, keys) for path in paths]
    order = [(key, "ascending") for key in keys]
    try:
        while sources := [source for source in sources if source.fill()]:
            first = min(sources, key=lambda source: source.last_key)
            bound = first.last_key
            taken = [source.take_all() if source is first else source.take_until(bound) for source in sources]
            yield pa.concat_tables(taken).sort_by(order)
    finally:
        for source in sources:
            source.close()


class _Source:
    """One file: a buffer of its next rows."""

    def __init__(self, filesystem: pafs.FileSystem, path: str, schema: pa.Schema, keys: Sequence[str]) -> None:
        self._keys, self._schema = keys, schema.remove_metadata()
        self._stream = filesystem.open_input_file(path)
        # Reading ahead and whole column chunks would make memory follow the files' sizes.
        file = pq.ParquetFile(self._stream, buffer_size=1 << 16, pre_buffer=False)
        self._batches = file.iter_batches(batch_size=_rows_per_buffer(file.metadata), use_threads=False)
        self._buffer = self._schema.empty_table()

    def fill(self) -> bool:
        """Fill the buffer if it is empty; False at the end of the file."""
        while not self._buffer.num_rows:
            batch = next(self._batches, None)
            if batch is None:
                self.close()
                return False
            self._buffer = pa.Table.from_batches([batch]).select(self._schema.names).cast(self._schema)
            self.last_key = self._key(self._buffer.num_rows - 1)
        return True

    def take_all(self) -> pa.Table:
        """Take the buffer."""
        taken, self._buffer = self._buffer, self._schema.empty_table()
        return taken

    def take_until(self, bound: Key) -> pa.Table:
        """Take the buffer's rows up to a key, included."""
        low, high = 0, self._buffer.num_rows
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._key(middle) <= bound else (low, middle)
        taken, self._buffer = self._buffer.slice(0, low), self._buffer.slice(low)
        return taken

    def close(self) -> None:
        """Close the file; idempotent."""
        self._stream.close()

    def _key(self, row: int) -> Key:
        values = (self._buffer.column(name)[row].as_py() for name in self._keys)
        return tuple((value is None, "" if value is None else value) for value in values)


def _rows_per_buffer(metadata: pq.FileMetaData) -> int:
    num_bytes: int = sum(metadata.row_group(idx).total_byte_size for idx in range(metadata.num_row_groups))
    num_rows: int = metadata.num_rows
    return max(1, min(65_536, BUFFER_BYTES * num_rows // max(num_bytes, 1)))
