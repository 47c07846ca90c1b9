"""How fast a learner tails the lake: rows per second, beside a plain pyarrow read of the same files.

The table is `steps` as a run leaves it: one commit per epoch, token lists and log-probabilities of a few dozen tokens a
row. `tail/steps` reads all commits from version 0, in order, log entries included; the peer knows the paths already and
reads the same columns with `pyarrow.dataset`. Both sides run in turns and the median of the rounds counts.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads

from lake.open import Lake
from lake.table import LakeTable
from lake.tail import Position, Tail

ROUNDS = 7
RESPONSE_TOKENS = 48
COLUMNS = ("trajectory_id", "step_idx", "group_id", "prompt_token_ids", "response_token_ids", "loss_mask", "logprobs")
"""What a learner trains on."""


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure epochs of a small and of a large batch."""
    return [
        _measure("tail/steps", num_commits=4 if quick else 50, rows_per_commit=100 if quick else 2_000, quick=quick),
        _measure("tail/small_commits", num_commits=4 if quick else 200, rows_per_commit=128, quick=quick),
    ]


def _measure(metric: str, num_commits: int, rows_per_commit: int, quick: bool) -> dict[str, Any]:
    num_rows = num_commits * rows_per_commit
    with tempfile.TemporaryDirectory(prefix="trajlake-bench-") as folder:
        lake = Lake(folder)
        lake.create()
        paths = _fill(lake.table("steps"), num_commits, rows_per_commit)
        ours, plain = [], []
        for _ in range(1 if quick else ROUNDS):
            ours.append(num_rows / _tail(Lake(folder).table("steps"), num_rows))
            plain.append(num_rows / _read(paths, num_rows))
    return {
        "metric": metric,
        "value": statistics.median(ours),
        "unit": "rows/s",
        "against": "pyarrow.dataset, same files and columns",
        "ratio": statistics.median(a / b for a, b in zip(ours, plain, strict=True)),
        "params": {"commits": num_commits, "rows_per_commit": rows_per_commit, "response_tokens": RESPONSE_TOKENS},
        **({} if quick else {"ratio_at_least": 0.5}),  # a quick run measures opening files, not reading them
    }


def _tail(table: LakeTable, expected: int) -> float:
    """Seconds to tail everything; the handle is opened beforehand, as a learner's is."""
    begun = time.perf_counter()
    num_rows = sum(batch.rows.num_rows for batch in Tail(table, Position(0), columns=COLUMNS).poll())
    seconds = time.perf_counter() - begun
    assert num_rows == expected, f"tailed {num_rows} rows of {expected}"
    return seconds


def _read(paths: Sequence[str], expected: int) -> float:
    """Seconds to read the same files without the lake, batch by batch as well."""
    begun = time.perf_counter()
    dataset = pads.dataset(list(paths), format="parquet")
    num_rows = sum(batch.num_rows for batch in dataset.to_batches(columns=list(COLUMNS)))
    seconds = time.perf_counter() - begun
    assert num_rows == expected
    return seconds


def _fill(table: LakeTable, num_commits: int, rows_per_commit: int) -> list[str]:
    """Commit epochs of steps; gives the files' paths in commit order."""
    rng = np.random.default_rng(0)
    paths = []
    for commit in range(num_commits):
        file = table.write_file(_steps(table.schema, commit, rows_per_commit, rng))
        table.commit([file], metadata={"pipeline": "bench"})
        paths.append(str(Path(table.url) / file.path))
    return paths


def _steps(schema: pa.Schema, commit: int, num_rows: int, rng: np.random.Generator) -> pa.Table:
    tokens = pa.array(list(rng.integers(0, 50_000, (num_rows, RESPONSE_TOKENS), dtype=np.int32)))
    columns = {
        "trajectory_id": [f"{commit:08d}-{row // 4:08d}" for row in range(num_rows)],
        "step_idx": [row % 4 for row in range(num_rows)],
        "group_id": [f"group-{row // 16}" for row in range(num_rows)],
        "prompt_token_ids": tokens,
        "response_token_ids": tokens,
        "loss_mask": [[True] * RESPONSE_TOKENS] * num_rows,
        "logprobs": pa.array(list(rng.normal(-1, 0.5, (num_rows, RESPONSE_TOKENS)))),
        "offset": range(commit * num_rows, (commit + 1) * num_rows),
    }
    nulls = pa.nulls(num_rows)
    return pa.table({field.name: pa.array(columns.get(field.name, nulls), field.type) for field in schema})
