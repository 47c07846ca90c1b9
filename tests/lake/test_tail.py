"""A tail delivers what was appended, once, in commit order, from a position that can be kept."""

from pathlib import Path

import pyarrow.compute as pc
import pytest

from lake.compact import compact
from lake.errors import VersionGoneError
from lake.open import Lake
from lake.tail import Position, Tail


def append(table, events_of, start, num_rows=10):
    return table.commit([table.write_file(events_of(range(start, start + num_rows)))])


def offsets(batches):
    return [offset for batch in batches for offset in batch.rows.column("offset").to_pylist()]


def test_rows_come_in_commit_order_and_once(lake, events_of):
    table = lake.table("events")
    for start in (30, 0, 20):
        append(table, events_of, start)
    tail = Tail(Lake(lake.url).table("events"), Position(0), columns=["offset"])
    assert offsets(tail.poll()) == [*range(30, 40), *range(10), *range(20, 30)]
    assert offsets(tail.poll()) == []
    append(table, events_of, 50)
    assert offsets(tail.poll()) == list(range(50, 60))
    assert tail.position == Position(5)


def test_a_tail_can_begin_after_a_version(lake, events_of):
    table = lake.table("events")
    version = append(table, events_of, 0)
    append(table, events_of, 10)
    assert offsets(Tail(table, Position(version + 1)).poll()) == list(range(10, 20))


@pytest.mark.parametrize("stop_after", range(1, 16))
def test_resuming_at_any_batch_loses_and_doubles_nothing(lake, events_of, stop_after):
    table = lake.table("events")
    for start in (0, 20, 40):
        files = [table.write_file(events_of(range(s, s + 10))) for s in (start, start + 10)]
        table.commit(files)
    even = pc.bit_wise_and(pc.field("offset"), 1) == 0
    first = Tail(table, Position(0), columns=["offset"], row_filter=even, batch_rows=4)
    got, position = [], Position(0)
    for batch, _ in zip(first.poll(), range(stop_after), strict=False):
        got += batch.rows.column("offset").to_pylist()
        position = batch.next
    rest = Tail(table, position, columns=["offset"], row_filter=even, batch_rows=4)
    assert got + offsets(rest.poll()) == list(range(0, 60, 2))


def test_compaction_neither_repeats_nor_hides_rows(lake, events_of):
    table = lake.table("events")
    for start in range(0, 80, 10):
        append(table, events_of, start)
    behind, up_to_date = Tail(table, Position(0)), Tail(table, Position(table.version + 1))
    assert compact(table).num_merges == 1
    assert offsets(behind.poll()) == list(range(80))
    assert offsets(up_to_date.poll()) == []


def test_a_replacement_is_marked(lake, events_of):
    table = lake.table("events")
    append(table, events_of, 0)
    table.replace([table.write_file(events_of(range(10)))])
    batches = list(Tail(table, Position(0)).poll())
    assert [(batch.version, batch.replaces) for batch in batches] == [(1, False), (2, True)]


def test_files_that_were_cleaned_up_are_named_with_the_range(lake, events_of):
    table = lake.table("events")
    for start in (0, 10, 20):
        append(table, events_of, start)
    lost = table.data_files(version=1)[0]
    (Path(table.url) / lost.path).unlink()
    with pytest.raises(VersionGoneError, match=f"can't read versions 1 to 3: its file {lost.path}.*tail from 4"):
        list(Tail(table, Position(1)).poll())


def test_log_entries_that_were_cleaned_up_are_named_with_the_range(lake, events_of):
    table = lake.table("events")
    append(table, events_of, 0)
    (Path(table.url) / "_delta_log" / f"{1:020}.json").unlink()
    with pytest.raises(VersionGoneError, match="can't read versions 1 to 1: its log entry"):
        list(Tail(table, Position(1)).poll())


def test_more_files_than_one_scan_takes_stay_in_order(lake, events_of):
    table = lake.table("events")
    for commit in range(5):
        table.commit([table.write_file(events_of(range(s * 2, s * 2 + 2))) for s in range(commit * 9, commit * 9 + 9)])
    assert offsets(Tail(table, Position(0)).poll()) == list(range(90))
