"""Compaction: many small files become a larger one, with the same rows in the same order of sort.

Size-tiered: files of one log partition fall into tiers, each `FANOUT` times larger than the one below, and a tier is
merged when it holds `min_files`. So a row is rewritten once per tier, log_8(n) times in all, and the number of live
files grows with the logarithm of the number of commits.

A merge is one commit that adds one file and removes its inputs with `dataChange` false: tails and readers of older
versions don't notice. Appends go on meanwhile. Where another commit took an input away the merge is thrown away.
Replaced files stay on disk for readers of older versions until a vacuum.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from lake.errors import CommitConflictError
from lake.merge import merge_sorted
from lake.table import LakeTable, LiveFile
from schemas.tables import SORT_KEYS

TARGET_BYTES = 128 * 1024 * 1024
"""Files of half this size or more are left alone; a merge makes none that is larger."""

FANOUT = 8

SMALLEST_TIER_BYTES = 64 * 1024
"""All files below this size are one tier."""

MAX_FILES_PER_MERGE = 32
"""Bounds a merge's memory: about 10 MB a file at worst (its buffer, and compressed pages)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompactResult:
    """What a compaction did."""

    num_merges: int = 0
    files_before: int = 0
    """Files that were merged."""
    files_after: int = 0
    """Files that they became."""
    num_bytes: int = 0
    """Size of the merged files."""
    num_conflicts: int = 0
    """Merges thrown away because somebody else had taken an input away."""


def compact(table: LakeTable, target_bytes: int = TARGET_BYTES, min_files: int = FANOUT) -> CompactResult:
    """Merge what is due, one commit per merge.

    Args:
        table: Table to compact; only its owner should (see the commit protocol).
        target_bytes: Size that files grow to.
        min_files: Files of a tier that make a merge worth it.
    """
    table.refresh()
    merges = files_before = num_bytes = conflicts = 0
    for group in plan_merges(table.data_files(), target_bytes, min_files):
        if _merge(table, group):
            merges, files_before = merges + 1, files_before + len(group)
            num_bytes += sum(file.size for file in group)
        else:
            conflicts += 1
    return CompactResult(merges, files_before, merges, num_bytes, conflicts)


def plan_merges(files: Sequence[LiveFile], target_bytes: int, min_files: int) -> list[list[LiveFile]]:
    """Groups of files to merge: same partition, same tier, neighbours in offset, not beyond the target together."""
    tiers: dict[tuple[object, ...], list[LiveFile]] = defaultdict(list)
    for file in files:
        if file.size < target_bytes // 2:
            tiers[_partition_of(file), tier_of(file.size)].append(file)
    merges = []
    for tier in tiers.values():
        if len(tier) >= min_files:
            merges += [g for g in _batches(sorted(tier, key=_age), target_bytes) if len(g) >= min(min_files, 2)]
    return [group for group in merges if len(group) > 1]


def tier_of(size: int) -> int:
    """0 below `SMALLEST_TIER_BYTES`, then one more for every factor of `FANOUT`."""
    return max(0, 1 + math.floor(math.log(max(size, 1) / SMALLEST_TIER_BYTES, FANOUT)))


def _partition_of(file: LiveFile) -> tuple[object, ...]:
    """Log and partition where the file's rows are of one; rows of several partitions form a group of their own."""
    low = (file.low.get("log_id"), file.low.get("partition"))
    high = (file.high.get("log_id"), file.high.get("partition"))
    return low if low == high else ("mixed",)


def _age(file: LiveFile) -> tuple[int, str]:
    """Neighbours in the log merge with each other; names are time-ordered."""
    return (file.low.get("offset", 0), file.path)


def _batches(files: Sequence[LiveFile], target_bytes: int) -> Iterator[list[LiveFile]]:
    """Consecutive files of up to `target_bytes` together."""
    batch: list[LiveFile] = []
    for file in files:
        if batch and (sum(f.size for f in batch) + file.size > target_bytes or len(batch) == MAX_FILES_PER_MERGE):
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


def _merge(table: LakeTable, group: Sequence[LiveFile]) -> bool:
    merged = table.write_stream(_sorted_rows(table, group))
    expected = sum(file.num_records for file in group)
    assert merged.num_records == expected, f"{table.name}: merged {merged.num_records} rows of {expected}"
    try:
        table.commit([merged], remove=group, data_change=False, metadata={"pipeline": "compact"})
    except CommitConflictError as error:
        table.discard([merged])
        _log.info("compaction of %s gave way: %s", table.name, error)
        return False
    return True


def _sorted_rows(table: LakeTable, group: Sequence[LiveFile]) -> Iterator[pa.Table]:
    """All rows of some files in the table's order; one file after the other where it has none."""
    keys = SORT_KEYS.get(table.name)
    if keys is None:
        return (pa.Table.from_batches([batch]) for batch in table.scan_files(group))
    return merge_sorted(table.filesystem, [file.path for file in group], table.schema, keys)
