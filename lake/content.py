"""Content hashes: equal for equal rows, whatever files, row groups or order they lie in.

The hash of a table is SHA-256 over its column names, its number of rows and the sum, modulo 2^256, of the rows'
SHA-256 digests. A sum doesn't depend on order, so nothing is sorted and memory stays at one batch, and unlike XOR it
counts a row that is there twice. It finds differences; it is no proof against someone who searches for colliding rows,
which is what the events' hash chains are for.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from lake.open import Lake
from lake.table import LakeTable
from schemas.tables import PROJECTIONS

_MODULUS = 1 << 256
_BATCH_ROWS = 4096


def content_hash(table: LakeTable, version: int | None = None) -> str:
    """Hex digest of all rows of a table at a version, the handle's by default."""
    return hash_batches(table.scan_files(table.data_files(version=version), batch_rows=_BATCH_ROWS), table.schema)


def lake_hashes(lake: Lake) -> dict[str, str]:
    """Content hash per table that is a function of the log: `events` and all projections."""
    hashes = {}
    for name in ("events", *PROJECTIONS):
        lake.table(name).refresh()
        hashes[name] = content_hash(lake.table(name))
    return hashes


def hash_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> str:
    """Hex digest of the rows of some batches."""
    total, num_rows = 0, 0
    encode = msgspec.msgpack.Encoder().encode
    for batch in batches:
        num_rows += batch.num_rows
        columns = [_canonical(batch.column(name)) for name in schema.names]
        for row in zip(*columns, strict=True):
            total += int.from_bytes(hashlib.sha256(encode(row)).digest(), "little")
    head = encode([schema.names, num_rows])
    return hashlib.sha256(head + (total % _MODULUS).to_bytes(32, "little")).hexdigest()


def _canonical(column: pa.Array) -> Sequence[Any]:
    """Values that encode alike wherever they come from: lists of numbers as bytes, unless the list holds a null."""
    if not pa.types.is_list(column.type) or not pa.types.is_primitive(column.type.value_type):
        return list(column.to_pylist())
    if column.values.null_count or pa.types.is_boolean(column.type.value_type):
        dtype = column.type.value_type.to_pandas_dtype()
        return [None if v is None else v if None in v else np.array(v, dtype).tobytes() for v in column.to_pylist()]
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()
    valid = column.is_valid().to_pylist()
    return [
        values[start:end].tobytes() if ok else None for start, end, ok in zip(offsets, offsets[1:], valid, strict=False)
    ]
