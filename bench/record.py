"""How fast one process records: acknowledged trajectories per second, beside SQLite without anything of ours.

A trajectory is 20 events of 1 KB as stored. `record/acknowledged` is a process of actors, each a thread that waits
until its trajectory is durable before it begins the next, as in a rollout; `record/one-actor` is the same with a
single thread. Their peer makes the same promise: it commits each trajectory. `record/grouped` is one thread that
records on and on and waits at the end, beside as many rows per commit as the recorder's own commits had: hardly a sync
is left to wait for, and the ratio is that of Python to C.

The peer inserts the very same keys and values with `executemany` into a file with the same pragmas (WAL,
synchronous=FULL, the log's page size). Both sides run in turns and the median of the rounds counts.
"""

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ingest.recorder import Recorder
from ingest.sqlite_log import PAGE_BYTES, SqliteLog
from schemas.events import Observation, TrajectoryFinished, TrajectoryStarted
from schemas.records import ProducerRecord

EVENTS = 20
EVENT_BYTES = 1_024
ROUNDS = 5
ACTORS = 8
_STARTED = TrajectoryStarted(task_key="bench/0", domain="bench", seed=0, source="x" * 480)
_FINISHED = TrajectoryFinished(status="completed", error="x" * 530)
_CONTENT = "x" * 560

Row = tuple[str, bytes]


class _CountingLog(SqliteLog):
    """Counts commits."""

    num_appends = 0

    def append(self, records: Sequence[ProducerRecord]) -> None:
        self.num_appends += 1
        super().append(records)


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure both ways of recording."""
    return [
        {
            **_measure("record/acknowledged", 24 if quick else 4_000, ACTORS, quick),
            "ratio_at_least": 0.6,
            "at_least": 1_000.0,
        },
        _measure("record/one-actor", 20 if quick else 1_000, 1, quick),
        _measure("record/grouped", 50 if quick else 4_000, 0, quick),
    ]


def _measure(metric: str, num_trajectories: int, num_actors: int, quick: bool) -> dict[str, Any]:
    ours, raw, batches, sizes = [], [], [], []
    for _ in range(1 if quick else ROUNDS):
        with tempfile.TemporaryDirectory(prefix="trajlake-bench-") as folder:
            seconds, batch, rows = _record(Path(folder), num_trajectories, num_actors)
            ours.append(num_trajectories / seconds)
            batches.append(batch)
            sizes.append(sum(len(value) for _, value in rows) / len(rows))
            raw.append(num_trajectories / _insert(Path(folder), rows, EVENTS if num_actors else batch))
    value = statistics.median(ours)
    return {
        "metric": metric,
        "value": value,
        "unit": "trajectories/s",
        "against": f"raw SQLite, same bytes, a commit per {'trajectory' if num_actors else 'batch'}",
        "ratio": statistics.median(a / b for a, b in zip(ours, raw, strict=True)),
        "params": {
            "trajectories": num_trajectories,
            "events": EVENTS,
            "event_bytes": EVENT_BYTES,
            "actors": num_actors,
        },
        "rows_per_commit": statistics.median(batches),
        "stored_event_bytes": statistics.mean(sizes),
    }


def _record(folder: Path, num_trajectories: int, num_actors: int) -> tuple[float, int, list[Row]]:
    """(seconds until all was acknowledged, rows per commit, what was stored); no actors: a thread that never waits."""
    with _CountingLog.create(folder / "log.sqlite") as log:
        with Recorder(log) as recorder, ThreadPoolExecutor(max(num_actors, 1)) as actors:
            begun = time.perf_counter()
            shares = [num_trajectories // max(num_actors, 1)] * max(num_actors, 1)
            list(actors.map(lambda share: _play(recorder, share, waits=num_actors > 0), shares))
            recorder.flush()
            seconds = time.perf_counter() - begun
            assert recorder.acknowledged == num_trajectories * EVENTS
        return seconds, round(num_trajectories * EVENTS / log.num_appends), _stored(log)


def _play(recorder: Recorder, num_trajectories: int, waits: bool) -> None:
    for _ in range(num_trajectories):
        _trajectory(recorder)
        if waits:
            recorder.flush()


def _trajectory(recorder: Recorder) -> None:
    with recorder.trajectory(_STARTED) as attempt:
        for _ in range(EVENTS - 2):
            attempt.record(Observation(action_id="0", content=_CONTENT))
        attempt.finish(_FINISHED)


def _stored(log: SqliteLog) -> list[Row]:
    rows: list[Row] = []
    for partition in log.partitions():
        for batch in log.read(partition, 0, log.bounds(partition).next, 1 << 24):
            rows += zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
    return rows


def _insert(folder: Path, rows: Sequence[Row], rows_per_commit: int) -> float:
    """Seconds that SQLite takes for the rows."""
    connection = sqlite3.connect(folder / "raw.sqlite", isolation_level=None)
    for pragma in (f"page_size={PAGE_BYTES}", "journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute('CREATE TABLE records ("offset" INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB NOT NULL)')
    begun = time.perf_counter()
    for start in range(0, len(rows), rows_per_commit):
        connection.execute("BEGIN IMMEDIATE")
        numbered = ((start + i, *row) for i, row in enumerate(rows[start : start + rows_per_commit]))
        connection.executemany("INSERT INTO records VALUES (?, ?, ?)", numbered)
        connection.execute("COMMIT")
    seconds = time.perf_counter() - begun
    connection.close()
    return seconds
