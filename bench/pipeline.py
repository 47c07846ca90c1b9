"""`pipeline`: a log with scored trajectories → all tables, in large epochs and in many small ones.

Every measurement is a fresh process over a log that was made before. Throughput counts from after the imports of the
command to the last commit, so it includes what the first epoch of a process costs; `steady` leaves out the first epoch
of project, which imports Great Expectations.
Against: a plain loop over the same log that reads SQLite, decodes with msgspec and appends the raw events with
`deltalake.write_deltalake`. It has no order, no exactly-once, no projections and no gate.
"""

import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench._workload import EVENTS_PER_TRAJECTORY, Workload

Figures = dict[str, float]
Metric = dict[str, Any]

_SIZES = {False: (100_000, 1_000_000), True: (1_000, 2_000)}
_NUM_EPOCHS = {False: 1_000, True: 12}
_TRAJECTORIES_PER_EPOCH = 4
_PEER_BATCH_RECORDS = 10_000


def run(quick: bool) -> list[Metric]:
    """Measure; takes about 15 minutes, half a minute if quick."""
    few, many = (_measure_size(size) for size in _SIZES[quick])
    num_epochs = _NUM_EPOCHS[quick]
    with _home(0) as home:
        epochs = _in_child("epochs", home, num_epochs)
    return [
        *_throughput(few),
        *_throughput(many, at_least=True),
        *_growth(few, many),
        *_small_epochs(epochs, num_epochs),
    ]


def _measure_size(num_events: int) -> Figures:
    with _home(num_events // EVENTS_PER_TRAJECTORY) as home:
        return {**_in_child("drain", home), **_in_child("loop", home)}


def _throughput(figures: Figures, at_least: bool = False) -> list[Metric]:
    num_events, seconds = figures["num_events"], figures["seconds"]
    name = f"pipeline/{round(num_events / 1000)}k"
    params = {"num_events": int(num_events), "mean_event_bytes": round(figures["num_bytes"] / num_events)}
    rates = {
        "events": (num_events / seconds, "events/s"),
        "bytes": (figures["num_bytes"] / 1e6 / seconds, "MB/s"),
        "steady_events": (1 / figures["steady_seconds_per_event"], "events/s"),
        "cpu": (figures["cpu_seconds"] / num_events * 1e6, "us/event"),
        "peak_memory": (figures["peak_bytes"] / 1e6, "MB"),
    }
    metrics: list[Metric] = [
        {"metric": f"{name}_{key}", "value": value, "unit": unit, "params": params}
        for key, (value, unit) in rates.items()
    ]
    metrics[0] |= {"against": "sqlite3 + msgspec + write_deltalake", "ratio": figures["loop_seconds"] / seconds}
    if at_least:
        metrics[0]["at_least"], metrics[1]["at_least"] = 8_000, 16
    return metrics


def _growth(few: Figures, many: Figures) -> list[Metric]:
    params = {"num_events": [int(few["num_events"]), int(many["num_events"])]}
    cost = [figures["seconds"] / figures["num_events"] for figures in (few, many)]
    memory = many["peak_bytes"] / few["peak_bytes"]
    return [
        {"metric": "pipeline/cost_growth", "value": cost[1] / cost[0], "unit": "x", "params": params, "at_most": 1.3},
        {"metric": "pipeline/memory_growth", "value": memory, "unit": "x", "params": params, "at_most": 1.5},
    ]


def _small_epochs(figures: Figures, num_epochs: int) -> list[Metric]:
    params = {"num_epochs": num_epochs, "events_per_epoch": _TRAJECTORIES_PER_EPOCH * EVENTS_PER_TRAJECTORY}
    named = [
        ("small_epoch", figures["first_mean"], "s"),
        ("small_epoch_growth", figures["last_mean"] / figures["first_mean"], "x"),
        ("small_epoch_last_growth", figures["last"] / figures["first_mean"], "x"),
        ("small_epoch_cpu", figures["first_cpu"], "s"),
        ("small_epoch_cpu_growth", figures["last_cpu"] / figures["first_cpu"], "x"),
    ]
    metrics: list[Metric] = [
        {"metric": f"pipeline/{name}", "value": value, "unit": unit, "params": params} for name, value, unit in named
    ]
    metrics[1]["at_most"] = 1.3
    return metrics


@contextmanager
def _home(num_trajectories: int) -> Iterator[Path]:
    """A home with a log of scored trajectories and an empty lake."""
    from ingest.open import create_log  # noqa: PLC0415 - the runner lists benchmarks by importing them
    from ingest.recorder import Recorder  # noqa: PLC0415
    from lake.open import Lake  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="trajlake-bench-") as folder:
        home = Path(folder)
        Lake(str(home / "lake")).create()
        with create_log(_log_url(home)) as log, Recorder(log, run_id="bench") as recorder:
            Workload().record(recorder, num_trajectories)
        yield home


