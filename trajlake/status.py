"""What a home holds and how far its pipelines are, as uniform rows (section, name, value, detail).

Counts of rows come from file statistics, so that a look at a large lake is as quick as one at a small one.

Leaves out: the reconciliation itself (`lake.reconcile`) and how rows are shown.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec import Struct

from schemas.tables import PROJECTIONS, TABLES

if TYPE_CHECKING:
    from ingest.port import EventLog
    from lake.open import Lake

Query = Callable[[str], pa.Table]
COLUMNS = ("section", "name", "value", "detail")


class StatusRow(Struct, kw_only=True, frozen=True):
    """One line of the status."""

    section: str
    """table, log, lag, trajectories, reconciliation, quarantine or epoch."""
    name: str
    value: float | int | None
    """Rows, records or milliseconds."""
    detail: str

    def as_row(self) -> dict[str, Any]:
        """For output."""
        return {name: getattr(self, name) for name in COLUMNS}


def collect(lake: "Lake", log: "EventLog") -> tuple[list[StatusRow], bool]:
    """The whole status, and whether the reconciliation holds."""
    from lake.reconcile import reconcile  # noqa: PLC0415 - datafusion comes with it
    from lake.sql import session  # noqa: PLC0415 - as above

    context = session(lake)

    def query(sql: str) -> pa.Table:
        return context.sql(sql).to_arrow_table()

    tables = list(table_rows(lake))
    found = reconcile(lake, log.log_id, {partition: log.bounds(partition) for partition in log.partitions()})
    rows = [
        *tables,
        *log_rows(lake, log),
        *trajectory_rows(query),
        StatusRow(section="reconciliation", name="log records", value=found.log_records, detail=str(found)),
        *quarantine_rows(query),
        *epoch_rows(query),
    ]
    return rows, found.holds


def table_rows(lake: "Lake") -> Iterator[StatusRow]:
    """Rows, files and bytes per table."""
    for name in TABLES:
        table = lake.table(name)
        version = table.refresh()
        files = table.data_files()
        size = sum(file.size for file in files)
        yield StatusRow(
            section="table",
            name=name,
            value=sum(file.num_records for file in files),
            detail=f"{len(files)} file{'s' * (len(files) != 1)}, {megabytes(size)}, version {version}",
        )


def log_rows(lake: "Lake", log: "EventLog") -> Iterator[StatusRow]:
    """Bounds of every partition, and how far behind each pipeline is in it."""
    partitions = list(log.partitions())
    bounds = {partition: log.bounds(partition) for partition in partitions}
    for partition, bound in bounds.items():
        yield StatusRow(
            section="log",
            name=f"partition {partition}",
            value=bound.next - bound.first,
            detail=f"offsets [{bound.first}, {bound.next}) of log {log.log_id}",
        )
    ingested = lake.table("events").progress("ingest", log.log_id, partitions)
    # The last table that project commits to: what it has, all have.
    projected = lake.table(PROJECTIONS[-1]).progress("project", log.log_id, partitions)
    yield _lag("ingest", ingested, {partition: bound.next for partition, bound in bounds.items()})
    yield _lag("project", projected, ingested)


def _lag(pipeline: str, done: Mapping[int, int], to_do: Mapping[int, int]) -> StatusRow:
    behind = {partition: to_do[partition] - done[partition] for partition in to_do}
    detail = ", ".join(f"partition {partition}: {lag}" for partition, lag in behind.items() if lag)
    return StatusRow(section="lag", name=pipeline, value=sum(behind.values()), detail=detail or "up to date")


def trajectory_rows(query: Query) -> Iterator[StatusRow]:
    """Trajectories by what became of them."""
    counts = query(
        """
        SELECT
            (SELECT count(*) FROM trajectories) AS settled,
            (SELECT count(*) FROM trajectories WHERE trainable) AS trainable,
            (SELECT count(DISTINCT trajectory_id) FROM events AS e
                LEFT ANTI JOIN trajectories AS t ON e.trajectory_id = t.trajectory_id
                LEFT ANTI JOIN (SELECT trajectory_id, attempt FROM quarantine WHERE scope <> 'record') AS q
                    ON e.trajectory_id = q.trajectory_id AND e.attempt = q.attempt
                WHERE e.trajectory_id IS NOT NULL) AS open
        """
    ).to_pylist()[0]
    yield StatusRow(section="trajectories", name="settled", value=counts["settled"], detail="")
    yield StatusRow(section="trajectories", name="trainable", value=counts["trainable"], detail="of those")
    detail = "in play, or waiting for a verdict" if counts["open"] else ""
    yield StatusRow(section="trajectories", name="open", value=counts["open"], detail=detail)


def quarantine_rows(query: Query) -> Iterator[StatusRow]:
    """Rows of quarantine by rule, the most frequent first."""
    found = query(
        "SELECT rule, count(*) AS num, min(reason) AS example FROM quarantine GROUP BY rule ORDER BY num DESC, rule"
    )
    for row in found.to_pylist():
        yield StatusRow(section="quarantine", name=row["rule"], value=row["num"], detail=f"such as: {row['example']}")


def epoch_rows(query: Query) -> Iterator[StatusRow]:
    """The last commits, newest first."""
    found = query(
        "SELECT pipeline, num_records, num_rows, duration_ms, note FROM epochs ORDER BY committed_ns DESC LIMIT 5"
    )
    for row in found.to_pylist():
        written = {name: count for name, count in json.loads(row["num_rows"] or "{}").items() if count}
        parts = [f"{row['num_records'] or 0} records", *(f"{count} {name}" for name, count in written.items())]
        note = f"; {row['note']}" if row["note"] else ""
        yield StatusRow(
            section="epoch",
            name=row["pipeline"],
            value=round(row["duration_ms"] or 0.0),
            detail=", ".join(parts) + note,
        )


def megabytes(size: int) -> str:
    """Bytes as megabytes."""
    return f"{size / 1e6:,.1f} MB"
