"""Readings of candidate rows that the checks need: columns as numpy values, lists as flat values with offsets."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Lists:
    """A list column as flat values and per-row lengths; null rows have length 0."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = column.combine_chunks()
        self.valid: Mask = flags(array.is_valid())
        # flatten() leaves out what null slots and slices cover, unlike `values`.
        self.values: pa.Array = array.flatten()
        self.lengths: Counts = np.where(self.valid, dense(array.value_lengths(), 0), 0).astype(np.int64)
        self.offsets: Counts = np.concatenate([[0], np.cumsum(self.lengths)])

    def count(self, bad: Mask) -> Counts:
        """Per row, how many of its values are bad."""
        positions = np.flatnonzero(bad)
        return np.diff(np.searchsorted(positions, self.offsets)).astype(np.int64)

    def sums(self, values: NDArray[np.int64]) -> Counts:
        """Per row, the sum of its values."""
        return np.diff(np.concatenate([[0], np.cumsum(values)])[self.offsets])


class Rows:
    """A candidate table with the few readings that the checks need."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._lists: dict[str, Lists] = {}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def has(self, name: str) -> bool:
        """Whether the table has the column at all."""
        return name in self._table.column_names

    def lists(self, name: str) -> Lists:
        """A list column."""
        if name not in self._lists:
            self._lists[name] = Lists(self._table.column(name))
        return self._lists[name]

    def floats(self, name: str) -> tuple[NDArray[np.float64], Mask]:
        """A numeric column and which of its rows are present; 0 where absent."""
        column = self._table.column(name)
        values = dense(pc.cast(column, pa.float64()), 0.0)
        return values.astype(np.float64), self.present(name)

    def integers(self, name: str) -> tuple[Counts, Mask]:
        """An integer column and which of its rows are present; 0 where absent."""
        return dense(self._table.column(name), 0).astype(np.int64), self.present(name)

    def present(self, name: str) -> Mask:
        """Rows where the column is not null."""
        return flags(pc.is_valid(self._table.column(name)))

    def true(self, name: str) -> Mask:
        """Rows where a bool column is true."""
        return flags(self._table.column(name))

    def false(self, name: str) -> Mask:
        """Rows where a bool column is false and not null."""
        return self.present(name) & ~self.true(name)

    def among(self, name: str, values: tuple[str, ...]) -> Mask:
        """Rows whose text is one of the values; null is none of them."""
        return flags(pc.is_in(self._table.column(name), value_set=pa.array(values, pa.string())))

    def strings(self, name: str) -> pa.ChunkedArray:
        """A text column."""
        return self._table.column(name)


def dense(values: Any, absent: float) -> NDArray[Any]:
    """An Arrow array or column as numpy, nulls filled."""
    filled = pc.fill_null(values, absent)
    return np.asarray(filled.to_numpy(zero_copy_only=False) if isinstance(filled, pa.Array) else filled.to_numpy())


def flags(values: Any) -> Mask:
    """A bool array or column as numpy, null as false."""
    return dense(values, False).astype(np.bool_)
