"""Plans of epochs: which offsets the next increment takes. Pure.

A plan begins where the last commit ended, in every partition, and ends where the source ends or the epoch's bound is
reached. Bounds are shared out by backlog, so that no partition starves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")

Ranges = dict[int, tuple[int, int]]
"""Partition → offsets [start, end)."""


ACCEPT_GAP = "`trajlake pipeline run --accept-gap` goes on and leaves a note in `epochs`."
NEW_LOG = "Create a new log beside it, set `log` in trajlake.toml to it, then `trajlake pipeline run --accept-gap`."


class GapError(Exception):
    """Records that should be ingested are gone, or the log is not the one that was ingested."""


class LostTailError(GapError):
    """The log ends before what was ingested from it; no decision makes its offsets unique again."""


def plan_ranges(starts: Mapping[int, int], ends: Mapping[int, int], max_records: int) -> Ranges:
    """Ranges from `starts` towards `ends`, together at most about `max_records` offsets wide.

    Every partition is in the plan; one with nothing new has an empty range, so that progress is checked for it too.
    """
    backlog = {partition: max(0, ends[partition] - start) for partition, start in starts.items()}
    total = sum(backlog.values())
    share = min(1.0, max_records / total) if total else 1.0
    return {
        partition: (start, start + min(backlog[partition], -int(-backlog[partition] * share // 1)))
        for partition, start in starts.items()
    }


class Extent(NamedTuple):
    """What a file holds of a partition."""

    start: int
    end: int
    """Its offsets lie in [start, end)."""
    num_bytes: int


def end_within(start: int, end: int, extents: Iterable[Extent], max_bytes: int) -> int:
    """Where a range has to end so that it holds about `max_bytes`, at least one offset on.

    Ends between files where it can, so that no file is read for two epochs.

    Args:
        start: First offset.
        end: Offset beyond the last, without the bound.
        extents: Files that hold the range, by rising start; asked for until the bound is reached.
        max_bytes: The bound.
    """
    left = float(max_bytes)
    for extent in extents:
        low, high = max(extent.start, start), min(extent.end, end)
        per_offset = extent.num_bytes / (extent.end - extent.start)
        if (high - low) * per_offset > left:
            return low if low > start else max(start + 1, low + int(left / per_offset))
        left -= max(0, high - low) * per_offset
    return end


def width(ranges: Ranges) -> int:
    """Offsets in the ranges; an upper bound of their records."""
    return sum(end - start for start, end in ranges.values())


def check_log(
    log_id: str, committed: Mapping[int, int], bounds: Mapping[int, tuple[int, int]], known_logs: set[str]
) -> None:
    """Refuse to go on over a hole in the log.

    Args:
        log_id: Identity of the log at hand.
        committed: Partition → next offset to ingest.
        bounds: Partition → (first retained, next) offset.
        known_logs: Logs that the lake has ingested from.

    Raises:
        GapError: names the range, and what to do; `LostTailError` can't be accepted.
    """
    # A lost tail first: no gap that is accepted beside it may hide it.
    lost = _ranges_where(lambda first, following, start: (following, start), committed, bounds)
    if lost:
        raise LostTailError(
            f"{lost} were ingested, but the log ends before: "
            f"it lost its tail and would give these offsets to others. {NEW_LOG}"
        )
    removed = _ranges_where(lambda first, following, start: (start, first), committed, bounds)
    if known_logs and log_id not in known_logs:
        known = ", ".join(sorted(known_logs))
        also = f"; {removed} of the new one were removed before ingestion" if removed else ""
        raise GapError(
            f"the log was recreated: it has the id {log_id}, the lake was ingested from {known}; "
            f"what only the old log held can't be read{also}. {ACCEPT_GAP}"
        )
    if removed:
        raise GapError(f"{removed} were removed before ingestion. {ACCEPT_GAP}")


def _ranges_where(
    span: Callable[[int, int, int], tuple[int, int]],
    committed: Mapping[int, int],
    bounds: Mapping[int, tuple[int, int]],
) -> str:
    """Partitions and their ranges `span(first, next, committed)`, where those are not empty; for people."""
    spans = {partition: span(*bounds[partition], start) for partition, start in sorted(committed.items())}
    return ", ".join(f"partition {p}: offsets [{low}, {high})" for p, (low, high) in spans.items() if low < high)


def in_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of at most `size` items, in order."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
