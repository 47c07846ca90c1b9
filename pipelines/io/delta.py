"""Delta source and sink for Beam: `ReadFromDelta`, `WriteToDelta`.

    tables = pipeline | "Read" >> ReadFromDelta("lake/", "steps", columns=("trajectory_id", "logprobs"))
    commits = tables | "Write" >> WriteToDelta("lake/", "steps", Progress("project", log_id, {0: (0, 100)}))

Elements are coarse: an Arrow table in is one Parquet file, a row group of a file is an Arrow table out. Workers write
files under fresh names; all descriptors meet in one committer that makes one Delta commit, or discards every file. The
two stages are also there on their own, `WriteFiles` and `commit_or_discard`, for pipelines with several tables in
a fixed order.

Workers reach the lake by URL. In process they share the warm handles of `lake.open.warm_lake`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.pvalue import PCollection

from lake.errors import CommitConflictError
from lake.files import DataFile
from lake.open import warm_lake
from lake.table import LakeTable, LiveFile, Progress
from pipelines.failpoints import reach


@dataclass(frozen=True, slots=True)
class Commit:
    """What a committer did."""

    table: str
    version: int
    num_rows: int
    num_files: int


class WriteFiles(beam.DoFn):
    """Writes each Arrow table as one Parquet file and hands on its descriptor."""

    def __init__(self, lake_url: str, table: str) -> None:
        self._lake_url, self._table = lake_url, table

    def setup(self) -> None:
        """Find the process's handle."""
        self._handle = warm_lake(self._lake_url).table(self._table)

    def process(self, element: pa.Table) -> Iterator[DataFile]:
        """Skips tables without rows: an empty file would only cost readers."""
        if element.num_rows:
            yield self._handle.write_file(element)


def commit_or_discard(
    table: LakeTable, files: Sequence[DataFile], progress: Progress | None, metadata: Mapping[str, str]
) -> Commit:
    """One commit of all files; on a conflict they are deleted.

    On any other error they stay: the commit may have gone through unseen, and a file too many is harmless.

    Raises:
        CommitConflictError: somebody else was faster; plan again.
    """
    try:
        version = table.commit(files, progress=progress, metadata=metadata)
    except CommitConflictError:
        table.discard(files)
        raise
    return Commit(table.name, version, sum(file.num_records for file in files), len(files))


class CommitFiles(beam.DoFn):
    """The one committer: takes all descriptors of a table at once."""

    def __init__(self, lake_url: str, table: str, progress: Progress | None, metadata: Mapping[str, str]) -> None:
        self._lake_url, self._table = lake_url, table
        self._progress, self._metadata = progress, dict(metadata)

    def setup(self) -> None:
        """Find the process's handle."""
        self._handle = warm_lake(self._lake_url).table(self._table)

    def process(self, element: tuple[str, Iterable[DataFile | bytes]]) -> Iterator[Commit]:
        """Commits even without files where progress has to be recorded."""
        files = [file for file in element[1] if isinstance(file, DataFile)]
        self._handle.refresh()
        if files or self._progress is not None:
            if self._progress is not None:
                reach(f"{self._progress.pipeline}.{self._table}.before_commit")
            yield commit_or_discard(self._handle, files, self._progress, self._metadata)


class WriteToDelta(beam.PTransform[PCollection[pa.Table], PCollection[Commit]]):
    """Writes a collection of Arrow tables to one lake table in one commit; gives the `Commit`.

    Args:
        lake_url: Lake that exists.
        table: One of `schemas.tables.TABLES`.
        progress: Ranges of the log behind these rows; the commit fails unless the table stands at their starts.
        metadata: Kept in the commit.

    Raises (at run time, inside the runner's error):
        CommitConflictError: somebody else committed first. No file is left.
    """

    def __init__(
        self,
        lake_url: str,
        table: str,
        progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._lake_url, self._table = lake_url, table
        self._progress, self._metadata = progress, dict(metadata or {})

    def expand(self, pcoll: PCollection[pa.Table]) -> PCollection[Commit]:
        """Files in parallel, then one committer; an impulse makes it run when there are no rows."""
        files = pcoll | "Write files" >> beam.ParDo(WriteFiles(self._lake_url, self._table))
        impulse = pcoll.pipeline | "Always" >> beam.Impulse()
        return (
            (files, impulse)
            | "Files or none" >> beam.Flatten()
            | "Key by table" >> beam.WithKeys(self._table)
            | "To one committer" >> beam.GroupByKey()
            | "Commit" >> beam.ParDo(CommitFiles(self._lake_url, self._table, self._progress, self._metadata))
        )


class ReadFile(beam.DoFn):
    """Reads one file, row group by row group."""

    def __init__(
        self, lake_url: str, table: str, columns: Sequence[str] | None, row_filter: pc.Expression | None
    ) -> None:
        self._lake_url, self._table = lake_url, table
        self._columns, self._row_filter = columns, row_filter

    def setup(self) -> None:
        """Find the process's handle."""
        self._handle = warm_lake(self._lake_url).table(self._table)

    def process(self, element: LiveFile) -> Iterator[pa.Table]:
        """One Arrow table per row group that has rows after the filter."""
        columns = list(self._columns) if self._columns is not None else None
        fragment = self._handle.fragment(element.path)
        for group in fragment.split_by_row_group(filter=self._row_filter, schema=self._handle.schema.remove_metadata()):
            rows = self._handle.dataset_of([group]).to_table(columns=columns, filter=self._row_filter)
            if rows.num_rows:
                yield rows


class ReadFromDelta(beam.PTransform[beam.Pipeline, PCollection[pa.Table]]):
    """Reads one lake table at one version as Arrow tables, one per row group.

    Args:
        lake_url: Lake that exists.
        table: One of `schemas.tables.TABLES`.
        columns: Columns, all by default.
        row_filter: Arrow expression; row groups that can't hold a match are not read.
        covering: Expression over file statistics (`lake.table.overlaps`); other files are not opened.
        version: The newest when the pipeline is built, by default: so a retried bundle sees the same rows.
    """

    def __init__(
        self,
        lake_url: str,
        table: str,
        columns: Sequence[str] | None = None,
        row_filter: pc.Expression | None = None,
        covering: pc.Expression | None = None,
        version: int | None = None,
    ) -> None:
        super().__init__()
        self._lake_url, self._table = lake_url, table
        self._columns, self._row_filter = columns, row_filter
        handle = warm_lake(lake_url).table(table)
        handle.refresh()
        self._files = handle.data_files(covering, version)

    def expand(self, pbegin: beam.Pipeline) -> PCollection[pa.Table]:
        """Spreads the files over the workers."""
        return (
            pbegin
            | "Files" >> beam.Create(self._files)
            | "Spread" >> beam.Reshuffle()
            | "Read" >> beam.ParDo(ReadFile(self._lake_url, self._table, self._columns, self._row_filter))
        )