def _log_url(home: Path) -> str:
    return f"sqlite://{home / 'log.sqlite'}"


def _in_child(part: str, home: Path, *arguments: object) -> Figures:
    """Run a part in a fresh process; figures are the last line that it prints."""
    command = [sys.executable, "-m", "bench.pipeline", part, str(home), *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {name: float(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


# ---- what children do ----


def _drain(home: Path) -> Figures:
    from pipelines.run import EpochDone  # noqa: PLC0415 - what the parent doesn't need

    done: list[EpochDone] = []
    begun, begun_cpu = time.perf_counter(), time.process_time()
    totals = _pipelines(home, done.append).run_once()
    seconds = time.perf_counter() - begun
    spent = {stage: [epoch.seconds for epoch in done if epoch.stage == stage] for stage in totals.epochs}
    num_events = totals.counters["project.num_records"]
    warm = [epoch for epoch in done if epoch.stage == "project"][1:]
    warm_events = sum(epoch.counters["num_records"] for epoch in warm)
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - begun_cpu,
        "num_events": num_events,
        "num_bytes": totals.counters["project.num_bytes"],
        "steady_seconds_per_event": (seconds - sum(spent["project"])) / num_events
        + (sum(epoch.seconds for epoch in warm) / warm_events if warm else sum(spent["project"]) / num_events),
        "peak_bytes": _peak_bytes(),
        **{f"{stage}_seconds": sum(times) for stage, times in spent.items()},
    }


def _epochs(home: Path, num_epochs: str) -> Figures:
    """Record a few trajectories and bring them into tables, again and again; what compaction takes is included."""
    from ingest.open import open_log  # noqa: PLC0415
    from ingest.recorder import Recorder  # noqa: PLC0415

    seconds, cpu = [], []
    workload, pipelines = Workload(), _pipelines(home, lambda done: None)
    with open_log(_log_url(home)) as log, Recorder(log, run_id="bench") as recorder:
        for _ in range(int(num_epochs) + 1):
            workload.record(recorder, _TRAJECTORIES_PER_EPOCH)
            begun, begun_cpu = time.perf_counter(), time.process_time()
            pipelines.run_once()
            seconds.append(time.perf_counter() - begun)
            cpu.append(time.process_time() - begun_cpu)
    del seconds[0], cpu[0]  # the first of a process pays for imports
    part = max(1, len(seconds) // 10)
    return {
        "first_mean": mean(seconds[:part]),
        "last_mean": mean(seconds[-part:]),
        "last": median(seconds[-5:]),
        "first_cpu": mean(cpu[:part]),
        "last_cpu": mean(cpu[-part:]),
    }


def _loop(home: Path) -> Figures:
    """The plain loop."""
    import pyarrow as pa  # noqa: PLC0415
    from deltalake import write_deltalake  # noqa: PLC0415

    from schemas.wire import decode_event  # noqa: PLC0415

    begun = time.perf_counter()
    connection = sqlite3.connect(home / "log.sqlite")
    for partition in range(2):
        cursor = connection.execute(f'SELECT "offset", value FROM records_{partition} ORDER BY "offset"')
        while rows := cursor.fetchmany(_PEER_BATCH_RECORDS):
            offsets, values = zip(*rows, strict=True)
            envelopes = [decode_event(value).envelope for value in values]
            columns = {"offset": offsets, "value": values} | {
                name: [getattr(envelope, name) for envelope in envelopes] for name in ("trajectory_id", "seq", "type")
            }
            write_deltalake(str(home / "plain"), pa.table(columns), mode="append")
    connection.close()
    return {"loop_seconds": time.perf_counter() - begun}


def _pipelines(home: Path, on_epoch: Any) -> Any:
    from pipelines.run import Pipelines, Urls  # noqa: PLC0415

    return Pipelines(Urls(str(home / "lake"), _log_url(home), str(home / "blobs")), on_epoch=on_epoch)


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


_PARTS: dict[str, Callable[..., Figures]] = {"drain": _drain, "epochs": _epochs, "loop": _loop}

if __name__ == "__main__":
    print(json.dumps(_PARTS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
