"""The public face: what a user imports, and the `trajlake` command.

    import trajlake

    home = trajlake.Home.find()

Names are imported when they are first used, so that `import trajlake` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingest.open import create_log, open_log
    from ingest.recorder import Recorder
    from lake.open import open_lake
    from lake.sql import run_sql
    from schemas import events
    from storage.blobs import BlobStore
    from trajlake.home import Home

_HOMES = {
    "BlobStore": "storage.blobs",
    "Home": "trajlake.home",
    "Recorder": "ingest.recorder",
    "create_log": "ingest.open",
    "events": "schemas",
    "open_lake": "lake.open",
    "open_log": "ingest.open",
    "run_sql": "lake.sql",
}

__all__ = ["BlobStore", "Home", "Recorder", "create_log", "events", "open_lake", "open_log", "run_sql"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trajlake' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = import_module(_HOMES[name])
    return import_module(f"{_HOMES[name]}.{name}") if name == "events" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
