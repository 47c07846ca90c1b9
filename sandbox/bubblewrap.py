"""Sandboxes by bubblewrap: unprivileged namespaces, no network, no server and no root needed.

Each command runs in namespaces of its own (user, pid, network, mount, ipc, uts, cgroup) with the workspace mounted at
`/workspace`; its end is the end of everything that it started. What a command may use is in `schemas.records.Limits`,
how limits are kept in `sandbox._limits`. `TRAJLAKE_BWRAP` names another bwrap binary, `TRAJLAKE_SANDBOX_DIR` another
place for workspaces.

Leaves out: seccomp filters, cgroups, images. Run it as a plain user: started by root, code inside is still host uid 0,
though without any capability.
"""

import posixpath
import threading
from collections.abc import Mapping
from typing import Self

from sandbox import _archive, _workspace
from sandbox._child import ArgumentsRefusedError, Child, start_long_running
from sandbox._directories import new_folder, owner_folder, remove_tree
from sandbox._monitor import process_watcher
from sandbox._process import BubblewrapProcess
from sandbox._root import ENVIRONMENT, host_mounts, image_digest
from sandbox.port import SandboxError
from sandbox.probe import bwrap_version, check_available, find_bwrap
from schemas.records import Command, ExecutionResult, Limits, SandboxState, Workspace

WORKSPACE = "/workspace"
"""Where commands see the workspace."""

_ISOLATION = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
    *("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
)
_NOT_RUN = 126
"""Exit code of shells for a command that can't be run."""


class BubblewrapSandbox:
    """A workspace in which commands run isolated; implements `sandbox.port.Sandbox`."""

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        """Make an empty workspace. `limits.disk_bytes` also bounds `snapshot` and `get_state`.

        Raises:
            SandboxUnavailableError: no sandbox can run here; the message names the remedy.
        """
        check_available()
        self._bwrap = find_bwrap()
        self._limits = limits
        self._folder = new_folder()
        self._workspace = self._folder / "workspace"
        self._processes: set[BubblewrapProcess] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._mounts = (
            *_ISOLATION,
            *host_mounts(),
            *("--ro-bind", str(owner_folder() / "etc"), "/etc", "--proc", "/proc", "--remount-ro", "/proc"),
            *("--dev", "/dev", "--remount-ro", "/dev", "--bind", str(self._workspace), WORKSPACE),
        )

    @property
    def image_digest(self) -> str:
        """See `sandbox._root.image_digest`."""
        return image_digest(bwrap_version(self._bwrap))

    def execute(self, command: Command) -> ExecutionResult:
        """Run to the end, within the command's limits; a failure of the sandbox itself is outcome `infra_error`."""
        try:
            child = Child(self._options(command), command.argv, command.limits)
        except ArgumentsRefusedError as error:
            return ExecutionResult(outcome="non_zero", exit_code=_NOT_RUN, error=str(error))
        except SandboxError as error:
            return ExecutionResult(outcome="infra_error", exit_code=None, error=str(error))
        return self._keep(BubblewrapProcess(child, command.limits, self._workspace)).run(command.stdin)

    def start(self, command: Command) -> BubblewrapProcess:
        """Start a long-running command; it lives until its end, `close` of it or of the sandbox, or this process's end.

        Raises:
            SandboxError: bwrap failed.
        """
        child = start_long_running(self._options(command), command.argv, command.limits)
        process = self._keep(BubblewrapProcess(child, command.limits, self._workspace))
        process_watcher().add(process.monitor, process.stop)
        if command.stdin:
            process.write(command.stdin)
        return process

    def get_state(self) -> SandboxState:
        """File tree of the workspace, with content hashes.

        Raises:
            WorkspaceLimitError: over the disk limit or too deep.
        """
        return SandboxState(files=_workspace.states(self._workspace, self._limits.disk_bytes))

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files (mode 644), making their folders; what stands in the way is replaced, links included."""
        _workspace.write_files(self._workspace, files)

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read a regular file, at most `max_bytes`; links are not followed.

        Raises:
            SandboxPathError: if it is no regular file inside the workspace or is larger.
        """
        return _workspace.read_file(self._workspace, path, max_bytes)

    def snapshot(self) -> Workspace:
        """The workspace as a deterministic tar: equal trees give equal digests.

        Raises:
            WorkspaceLimitError: over the disk limit or too deep.
        """
        return _archive.pack(self._workspace, self._limits.disk_bytes)

    def restore(self, workspace: Workspace) -> None:
        """Replace the workspace by a snapshot, made here or elsewhere.

        Raises:
            SandboxError: wrong digest, or no archive that `snapshot` could have made.
        """
        _archive.unpack(self._workspace, workspace)

    def close(self) -> None:
        """Kill everything and remove the workspace; idempotent."""
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.close()
        remove_tree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _keep(self, process: BubblewrapProcess) -> BubblewrapProcess:
        with self._lock:
            if not self._closed:
                self._processes = {known for known in self._processes if not known.closed} | {process}
                return process
        process.close()
        raise SandboxError("the sandbox is closed")

    def _options(self, command: Command) -> list[str]:
        """Bwrap's command line up to the command; the environment in it is the sandbox's, never bwrap's own."""
        if self._closed:
            raise SandboxError("the sandbox is closed")
        memory = str(command.limits.memory_bytes)
        options = [self._bwrap, *self._mounts]
        for folder in ("/tmp", "/dev/shm"):  # noqa: S108 - inside the sandbox; counted as memory
            options += ["--perms", "1777", "--size", memory, "--tmpfs", folder]
        for name, value in (ENVIRONMENT | command.env).items():
            options += ["--setenv", name, value]
        return [*options, "--chdir", posixpath.normpath(posixpath.join(WORKSPACE, command.cwd)), "--remount-ro", "/"]
