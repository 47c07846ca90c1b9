"""Shared fixtures: a real lake in a temporary folder, and rows for its tables."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lake.open import Lake
from schemas.tables import TABLES


def build_rows(table: str, columns: Mapping[str, list[Any]]) -> pa.Table:
    """Rows of a table; columns that are not given are null."""
    schema = TABLES[table]
    num_rows = len(next(iter(columns.values())))
    return pa.table({name: columns.get(name, [None] * num_rows) for name in schema.names}, schema=schema)


def build_events(offsets: range, log_id: str = "log", partition: int = 0, trajectories: int = 5) -> pa.Table:
    """Events sorted as files are: by trajectory, then offset."""
    events = build_rows(
        "events",
        {
            "log_id": [log_id] * len(offsets),
            "partition": [partition] * len(offsets),
            "offset": list(offsets),
            "type": ["action"] * len(offsets),
            "trajectory_id": [f"t{offset // trajectories:06d}" for offset in offsets],
            "is_closing": [offset % trajectories == trajectories - 1 for offset in offsets],
            "value": [f"value {offset}".encode() for offset in offsets],
        },
    )
    return events.sort_by([("trajectory_id", "ascending"), ("offset", "ascending")])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    created = Lake(str(tmp_path / "lake"))
    created.create()
    return created


@pytest.fixture
def rows_of() -> Callable[[str, Mapping[str, list[Any]]], pa.Table]:
    return build_rows


@pytest.fixture
def events_of() -> Callable[..., pa.Table]:
    return build_events
