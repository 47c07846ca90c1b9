"""Ingest: from the event log to `events`, every record exactly once. Owns `events` and writes nothing else.

Workers read their ranges of the log in parallel and write files; one committer makes one Delta commit with the next
offsets as its `txn`. Ranges begin where the last commit ended. A hole in the log stops ingestion with the range named.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import PCollection

from ingest.port import EventLog
from lake.errors import CommitConflictError
from lake.open import Lake
from lake.table import LakeTable, Progress
from pipelines.bookkeeping import EpochCounts, epochs_table
from pipelines.decode import events_table
from pipelines.failpoints import reach
from pipelines.io.delta import Commit, WriteToDelta
from pipelines.plan import GapError, LostTailError, Ranges, check_log, plan_ranges, width
from pipelines.runner import count, run_beam
from pipelines.warm import warm_lake, warm_log
from schemas.config.pipelines import PipelineConfig

PIPELINE = "ingest"
_BATCH_BYTES = 32 * 1024 * 1024
"""Raw bytes of a file of `events`, and of what a worker holds."""


class ReadLogFn(beam.DoFn):
    """(partition, start, end) → tables of `events`, each sorted and of bounded size."""

    def __init__(self, log_url: str, batch_bytes: int) -> None:
        self._log_url = log_url
        self._batch_bytes = batch_bytes

    def process(self, shard: tuple[int, int, int]) -> Iterator[pa.Table]:
        """One table a batch of the log."""
        log = warm_log(self._log_url)
        for batch in log.read(*shard, self._batch_bytes):
            count("num_records", batch.num_rows)
            count("num_bytes", batch.column("value").nbytes)
            yield events_table(log.log_id, shard[0], batch)


class RecordEpochFn(beam.DoFn):
    """After the commit: its row in `epochs`."""

    def __init__(self, lake_url: str, progress: Progress, started: float, note: str | None) -> None:
        self._lake_url = lake_url
        self._progress = progress
        self._started = started
        self._note = note

    def process(self, commit: Commit) -> Iterator[int]:
        """Gives the version of `events`."""
        reach("ingest.events.after_commit")
        record_epoch(warm_lake(self._lake_url), self._progress, commit.num_rows, self._started, self._note)
        reach("ingest.epochs.after_commit")
        yield commit.version


def record_epoch(lake: Lake, progress: Progress, num_records: int, started: float, note: str | None) -> None:
    """Write the row of `epochs` for a range that `events` holds, unless it is there."""
    table = lake.table("epochs")
    table.refresh()
    counts = EpochCounts(num_records=num_records)
    file = table.write_file(epochs_table(progress, counts, {"events": num_records}, started, note))
    try:
        table.commit([file], progress=progress, metadata={"pipeline": PIPELINE})
    except CommitConflictError:
        table.discard([file])  # somebody who finished this range for us was faster


def finish_epoch_row(lake: Lake, log_id: str, partitions: Sequence[int]) -> None:
    """Write the row that a process which died after its commit of `events` still owes, with that commit's note."""
    events, epochs = lake.table("events"), lake.table("epochs")
    committed = events.progress(PIPELINE, log_id, partitions)
    noted = epochs.progress(PIPELINE, log_id, partitions)
    if committed == noted:
        return
    ranges = {partition: (noted[partition], committed[partition]) for partition in partitions}
    note, num_records = _last_commit(events, log_id)
    record_epoch(lake, Progress(PIPELINE, log_id, ranges), num_records, time.time(), note or "recovered")


def _last_commit(events: LakeTable, log_id: str) -> tuple[str | None, int]:
    """(note, rows) of the newest commit of `events` by ingest of a log; what others committed since is passed over."""
    for version in range(events.version, 0, -1):
        actions = events.log_actions(version)
        if any(action.get("txn", {}).get("appId", "").startswith(f"{PIPELINE}/{log_id}/") for action in actions):
            info = next(action["commitInfo"] for action in actions if "commitInfo" in action)
            added = [json.loads(action["add"]["stats"])["numRecords"] for action in actions if "add" in action]
            return info.get("note"), sum(added)
    raise AssertionError("progress is recorded by a commit")


def build(
    pipeline: beam.Pipeline, urls: tuple[str, str], ranges: Ranges, progress: Progress, started: float, note: str | None
) -> PCollection[int]:
    """The Beam pipeline of one epoch: reads `ranges` of the log, commits `progress`, which may begin before them."""
    lake_url, log_url = urls
    shards = [(partition, *span) for partition, span in ranges.items() if span[0] < span[1]]
    metadata = {"pipeline": PIPELINE, **({"note": note} if note else {})}
    return (
        pipeline
        | "Ranges" >> beam.Create(shards, reshuffle=False)
        | "Read log" >> beam.ParDo(ReadLogFn(log_url, _BATCH_BYTES))
        | "Commit events" >> WriteToDelta(lake_url, "events", progress, metadata)
        | "Record epoch" >> beam.ParDo(RecordEpochFn(lake_url, progress, started, note))
    )


def starts_of(lake: Lake, log: EventLog, known: set[str], accept_gap: bool) -> tuple[dict[int, int], str | None]:
    """(next offset to ingest per partition, note about an accepted gap).

    Raises:
        GapError: records are gone and nobody accepted that.
    """
    partitions = log.partitions()
    committed = lake.table("events").progress(PIPELINE, log.log_id, partitions)
    bounds = {partition: log.bounds(partition) for partition in partitions}
    spans = {partition: (bound.first, bound.next) for partition, bound in bounds.items()}
    try:
        check_log(log.log_id, committed, spans, known)
    except LostTailError:
        raise
    except GapError as gap:
        if not accept_gap:
            raise
        return {p: max(start, spans[p][0]) for p, start in committed.items()}, f"gap accepted: {gap}"
    return committed, None


def ends_of(log: EventLog, starts: Mapping[int, int]) -> dict[int, int]:
    """Next offsets of the log."""
    return {partition: log.bounds(partition).next for partition in starts}


def ingest_epoch(
    lake_url: str,
    log_url: str,
    config: PipelineConfig,
    *,
    known: set[str],
    accept_gap: bool = False,
    beam_options: Sequence[str] = (),
) -> dict[str, int] | None:
    """Run one epoch.

    Args:
        lake_url: The lake.
        log_url: The event log.
        config: Bounds of an epoch.
        known: Logs that the lake knows (`bookkeeping.known_partitions`); this one is added.
        accept_gap: Go on over removed records, leaving a note.
        beam_options: Beam's own options.

    Returns:
        Counters by name, or None when there was nothing to do.

    Raises:
        GapError: see `starts_of`.
    """
    lake, log = warm_lake(lake_url), warm_log(log_url)
    for name in ("events", "epochs"):
        lake.table(name).refresh()
    finish_epoch_row(lake, log.log_id, log.partitions())
    starts, note = starts_of(lake, log, known, accept_gap)
    ranges = plan_ranges(starts, ends_of(log, starts), config.max_epoch_records)
    if not width(ranges) and note is None:
        return None
    known.add(log.log_id)
    progress = _progress(lake, log, ranges)
    reach("ingest.events.before_files")
    started = time.time()
    urls = lake_url, log_url
    return run_beam(lambda pipeline: build(pipeline, urls, ranges, progress, started, note), beam_options)


def _progress(lake: Lake, log: EventLog, ranges: Ranges) -> Progress:
    """The range to commit: over an accepted gap it begins where the last commit ended."""
    committed = lake.table("events").progress(PIPELINE, log.log_id, list(ranges))
    return Progress(PIPELINE, log.log_id, {p: (committed[p], end) for p, (_, end) in ranges.items()})
