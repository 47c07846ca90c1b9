"""Named places at which a process can be made to die, so that recovery is tested by real deaths.

`TRAJLAKE_FAILPOINT=ingest.events.before_commit` kills the process (SIGKILL: no handler, no cleanup) when it reaches
that place; `NAME:3` when it reaches it for the third time. `FAILPOINTS` lists every name. Unset, a place costs one
dictionary look-up.
"""

import os
import signal
from collections import Counter

from schemas.tables import PROJECT_TABLES

FAILPOINTS = (
    "ingest.events.before_files",
    "ingest.events.before_commit",
    "ingest.events.after_commit",
    "ingest.epochs.after_commit",
    "verify.scores.before_append",
    "verify.scores.after_append",
    "verify.epochs.after_commit",
    "project.before_files",
    *(f"project.{table}.{moment}_commit" for table in PROJECT_TABLES for moment in ("before", "after")),
    "compact.before_commit",
    "compact.after_commit",
    "rebuild.before_commit",
    "rebuild.after_commit",
)

_reached: Counter[str] = Counter()


def reach(name: str) -> None:
    """Die here if `TRAJLAKE_FAILPOINT` says so."""
    wanted = os.environ.get("TRAJLAKE_FAILPOINT")
    if wanted is None:
        return
    assert name in FAILPOINTS, f"{name} is not listed in FAILPOINTS"
    _reached[name] += 1
    wanted_name, _, count = wanted.partition(":")
    if name == wanted_name and _reached[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
