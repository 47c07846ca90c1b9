"""Rows of `epochs` and `quality`: what each commit did and what its gate saw. Pure but for the clock."""

import json
import time
from collections.abc import Mapping, Sequence

import pyarrow as pa
from msgspec import Struct

from lake.open import Lake
from lake.table import Progress
from pipelines.gate.gate import QualityResult
from pipelines.rows import Columns
from schemas.tables import EPOCHS, QUALITY


class EpochCounts(Struct, frozen=True):
    """Records of an epoch by outcome."""

    num_records: int = 0
    num_bytes: int = 0
    accepted: int = 0
    quarantined: int = 0
    duplicates: int = 0


def known_partitions(lake: Lake) -> dict[str, list[int]]:
    """Log id → partitions of every log that the lake was ingested from, as `epochs` and the files of `events` tell."""
    epochs, events = lake.table("epochs"), lake.table("events")
    epochs.refresh()
    events.refresh()
    found: dict[str, set[int]] = {}
    for batch in epochs.scan_files(epochs.data_files(), ["log_id", "ranges"]):
        for row in batch.to_pylist():
            found.setdefault(row["log_id"], set()).update(int(partition) for partition in json.loads(row["ranges"]))
    for file in events.data_files():
        assert file.low["log_id"] == file.high["log_id"], "a file of events holds records of one log"
        partitions = range(file.low["partition"], file.high["partition"] + 1)
        found.setdefault(file.low["log_id"], set()).update(partitions)
    return {log_id: sorted(partitions) for log_id, partitions in found.items()}


def ranges_json(progress: Progress) -> str:
    """Offsets [start, end) per partition, as JSON."""
    return json.dumps({str(partition): list(span) for partition, span in sorted(progress.ranges.items())})


def epochs_table(
    progress: Progress,
    counts: EpochCounts,
    num_rows: Mapping[str, int],
    started: float,
    note: str | None = None,
) -> pa.Table:
    """The one row of `epochs` of a commit.

    Args:
        progress: Pipeline, log and ranges.
        counts: Records by outcome; only project decides about records, others leave those columns null.
        num_rows: Rows written by table.
        started: When the epoch began, seconds since the Unix epoch.
        note: A decision that somebody took.
    """
    columns = Columns(EPOCHS)
    decided = counts.accepted + counts.quarantined + counts.duplicates
    outcomes = {
        "accepted": counts.accepted,
        "quarantined": counts.quarantined,
        "duplicates": counts.duplicates,
        "open_delta": counts.num_records - decided,
    }
    columns.add(
        {
            "pipeline": progress.pipeline,
            "log_id": progress.log_id,
            "ranges": ranges_json(progress),
            "num_records": counts.num_records,
            "num_bytes": counts.num_bytes,
            **(outcomes if progress.pipeline == "project" else {}),
            "num_rows": json.dumps(dict(num_rows)),
            "duration_ms": (time.time() - started) * 1000,
            "note": note,
            "committed_ns": time.time_ns(),
        }
    )
    return columns.table()


def quality_table(found: Sequence[tuple[str, QualityResult]], progress: Progress) -> pa.Table:
    """Rows of `quality` of a commit, from (table, result) pairs."""
    columns = Columns(QUALITY)
    ranges, now = ranges_json(progress), time.time_ns()
    for name, result in found:
        columns.add(
            {
                "pipeline": progress.pipeline,
                "table": name,
                "rule": result.rule,
                "expectation": result.expectation,
                "success": result.success,
                "num_checked": result.num_checked,
                "num_unexpected": result.num_unexpected,
                "log_id": progress.log_id,
                "ranges": ranges,
                "checked_ns": now,
            }
        )
    return columns.table()
