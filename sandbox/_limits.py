"""Limits of a sandbox: what the kernel enforces per process, and what a sampled look at all its processes finds.

The kernel's limits are per process (`setrlimit(2)`), and `RLIMIT_NPROC` doesn't bind where trajlake runs as root. So
the whole sandbox is sampled as well, through `/proc/PID/root/proc`: the sandbox's own view of its processes, which
holds exactly those of its pid namespace, orphans included. Between two samples (≥ 20 ms) a limit can be passed by
what fits into that time; cgroups, which don't have this gap, need rights that a plain user seldom has.
"""

import math
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from schemas.records import ExecutionOutcome, Limits

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_ADDRESS_SPACE_SLACK = 1 << 30
"""Added to the memory limit for RLIMIT_AS: address space is reserved far beyond what is used."""
_OPEN_FILES = 1024
_MEMORY_FOLDERS = ("tmp", "dev/shm")
"""Of the sandbox: in memory, so what they hold counts as memory."""


class Sample(NamedTuple):
    """All processes of a sandbox together, at one moment."""

    processes: int
    memory_bytes: int
    cpu_seconds: float


class Breach(NamedTuple):
    """A limit that was passed."""

    outcome: ExecutionOutcome
    message: str


def set_kernel_limits(pid: int, limits: Limits) -> None:
    """Set limits of a process that waits to begin, and of all that it will start.

    Raises:
        ProcessLookupError: it has ended.
    """
    cpu = max(1, math.ceil(limits.cpu_seconds))
    wanted = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (2 * limits.memory_bytes + _ADDRESS_SPACE_SLACK,) * 2,
        resource.RLIMIT_FSIZE: (limits.disk_bytes,) * 2,
        # Above the limit, so that a sample sees it passed and names it: at the limit a fork would only fail.
        resource.RLIMIT_NPROC: (2 * limits.processes + 16,) * 2,
        resource.RLIMIT_NOFILE: (_OPEN_FILES,) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, (soft, hard) in wanted.items():
        ceiling = resource.prlimit(pid, kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)  # noqa: PLW2901 - never above what we may set
        resource.prlimit(pid, kind, (soft, hard))


def take_sample(pid: int, max_processes: int) -> Sample | None:
    """Look at all processes of the sandbox whose pid namespace has `pid` as its first process.

    None before its root is set up, when `/proc/PID/root` is still the host's, and once it is gone.

    Memory is the sum of resident sets, so pages that processes share count more than once: an upper bound, which
    `exact_memory` refines. CPU time includes children that were waited for. With more than `max_processes`, zombies
    included, only their number is taken: looking at each of a fork bomb's would let it grow.
    """
    root = f"/proc/{pid}/root"
    try:
        if os.stat(f"{root}/proc").st_dev == os.stat("/proc").st_dev:  # noqa: PTH116 - fifty times a second
            return None
        numbers = [name for name in os.listdir(f"{root}/proc") if name.isdigit()]  # noqa: PTH208 - as above
    except OSError:
        return None
    processes = len(numbers) - ("1" in numbers)  # the first is bwrap's reaper
    if processes > max_processes:
        return Sample(processes, 0, 0.0)
    pages = ticks = 0
    for number in numbers:
        with suppress(OSError, ValueError, IndexError):
            # After the command's name, which may hold anything, in proc(5)'s order from field 3 on.
            fields = Path(f"{root}/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
    memory = pages * _PAGE_BYTES + _bytes_in_memory_folders(root)
    return Sample(processes, memory, ticks / _TICKS_PER_SECOND)


def exact_memory(pid: int) -> int:
    """Memory of all processes with shared pages counted once (proportional set size); dearer than a sample."""
    root = f"/proc/{pid}/root"
    total = 0
    with suppress(OSError):
        for number in os.listdir(f"{root}/proc"):  # noqa: PTH208 - as above
            with suppress(OSError):
                if number.isdigit():
                    total += _proportional_bytes(Path(f"{root}/proc/{number}/smaps_rollup").read_bytes())
    return total + _bytes_in_memory_folders(root)


def find_breach(pid: int, sample: Sample, wall_seconds: float, limits: Limits) -> Breach | None:
    """The first limit that is passed, or None."""
    if wall_seconds > limits.wall_seconds:
        return Breach("timeout", f"over {limits.wall_seconds:g} s of wall time")
    if sample.processes > limits.processes:
        return Breach("process_limit", f"{sample.processes} processes, limit {limits.processes}")
    if sample.memory_bytes > limits.memory_bytes:
        memory = exact_memory(pid)
        if memory > limits.memory_bytes:
            return Breach("oom", f"{memory >> 20} MiB of memory, limit {limits.memory_bytes >> 20} MiB")
    if sample.cpu_seconds > limits.cpu_seconds:
        return Breach("timeout", f"over {limits.cpu_seconds:g} s of CPU time")
    return None


def classify_exit(code: int) -> tuple[ExecutionOutcome, int | None, str | None]:
    """Outcome, exit code and error text of a command's end as bwrap reports it.

    bwrap says 128 + n both for death by signal n and for such an exit code; like shells, we take it for a signal.
    """
    if code == 0:
        return "ok", 0, None
    number = code - 128
    if number == signal.SIGXCPU:
        return "timeout", None, "over the limit of CPU time"
    if number == signal.SIGXFSZ:
        return "disk_limit", None, "a file over the limit of disk"
    if 0 < number < signal.SIGRTMIN and number in signal.valid_signals():
        return "killed", None, f"killed by {signal.Signals(number).name} (exit code {code})"
    return "non_zero", code, f"exit code {code}"


def _bytes_in_memory_folders(root: str) -> int:
    used = 0
    for folder in _MEMORY_FOLDERS:
        with suppress(OSError):
            state = os.statvfs(f"{root}/{folder}")
            used += (state.f_blocks - state.f_bfree) * state.f_frsize
    return used


def _proportional_bytes(rollup: bytes) -> int:
    for line in rollup.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0
