"""A running command in a bubblewrap sandbox: implements `sandbox.port.Process`, and is what `execute` runs."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from sandbox._child import Child
from sandbox._limits import Breach, classify_exit
from sandbox._monitor import Monitor, process_watcher
from sandbox._streams import Streams
from schemas.records import ExecutionOutcome, ExecutionResult, Limits, Usage

_DRAIN_SECONDS = 5.0
"""After bwrap's end its pipes end as soon as the kernel has killed what was left in the namespace."""
_EXEC_FAILURES = ((b"bwrap: execvp", 127), (b"bwrap: Can't chdir to", 126))
"""How bwrap says that the command, not the sandbox, was at fault; codes as shells give them."""


class BubblewrapProcess:
    """A started command. Limits hold over its whole life; `output_bytes` for what was not yet read of each stream."""

    def __init__(self, child: Child, limits: Limits, workspace: Path) -> None:
        self._child, self._limits = child, limits
        self.monitor = Monitor(child.init_pid, limits, workspace)
        self._streams = Streams(child, limits.output_bytes)
        self._breach: Breach | None = None
        self._result: ExecutionResult | None = None

    @property
    def closed(self) -> bool:
        """True once everything of it is gone."""
        return self._child.exited < 0

    def stop(self, breach: Breach) -> None:
        """Kill it for a limit that it passed, unless it has just ended; the first breach is the outcome."""
        if not self._child.has_ended():
            self._breach = self._breach or breach
            self._child.kill()

    def write(self, data: bytes) -> None:
        """Send bytes; those to an ended process are lost, as `read_until` and `poll` then tell."""
        self._streams.feed(data, end=False)
        while self._streams.feeding and not self._streams.ended:
            self._move(None)

    def read_until(self, marker: bytes, timeout_seconds: float) -> tuple[bytes, bool]:
        """Bytes up to and with `marker`; False where the time, the output limit or the process ended first."""
        deadline = time.monotonic() + timeout_seconds
        stdout, searched = self._streams.stdout, 0
        while True:
            found = stdout.data.find(marker, max(0, searched - len(marker) + 1))
            if found >= 0:
                return stdout.take(found + len(marker)), True
            searched = len(stdout.data)
            left = deadline - time.monotonic()
            if not stdout.open or stdout.truncated or left <= 0:
                return stdout.take(searched), False
            self._move(left)

    def poll(self) -> int | None:
        """Exit code as a shell says it (128 + signal), or None while it runs."""
        if not self._child.has_ended():
            return None
        code = self._child.end()
        return 128 + signal.SIGKILL if code is None else code

    def signal(self, number: int) -> None:
        """Send a signal to the command itself; nothing where it has ended."""
        pid = self._child.command_pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, timeout_seconds: float | None = None) -> ExecutionResult:
        """Close its input and wait for the end; after `timeout_seconds` it is killed, outcome `timeout`.

        `stdout` holds what no `read_until` took.
        """
        if self._result is None:
            self._streams.feed(b"", end=True)
            deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
            self._finish(deadline, watched=True)
        assert self._result is not None
        return self._result

    def run(self, stdin: bytes) -> ExecutionResult:
        """Feed `stdin` and wait for the end, looking after the limits in this thread."""
        self._streams.feed(stdin, end=True)
        self._finish(None, watched=False)
        assert self._result is not None
        return self._result

    def close(self) -> None:
        """Kill it, with everything that it started; idempotent."""
        process_watcher().remove(self.monitor)
        self._child.close()

    def _finish(self, deadline: float | None, *, watched: bool) -> None:
        try:
            while not self._streams.ended:
                self._move(self._next_turn(deadline, watched=watched))
                self._look(deadline, watched=watched)
            drain_until = time.monotonic() + _DRAIN_SECONDS
            while not self._streams.drained and time.monotonic() < drain_until:
                self._move(drain_until - time.monotonic())
            self._result = self._conclude(self._child.end())
        finally:
            self.close()

    def _next_turn(self, deadline: float | None, *, watched: bool) -> float | None:
        """Seconds until something other than the child has to be seen to."""
        moments = [moment for moment in (deadline, None if watched else self.monitor.due) if moment is not None]
        return min(moments) - time.monotonic() if moments else None

    def _look(self, deadline: float | None, *, watched: bool) -> None:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            self.stop(Breach("timeout", "not ended in the time given to wait"))
        elif not watched and now >= self.monitor.due:
            breach = self.monitor.look()
            if breach is not None:
                self.stop(breach)

    def _move(self, seconds: float | None) -> None:
        self._streams.move(seconds)
        if self._breach is None and (self._streams.stdout.truncated or self._streams.stderr.truncated):
            self._breach = Breach("output_limit", f"over {self._limits.output_bytes} bytes of output")
            self._child.kill()

    def _conclude(self, reported: int | None) -> ExecutionResult:
        outcome, code, error = self._judge(reported)
        stdout, stderr = self._streams.stdout, self._streams.stderr
        return ExecutionResult(
            outcome=outcome,
            exit_code=code,
            stdout=bytes(stdout.data),
            stderr=bytes(stderr.data),
            stdout_truncated=stdout.truncated,
            stderr_truncated=stderr.truncated,
            usage=Usage(
                wall_seconds=time.monotonic() - self.monitor.started,
                cpu_seconds=self.monitor.cpu_seconds,
                peak_memory_bytes=self.monitor.peak_bytes,
            ),
            error=error,
        )

    def _judge(self, reported: int | None) -> tuple[ExecutionOutcome, int | None, str | None]:
        breach = self._breach or (self.monitor.look_at_disk() if reported is not None else None)
        if breach is not None:
            return breach.outcome, None, breach.message
        if reported is not None:
            return classify_exit(reported)
        said = bytes(self._streams.stderr.data)
        for beginning, code in _EXEC_FAILURES:
            if said.startswith(beginning):
                return "non_zero", code, said.decode(errors="replace").strip()
        return "infra_error", None, f"bwrap failed: {said.decode(errors='replace').strip() or 'no error text'}"
