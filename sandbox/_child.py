"""One running bwrap with the command in it: start it under limits, signal it, end it, learn how it ended.

bwrap is started held (`--block-fd`) until its child's limits are set, and reports through `--json-status-fd`: the first
process of the new pid namespace, then the command's exit code. No exit code means that bwrap itself failed, whatever
its own return code says.
"""

import errno
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from sandbox._limits import set_kernel_limits
from sandbox.port import SandboxError
from schemas.records import Limits

_START_SECONDS = 30.0
_KILL_SECONDS = 10.0
_spawners: dict[int, ThreadPoolExecutor] = {}


class ArgumentsRefusedError(SandboxError):
    """The kernel doesn't take the command's arguments: too long, or with NUL bytes. The command's fault."""


class Child:
    """A started bwrap. `stdin`, `stdout`, `stderr` are non-blocking descriptors, closed by `close`."""

    def __init__(self, options: Sequence[str], argv: Sequence[str], limits: Limits) -> None:
        """Start it.

        Raises:
            ArgumentsRefusedError: the command's arguments.
            SandboxError: bwrap failed.
        """
        self._reaped = False
        self._descriptors = threading.Lock()
        """Held while they are used from another thread or closed, so that no reused number is signalled."""
        self._status = b""
        self._exit_line: bytes | None = None
        status_read, status_write = os.pipe()
        block_read, block_write = os.pipe()
        try:
            self._popen = _popen(
                [*options, "--json-status-fd", str(status_write), "--block-fd", str(block_read)],
                argv,
                (status_write, block_read),
            )
        except BaseException:
            os.close(status_read)
            os.close(block_write)
            raise
        finally:
            os.close(status_write)
            os.close(block_read)
        self._streams = [stream for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr) if stream]
        self.stdin, self.stdout, self.stderr = (stream.fileno() for stream in self._streams)
        self.status = status_read
        self.exited = os.pidfd_open(self._popen.pid)
        """Readable once bwrap has ended."""
        self._init = -1
        self.init_pid = 0
        """First process of the sandbox's pid namespace, as the host numbers it."""
        try:
            self._release(block_write, limits)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(block_write)

    def _release(self, block: int, limits: Limits) -> None:
        """Wait for the namespace's first process, set its limits, let it go on."""
        first = self._read_status_line()
        if first is None:
            said = os.read(self.stderr, 4096).decode(errors="replace").strip()
            raise SandboxError(f"bwrap ended before the command began: {said or 'no error text'}")
        self.init_pid = int(json.loads(first)["child-pid"])
        with suppress(ProcessLookupError):  # it may fail and end meanwhile; the missing exit code will tell
            self._init = os.pidfd_open(self.init_pid)
            set_kernel_limits(self.init_pid, limits)
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(descriptor, False)
        with suppress(BrokenPipeError):
            os.write(block, b"x")

    @property
    def stdin_open(self) -> bool:
        """False once `close_stdin` was called."""
        return not self._streams[0].closed

    def close_stdin(self) -> None:
        """End the command's standard input."""
        self._streams[0].close()

    def command_pid(self) -> int | None:
        """The command's process as the host numbers it, None once it has ended."""
        with suppress(OSError, IndexError):
            return int(Path(f"/proc/{self.init_pid}/task/{self.init_pid}/children").read_text().split()[0])
        return None

    def has_ended(self) -> bool:
        """True once bwrap has ended; then everything in it is dead or dying."""
        with self._descriptors:
            return self._reaped or _wait_readable(self.exited, 0)

    def kill(self) -> None:
        """Kill all processes of the sandbox, by its pid namespace; returns at once. Any thread may call it."""
        with self._descriptors, suppress(ProcessLookupError):
            if self._init >= 0:
                self._hurry()
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            elif not self._reaped:
                self._popen.kill()

    def _hurry(self) -> None:
        """Raise the priority of the namespace's first process: the namespace dies only once that gets to run.

        Behind a fork bomb's thousands that takes seconds. Only root may do this, and only root needs it: a plain
        user's bomb is stopped by RLIMIT_NPROC.
        """
        if not _wait_readable(self._init, 0):
            with suppress(PermissionError, ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self.init_pid, -20)

    def end(self) -> int | None:
        """Wait for bwrap's end and for the death of all that was in it; call after `kill` or `has_ended`.

        Returns:
            The command's exit code as a shell says it (128 + signal); None where bwrap failed before it ran.
        """
        if not self._reaped:
            if not _wait_readable(self.exited, _KILL_SECONDS):
                self._popen.kill()  # its death is its child's too: --die-with-parent
            self._popen.wait()
            self._reaped = True
            while self._read_status_line() is not None:
                pass
            if self._init >= 0:
                _wait_readable(self._init, _KILL_SECONDS)
        return None if self._exit_line is None else int(json.loads(self._exit_line)["exit-code"])

    def close(self) -> None:
        """Kill, wait, and close all descriptors; idempotent."""
        if self.exited < 0:
            return
        self.kill()
        self.end()
        for stream in self._streams:
            stream.close()
        with self._descriptors:
            for descriptor in (self.status, self.exited, self._init):
                if descriptor >= 0:
                    os.close(descriptor)
            self.exited = self._init = -1

    def _read_status_line(self) -> bytes | None:
        """The next line of bwrap's status, None at its end or if bwrap says nothing for too long."""
        deadline = time.monotonic() + _START_SECONDS
        while b"\n" not in self._status:
            if not _wait_readable(self.status, deadline - time.monotonic()):
                return None
            chunk = os.read(self.status, 4096)
            if not chunk:
                return None
            self._status += chunk
        line, _, self._status = self._status.partition(b"\n")
        if b"exit-code" in line:
            self._exit_line = line
        return line


def start_long_running(options: Sequence[str], argv: Sequence[str], limits: Limits) -> Child:
    """Start from a thread that lives as long as this process does.

    `--die-with-parent` means the parent *thread*: a sandbox started from a worker thread would die with that thread
    (prctl(2), PR_SET_PDEATHSIG).
    """
    spawner = _spawners.get(os.getpid())
    if spawner is None:
        spawner = _spawners.setdefault(os.getpid(), ThreadPoolExecutor(1, "sandbox-spawner"))
    return spawner.submit(Child, options, argv, limits).result()


def _popen(options: Sequence[str], argv: Sequence[str], descriptors: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            [*options, "--", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C is for us to handle, not for bwrap
            env={},
        )
    except ValueError as error:
        raise ArgumentsRefusedError(f"a command's arguments can't hold NUL bytes ({error})") from error
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise ArgumentsRefusedError("the command's arguments are too long") from error
        raise SandboxError(f"can't run {options[0]}: {error}") from error


def _wait_readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
