"""Runs pipeline processes that may be killed. It imports once, what takes seconds, then forks for every run.

Reads one JSON object a line: `lake`, `log`, `blobs`, and optionally `env`, `only`, `config`, `repeat`, `job`. Answers
one JSON object a line: `status` as `os.waitpid` gives it (negative: the signal), `error` and `totals`.
The parent opens neither lake nor log, so every child is a process like any other.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import apache_beam  # noqa: F401 - the slow imports are the point
import deltalake  # noqa: F401
import pyarrow as pa

from ingest.open import open_log
from pipelines.gate.gate import Gate
from pipelines.ingest import ingest_epoch
from pipelines.project import project_epoch
from pipelines.rebuild import rebuild
from pipelines.run import STAGES, Pipelines, Urls
from pipelines.warm import warm_gate
from schemas.config.pipelines import PipelineConfig
from schemas.tables import TABLES


def warm_up(gate: Gate) -> None:
    """Let Great Expectations import what it imports at its first check."""
    schema = TABLES["scores"]
    gate.check("scores", pa.Table.from_pylist([{"score": 1.0}], schema=schema))


def work(order: dict[str, Any]) -> Any:
    """What the child does."""
    urls = Urls(order["lake"], order["log"], order["blobs"])
    config = PipelineConfig(**{"verify_tries": 1, "verify_retry_seconds": 0.01} | order.get("config", {}))
    if order.get("job") == "rebuild":
        return rebuild(urls.lake, config)
    if order.get("job") == "project":
        return _project_all(urls, config)
    if order.get("job") == "ingest":
        return _ingest_all(urls, config)
    totals = Pipelines(
        urls, config, only=order.get("only", STAGES), accept_gap=order.get("accept_gap", False)
    ).run_once()
    return {"epochs": totals.epochs, "counters": totals.counters}


def _project_all(urls: Urls, config: PipelineConfig) -> dict[str, int]:
    """Without any lease, epoch after epoch, until nothing is left: what a second process on an object store does."""
    log = open_log(urls.log)
    conflicts = epochs = 0
    while (counters := project_epoch(urls.lake, log.log_id, list(log.partitions()), config)) is not None:
        epochs += 1
        conflicts += counters.get("conflicts", 0)
    return {"epochs": epochs, "conflicts": conflicts}


def _ingest_all(urls: Urls, config: PipelineConfig) -> dict[str, int]:
    """The same for ingest."""
    conflicts = epochs = 0
    while (counters := ingest_epoch(urls.lake, urls.log, config, known=set())) is not None:
        epochs += 1
        conflicts += counters.get("conflicts", 0)
    return {"epochs": epochs, "conflicts": conflicts}


def child(order: dict[str, Any], answer: str) -> None:
    """Do the work, say how it went, leave without cleaning up the parent's things."""
    os.environ.update(order.get("env", {}))
    try:
        result = {"totals": work(order)}
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent wants to know
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
        code = 1
    Path(answer).write_text(json.dumps(result))
    os._exit(code)


def main() -> None:
    """Serve orders until the end of standard input; several of one line run at the same time."""
    warm_up(warm_gate())
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        running = []
        for order in json.loads(line):
            descriptor, answer = tempfile.mkstemp()
            os.close(descriptor)
            pid = os.fork()
            if pid == 0:
                child(order, answer)
            running.append((pid, answer))
        answers = []
        for pid, answer in running:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said = Path(answer).read_text()
            answers.append({"status": status, **(json.loads(said) if said else {})})
            Path(answer).unlink()
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
