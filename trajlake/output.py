"""Writes rows as a table for people, or as JSON, CSV, Parquet or Arrow for programs.

Batches are written as they come, so that a large result needs little memory; a table for people shows the first
`TABLE_ROWS` and says so. In JSON and CSV binary values are hex, and what JSON can't hold (NaN, infinities) is null.
"""

import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import IO, Any, BinaryIO, cast

import msgspec
import pyarrow as pa

TABLE_ROWS = 200
CELL_CHARS = 120


class Format(StrEnum):
    """How rows come out."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


class OutputError(ValueError):
    """Rows can't be written this way; the message says what to do instead."""


def write_rows(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], how: Format, stream: IO[bytes], notes: IO[str] | None = None
) -> int:
    """Write batches of one schema.

    Args:
        schema: Their schema.
        batches: The rows; read one at a time.
        how: Format.
        stream: Where the rows go, as bytes.
        notes: Where remarks for people go (standard error by default).

    Returns:
        Number of rows.

    Raises:
        OutputError: for a binary format on a terminal.
    """
    if how in (Format.PARQUET, Format.ARROW) and stream.isatty():
        raise OutputError(f"{how.value} is binary: send it to a file, as in > rows.{how.value}")
    writer = {
        Format.TABLE: _write_table,
        Format.JSON: _write_json,
        Format.CSV: _write_csv,
        Format.PARQUET: _write_parquet,
        Format.ARROW: _write_arrow,
    }[how]
    return writer(schema, batches, stream, notes or sys.stderr)


def rows_to_batches(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Plain rows as one batch; for commands that make a few rows themselves."""
    table = pa.Table.from_pydict({name: [row.get(name) for row in rows] for name in columns})
    return table.schema, table.to_batches()


def to_json(value: Any) -> str:
    """JSON text of plain values and structs, binary as hex."""
    return msgspec.json.encode(_json_value(value)).decode()


def _json_value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _json_value(msgspec.structs.asdict(value))
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_json_value(inner) for inner in value]
    return value


def _plain_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        # Row by row: a whole batch as Python objects would be many times its size.
        for index in range(batch.num_rows):
            yield batch.slice(index, 1).to_pylist()[0]


def _write_json(schema: pa.Schema, batches: Iterable[pa.RecordBatch], stream: IO[bytes], _notes: IO[str]) -> int:
    count = 0
    for row in _plain_rows(batches):
        stream.write(b",\n " if count else b"[")
        stream.write(msgspec.json.encode(_json_value(row)))
        count += 1
    stream.write(b"]\n" if count else b"[]\n")
    return count


def _flat(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Nested columns as JSON text and binary ones as hex, for CSV."""
    arrays = []
    for column in batch.columns:
        if pa.types.is_nested(column.type) or pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            arrays.append(pa.array([_text_or_none(value) for value in column.to_pylist()], pa.string()))
        else:
            arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _text_or_none(value: Any) -> str | None:
    if value is None or isinstance(value, bytes):
        return None if value is None else value.hex()
    return msgspec.json.encode(_json_value(value)).decode()


def _write_csv(schema: pa.Schema, batches: Iterable[pa.RecordBatch], stream: IO[bytes], _notes: IO[str]) -> int:
    import pyarrow.csv  # noqa: PLC0415 - only where it is asked for

    flat_schema = _flat(pa.RecordBatch.from_pylist([], schema)).schema
    count = 0
    with pyarrow.csv.CSVWriter(stream, flat_schema) as writer:
        for batch in batches:
            writer.write_batch(_flat(batch))
            count += batch.num_rows
    return count


def _write_parquet(schema: pa.Schema, batches: Iterable[pa.RecordBatch], stream: IO[bytes], _notes: IO[str]) -> int:
    import pyarrow.parquet  # noqa: PLC0415 - only where it is asked for

    count = 0
    with pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _write_arrow(schema: pa.Schema, batches: Iterable[pa.RecordBatch], stream: IO[bytes], _notes: IO[str]) -> int:
    count = 0
    with pa.ipc.new_stream(stream, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        text = value.hex()
    elif isinstance(value, dict | list):
        text = msgspec.json.encode(_json_value(value)).decode()
    else:
        text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= CELL_CHARS else text[: CELL_CHARS - 1] + "…"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _write_table(schema: pa.Schema, batches: Iterable[pa.RecordBatch], stream: IO[bytes], notes: IO[str]) -> int:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - only where it is asked for
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for field in schema:
        table.add_column(Text(field.name), justify="right" if _is_number(field.type) else "left", overflow="fold")
    shown, more = 0, False
    for row in _plain_rows(batches):
        if shown == TABLE_ROWS:
            more = True
            break
        table.add_row(*(Text(_cell(value)) for value in row.values()))
        shown += 1
    text = io.TextIOWrapper(cast(BinaryIO, stream), encoding="utf-8", write_through=True)
    try:
        # Not on a terminal there is no width to keep to: a pipe wants whole lines.
        Console(file=text, width=None if stream.isatty() else 4096).print(table)
    finally:
        text.detach()  # the stream stays its owner's
    if more:
        notes.write(f"the first {TABLE_ROWS} rows; --format json, csv, parquet or arrow gives all\n")
    return shown
