"""The lake as a learner's input: what was there at the start, then what is appended.

Steps of new trajectories are looked up by id: they are committed before their trajectory is, and ids are
time-ordered, so file statistics leave few files to read.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lake.errors import VersionGoneError
from lake.open import Lake
from lake.table import LakeTable, overlaps
from lake.tail import Position, Tail
from learner.dataset import ANNOTATION_COLUMNS, STEP_COLUMNS, TRAJECTORY_COLUMNS, GroupBuilder

_LOOKUP_ROWS = 4096
"""Trajectories whose steps are read at once."""


class LakeSource:
    """Feeds a `GroupBuilder` with a run's rows.

    Args:
        lake: where to read.
        run_id: whose rows.
        builder: takes them; rows that it has seen before may be given again.
    """

    def __init__(self, lake: Lake, run_id: str, builder: GroupBuilder) -> None:
        self._builder = builder
        self._steps = lake.table("steps")
        mine = pc.field("run_id") == run_id
        self._trajectories = _Followed(
            lake.table("trajectories"), TRAJECTORY_COLUMNS, mine & (pc.field("split") == "train")
        )
        self._annotations = _Followed(
            lake.table("annotations"), ANNOTATION_COLUMNS, mine & (pc.field("kind") == "group_closed")
        )

    @property
    def table_versions(self) -> dict[str, int]:
        """Delta versions that were read last: hints for whoever looks a training step up."""
        return {table.name: table.version for table in (self._trajectories.table, self._steps)}

    def poll(self) -> None:
        """Give the builder all that was committed since the last time."""
        for rows in self._trajectories.poll():
            for start in range(0, rows.num_rows, _LOOKUP_ROWS):
                wanted = self._builder.wanted(rows.slice(start, _LOOKUP_ROWS))
                if wanted:
                    self._builder.add(wanted, self._steps_of(wanted))
        for rows in self._annotations.poll():
            self._builder.close_groups(rows)

    def _steps_of(self, trajectories: list[dict[str, Any]]) -> pa.Table:
        ids = sorted(row["trajectory_id"] for row in trajectories)
        self._steps.refresh()
        files = self._steps.data_files(overlaps("trajectory_id", ids[0], ids[-1]))
        return self._steps.read_files(files, STEP_COLUMNS, pc.field("trajectory_id").isin(ids))


class _Followed:
    """All rows of a table as it is, then what is appended; all again where a tail lost its place."""

    def __init__(self, table: LakeTable, columns: tuple[str, ...], row_filter: pc.Expression) -> None:
        self.table, self._columns, self._row_filter = table, columns, row_filter
        self._tail: Tail | None = None

    def poll(self) -> Iterator[pa.Table]:
        if self._tail is not None:
            try:
                for batch in self._tail.poll():
                    yield pa.Table.from_batches([batch.rows])
            except VersionGoneError:
                self._tail = None  # too far behind: what was cleaned up is in the table as it is now
            else:
                return
        version = self.table.refresh()
        for rows in self.table.scan_files(self.table.data_files(), self._columns, self._row_filter):
            yield pa.Table.from_batches([rows])
        self._tail = Tail(self.table, Position(version + 1), columns=self._columns, row_filter=self._row_filter)
