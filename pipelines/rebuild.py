"""Rebuild: the projections made again from `events`, in place, without running one sandbox.

Takes every pipeline's lease. What is rebuilt is what was projected: the same ranges of the log, so progress stays as it
is and the content must be the same, row for row. Tables are replaced one by one, `trajectories` last; table versions go
on, so time travel still finds what was there before.
"""

import time
from collections.abc import Iterable, Iterator

import apache_beam as beam
import pyarrow.compute as pc
from apache_beam.pvalue import PCollection

from lake.errors import CommitConflictError
from lake.open import Lake
from lake.table import LakeTable, Progress
from pipelines.bookkeeping import epochs_table, known_partitions, quality_table
from pipelines.failpoints import reach
from pipelines.lease import lease
from pipelines.plan import Ranges, width
from pipelines.project import (
    PIPELINE,
    AssembleFn,
    Shard,
    ShardFiles,
    is_begun,
    merge_counts,
    plan_within,
    project_epoch,
)
from pipelines.run import STAGES, ConflictError
from pipelines.runner import run_beam
from pipelines.warm import warm_lake
from schemas.config.pipelines import PipelineConfig
from schemas.tables import PROJECTIONS


class ReplaceFn(beam.DoFn):
    """All new files of all logs → one overwriting commit a table."""

    def __init__(self, lake_url: str, done: dict[str, Ranges], started: float) -> None:
        self._lake_url = lake_url
        self._done = done
        self._started = started

    def process(self, element: tuple[int, Iterable[tuple[str, ShardFiles]]]) -> Iterator[str]:
        """Gives the names of the tables that were replaced."""
        lake = warm_lake(self._lake_url)
        shards = list(element[1])
        metadata = {"pipeline": "rebuild"}
        for name in PROJECTIONS:
            if name == PROJECTIONS[-1]:
                self._replace_bookkeeping(lake, shards)
            table = lake.table(name)
            table.refresh()
            self._require_progress(table)
            reach("rebuild.before_commit")
            table.replace([file for _, shard in shards for file in shard.files[name]], metadata=metadata)
            reach("rebuild.after_commit")
            yield name

    def _require_progress(self, table: LakeTable) -> None:
        """On an object store there is no lease that keeps project from committing meanwhile."""
        for log_id, ranges in self._done.items():
            if table.progress(PIPELINE, log_id, list(ranges)) != Progress(PIPELINE, log_id, ranges).ends:
                raise CommitConflictError(f"{table.name}: project has committed since the rebuild began")

    def _replace_bookkeeping(self, lake: Lake, shards: list[tuple[str, ShardFiles]]) -> None:
        """`quality` and the project rows of `epochs` derive from commits: now there is one per log."""
        epochs, quality = lake.table("epochs"), lake.table("quality")
        epochs.refresh()
        quality.refresh()
        kept = epochs.read_files(epochs.data_files(), row_filter=pc.field("pipeline") != PIPELINE)
        epoch_files, quality_files = [epochs.write_file(kept)] if kept.num_rows else [], []
        for log_id, ranges in self._done.items():
            mine = [shard for shard_log_id, shard in shards if shard_log_id == log_id]
            progress = Progress(PIPELINE, log_id, ranges)
            num_rows = {name: sum(shard.num_rows[name] for shard in mine) for name in PROJECTIONS}
            row = epochs_table(progress, merge_counts(mine), num_rows, self._started, "rebuilt")
            epoch_files.append(epochs.write_file(row))
            found = quality_table([result for shard in mine for result in shard.quality], progress)
            if found.num_rows:
                quality_files.append(quality.write_file(found))
        quality.replace(quality_files, metadata={"pipeline": "rebuild"})
        epochs.replace(epoch_files, metadata={"pipeline": "rebuild"})


class AssembleOfLogFn(beam.DoFn):
    """(log id, shard) → (0, (log id, files))."""

    def __init__(self, lake_url: str) -> None:
        self._lake_url = lake_url

    def process(self, element: tuple[str, Shard]) -> Iterator[tuple[int, tuple[str, ShardFiles]]]:
        """Like project's, keyed for the only committer."""
        log_id, shard = element
        for key, files in AssembleFn(self._lake_url, log_id).process(shard):
            yield key, (log_id, files)


def projected_ranges(lake: Lake) -> dict[str, Ranges]:
    """Log id → what project has committed, from offset 0."""
    trajectories = lake.table("trajectories")
    trajectories.refresh()
    return {
        log_id: {p: (0, end) for p, end in trajectories.progress(PIPELINE, log_id, partitions).items()}
        for log_id, partitions in known_partitions(lake).items()
    }


def finish_begun(lake: Lake, config: PipelineConfig) -> None:
    """Finish an epoch that a process which died has committed to some tables only: all must stand at one place."""
    for log_id, partitions in known_partitions(lake).items():
        while is_begun(lake, log_id, partitions):
            project_epoch(lake.url, log_id, partitions, config)


def shards_of_log(events: LakeTable, log_id: str, ranges: Ranges, config: PipelineConfig) -> Iterator[Shard]:
    """Shards of bounded size that together cover the ranges, in order."""
    ends = {partition: end for partition, (_, end) in ranges.items()}
    starts = {partition: start for partition, (start, _) in ranges.items()}
    while True:
        planned = plan_within(events, log_id, starts, ends, config)
        if not width(planned):
            return
        yield Shard({partition: span for partition, span in planned.items() if span[0] < span[1]})
        starts = {partition: end for partition, (_, end) in planned.items()}


def build(
    pipeline: beam.Pipeline, lake_url: str, done: dict[str, Ranges], config: PipelineConfig, started: float
) -> PCollection[str]:
    """The Beam pipeline of a rebuild."""
    events = warm_lake(lake_url).table("events")
    events.refresh()
    shards = [
        (log_id, shard) for log_id, ranges in done.items() for shard in shards_of_log(events, log_id, ranges, config)
    ]
    return (
        pipeline
        | "Shards" >> beam.Create(shards)
        | "Assemble, gate, write" >> beam.ParDo(AssembleOfLogFn(lake_url))
        | "To one committer" >> beam.GroupByKey()
        | "Replace" >> beam.ParDo(ReplaceFn(lake_url, done, started))
    )


def rebuild(lake_url: str, config: PipelineConfig | None = None) -> dict[str, int]:
    """Rebuild every projection.

    Returns:
        Table → rows that it has now.

    Raises:
        LeaseHeldError: a pipeline is at work.
        ConflictError: a pipeline is at work that this lake's storage has no lease against.
    """
    lake, config = warm_lake(lake_url), config or PipelineConfig()
    with lease(lake.url, STAGES):
        finish_begun(lake, config)
        done = projected_ranges(lake)
        if any(width(ranges) for ranges in done.values()):
            counters = run_beam(lambda pipeline: build(pipeline, lake.url, done, config, time.time()))
            if counters.get("conflicts"):
                raise ConflictError("another process commits to the projections; stop it and rebuild again")
    rows = {}
    for name in PROJECTIONS:
        lake.table(name).refresh()
        rows[name] = sum(file.num_records for file in lake.table(name).data_files())
    return rows
