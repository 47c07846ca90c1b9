"""Project: from `events` to every projection, one commit a table and epoch. Owns all projections.

    plan → assemble → quality gate → files (in parallel workers) → one committer, tables in a fixed order

`trajectories` is committed last. A process that dies between two tables leaves some of them ahead; the next epoch then
recomputes exactly the range that was begun and commits it to the tables that lack it. As rows are a pure function of
`events`, they are the same rows.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.pvalue import PCollection

from lake.errors import CommitConflictError
from lake.events import file_extents, read_history, read_run_events, scan_range, seen_run_events
from lake.files import DataFile
from lake.open import Lake
from lake.table import LakeTable, Progress
from pipelines.assemble import RECORD_COLUMNS, Candidates, assemble
from pipelines.bookkeeping import EpochCounts, epochs_table, quality_table
from pipelines.failpoints import reach
from pipelines.garbage import collector_paused
from pipelines.gate.gate import QualityResult
from pipelines.plan import Extent, Ranges, end_within, plan_ranges, width
from pipelines.runner import count, run_beam
from pipelines.sift import Violation, sift
from pipelines.warm import warm_gate, warm_lake
from schemas.config.pipelines import PipelineConfig
from schemas.tables import PROJECT_TABLES, PROJECTIONS

PIPELINE = "project"


class Shard(NamedTuple):
    """Ranges that one worker takes: as few as keep all workers busy, since the gate costs per call."""

    ranges: Ranges


class ShardFiles(NamedTuple):
    """What a worker hands to the committer."""

    files: dict[str, list[DataFile]]
    num_rows: dict[str, int]
    counts: EpochCounts
    quality: list[tuple[str, QualityResult]]


class PartitionHistory:
    """`pipelines.assemble.History` over the files of `events`."""

    def __init__(self, events: LakeTable, log_id: str, partition: int, before: int) -> None:
        self._where = (events, log_id, partition)
        self._before = before

    def closed(self, trajectory_ids: Sequence[str]) -> set[str]:
        """Trajectories with an earlier record of a closing type."""
        columns = ["offset", "trajectory_id"]
        found = read_history(*self._where, trajectory_ids, self._before, columns, only=pc.field("is_closing"))
        return set(found.column("trajectory_id").to_pylist())

    def of(self, trajectory_ids: Sequence[str]) -> pa.Table:
        """All earlier records."""
        return read_history(*self._where, trajectory_ids, self._before, RECORD_COLUMNS)

    def of_run(self, streams: Mapping[str, tuple[int, int]]) -> pa.Table:
        """Earlier run-level records."""
        # Nearly always there is none: so look without the records' bytes first.
        if not seen_run_events(*self._where, streams, self._before):
            return self._where[0].schema.remove_metadata().empty_table().select(RECORD_COLUMNS)
        return read_run_events(*self._where, streams, self._before, RECORD_COLUMNS)


def write_shard(lake: Lake, log_id: str, ranges: Ranges) -> list[ShardFiles]:
    """Assemble a shard and write its files, without committing them; large ones piece by piece."""
    events, pieces = lake.table("events"), list[ShardFiles]()
    candidates = Candidates(log_id, on_full=lambda full: pieces.append(write_candidates(lake, full)))
    with collector_paused():
        for partition, (start, end) in sorted(ranges.items()):
            if start < end:
                records = scan_range(events, log_id, partition, start, end, RECORD_COLUMNS)
                assemble(candidates, partition, records, PartitionHistory(events, log_id, partition, start))
        pieces.append(write_candidates(lake, candidates))
    return pieces


def write_candidates(lake: Lake, candidates: Candidates) -> ShardFiles:
    """Gate what was assembled and write it."""
    quality: list[tuple[str, QualityResult]] = []

    def check(name: str, table: pa.Table) -> Sequence[Violation]:
        result = warm_gate().check(name, table)
        quality.extend((name, found) for found in result.quality)
        return result.violations

    sifted = sift(candidates, check)
    files = {
        name: [lake.table(name).write_file(table)] if table.num_rows else [] for name, table in sifted.tables.items()
    }
    counts = EpochCounts(
        num_records=sifted.num_records,
        num_bytes=sifted.num_bytes,
        accepted=sifted.accepted,
        quarantined=sifted.quarantined,
        duplicates=sifted.duplicates,
    )
    return ShardFiles(files, {name: table.num_rows for name, table in sifted.tables.items()}, counts, quality)


class AssembleFn(beam.DoFn):
    """Shard → files of every projection."""

    def __init__(self, lake_url: str, log_id: str) -> None:
        self._lake_url = lake_url
        self._log_id = log_id

    def process(self, shard: Shard) -> Iterator[tuple[int, ShardFiles]]:
        """The files of this shard, keyed for the only committer."""
        lake = warm_lake(self._lake_url)
        lake.table("events").refresh()
        for files in write_shard(lake, self._log_id, shard.ranges):
            yield 0, files


class CommitFn(beam.DoFn):
    """Files of all shards → one commit a table, in order."""

    def __init__(self, lake_url: str, log_id: str, ranges: Ranges, started: float) -> None:
        self._lake_url = lake_url
        self._progress = Progress(PIPELINE, log_id, ranges)
        self._started = started

    def process(self, element: tuple[int, Iterable[ShardFiles]]) -> Iterator[int]:
        """Commit; gives the version of `trajectories`."""
        lake = warm_lake(self._lake_url)
        shards = list(element[1])
        yield commit_epoch(lake, self._progress, shards, self._started)
        total = merge_counts(shards)
        for name in ("num_records", "num_bytes", "accepted", "quarantined", "duplicates"):
            count(name, getattr(total, name))
        count("trajectories", sum(shard.num_rows["trajectories"] for shard in shards))


def merge_counts(shards: Sequence[ShardFiles]) -> EpochCounts:
    """Counts of a whole epoch."""
    return EpochCounts(
        **{name: sum(getattr(shard.counts, name) for shard in shards) for name in EpochCounts.__struct_fields__}
    )


def commit_epoch(lake: Lake, progress: Progress, shards: Sequence[ShardFiles], started: float) -> int:
    """Commit an epoch to the tables that lack it.

    Raises:
        CommitConflictError: a table is neither at the range's start nor at its end; nothing more is committed, and
            files that no commit names are removed.
    """
    files = {name: [file for shard in shards for file in shard.files[name]] for name in PROJECTIONS}
    num_rows = {name: sum(shard.num_rows[name] for shard in shards) for name in PROJECTIONS}
    quality = quality_table([found for shard in shards for found in shard.quality], progress)
    files["quality"] = [lake.table("quality").write_file(quality)] if quality.num_rows else []
    epoch = epochs_table(progress, merge_counts(shards), num_rows, started)
    files["epochs"] = [lake.table("epochs").write_file(epoch)]
    version = -1
    for name in PROJECT_TABLES:
        table = lake.table(name)
        table.refresh()
        if is_done(table, progress):
            table.discard(files.pop(name))
            continue
        reach(f"project.{name}.before_commit")
        try:
            version = table.commit(files[name], progress=progress, metadata={"pipeline": PIPELINE})
        except CommitConflictError:
            for other, left in files.items():
                lake.table(other).discard(left)
            raise
        del files[name]
        reach(f"project.{name}.after_commit")
    return version


def is_done(table: LakeTable, progress: Progress) -> bool:
    """Whether a table has this very range already."""
    found = table.progress(progress.pipeline, progress.log_id, list(progress.ranges))
    ranges = progress.ranges
    return any(start < end for start, end in ranges.values()) and all(
        found[partition] == end for partition, (_, end) in ranges.items()
    )


def _progress(lake: Lake, log_id: str, partitions: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """(what every table has, what some table has), as next offsets."""
    states = []
    for name in PROJECT_TABLES:
        table = lake.table(name)
        table.refresh()
        states.append(table.progress(PIPELINE, log_id, partitions))
    starts = {partition: min(state[partition] for state in states) for partition in partitions}
    return starts, {partition: max(state[partition] for state in states) for partition in partitions}


def is_begun(lake: Lake, log_id: str, partitions: Sequence[int]) -> bool:
    """Whether some tables have an epoch that others lack."""
    starts, begun = _progress(lake, log_id, partitions)
    return starts != begun


def plan_epoch(lake: Lake, log_id: str, partitions: Sequence[int], config: PipelineConfig) -> Ranges:
    """The next range: one that was begun and not finished, else what ingest committed since."""
    starts, begun = _progress(lake, log_id, partitions)
    if begun != starts:
        return {partition: (starts[partition], begun[partition]) for partition in partitions}
    events = lake.table("events")
    events.refresh()
    return plan_within(events, log_id, starts, events.progress("ingest", log_id, partitions), config)


def plan_within(
    events: LakeTable, log_id: str, starts: Mapping[int, int], ends: Mapping[int, int], config: PipelineConfig
) -> Ranges:
    """Ranges from `starts` towards `ends` within the bounds of an epoch."""
    ranges = plan_ranges(starts, ends, config.max_epoch_records)
    bytes_per_offset = config.max_epoch_bytes / max(1, width(ranges))
    return {
        partition: (
            start,
            end_within(
                start, end, _extents(events, log_id, partition, start, end), int((end - start) * bytes_per_offset)
            ),
        )
        for partition, (start, end) in ranges.items()
    }


def _extents(events: LakeTable, log_id: str, partition: int, start: int, end: int) -> Iterator[Extent]:
    return map(Extent._make, file_extents(events, log_id, partition, start, end))


def shards_of(ranges: Ranges, max_records: int) -> list[Shard]:
    """Few large elements: one for a small epoch, one per partition for a large one."""
    filled = {partition: span for partition, span in ranges.items() if span[0] < span[1]}
    if width(filled) <= max_records:
        return [Shard(filled)]
    return [Shard({partition: span}) for partition, span in filled.items()]


_RECORDS_PER_SHARD = 20_000


def build(pipeline: beam.Pipeline, lake_url: str, log_id: str, ranges: Ranges, started: float) -> PCollection[int]:
    """The Beam pipeline of one epoch."""
    return (
        pipeline
        | "Shards" >> beam.Create(shards_of(ranges, _RECORDS_PER_SHARD), reshuffle=False)
        | "Assemble, gate, write" >> beam.ParDo(AssembleFn(lake_url, log_id))
        | "To one committer" >> beam.GroupByKey()
        | "Commit" >> beam.ParDo(CommitFn(lake_url, log_id, ranges, started))
    )


def project_epoch(
    lake_url: str, log_id: str, partitions: Sequence[int], config: PipelineConfig, beam_options: Sequence[str] = ()
) -> dict[str, int] | None:
    """Run one epoch.

    Returns:
        Counters by name, or None when there was nothing to do.
    """
    ranges = plan_epoch(warm_lake(lake_url), log_id, partitions, config)
    if not width(ranges):
        return None
    reach("project.before_files")
    started = time.time()
    return run_beam(lambda pipeline: build(pipeline, lake_url, log_id, ranges, started), beam_options)
