"""Compaction keeps rows and order, and never doubles or loses a row, whatever happens beside it."""

import threading

import pyarrow as pa
import pytest

from lake.compact import compact, plan_merges, tier_of
from lake.content import content_hash
from lake.errors import CommitConflictError
from lake.merge import merge_sorted
from lake.open import Lake
from lake.table import LiveFile
from schemas.tables import SORT_KEYS


def append(table, rows):
    return table.commit([table.write_file(rows)])


def rows_in(table):
    table.refresh()
    return sum(file.num_records for file in table.data_files())


def test_content_and_order_stay_and_files_become_few(lake, events_of):
    table = lake.table("events")
    for start in range(0, 160, 10):
        append(table, events_of(range(start, start + 10), partition=start // 80, trajectories=37))
    before = content_hash(table)
    result = compact(table)
    assert (result.num_merges, result.files_before, result.files_after) == (2, 16, 2)
    assert content_hash(table) == before
    keys = [(key, "ascending") for key in SORT_KEYS["events"]]
    for file in table.data_files():
        rows = table.read_files([file])
        assert rows.equals(rows.sort_by(keys))
        assert file.low["partition"] == file.high["partition"]
    assert compact(table).num_merges == 0


def test_files_of_several_partitions_and_tables_without_order_are_merged_too(lake, rows_of):
    epochs, scores = lake.table("epochs"), lake.table("scores")
    for number in range(8):
        append(epochs, rows_of("epochs", {"committed_ns": [number]}))
        append(scores, rows_of("scores", {"partition": [0, 1], "offset": [number, number]}))
    assert compact(epochs).files_after == compact(scores).files_after == 1
    assert epochs.read_files(epochs.data_files()).column("committed_ns").to_pylist() == list(range(8))
    merged = scores.read_files(scores.data_files())
    assert merged.column("partition").to_pylist() == [0] * 8 + [1] * 8


def test_nulls_sort_last_and_none_is_lost(lake, rows_of):
    table = lake.table("events")
    for number in range(8):
        ids = [f"t{number}", f"t{number + 4}", None]
        rows = {"trajectory_id": ids, "partition": [0] * 3, "offset": [number * 3, number * 3 + 1, number * 3 + 2]}
        append(table, rows_of("events", rows))
    compact(table)
    ids = table.read_files(table.data_files()).column("trajectory_id").to_pylist()
    assert ids[-8:] == [None] * 8
    assert ids[:-8] == sorted(ids[:-8])
    assert len(ids) == 24


def test_a_merge_holds_a_bounded_part_of_its_files(lake, rows_of, monkeypatch):
    monkeypatch.setattr("lake.merge.BUFFER_BYTES", 1000)
    table = lake.table("events")
    files = []
    for number in range(4):
        offsets = list(range(number, 4000, 4))
        rows = {"trajectory_id": ["t"] * 1000, "partition": [0] * 1000, "offset": offsets}
        files.append(table.write_file(rows_of("events", rows)))
    parts = list(merge_sorted(table.filesystem, [f.path for f in files], table.schema, SORT_KEYS["events"]))
    assert pa.concat_tables(parts).column("offset").to_pylist() == list(range(4000))
    assert max(part.num_rows for part in parts) < 1000


def test_two_compactions_of_the_same_files_double_nothing(lake, events_of):
    table, other = lake.table("events"), Lake(lake.url).table("events")
    for start in range(0, 80, 10):
        append(table, events_of(range(start, start + 10)))
    other.refresh()
    inputs = other.data_files()
    compact(table)
    with pytest.raises(CommitConflictError):
        other.commit([other.write_file(events_of(range(80)))], remove=inputs, data_change=False)
    assert rows_in(table) == 80


def test_a_compaction_does_not_bring_back_what_a_rebuild_took_away(lake, events_of):
    table, other = lake.table("events"), Lake(lake.url).table("events")
    for start in range(0, 80, 10):
        append(table, events_of(range(start, start + 10)))
    other.refresh()
    inputs = other.data_files()
    table.replace([table.write_file(events_of(range(5)))])
    with pytest.raises(CommitConflictError):
        other.commit([other.write_file(events_of(range(80)))], remove=inputs, data_change=False)
    assert rows_in(table) == 5


def test_appends_beside_compactions_all_land(lake, events_of):
    appender, compactor = lake.table("events"), Lake(lake.url).table("events")
    merges, done = [], threading.Event()

    def keep_compacting():
        while not done.is_set():
            merges.append(compact(compactor, min_files=4))

    thread = threading.Thread(target=keep_compacting)
    thread.start()
    try:
        for start in range(0, 400, 10):
            append(appender, events_of(range(start, start + 10)))
    finally:
        done.set()
        thread.join()
    assert rows_in(appender) == 400
    assert sum(result.num_merges for result in merges) > 0
    offsets = appender.read_files(appender.data_files(), ["offset"]).column("offset").to_pylist()
    assert sorted(offsets) == list(range(400))


def file_of(size, offset=0, partition=0):
    position = {"log_id": "log", "partition": partition, "offset": offset}
    return LiveFile(f"part-{offset}-{partition}", size, 1, position, position)


def test_only_full_tiers_are_merged_and_large_files_are_left_alone():
    small = [file_of(1000, offset) for offset in range(8)]
    assert plan_merges(small, target_bytes=10**8, min_files=8) == [small]
    assert plan_merges(small[:7], target_bytes=10**8, min_files=8) == []
    other_tier = [file_of(10**6, offset) for offset in range(7)]
    assert plan_merges([*small[:7], *other_tier], target_bytes=10**8, min_files=8) == []
    assert plan_merges([file_of(10**8, offset) for offset in range(20)], target_bytes=10**8, min_files=8) == []
    assert plan_merges([file_of(1000, o, o) for o in range(20)], target_bytes=10**8, min_files=8) == []


def test_rows_are_rewritten_a_logarithmic_number_of_times():
    files, written = [], 0
    for commit in range(1000):
        files.append(file_of(10_000, commit))
        for group in plan_merges(files, target_bytes=10**9, min_files=8):
            size = sum(file.size for file in group)
            written += size
            files = [file for file in files if file not in group]
            files.append(file_of(size, group[0].low["offset"]))
    assert len(files) <= 40
    assert written <= 6 * 1000 * 10_000
    assert tier_of(10_000) < tier_of(10_000_000)
