"""Ingest: the log as it is, once, in whatever epochs; and a stop, with the range named, where it has holes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ingest.open import open_log
from lake.errors import CommitConflictError
from lake.table import Progress
from pipelines.bookkeeping import known_partitions
from pipelines.decode import events_table
from pipelines.plan import GapError, LostTailError
from pipelines.warm import warm_log
from schemas.wire import sha256

MakeHome = Callable[..., Any]


def log_of(home: Any) -> list[tuple[int, int, bytes]]:
    """(partition, offset, bytes) of every record of the log."""
    found = []
    for partition in home.log.partitions():
        bounds = home.log.bounds(partition)
        for batch in home.log.read(partition, bounds.first, bounds.next, 1 << 20):
            offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
            found += [(partition, offset, value) for offset, value in zip(offsets, values, strict=True)]
    return found


def events_of(home: Any) -> list[tuple[int, int, bytes]]:
    rows = home.rows("events")
    return sorted((row["partition"], row["offset"], row["value"]) for row in rows)


def notes_of(home: Any) -> list[str | None]:
    rows = [row for row in home.rows("epochs") if row["pipeline"] == "ingest"]
    return [row["note"] for row in sorted(rows, key=lambda row: row["committed_ns"])]


@pytest.mark.parametrize("size", [1_000_000, 70])
def test_events_are_the_log(new_home: MakeHome, kit: Any, size: int):
    home = new_home(kit.eventful(num_whole=2), partitions=3)
    home.run(only=["ingest"], max_epoch_records=size)
    assert events_of(home) == log_of(home)
    epochs = home.rows("epochs")
    assert sum(row["num_records"] for row in epochs) == len(log_of(home))
    assert (len(epochs) > 1) == (size == 70)
    assert home.run(only=["ingest"]).epochs == {}, "nothing is left to do"


def test_columns_are_the_envelope_s_and_null_where_there_is_none(kit: Any, tape: Any):
    tape.start("t")
    tape.put("k", b"junk")
    values = [record.value for record in tape.records]
    batch = pa.record_batch({"offset": [5, 7], "key": ["t", "k"], "value": values})
    good, bad = events_table("log", 1, batch).sort_by("offset").to_pylist()
    assert (good["type"], good["stream"], good["seq"], good["is_closing"], good["run_stream"]) == (
        "trajectory_started",
        "t/0",
        0,
        False,
        None,
    )
    assert good["envelope_sha256"] == sha256(kit.msgspec.msgpack.decode(values[0])["envelope"])
    position = {"log_id": "log", "partition": 1, "offset": 7, "value": b"junk"}
    assert {name: value for name, value in bad.items() if value is not None} == position


def test_an_empty_log_is_nothing_to_do(new_home: MakeHome):
    home = new_home()
    assert home.run().epochs == {}
    assert home.reconciliation().holds
    assert known_partitions(home.lake) == {}


def test_a_plan_that_another_process_has_carried_out_is_thrown_away(new_home: MakeHome, kit: Any, tape: Any):
    tape.whole("t")
    home = new_home(tape.records)
    home.run(only=["ingest"])
    events = home.lake.table("events")
    events.refresh()
    files = set(Path(home.urls.lake, "events").glob("*.parquet"))
    file = events.write_file(events.read_files(events.data_files()))
    starts = {partition: (0, home.log.bounds(partition).next) for partition in home.log.partitions()}
    with pytest.raises(CommitConflictError, match="stands at"):
        events.commit([file], progress=Progress("ingest", home.log.log_id, starts))
    events.discard([file])
    assert set(Path(home.urls.lake, "events").glob("*.parquet")) == files
    assert events_of(home) == log_of(home)


def test_a_removed_prefix_stops_ingestion_until_it_is_accepted(new_home: MakeHome, kit: Any):
    home = new_home(kit.eventful(num_whole=2))
    home.run(only=["ingest"], max_epoch_records=60)
    before = events_of(home)
    home.log.append(kit.eventful(num_whole=4, seed=9))
    ends = {partition: home.log.bounds(partition).next for partition in home.log.partitions()}
    committed = {partition: sum(row[0] == partition for row in before) for partition in ends}
    for partition in ends:
        home.log.truncate_before(partition, committed[partition] + 5 + partition)
    spans = {partition: (start, start + 5 + partition) for partition, start in committed.items()}
    named = ", ".join(rf"partition {p}: offsets \[{start}, {end}\)" for p, (start, end) in spans.items())
    for _ in range(2):
        with pytest.raises(GapError, match=named):
            home.run()
    assert events_of(home) == before, "nothing was ingested beyond the gap"

    home.run(accept_gap=True)
    assert events_of(home) == sorted({*before, *log_of(home)})
    [note] = [note for note in notes_of(home) if note]
    assert note.startswith("gap accepted: partition 0: offsets")
    assert home.reconciliation().holds
    home.run(accept_gap=True)
    home.run()
    assert len([note for note in notes_of(home) if note]) == 1, "one decision, one note"


def test_a_prefix_that_is_all_there_was_can_be_accepted_too(new_home: MakeHome, tape: Any):
    tape.whole("t")
    home = new_home(tape.records, partitions=1)
    home.log.truncate_before(0, home.log.bounds(0).next)
    with pytest.raises(GapError, match=rf"offsets \[0, {len(tape.records)}\)"):
        home.run()
    home.run(accept_gap=True)
    assert len(notes_of(home)) == 1
    assert (events_of(home), home.run().epochs) == ([], {})


def test_the_note_of_an_accepted_gap_survives_a_death(new_home: MakeHome, zygote: Any, tape: Any):
    for index in range(4):
        tape.whole(f"t{index}")
    home = new_home(tape.records, partitions=1)
    home.log.truncate_before(0, 2)
    [died] = zygote.run(home.order("ingest.events.after_commit", accept_gap=True))
    assert died["status"] < 0
    assert notes_of(home) == []
    home.run()
    [note] = notes_of(home)
    assert note.startswith("gap accepted: partition 0: offsets [0, 2)")
    assert [row["num_records"] for row in home.rows("epochs") if row["pipeline"] == "ingest"] == [len(events_of(home))]


def put_log(home: Any, source: Any) -> None:
    """Put another home's log in the place of this one's."""
    for one in (home, source):
        one.log.close()
    warm_log.cache_clear()
    for path in home.folder.glob("log.sqlite*"):
        path.unlink()
    shutil.copy(source.folder / "log.sqlite", home.folder)
    home.log = open_log(home.urls.log)


def test_a_lost_tail_stops_ingestion_and_no_flag_helps(new_home: MakeHome, kit: Any, tmp_path: Path):
    home = new_home(kit.eventful(num_whole=2))
    backup = home.copy(tmp_path / "backup")
    lost = {partition: home.log.bounds(partition).next for partition in home.log.partitions()}
    home.log.append(kit.eventful(num_whole=3))
    home.run()
    before = home.hashes()
    ends = {partition: home.log.bounds(partition).next for partition in home.log.partitions()}
    put_log(home, backup)
    named = ", ".join(rf"partition {p}: offsets \[{lost[p]}, {ends[p]}\)" for p in lost)
    for accept_gap in (False, True):
        with pytest.raises(LostTailError, match=f"{named} were ingested.*lost its tail"):
            home.run(accept_gap=accept_gap)
    home.log.truncate_before(0, 4)
    with pytest.raises(LostTailError):
        home.run(accept_gap=True)
    assert home.hashes() == before


@pytest.fixture
def recreated(new_home: MakeHome, kit: Any) -> Any:
    """A home whose log was replaced by another one, after everything was ingested and nothing projected."""
    home = new_home(kit.eventful(num_whole=2))
    home.run(only=["ingest"])
    other = new_home([], "other")
    tape = kit.Tape()
    tape.whole("new")
    other.log.append(tape.records)
    home.old_log_id = home.log.log_id
    put_log(home, other)
    return home


def test_a_recreated_log_stops_ingestion_until_it_is_accepted(recreated: Any):
    home = recreated
    before = events_of(home)
    with pytest.raises(
        GapError, match=f"recreated: it has the id {home.log.log_id}, the lake was ingested from {home.old_log_id}"
    ):
        home.run()
    assert events_of(home) == before
    home.run(accept_gap=True)
    assert len(events_of(home)) == len(before) + len(log_of(home))
    assert [note.split(":")[0] for note in notes_of(home) if note] == ["gap accepted"]
    assert "new" in {row["trajectory_id"] for row in home.rows("trajectories")}


def test_what_was_ingested_from_the_old_log_is_projected_all_the_same(recreated: Any):
    home = recreated
    home.run(only=["ingest"], accept_gap=True)
    assert home.reconciliation().holds, "nothing is projected, of neither log"
    home.run()
    assert {row["log_id"] for row in home.rows("trajectories")} == {home.log.log_id, home.old_log_id}
    found = home.reconciliation()
    assert found.holds, str(found)
    assert home.run().epochs == {}


def test_a_log_that_was_recreated_after_a_death_is_noticed(new_home: MakeHome, zygote: Any, kit: Any, tape: Any):
    tape.whole("t")
    home, other = new_home(tape.records), new_home(tape.records, "other")
    [died] = zygote.run(home.order("ingest.events.after_commit"))
    assert died["status"] < 0
    assert home.rows("epochs") == []
    with pytest.raises(GapError, match="recreated"):
        kit.Pipelines(kit.Urls(home.urls.lake, other.urls.log, home.urls.blobs)).run_once()
