"""Handles that one process keeps: a worker that runs many epochs opens the lake and the log once."""

from functools import lru_cache

from ingest.open import open_log
from ingest.port import EventLog
from lake.open import warm_lake
from pipelines.gate.gate import Gate

__all__ = ["warm_gate", "warm_lake", "warm_log"]


@lru_cache(maxsize=8)
def warm_log(url: str) -> EventLog:
    """The event log at a URL."""
    return open_log(url)


@lru_cache(maxsize=1)
def warm_gate() -> Gate:
    """The quality gate; its Great Expectations context does not pickle."""
    return Gate()
