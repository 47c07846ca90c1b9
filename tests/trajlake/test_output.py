"""Rows in every format, and what a terminal or a pipe gets."""

import io
import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from trajlake.output import TABLE_ROWS, Format, OutputError, rows_to_batches, write_rows

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("reward", pa.float64()),
        ("digest", pa.binary()),
        ("tokens", pa.list_(pa.int32())),
        ("runs", pa.list_(pa.struct([("version", pa.int64()), ("length", pa.int32())]))),
    ]
)
ROWS = [
    {"id": "a,\n[b]", "reward": 1.0, "digest": b"\x00\xff", "tokens": [1, 2], "runs": [{"version": 1, "length": 2}]},
    {"id": None, "reward": float("nan"), "digest": None, "tokens": None, "runs": None},
]


def batches():
    return pa.Table.from_pylist(ROWS, SCHEMA).to_batches(max_chunksize=1)


def written(how, rows=None, notes=None):
    stream = io.BytesIO()
    count = write_rows(SCHEMA, batches() if rows is None else rows, how, stream, notes)
    return count, stream.getvalue()


def test_json_is_one_array_of_objects_with_hex_for_binary_and_null_for_what_json_lacks():
    count, data = written(Format.JSON)
    assert count == 2
    assert json.loads(data) == [
        {"id": "a,\n[b]", "reward": 1.0, "digest": "00ff", "tokens": [1, 2], "runs": [{"version": 1, "length": 2}]},
        {"id": None, "reward": None, "digest": None, "tokens": None, "runs": None},
    ]


def test_no_rows_are_still_valid_in_every_format():
    assert json.loads(written(Format.JSON, [])[1]) == []
    assert written(Format.CSV, [])[1].decode().strip() == '"id","reward","digest","tokens","runs"'
    assert pa.ipc.open_stream(written(Format.ARROW, [])[1]).read_all().schema == SCHEMA
    assert pa.parquet.read_table(io.BytesIO(written(Format.PARQUET, [])[1])).num_rows == 0
    assert b"reward" in written(Format.TABLE, [])[1]


def test_csv_reads_back_with_nested_values_as_json():
    table = pa.csv.read_csv(
        io.BytesIO(written(Format.CSV)[1]), parse_options=pa.csv.ParseOptions(newlines_in_values=True)
    )
    assert table["id"][0].as_py() == "a,\n[b]"
    assert json.loads(table["runs"][0].as_py()) == [{"version": 1, "length": 2}]
    assert table["digest"][0].as_py() == "00ff"


@pytest.mark.parametrize("how", [Format.PARQUET, Format.ARROW])
def test_binary_formats_keep_types_and_values(how):
    data = written(how)[1]
    table = pa.parquet.read_table(io.BytesIO(data)) if how is Format.PARQUET else pa.ipc.open_stream(data).read_all()
    expected = pa.Table.from_batches(batches())
    assert table.drop(["reward"]).equals(expected.drop(["reward"]))
    assert str(table["reward"].to_pylist()) == "[1.0, nan]"


def test_a_table_for_people_shows_markup_as_text_and_null_as_null():
    text = written(Format.TABLE)[1].decode()
    assert "a, [b]" in text
    assert "null" in text


def test_a_long_table_stops_and_says_how_to_get_all():
    schema, rows = rows_to_batches([{"n": n} for n in range(TABLE_ROWS + 1)], ["n"])
    stream, notes = io.BytesIO(), io.StringIO()
    assert write_rows(schema, rows, Format.TABLE, stream, notes) == TABLE_ROWS
    assert f"first {TABLE_ROWS} rows" in notes.getvalue()


class _Terminal(io.BytesIO):
    def isatty(self):
        return True


def test_binary_formats_refuse_a_terminal_and_name_the_remedy():
    with pytest.raises(OutputError, match=r"> rows\.parquet"):
        write_rows(SCHEMA, batches(), Format.PARQUET, _Terminal())
