"""Content hashes tell rows apart and nothing else."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.content import content_hash, hash_batches, lake_hashes
from lake.open import Lake
from schemas.tables import PROJECTIONS

SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("number", pa.float64()),
        ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),
        ("runs", pa.list_(pa.struct([("version", pa.int64()), ("length", pa.int32())]))),
    ]
)
ROW = st.fixed_dictionaries(
    {
        "text": st.none() | st.text(max_size=3),
        "number": st.none() | st.floats(),
        "tokens": st.none() | st.lists(st.none() | st.integers(-5, 5), max_size=3),
        "mask": st.none() | st.lists(st.booleans(), max_size=3),
        "runs": st.none()
        | st.lists(st.fixed_dictionaries({"version": st.integers(0, 3), "length": st.just(1)}), max_size=2),
    }
)


def digest(rows, batch_rows=100):
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    return hash_batches(table.to_batches(max_chunksize=batch_rows), SCHEMA)


@given(st.lists(ROW, max_size=8), st.randoms(), st.integers(1, 4))
def test_order_and_batches_do_not_matter(rows, random, batch_rows):
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert digest(rows) == digest(shuffled, batch_rows)


@given(st.lists(ROW, min_size=1, max_size=5))
def test_a_row_more_or_less_matters(rows):
    assert digest(rows) != digest(rows[1:])
    assert digest(rows) != digest([*rows, rows[0]])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"text": None}, {"text": ""}),
        ({"number": 0.1}, {"number": 0.1 + 2**-56}),
        ({"tokens": None}, {"tokens": []}),
        ({"tokens": [1, 2]}, {"tokens": [2, 1]}),
        ({"tokens": [0]}, {"tokens": [None]}),
        ({"mask": [True]}, {"mask": [False]}),
        ({"runs": [{"version": 1, "length": 2}]}, {"runs": [{"version": 2, "length": 1}]}),
    ],
)
def test_values_are_told_apart(one, other):
    full = dict.fromkeys(SCHEMA.names)
    assert digest([{**full, **one}]) != digest([{**full, **other}])


def test_a_slice_of_a_list_column_hashes_like_its_rows():
    rows = [{**dict.fromkeys(SCHEMA.names), "tokens": [number, number]} for number in range(6)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA).combine_chunks()
    assert hash_batches(table.slice(2, 3).to_batches(), SCHEMA) == digest(rows[2:5])


def test_layout_and_versions(lake, events_of, tmp_path):
    table = lake.table("events")
    for start in (0, 10):
        table.commit([table.write_file(events_of(range(start, start + 10)))])
    other = Lake(str(tmp_path / "other"))
    other.create()
    other.table("events").commit([other.table("events").write_file(events_of(range(20)))])
    assert content_hash(table) == content_hash(other.table("events"))
    assert content_hash(table, version=1) != content_hash(table)
    assert lake_hashes(lake) == lake_hashes(other)
    assert set(lake_hashes(lake)) == {"events", *PROJECTIONS}
