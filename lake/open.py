"""A lake: one folder (or object-store prefix) with one Delta table per entry of `schemas.tables.TABLES`.

Retention is set on every table rather than left to defaults: see `table_properties`.
"""

import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from lake.errors import LakeNotFoundError
from lake.files import STATS_COLUMNS
from lake.table import CHECKPOINT_INTERVAL, LakeTable
from schemas.tables import TABLES

LOG_RETENTION_DAYS = 30
"""How far `--at` and a tail can look back."""

FILE_RETENTION_DAYS = 30
"""How long files that compaction or rebuild replaced stay for readers of older versions."""


def table_properties(name: str) -> dict[str, str]:
    """Delta properties of a table."""
    return {
        "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
        "delta.logRetentionDuration": f"interval {LOG_RETENTION_DAYS} days",
        "delta.deletedFileRetentionDuration": f"interval {FILE_RETENTION_DAYS} days",
        "delta.enableExpiredLogCleanup": "true",
        "delta.dataSkippingStatsColumns": ",".join(STATS_COLUMNS[name]),
    }


class Lake:
    """All tables under one URL; handles are opened once and stay warm.

    Args:
        url: A path, `file://…`, or an object store's URL.
        storage_options: Passed to delta-rs, for object stores.
    """

    def __init__(self, url: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.url = _normalise(url)
        self.storage_options = dict(storage_options) if storage_options else None
        self._tables: dict[str, LakeTable] = {}
        self._lock = threading.Lock()

    def url_of(self, name: str) -> str:
        """URL of a table's folder.

        Raises:
            ValueError: there is no table of this name in the data model.
        """
        if name not in TABLES:
            raise ValueError(f"no table {name!r}; tables are {', '.join(TABLES)}")
        return f"{self.url}/{name}"

    def create(self) -> None:
        """Create the tables that are missing. Several processes may do so at once."""
        for name, schema in TABLES.items():
            url = self.url_of(name)
            if not self._has(name):
                try:
                    DeltaTable.create(
                        url,
                        schema,
                        mode="ignore",
                        name=name,
                        configuration=table_properties(name),
                        storage_options=self.storage_options,
                    )
                except DeltaError:
                    if not self._has(name):  # otherwise somebody else created it between look and create
                        raise

    def exists(self) -> bool:
        """Whether every table is there."""
        return not self.missing()

    def missing(self) -> list[str]:
        """Tables that are not there."""
        return [name for name in TABLES if not self._has(name)]

    def table(self, name: str) -> LakeTable:
        """The warm handle of a table.

        Raises:
            LakeNotFoundError: the table was not created.
        """
        with self._lock:
            if name not in self._tables:
                self._tables[name] = LakeTable(self.url_of(name), name, TABLES[name], self.storage_options)
            return self._tables[name]

    def _has(self, name: str) -> bool:
        return DeltaTable.is_deltatable(self.url_of(name), storage_options=self.storage_options)


def open_lake(url: str, storage_options: Mapping[str, str] | None = None) -> Lake:
    """Open a lake that exists.

    Raises:
        LakeNotFoundError: tables are missing.
    """
    lake = Lake(url, storage_options)
    missing = lake.missing()
    if missing:
        raise LakeNotFoundError(f"no lake at {lake.url} (missing: {', '.join(missing)}): run `trajlake init`")
    return lake


@functools.lru_cache(maxsize=16)
def warm_lake(url: str) -> Lake:
    """The process's shared lake at a URL: pipelines that run epoch after epoch keep their handles."""
    return open_lake(url)


def _normalise(url: str) -> str:
    if url.startswith("file://"):
        url = unquote(urlsplit(url).path)
    return url.rstrip("/") if "://" in url else str(Path(url).absolute())
