"""One process per pipeline and lake: a lock file beside the tables, with who holds it.

The lock spares the loser its work and tells it why. What makes two processes harmless is the commit protocol (`txn`
checked on the handle that commits), which holds on object stores too, where there is no such lock.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse


class LeaseHeldError(Exception):
    """Another process runs this pipeline on this lake; the message says which."""


@contextmanager
def lease(lake_url: str, names: tuple[str, ...]) -> Iterator[None]:
    """Hold the locks of the named pipelines.

    Raises:
        LeaseHeldError: naming the holder.
    """
    folder = _local_folder(lake_url)
    if folder is None:
        yield
        return
    held: list[int] = []
    try:
        held.extend(_lock(folder / f".{name}.lock", name) for name in sorted(names))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)  # frees the lock; so does the kernel when the process dies


def _local_folder(lake_url: str) -> Path | None:
    parsed = urlparse(lake_url)
    if parsed.scheme not in ("", "file"):
        return None
    return Path(unquote(parsed.path) if parsed.scheme else lake_url)


def _lock(path: Path, name: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise LeaseHeldError(f"pipeline {name!r} of this lake is being run by {holder}; stop it or wait") from None
    os.ftruncate(descriptor, 0)
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()} since {started} UTC".encode(), 0)
    return descriptor
