"""Reconciliation: where is every record of the log?

    log records = accepted + quarantined + duplicates + open

Each side is counted from another place: log records from the log's own offsets and `events`, accepted and quarantined
from the projections, duplicates from `epochs`, open by looking in `events` for what no projection decided. So the
equation can fail, and a failure means that a record was lost, doubled or miscounted.
"""

import json
from collections.abc import Mapping

from msgspec import Struct

from lake.open import Lake
from lake.sql import run_sql
from schemas.records import Bounds

_COUNTS = {
    "events": "SELECT count(*) FROM events",
    "accepted": """
        SELECT (SELECT coalesce(sum(num_events), 0) FROM trajectories)
             + (SELECT count(*) FROM scores WHERE NOT ({ahead}))
             + (SELECT count(*) FROM policies WHERE NOT ({ahead}))
             + (SELECT count(*) FROM consumption WHERE NOT ({ahead}))
             + (SELECT count(*) FROM annotations WHERE NOT ({ahead}))""",
    "quarantined": "SELECT coalesce(sum(num_events), 0) FROM quarantine WHERE NOT ({ahead})",
}
"""`ahead`: where project died halfway through an epoch some tables have rows that `trajectories` lacks. Not counted."""

_OPEN = """
    WITH quarantined AS (
        SELECT * FROM quarantine WHERE NOT ({ahead})
    ), settled AS (
        SELECT log_id, partition, trajectory_id FROM trajectories
        UNION ALL
        SELECT log_id, partition, trajectory_id FROM quarantined WHERE scope = 'trajectory'
    ), ahead AS (
        SELECT log_id, partition, "offset" FROM events WHERE {ahead}
    ), waiting AS (
        SELECT e.log_id, e.partition, e."offset" FROM events AS e
        LEFT ANTI JOIN settled AS s
            ON e.log_id = s.log_id AND e.partition = s.partition AND e.trajectory_id = s.trajectory_id
        LEFT ANTI JOIN (SELECT * FROM quarantined WHERE scope = 'attempt') AS a
            ON e.log_id = a.log_id AND e.partition = a.partition
            AND e.trajectory_id = a.trajectory_id AND e.attempt = a.attempt
        LEFT ANTI JOIN (SELECT * FROM quarantined WHERE scope = 'record') AS q
            ON e.log_id = q.log_id AND e.partition = q.partition AND e."offset" = q."offset"
        WHERE e.stream = e.trajectory_id || '/' || CAST(e.attempt AS VARCHAR)
    )
    SELECT count(*) FROM (SELECT * FROM ahead UNION SELECT * FROM waiting)"""
"""Records that project has not looked at, and an attempt's own records: those wait until it closes or its trajectory
settles, unless they were quarantined one by one."""


class Reconciliation(Struct, frozen=True):
    """The equation's sides, in records."""

    log_records: int
    accepted: int
    quarantined: int
    duplicates: int
    open: int
    """Waiting for their trajectory to settle, or not yet projected."""

    @property
    def holds(self) -> bool:
        """Whether every record is accounted for, once."""
        return self.log_records == self.accepted + self.quarantined + self.duplicates + self.open

    def __str__(self) -> str:
        sides = f"{self.accepted} accepted + {self.quarantined} quarantined + {self.duplicates} duplicates"
        sign = "=" if self.holds else "≠"
        return f"{self.log_records} log records {sign} {sides} + {self.open} open"


def reconcile(lake: Lake, log_id: str, bounds: Mapping[int, Bounds]) -> Reconciliation:
    """Count both sides.

    Args:
        lake: The lake; its pipelines are not at work, or the counts belong to different moments.
        log_id: The log at hand.
        bounds: Its partitions' offsets.
    """
    ahead = _ahead(lake)
    counts = {name: _count(lake, query.format(ahead=ahead)) for name, query in _COUNTS.items()}
    ingested = lake.table("events").progress("ingest", log_id, list(bounds))
    coming = sum(max(0, bound.next - max(bound.first, ingested[partition])) for partition, bound in bounds.items())
    return Reconciliation(
        log_records=counts["events"] + coming,
        accepted=counts["accepted"],
        quarantined=counts["quarantined"],
        duplicates=_duplicates(lake),
        open=_count(lake, _OPEN.format(ahead=ahead)) + coming,
    )


def _duplicates(lake: Lake) -> int:
    """Those of whole epochs."""
    query = "SELECT log_id, ranges, duplicates FROM epochs WHERE pipeline = 'project' AND duplicates > 0"
    total = 0
    for row in run_sql(lake, query).to_pylist():
        ends = {int(partition): end for partition, (_, end) in json.loads(row["ranges"]).items()}
        done = lake.table("trajectories").progress("project", row["log_id"], list(ends))
        total += row["duplicates"] if all(end <= done[partition] for partition, end in ends.items()) else 0
    return total


def _ahead(lake: Lake) -> str:
    """SQL: true for records that project has not looked at, of whichever log the lake was ingested from."""
    beyond = ["false"]
    for row in run_sql(lake, "SELECT DISTINCT log_id, partition FROM events").to_pylist():
        log_id, partition = row["log_id"], row["partition"]
        end = lake.table("trajectories").progress("project", log_id, [partition])[partition]
        beyond.append(f"(log_id = '{log_id}' AND partition = {partition} AND \"offset\" >= {end})")
    return " OR ".join(beyond)


def _count(lake: Lake, query: str) -> int:
    return int(run_sql(lake, query).column(0)[0].as_py())
