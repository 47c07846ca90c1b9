"""Where sandboxes keep their workspaces on the host, and how a dead owner's are removed.

One folder per user (0700), in it one per owning process with a lock file that the owner holds as long as it lives. So
who can take the lock knows that the owner is dead, in whichever pid namespace it was, and removes what it left.
`TRAJLAKE_SANDBOX_DIR` chooses another place, e.g. a disk with a quota.
"""

import atexit
import fcntl
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox._root import make_etc
from sandbox.port import SandboxUnavailableError

_LOCK = "lock"
_mutex = threading.Lock()
_numbers = itertools.count()
_owned: tuple[int, Path, int] | None = None
"""(pid, folder, descriptor of the held lock); a forked child's pid differs, so it makes its own."""


def base_folder() -> Path:
    """The user's folder for sandboxes, made if missing.

    Raises:
        SandboxUnavailableError: if it belongs to somebody else.
    """
    default = Path(tempfile.gettempdir()) / f"trajlake-sandbox-{os.getuid()}"
    folder = Path(os.environ.get("TRAJLAKE_SANDBOX_DIR") or default).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if state.st_uid != os.getuid() or folder.is_symlink():
        raise SandboxUnavailableError(
            f"{folder} belongs to uid {state.st_uid}; set TRAJLAKE_SANDBOX_DIR to your own folder"
        )
    return folder


def owner_folder() -> Path:
    """This process's folder, made at first use; then dead owners' folders are removed."""
    global _owned  # noqa: PLW0603 - one folder per process
    with _mutex:
        if _owned is None or _owned[0] != os.getpid() or not _owned[1].is_dir():
            base = base_folder()
            with _exclusive(base):
                folder, descriptor = _make_owner(base)
                dead = _set_dead_aside(base)
            _owned = (os.getpid(), folder, descriptor)
            atexit.register(_remove_owned, os.getpid(), folder)
            for left in dead:
                remove_tree(left)
        return _owned[1]


def new_folder() -> Path:
    """A fresh folder for one sandbox, with its empty `workspace`."""
    folder = owner_folder() / f"s{next(_numbers)}"
    (folder / "workspace").mkdir(mode=0o755, parents=True)
    return folder


def remove_tree(folder: Path) -> None:
    """Remove a hostile tree: unreadable folders and any depth included."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        # Neither follows links on its way down; both cope with trees deeper than PATH_MAX.
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], check=False, capture_output=True)  # noqa: S607 - coreutils
        subprocess.run(["rm", "-rf", "--", folder], check=False, capture_output=True)  # noqa: S607 - coreutils


def _make_owner(base: Path) -> tuple[Path, int]:
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base))
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    make_etc(folder / "etc")
    return folder, descriptor


def _set_dead_aside(base: Path) -> list[Path]:
    """Rename folders whose owner is dead, so that removing them needs no lock; a crash meanwhile leaves `dead-`."""
    dead = []
    for folder in base.iterdir():
        if folder.name.startswith("dead-"):
            dead.append(folder)
        elif folder.is_dir() and not _is_locked(folder):
            dead.append(folder.rename(base / f"dead-{folder.name}"))
    return dead


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _exclusive(base: Path) -> Iterator[None]:
    """Held while owners are made or looked over, so that none is seen before it has its lock."""
    descriptor = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_owned(pid: int, folder: Path) -> None:
    if os.getpid() == pid:  # not in a forked child, which inherits exit handlers
        remove_tree(folder)
