"""`freshness`: how old a row is when a learner can see it, with `trajlake pipeline run --follow` at work.

A producer records trajectories at a steady, moderate rate; a tail of `trajectories`, as a learner has it, notes when
each row appears. `freshness/settled` counts from the record that settles a trajectory (its score by the
environment), `freshness/verified` from `trajectory_finished` of rollouts that are graded in a second sandbox
(HumanEval's references).
"""

import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench._workload import Workload
from ingest.recorder import Recorder
from lake.tail import Position, Tail
from trajlake.home import Home

_SECONDS = {False: 90.0, True: 20.0}
_WARM_UP_SECONDS = 15.0
"""The follower's imports and first increments are no steady state."""
_PAUSE_SECONDS = 0.25
"""Between two trajectories of a producer."""
_DRAIN_SECONDS = 60.0
_LOOK_SECONDS = 0.05


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure both; takes about two minutes, half a minute if quick."""
    params = {"seconds": _SECONDS[quick], "pause_seconds": _PAUSE_SECONDS}
    with tempfile.TemporaryDirectory(prefix="trajlake-bench-") as folder:
        home = Home.find(Path(folder) / "home", environ={})
        home.init()
        with _follower(home):
            settled, verified, seen = _measure(home, _SECONDS[quick])
    return [
        *_metrics("freshness/settled", settled, seen, params, at_most=3.0),
        *_metrics("freshness/verified", verified, seen, params, at_most=8.0),
    ]


@contextmanager
def _follower(home: Home) -> Iterator[None]:
    command = [sys.executable, "-m", "trajlake", "pipeline", "run", "--home", str(home.root), "--follow"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def _measure(home: Home, seconds: float) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """(trajectory → time of its settling record, → time of its finish, → time its row was seen)."""
    settled: dict[str, float] = {}
    verified: dict[str, float] = {}
    seen: dict[str, float] = {}
    stop = threading.Event()
    producers = [
        threading.Thread(target=_produce, args=(home, stop, settled)),
        threading.Thread(target=_roll_out, args=(home, stop)),
    ]
    for producer in producers:
        producer.start()
    tail = Tail(home.open_lake().table("trajectories"), Position(0), columns=("trajectory_id", "domain", "finished_ns"))
    began = time.time()
    drain_until = began + _WARM_UP_SECONDS + seconds + _DRAIN_SECONDS
    while time.time() < drain_until:
        for batch in tail.poll():
            for row in batch.rows.to_pylist():
                seen[row["trajectory_id"]] = time.time()
                if row["domain"] == "humaneval":
                    verified[row["trajectory_id"]] = row["finished_ns"] / 1e9
        if time.time() > began + _WARM_UP_SECONDS + seconds:
            stop.set()
            if not any(producer.is_alive() for producer in producers) and settled.keys() <= seen.keys():
                break
        time.sleep(_LOOK_SECONDS)
    for producer in producers:
        producer.join()
    warm = began + _WARM_UP_SECONDS
    return _after(settled, warm), _after(verified, warm), seen


def _after(times: dict[str, float], begin: float) -> dict[str, float]:
    return {trajectory_id: at for trajectory_id, at in times.items() if at >= begin}


def _produce(home: Home, stop: threading.Event, settled: dict[str, float]) -> None:
    """Trajectories that their environment scores."""
    workload = Workload()
    with home.open_log() as log, Recorder(log, home.blobs()) as recorder:
        while not stop.wait(_PAUSE_SECONDS):
            trajectory_id = workload.record_one(recorder)
            settled[trajectory_id] = time.time()
            recorder.flush()


def _roll_out(home: Home, stop: threading.Event) -> None:
    """Trajectories that a verifier scores."""
    from domains.registry import load_domain  # noqa: PLC0415 - only here
    from rollout.run import RolloutSession  # noqa: PLC0415 - only here
    from trajlake.policies import make_policy  # noqa: PLC0415 - only here

    domain = load_domain("humaneval")
    policy, _ = make_policy("reference", domain, home.config)
    with home.open_log() as log, RolloutSession(domain, policy, log, home.blobs(), home.config.rollout) as session:
        round_idx = 0
        while not stop.wait(_PAUSE_SECONDS):
            session.run("eval", 1, round_idx=round_idx)
            round_idx += 1


def _metrics(
    name: str, begun: dict[str, float], seen: dict[str, float], params: dict[str, float], at_most: float
) -> Iterator[dict[str, Any]]:
    missing = begun.keys() - seen.keys()
    assert not missing, f"{len(missing)} trajectories never came to be rows, such as {min(missing)}"
    ages = sorted(seen[trajectory_id] - at for trajectory_id, at in begun.items())
    for label, value in (("p50", statistics.median(ages)), ("p95", ages[int(0.95 * (len(ages) - 1))])):
        yield {
            "metric": f"{name}_{label}",
            "value": value,
            "unit": "s",
            "against": None,
            "ratio": None,
            "params": params,
            **({"at_most": at_most} if label == "p50" else {}),
        }
