"""Statistics of live files: which files may hold what a reader looks for.

A version's statistics are one Arrow table with a row per live file: path, size_bytes, num_records, and for each column
of `lake.files.STATS_COLUMNS` `min.C`, `max.C`, `null_count.C`, null where the log has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A file that belongs to a version of the table."""

    path: str
    size: int
    """Bytes."""
    num_records: int
    low: Mapping[str, Any]
    """Column → lower bound, where known."""
    high: Mapping[str, Any]
    """Column → upper bound, where known."""


def overlaps(column: str, low: int | str, high: int | str) -> pc.Expression:
    """Over file statistics: true where a file may hold a value of `column` in [low, high]."""
    all_null = pc.field(f"null_count.{column}") == pc.field("num_records")
    above = pc.coalesce(pc.field(f"max.{column}") >= low, pc.scalar(value=True))
    below = pc.coalesce(pc.field(f"min.{column}") <= high, pc.scalar(value=True))
    return above & below & ~pc.coalesce(all_null, pc.scalar(value=False))


def normalise(adds: pa.Table, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
    """Delta's flattened add actions as the table described above."""
    found = {name: adds.column(name) for name in ("path", "size_bytes", "num_records")}
    for name in columns:
        kind = schema.field(name).type
        for key, key_type in ((f"min.{name}", kind), (f"max.{name}", kind), (f"null_count.{name}", pa.int64())):
            known = key in adds.column_names
            found[key] = adds.column(key).cast(key_type) if known else pa.nulls(adds.num_rows, key_type)
    return pa.table(found)


def live_files(stats: pa.Table, columns: Sequence[str]) -> list[LiveFile]:
    """One record per row of the statistics."""
    return [
        LiveFile(
            row["path"],
            row["size_bytes"],
            row["num_records"],
            {name: row[f"min.{name}"] for name in columns if row[f"min.{name}"] is not None},
            {name: row[f"max.{name}"] for name in columns if row[f"max.{name}"] is not None},
        )
        for row in stats.to_pylist()
    ]


def guarantee(row: Mapping[str, Any], columns: Sequence[str]) -> pc.Expression:
    """What holds for every row of a file, so that Arrow skips the file where a filter contradicts it."""
    known = pc.scalar(value=True)
    for name in columns:
        low, high, nulls = row[f"min.{name}"], row[f"max.{name}"], row[f"null_count.{name}"]
        if nulls is None:
            continue
        if nulls == row["num_records"]:
            known &= pc.field(name).is_null()
        elif low is not None and high is not None and not isinstance(low, bool):
            within = (pc.field(name) >= low) & (pc.field(name) <= high)
            known &= within | pc.field(name).is_null() if nulls else within
    return known
