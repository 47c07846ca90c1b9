"""Watches a sandbox's use of its limits: often while it works, seldom while it idles.

`execute` asks its monitor between reads, in the calling thread. Long-running processes, which nobody may be reading,
are watched by one daemon thread.
"""

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sandbox._limits import Breach, find_breach, take_sample
from sandbox._workspace import measure
from schemas.records import Limits

_SHORTEST_SECONDS = 0.02
_LONGEST_SECONDS = 0.2
_DISK_SECONDS = 0.1
_DISK_SHARE = 20
"""Looking at the disk may take one part in so many of the time."""


class Monitor:
    """Looks at one sandbox. `due` is when the next look is wanted, on the monotonic clock."""

    def __init__(self, init_pid: int, limits: Limits, workspace: Path) -> None:
        self._init_pid, self._limits, self._workspace = init_pid, limits, workspace
        self.started = time.monotonic()
        self.peak_bytes: int | None = None
        self.cpu_seconds: float | None = None
        """At the last sample; both are null where the command ended before the first."""
        self._interval = _SHORTEST_SECONDS
        self.due = self.started + self._interval
        self._disk_due = self.started + _DISK_SECONDS

    def look(self) -> Breach | None:
        """Take a sample; a passed limit, or None."""
        sample = take_sample(self._init_pid, self._limits.processes)
        now = time.monotonic()
        if sample is None:
            self.due = now + _SHORTEST_SECONDS if self.cpu_seconds is None else math.inf  # not begun, or gone
            return Breach("timeout", "not begun in time") if now - self.started > self._limits.wall_seconds else None
        worked = sample.cpu_seconds != self.cpu_seconds
        if sample.processes <= self._limits.processes:
            self.peak_bytes = max(self.peak_bytes or 0, sample.memory_bytes)
            self.cpu_seconds = sample.cpu_seconds
        breach = find_breach(self._init_pid, sample, now - self.started, self._limits)
        if breach is None and worked and now >= self._disk_due:
            breach = self.look_at_disk()
        self._interval = _SHORTEST_SECONDS if worked else min(self._interval * 2, _LONGEST_SECONDS)
        wall_end = self.started + self._limits.wall_seconds
        self.due = min(time.monotonic() + self._interval, max(wall_end, now) + 0.001)
        return breach

    def look_at_disk(self) -> Breach | None:
        """Measure the workspace."""
        began = time.monotonic()
        used = measure(self._workspace, self._limits.disk_bytes)
        ended = time.monotonic()
        self._disk_due = ended + max(_DISK_SECONDS, _DISK_SHARE * (ended - began))
        if used > self._limits.disk_bytes:
            return Breach("disk_limit", f"the workspace holds more than {self._limits.disk_bytes} bytes")
        return None


class Watcher:
    """One daemon thread that looks at all registered monitors when they are due."""

    def __init__(self) -> None:
        self._watched: dict[Monitor, Callable[[Breach], None]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, monitor: Monitor, on_breach: Callable[[Breach], None]) -> None:
        """Watch until removed or until a limit is passed; `on_breach` is called from the watcher's thread."""
        with self._changed:
            self._watched[monitor] = on_breach
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox-watcher", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, monitor: Monitor) -> None:
        """Watch no more; unknown monitors are ignored."""
        with self._changed:
            self._watched.pop(monitor, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                due = [monitor for monitor in self._watched if monitor.due <= now]
                if not due:
                    soonest = min((monitor.due for monitor in self._watched), default=None)
                    self._changed.wait(None if soonest in (None, math.inf) else max(0.0, soonest - now))
                    continue
            for monitor in due:
                self._look(monitor)

    def _look(self, monitor: Monitor) -> None:
        breach = monitor.look()
        if breach is not None:
            with self._changed:
                on_breach = self._watched.pop(monitor, None)
            if on_breach is not None:
                on_breach(breach)


_watchers: dict[int, Watcher] = {}


def process_watcher() -> Watcher:
    """This process's watcher; a forked child, whose threads are gone, gets its own."""
    return _watchers.setdefault(os.getpid(), Watcher())
