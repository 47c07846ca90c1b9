"""Sends rows to standard output in the format that was asked for."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajlake.cli.options import FormatName

if TYPE_CHECKING:
    import pyarrow as pa


def put_batches(schema: "pa.Schema", batches: "Iterable[pa.RecordBatch]", how: FormatName) -> int:
    """Write batches; gives the number of rows."""
    from trajlake.output import Format, write_rows

    count = write_rows(schema, batches, Format(how), sys.stdout.buffer)
    sys.stdout.buffer.flush()
    return count


def put_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], how: FormatName) -> None:
    """Write a few rows that a command made itself."""
    from trajlake.output import rows_to_batches

    put_batches(*rows_to_batches(rows, columns), how)
