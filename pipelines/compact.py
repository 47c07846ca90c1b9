"""Compact: small files of a table joined into larger ones, same rows, same order.

An owner compacts its tables between its epochs. Rewrites are marked `dataChange = false`, so tails pass them over.
"""

from lake.compact import compact
from lake.open import Lake
from pipelines.failpoints import reach
from schemas.config.pipelines import PipelineConfig
from schemas.tables import TABLES


def compact_lake(lake: Lake, config: PipelineConfig) -> dict[str, int]:
    """Compact every table that has many small files.

    Returns:
        `files_before` and `files_after` of what was joined; empty when nothing was.
    """
    counters: dict[str, int] = {}
    for name in TABLES:
        table = lake.table(name)
        table.refresh()
        reach("compact.before_commit")
        result = compact(table, target_bytes=config.target_file_bytes, min_files=config.compact_min_files)
        reach("compact.after_commit")
        if result.files_before:
            counters["files_before"] = counters.get("files_before", 0) + result.files_before
            counters["files_after"] = counters.get("files_after", 0) + result.files_after
    return counters
