"""Table schemas: documented, sortable, and wide enough for what decodes."""

from typing import Any

import msgspec.inspect as types
import pyarrow as pa
import pytest

from schemas.events import BODY_TYPES, Envelope
from schemas.tables import PROJECTIONS, SORT_KEYS, TABLES

COLUMNS = [(table, field) for table, schema in TABLES.items() for field in schema]
COLUMN_IDS = [f"{table}.{field.name}" for table, field in COLUMNS]

TABLES_OF = {
    "trajectory_started": "trajectories",
    "model_call": "steps",
    "trajectory_finished": "trajectories",
    "score": "scores",
    "annotation": "annotations",
    "policy_published": "policies",
    "consumed": "consumption",
    "step_trained": "consumption",
}


@pytest.mark.parametrize(("table", "field"), COLUMNS, ids=COLUMN_IDS)
def test_every_column_has_a_sentence(table: str, field: pa.Field):
    comment = (field.metadata or {}).get(b"comment", b"").decode()
    assert len(comment) >= 4, f"{table}.{field.name} has no comment"
    assert comment.endswith((".", ")"))


@pytest.mark.parametrize("table", TABLES)
def test_column_names_are_unique(table: str):
    assert len(set(TABLES[table].names)) == len(TABLES[table].names)


def test_sort_keys_name_columns():
    for table, keys in SORT_KEYS.items():
        assert set(keys) <= set(TABLES[table].names), table
    assert set(PROJECTIONS) <= set(SORT_KEYS)


def test_trajectories_are_committed_last():
    assert PROJECTIONS[-1] == "trajectories"


def _integers(kind: Any) -> list[types.IntType]:
    inner = getattr(kind, "types", None) or getattr(kind, "item_types", None) or [getattr(kind, "item_type", None)]
    return [kind] if isinstance(kind, types.IntType) else [leaf for item in inner if item for leaf in _integers(item)]


def _widths(kind: pa.DataType) -> list[int]:
    if pa.types.is_list(kind):
        return _widths(kind.value_type)
    if pa.types.is_struct(kind):
        return [width for field in kind for width in _widths(field.type)]
    return [kind.bit_width] if pa.types.is_integer(kind) else []


def _pairs() -> list[tuple[str, str, list[types.IntType], pa.DataType]]:
    pairs = [("envelope", "events", Envelope)] + [(kind, TABLES_OF[kind], BODY_TYPES[kind]) for kind in TABLES_OF]
    return [
        (f"{name}.{field.name}", table, _integers(field.type), TABLES[table].field(field.name).type)
        for name, table, cls in pairs
        for field in types.type_info(cls).fields  # type: ignore[attr-defined]
        if field.name in TABLES[table].names and _integers(field.type)
    ]


@pytest.mark.parametrize(("name", "table", "integers", "column"), _pairs(), ids=[pair[0] for pair in _pairs()])
def test_decoded_integers_fit_their_columns(name: str, table: str, integers: list[types.IntType], column: pa.DataType):
    widths = _widths(column)
    assert len(widths) == len(integers), f"{name} → {table}"
    for integer, width in zip(integers, widths, strict=True):
        assert integer.ge is not None
        assert integer.ge >= -(2 ** (width - 1))
        assert integer.le is not None
        assert integer.le <= 2 ** (width - 1) - 1
