"""Choose an event log backend by URL."""

from collections.abc import Callable
from typing import Any

from ingest.port import EventLog

KNOWN_SCHEMES = ("sqlite:///",)
"""What a log URL may start with."""


def open_log(url: str) -> EventLog:
    """Open the log at a URL, such as `sqlite:///abs/path/log.sqlite`.

    Raises:
        ValueError: for an unknown scheme.
        LogNotFoundError: if there is no log.
        LogFormatError: if what is there is no log.
        LogUnavailableError: if it can't be reached.
    """
    return _backend(url).open(url)  # type: ignore[no-any-return] # each backend is an EventLog; its constructors differ


def create_log(url: str, partitions: int = 2) -> EventLog:
    """Create a log at a URL; the number of partitions is fixed from then on.

    Raises:
        ValueError: for an unknown scheme.
        LogExistsError: if there is one already.
        LogUnavailableError: if it can't be written.
    """
    return _backend(url).create(url, partitions)  # type: ignore[no-any-return] # as above


def _backend(url: str) -> Any:
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in _BACKENDS:
        raise ValueError(f"log URL {url!r}: unknown scheme {scheme!r}; known: {', '.join(KNOWN_SCHEMES)}")
    return _BACKENDS[scheme]()


def _sqlite() -> Any:
    from ingest.sqlite_log import SqliteLog  # noqa: PLC0415 - a backend's libraries are needed only where it is used

    return SqliteLog


_BACKENDS: dict[str, Callable[[], Any]] = {"sqlite": _sqlite}
