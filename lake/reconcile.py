"""Reconciliation: where is every record of the log?

    log records = accepted + quarantined + duplicates + open

Each side is counted from another place: log records from the log's own offsets and `events`, accepted and quarantined
from the projections, duplicates from `epochs`, open by looking in `events` for what no projection decided. So the
equation can fail, and a failure means that a record was lost, doubled or miscounted.
"""

from collections.abc import Mapping

from msgspec import Struct

from lake.open import Lake
from lake.sql import run_sql
from schemas.records import Bounds

_COUNTS = {
    "events": "SELECT count(*) FROM events",
    "accepted": """
        SELECT (SELECT coalesce(sum(num_events), 0) FROM trajectories) + (SELECT count(*) FROM scores)
             + (SELECT count(*) FROM policies) + (SELECT count(*) FROM consumption)
             + (SELECT count(*) FROM annotations)""",
    "quarantined": "SELECT coalesce(sum(num_events), 0) FROM quarantine",
    "duplicates": "SELECT coalesce(sum(duplicates), 0) FROM epochs WHERE pipeline = 'project'",
    # An attempt's own records wait until it closes, unless they were quarantined one by one.
    "open": """
        WITH closed AS (
            SELECT trajectory_id, attempt FROM trajectories
            UNION ALL
            SELECT trajectory_id, attempt FROM quarantine WHERE scope IN ('attempt', 'trajectory')
        )
        SELECT count(*) FROM events AS e
        LEFT ANTI JOIN closed AS c ON e.trajectory_id = c.trajectory_id AND e.attempt = c.attempt
        LEFT ANTI JOIN (SELECT log_id, partition, "offset" FROM quarantine WHERE scope = 'record') AS q
            ON e.log_id = q.log_id AND e.partition = q.partition AND e."offset" = q."offset"
        WHERE e.stream = concat(e.trajectory_id, '/', e.attempt)""",
}


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
    counts = {name: int(run_sql(lake, query).to_pylist()[0].popitem()[1]) for name, query in _COUNTS.items()}
    ingested = lake.table("events").progress("ingest", log_id, list(bounds))
    projected = lake.table("trajectories").progress("project", log_id, list(bounds))
    coming = sum(max(0, bound.next - ingested[partition]) for partition, bound in bounds.items())
    return Reconciliation(
        log_records=counts["events"] + coming,
        accepted=counts["accepted"],
        quarantined=counts["quarantined"],
        duplicates=counts["duplicates"],
        open=_open(lake, log_id, counts["open"], projected) + coming,
    )


def _open(lake: Lake, log_id: str, waiting: int, projected: Mapping[int, int]) -> int:
    """Own records that wait, and records of any kind that project has not looked at."""
    ahead = " OR ".join(f'(partition = {partition} AND "offset" >= {end})' for partition, end in projected.items())
    later = f"SELECT count(*) FROM events WHERE log_id = '{log_id}' AND ({ahead})"  # noqa: S608 - numbers and an id of ours
    own = "stream = concat(trajectory_id, '/', attempt)"
    others = run_sql(lake, f"{later} AND ({own}) IS NOT TRUE").to_pylist()[0].popitem()[1]
    return waiting + int(others)
