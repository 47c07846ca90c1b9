"""Reading and writing a workspace from outside while hostile code may be changing it.

Every path is walked folder by folder with `O_NOFOLLOW` from a descriptor of the workspace, so a symlink can lead
nowhere; what is opened is checked to be a regular file before it is read; sizes, numbers and depth are bounded.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from sandbox._directories import remove_tree
from sandbox.port import SandboxPathError, WorkspaceLimitError
from schemas.records import FileState

MAX_DEPTH = 100
"""Of folders; deeper trees are refused, since they are only made to break readers."""
Kind = Literal["file", "directory", "symlink"]
_BLOCK = 512
_CHUNK_BYTES = 1 << 20
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 8


class Entry(NamedTuple):
    """One entry found in a workspace, with the open folder that it lies in."""

    path: str
    name: str
    folder: int
    status: os.stat_result


def parts_of(path: str) -> tuple[str, ...]:
    """Components of a path relative to the workspace.

    Raises:
        SandboxPathError: absolute, empty, with `..`, with NUL, or too deep.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or len(parts) > MAX_DEPTH:
        raise SandboxPathError(f"not a path inside the workspace: {path[:200]!r}")
    return parts


def read_file(root: Path, path: str, max_bytes: int) -> bytes:
    """Read a regular file.

    Raises:
        SandboxPathError: no regular file inside the workspace (links are not followed), or larger.
    """
    *folders, name = parts_of(path)
    with open_root(root) as descriptor:
        try:
            folder = descend(descriptor, folders)
        except OSError as error:
            raise SandboxPathError(f"can't open {path[:200]!r}: {error.strerror}") from error
        try:
            content = _read_regular(folder, name, max_bytes)
        finally:
            os.close(folder)
    if content is None:
        raise SandboxPathError(f"{path[:200]!r} is no regular file")
    if len(content) > max_bytes:
        raise SandboxPathError(f"{path[:200]!r} has more than {max_bytes} bytes")
    return content


def write_files(root: Path, files: Mapping[str, bytes], mode: int = 0o644) -> None:
    """Write files; whatever stands in the way of a file or of its folders is replaced, links included.

    Raises:
        SandboxPathError: a path that leaves the workspace.
    """
    wanted = {path: parts_of(path) for path in files}
    with open_root(root) as descriptor:
        for path, (*folders, name) in wanted.items():
            folder = descend(descriptor, folders, make=True)
            try:
                write_regular(folder, name, files[path], mode)
            finally:
                os.close(folder)


def walk(root: Path) -> Iterator[Entry]:
    """All entries, folders before their content, names in order; entries that vanish meanwhile are left out.

    Raises:
        WorkspaceLimitError: deeper than `MAX_DEPTH`.
    """
    with open_root(root) as descriptor:
        yield from _walk(descriptor, "", 1)


def measure(root: Path, limit: int) -> int:
    """Bytes of the workspace as a tar would hold them, so that a million empty files cost too; stops above `limit`."""
    total = 0
    try:
        for entry in walk(root):
            total += _BLOCK
            if stat.S_ISREG(entry.status.st_mode):
                total += -(-entry.status.st_size // _BLOCK) * _BLOCK
            if total > limit:
                break
    except WorkspaceLimitError:
        return limit + 1
    return total


def states(root: Path, max_bytes: int) -> dict[str, FileState]:
    """Every file, folder and symlink with its state; sockets, pipes and devices are left out.

    Raises:
        WorkspaceLimitError: more than `max_bytes` in all.
    """
    found: dict[str, FileState] = {}
    for entry, kind, content, target in contents(root, max_bytes):
        found[entry.path] = FileState(
            kind=kind,
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest() if kind == "file" else None,
            mode=stat.S_IMODE(entry.status.st_mode),
            target=target,
        )
    return found


def contents(root: Path, max_bytes: int) -> Iterator[tuple[Entry, Kind, bytes, str | None]]:
    """Entries with kind, bytes of a file, target of a link; bounded in all as `measure` counts."""
    left = max_bytes
    for entry in walk(root):
        kind, content, target = kind_of(entry.status), b"", None
        left -= _BLOCK
        with suppress(FileNotFoundError):
            if kind == "symlink":
                target = os.readlink(entry.name, dir_fd=entry.folder)
            elif kind == "file":
                read = _read_regular(entry.folder, entry.name, max(left, 0))
                kind, content = (kind, read) if read is not None else (None, b"")
            left -= -(-len(content) // _BLOCK) * _BLOCK
            if left < 0:
                raise WorkspaceLimitError(f"the workspace has more than {max_bytes} bytes")
            if kind:
                yield entry, kind, content, target


def kind_of(status: os.stat_result) -> Kind | None:
    if stat.S_ISREG(status.st_mode):
        return "file"
    if stat.S_ISDIR(status.st_mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(status.st_mode) else None


def _walk(folder: int, prefix: str, depth: int) -> Iterator[Entry]:
    if depth > MAX_DEPTH:
        raise WorkspaceLimitError(f"the workspace is more than {MAX_DEPTH} folders deep")
    for name in sorted(os.listdir(folder)):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield Entry(prefix + name, name, folder, status)
        if stat.S_ISDIR(status.st_mode):
            with suppress(FileNotFoundError, NotADirectoryError):
                inner = _open_entry(folder, name, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    yield from _walk(inner, f"{prefix}{name}/", depth + 1)
                finally:
                    os.close(inner)


@contextmanager
def open_root(root: Path) -> Iterator[int]:
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    except PermissionError:
        root.chmod(0o755)  # the code inside owns it and may have closed it
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_entry(folder: int, name: str, flags: int) -> int:
    """Open without following; an entry of ours that was made unreadable is made readable."""
    try:
        return os.open(name, flags | _OPEN, dir_fd=folder)
    except PermissionError:
        handle = os.open(name, os.O_PATH | _OPEN, dir_fd=folder)
        try:
            status = os.fstat(handle)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise
            Path(f"/proc/self/fd/{handle}").chmod(stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        finally:
            os.close(handle)
        return os.open(name, flags | _OPEN, dir_fd=folder)


def descend(root: int, folders: list[str], *, make: bool = False) -> int:
    """Open the folder at the end of `folders`, one component at a time; the caller closes it.

    Raises:
        OSError: a component is missing, a link or no folder (where `make` is not given).
    """
    current = os.dup(root)
    for name in folders:
        try:
            inner = _make_folder(current, name) if make else _open_entry(current, name, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(current)
        current = inner
    return current


def _make_folder(parent: int, name: str) -> int:
    for _ in range(_TRIES):
        try:
            return _open_entry(parent, name, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
        except OSError:  # a link or a file
            remove_entry(parent, name)
    raise SandboxPathError(f"{name[:200]!r} keeps changing")


def _read_regular(folder: int, name: str, max_bytes: int) -> bytes | None:
    """Content, at most one byte more than `max_bytes`; None where it is no regular file."""
    try:
        descriptor = _open_entry(folder, name, os.O_RDONLY | os.O_NONBLOCK)  # non-blocking: a pipe has no writer
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        content = bytearray()
        while len(content) <= max_bytes:
            chunk = file.read(min(_CHUNK_BYTES, max_bytes + 1 - len(content)))
            if not chunk:
                break
            content += chunk
        return bytes(content)


def write_regular(folder: int, name: str, content: bytes, mode: int) -> None:
    for _ in range(_TRIES):
        remove_entry(folder, name)
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
        return
    raise SandboxPathError(f"{name[:200]!r} keeps changing")


def remove_entry(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        remove_tree(Path(f"/proc/self/fd/{folder}") / name)
