"""Look-ups in `events` by log position, by trajectory and by run stream.

Every look-up first picks files by the table's statistics, then row groups by the files' own, then filters rows. Files
are sorted by trajectory and ids are time-ordered, so what is opened follows what is asked for, not the table's size.

A look-up returns the rows asked for in memory: ask for a bounded range, or a bounded number of trajectories.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from lake.table import LakeTable, LiveFile, overlaps

SeqRange = tuple[int, int]
"""[lowest, highest], both included."""


def read_range(
    table: LakeTable, log_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
) -> pa.Table:
    """Events of one partition with start ≤ offset < end, in order of offset."""
    if start >= end:
        return _empty(table, columns)
    files = _range_files(table, log_id, partition, start, end)
    dataset = table.dataset([file.path for file in files])
    return _sorted_by_offset(table, dataset, columns, _in_range(log_id, partition, start, end))


def scan_range(
    table: LakeTable, log_id: str, partition: int, start: int, end: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Like `read_range`, but in the files' order and batch by batch, so that it holds a few batches only."""
    files = _range_files(table, log_id, partition, start, end)
    return table.scan_files(files, columns, _in_range(log_id, partition, start, end))


def file_extents(table: LakeTable, log_id: str, partition: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(first offset, last offset + 1, uncompressed bytes) of files that may hold a range, by first offset.

    Sizes come from the files' footers, each read when its file is asked for.
    """
    files = _range_files(table, log_id, partition, start, end)
    for file in sorted(files, key=lambda file: file.low["offset"]):
        footer = table.fragment(file.path).metadata
        num_bytes = sum(footer.row_group(index).total_byte_size for index in range(footer.num_row_groups))
        yield file.low["offset"], file.high["offset"] + 1, num_bytes


def history_files(
    table: LakeTable, log_id: str, partition: int, trajectory_ids: Sequence[str], before: int
) -> list[LiveFile]:
    """Files that may hold events of these trajectories below an offset."""
    ids = sorted(trajectory_ids)
    if not ids or before <= 0:
        return []
    covering = _files_of(log_id, partition) & overlaps("offset", 0, before - 1)
    files = table.data_files(covering & overlaps("trajectory_id", ids[0], ids[-1]))
    return [f for f in files if _any_between(ids, f.low.get("trajectory_id"), f.high.get("trajectory_id"))]


def read_history(
    table: LakeTable,
    log_id: str,
    partition: int,
    trajectory_ids: Sequence[str],
    before: int,
    columns: Sequence[str] | None = None,
    *,
    only: pc.Expression | None = None,
) -> pa.Table:
    """Events of some trajectories with offset < `before`, in order of offset.

    Args:
        table: `events`.
        log_id: Log.
        partition: Partition of the log that holds these trajectories.
        trajectory_ids: Trajectories.
        before: Offset that bounds the look back, exclusive.
        columns: Columns to return, all by default.
        only: Only events that satisfy this, such as `pc.field("is_closing")`.
    """
    ids = sorted(set(trajectory_ids))
    files = history_files(table, log_id, partition, ids, before)
    dataset = _pruned(table, files, "trajectory_id", lambda low, high: _any_between(ids, low, high))
    rows = (
        pc.field("trajectory_id").isin(pa.array(ids, pa.string()))
        & (pc.field("offset") < before)
        & _in_partition(log_id, partition)
    )
    if only is not None:
        rows &= only
    return _sorted_by_offset(table, dataset, columns, rows)


def run_event_files(
    table: LakeTable, log_id: str, partition: int, streams: Mapping[str, SeqRange], before: int
) -> list[LiveFile]:
    """Files that may hold events of these run streams, in these ranges of seq, below an offset."""
    names = sorted(streams)
    if not names or before <= 0:
        return []
    lowest, highest = min(low for low, _ in streams.values()), max(high for _, high in streams.values())
    covering = _files_of(log_id, partition) & overlaps("offset", 0, before - 1)
    covering &= overlaps("run_seq", lowest, highest) & overlaps("run_stream", names[0], names[-1])
    files = table.data_files(covering)
    return [f for f in files if _any_between(names, f.low.get("run_stream"), f.high.get("run_stream"))]


def seen_run_events(
    table: LakeTable, log_id: str, partition: int, streams: Mapping[str, SeqRange], before: int
) -> set[tuple[str, int]]:
    """Identities (stream, seq) of run-level events with offset < `before` within the ranges asked for."""
    found = read_run_events(table, log_id, partition, streams, before, ["run_stream", "run_seq"]).to_pydict()
    return set(zip(found["run_stream"], found["run_seq"], strict=True))


def read_run_events(
    table: LakeTable,
    log_id: str,
    partition: int,
    streams: Mapping[str, SeqRange],
    before: int,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Run-level events with offset < `before` within the ranges of seq asked for, in order of offset."""
    names = sorted(streams)
    files = run_event_files(table, log_id, partition, streams, before)
    dataset = _pruned(table, files, "run_stream", lambda low, high: _any_between(names, low, high))
    rows = (
        pc.field("run_stream").isin(pa.array(names, pa.string()))
        & (pc.field("offset") < before)
        & _in_partition(log_id, partition)
    )
    lowest, highest = min((s for s, _ in streams.values()), default=0), max((s for _, s in streams.values()), default=0)
    rows &= (pc.field("run_seq") >= lowest) & (pc.field("run_seq") <= highest)
    wanted = list(columns) if columns is not None else table.schema.names
    found = _sorted_by_offset(table, dataset, [*dict.fromkeys([*wanted, "run_stream", "run_seq"])], rows)
    pairs = zip(found.column("run_stream").to_pylist(), found.column("run_seq").to_pylist(), strict=True)
    inside = [streams[name][0] <= seq <= streams[name][1] for name, seq in pairs]
    return found.filter(pa.array(inside, pa.bool_())).select(wanted)


def _files_of(log_id: str, partition: int) -> pc.Expression:
    return overlaps("log_id", log_id, log_id) & overlaps("partition", partition, partition)


def _range_files(table: LakeTable, log_id: str, partition: int, start: int, end: int) -> list[LiveFile]:
    if start >= end:
        return []
    return table.data_files(_files_of(log_id, partition) & overlaps("offset", start, end - 1))


def _in_range(log_id: str, partition: int, start: int, end: int) -> pc.Expression:
    return (pc.field("offset") >= start) & (pc.field("offset") < end) & _in_partition(log_id, partition)


def _in_partition(log_id: str, partition: int) -> pc.Expression:
    return (pc.field("log_id") == log_id) & (pc.field("partition") == partition)


def _any_between(values: Sequence[str], low: str | None, high: str | None) -> bool:
    """Whether one of the sorted values lies in [low, high]; an unknown bound bounds nothing."""
    first = 0 if low is None else bisect_left(values, low)
    last = len(values) if high is None else bisect_right(values, high)
    return first < last


def _pruned(
    table: LakeTable, files: Sequence[LiveFile], column: str, may_hold: Callable[[str | None, str | None], bool]
) -> pads.Dataset:
    """Row groups whose bounds of a column may hold what is looked for."""
    fragments = []
    for file in files:
        fragment = table.fragment(file.path)
        wanted = [group.id for group in fragment.row_groups if _group_may_hold(group.statistics, column, may_hold)]
        if wanted:
            fragments.append(fragment.subset(row_group_ids=wanted))
    return table.dataset_of(fragments)


def _group_may_hold(
    statistics: Mapping[str, Mapping[str, str]] | None,
    column: str,
    may_hold: Callable[[str | None, str | None], bool],
) -> bool:
    """Arrow leaves the column out both where it is all null and where it has no bounds: then the rows decide."""
    bounds = (statistics or {}).get(column, {})
    return may_hold(bounds.get("min"), bounds.get("max"))


def _sorted_by_offset(
    table: LakeTable, dataset: pads.Dataset, columns: Sequence[str] | None, rows: pc.Expression
) -> pa.Table:
    wanted = list(columns) if columns is not None else table.schema.names
    found = dataset.to_table(columns=list(dict.fromkeys([*wanted, "offset"])), filter=rows)
    return found.sort_by("offset").select(wanted)


def _empty(table: LakeTable, columns: Sequence[str] | None) -> pa.Table:
    return table.dataset([]).schema.empty_table().select(list(columns) if columns is not None else table.schema.names)
