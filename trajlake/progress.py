"""How far something is, on standard error: bars on a terminal, a line now and then elsewhere.

Nothing shows for work that ends within `QUIET_SECONDS`.

    with Progress() as progress:
        progress("ingest", done, total)      # total None: not known
"""

import sys
import time
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

QUIET_SECONDS = 2.0
LINE_SECONDS = 10.0
"""Between two lines where there is no terminal."""


class Progress:
    """Receives (stage, done, total) and shows it.

    Args:
        stream: Where it shows; standard error by default.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._last_line = self._began
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int | None = None) -> None:
        """Show that `done` of `total` parts of a stage are over."""
        now = time.monotonic()
        if now - self._began < QUIET_SECONDS:
            return
        if self._stream.isatty():
            self._show_bar(stage, done, total)
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            of = "" if total is None else f" of {total:,}"
            self._stream.write(f"{stage}: {done:,}{of} after {now - self._began:.0f} s\n")
            self._stream.flush()

    def _show_bar(self, stage: str, done: int, total: int | None) -> None:
        if self._bars is None:
            self._bars = _new_bars(self._stream)
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)


def _new_bars(stream: IO[str]) -> "Bars":
    from rich.console import Console  # noqa: PLC0415 - only once a bar shows
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - as above

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(file=stream))
