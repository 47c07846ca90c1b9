"""Data files of a table: written once under a fresh name, described by a picklable `DataFile`.

Parquet with zstd, row groups of about `ROW_GROUP_BYTES`, statistics for the columns of `STATS_COLUMNS` only: the ones
that look-ups prune by. Statistics of payloads would cost log size and give nothing.

Leaves out: making files visible, which is a commit (see `lake.table`).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import uuid_utils

ROW_GROUP_BYTES = 8 * 1024 * 1024
"""Uncompressed bytes of a row group: what a look-up of one trajectory has to decode at least."""

MAX_ROW_GROUP_ROWS = 65_536

MAX_BOUND_CHARS = 128
"""Longer strings are cut in the table's statistics: the lower bound down, the upper bound up."""

_POSITION = ("log_id", "partition", "offset", "trajectory_id", "run_id")

STATS_COLUMNS: dict[str, tuple[str, ...]] = {
    "events": (*_POSITION, "type", "attempt", "is_closing", "run_stream", "run_seq"),
    "trajectories": (
        *_POSITION,
        "group_id",
        "task_key",
        "domain",
        "split",
        "min_policy_version",
        "max_policy_version",
        "trainable",
    ),
    "steps": (*_POSITION, "group_id", "domain", "split", "step_idx", "trainable"),
    "scores": (*_POSITION, "verifier_id", "verifier_version"),
    "quarantine": (*_POSITION, "rule"),
    "policies": ("log_id", "partition", "offset", "run_id", "policy_id", "version"),
    "consumption": ("log_id", "partition", "offset", "run_id", "learner_id", "train_step"),
    "annotations": (*_POSITION, "kind", "subject"),
    "quality": ("log_id", "table", "rule", "checked_ns"),
    "epochs": ("log_id", "pipeline", "committed_ns"),
}
"""Columns with minimum, maximum and null count, per table; all integers, short strings or booleans."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A written Parquet file that a commit can add. Travels through Beam.

    Example:
        >>> DataFile("part-0198….zstd.parquet", 4096, 10, '{"numRecords": 10}', 1_700_000_000_000)  # doctest: +SKIP
    """

    path: str
    """Relative to the table's folder."""
    size: int
    """Bytes."""
    num_records: int
    stats: str
    """Delta statistics, JSON."""
    modified_ms: int
    """Milliseconds since the epoch."""


def fresh_name() -> str:
    """A name that no file had before; never derived from content, so a retry can't overwrite a committed file."""
    return f"part-{uuid_utils.uuid7()}.zstd.parquet"


def rows_per_group(num_bytes: int, num_rows: int) -> int:
    """Rows of a row group so that it holds about `ROW_GROUP_BYTES`."""
    return max(1, min(MAX_ROW_GROUP_ROWS, ROW_GROUP_BYTES * num_rows // max(num_bytes, 1)))


def coalesce(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Small tables joined up to about a row group, so that a merge doesn't write many tiny ones."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(part.nbytes for part in held) >= ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def parquet_writer(
    filesystem: pafs.FileSystem, path: str, schema: pa.Schema, stats_columns: Sequence[str]
) -> pq.ParquetWriter:
    """Writer with the lake's format: zstd, row-group statistics for the pruning columns."""
    return pq.ParquetWriter(
        path,
        schema.remove_metadata(),
        filesystem=filesystem,
        compression="zstd",
        write_statistics=list(stats_columns),
        use_dictionary=[field.name for field in schema if pa.types.is_string(field.type)],
        store_schema=False,
    )


class StatsCollector:
    """Delta statistics of a file that is written table by table."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._num_records = 0
        self._low: dict[str, int | str | bool] = {}
        self._high: dict[str, int | str | bool] = {}
        self._nulls: dict[str, int] = dict.fromkeys(columns, 0)

    def add(self, table: pa.Table) -> None:
        """Take in the rows of one table."""
        self._num_records += table.num_rows
        for name in self._columns:
            column = table.column(name)
            self._nulls[name] += column.null_count
            bounds = pc.min_max(column).as_py()
            if bounds["min"] is not None:
                self._low[name] = min(self._low.get(name, bounds["min"]), bounds["min"])
                self._high[name] = max(self._high.get(name, bounds["max"]), bounds["max"])

    def json(self) -> str:
        """The Delta `stats` string."""
        low = {name: _lower_bound(value) for name, value in self._low.items()}
        high = {name: _upper_bound(value) for name, value in self._high.items()}
        stats = {
            "numRecords": self._num_records,
            "minValues": low,
            "maxValues": {name: value for name, value in high.items() if value is not None},
            "nullCount": self._nulls,
        }
        return json.dumps(stats, ensure_ascii=False, separators=(",", ":"))


def _lower_bound(value: int | str | bool) -> int | str | bool:
    return value[:MAX_BOUND_CHARS] if isinstance(value, str) else value


def _upper_bound(value: int | str | bool) -> int | str | bool | None:
    """A value that is ≥ `value` in code-point order and short; null where there is none."""
    if not isinstance(value, str) or len(value) <= MAX_BOUND_CHARS:
        return value
    prefix = value[:MAX_BOUND_CHARS].rstrip("\U0010ffff")
    if not prefix:
        return None
    following = ord(prefix[-1]) + 1
    return prefix[:-1] + chr(0xE000 if following == 0xD800 else following)  # surrogates are no characters
