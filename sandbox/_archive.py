"""Snapshots of a workspace as deterministic tars, and the way back.

Written member by member through `sandbox._workspace`, not by `tarfile`'s own extraction, which follows links on the way
to a member and refuses links that a workspace may well hold.
"""

import hashlib
import io
import os
import stat
import tarfile
from pathlib import Path

from sandbox._directories import remove_tree
from sandbox._workspace import contents, descend, kind_of, open_root, parts_of, remove_entry, walk, write_regular
from sandbox.port import SandboxError
from schemas.records import Workspace


def pack(root: Path, max_bytes: int) -> Workspace:
    """Deterministic tar: names in order, no times, no owners. Links stay links, hard links become copies.

    Sockets, pipes and devices are left out, and named in the archive's comment.

    Raises:
        WorkspaceLimitError: more than `max_bytes` in all.
    """
    special = sorted(entry.path for entry in walk(root) if not kind_of(entry.status))
    note = {"comment": "left out (special): " + ", ".join(special)} if special else None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers=note) as archive:
        for entry, kind, content, target in contents(root, max_bytes):
            member = tarfile.TarInfo(entry.path)
            member.mode = stat.S_IMODE(entry.status.st_mode) & 0o777
            member.type = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}[kind]
            member.linkname, member.size = target or "", len(content)
            archive.addfile(member, io.BytesIO(content))
    data = buffer.getvalue()
    return Workspace(sha256=hashlib.sha256(data).hexdigest(), data=data)


def unpack(root: Path, workspace: Workspace) -> None:
    """Replace the workspace by a snapshot.

    Raises:
        SandboxError: the digest is wrong, or it is no archive of plain files, folders and symlinks.
    """
    if hashlib.sha256(workspace.data).hexdigest() != workspace.sha256:
        raise SandboxError(f"workspace {workspace.sha256} has other content than its digest says")
    clear(root)
    modes: list[tuple[tuple[str, ...], int]] = []
    with open_root(root) as descriptor:
        try:
            with tarfile.open(fileobj=io.BytesIO(workspace.data), mode="r:") as archive:
                for member in archive:
                    _unpack_member(descriptor, archive, member)
                    if member.isdir():
                        modes.append((parts_of(member.name), member.mode & 0o777))
        except (tarfile.TarError, OSError) as error:
            raise SandboxError(f"workspace {workspace.sha256} can't be unpacked: {error}") from error
        # Last and inside out: a folder that can't be written had to be filled first.
        for parts, mode in reversed(modes):
            _set_mode(descriptor, parts, mode)


def clear(root: Path) -> None:
    """Remove all that is in the workspace; the folder itself stays, since it may be mounted."""
    with open_root(root):
        pass
    for child in list(root.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            child.unlink(missing_ok=True)


def _unpack_member(root: int, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    *folders, name = parts_of(member.name)
    if member.isdir():
        os.close(descend(root, [*folders, name], make=True))
        return
    folder = descend(root, folders, make=True)
    try:
        if member.issym():
            remove_entry(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
        elif member.isreg() and not member.issparse():
            source = archive.extractfile(member)
            assert source is not None
            write_regular(folder, name, source.read(), member.mode & 0o777)
        else:
            raise SandboxError(f"workspace archive holds {member.name[:200]!r} of type {member.type!r}")
    finally:
        os.close(folder)


def _set_mode(root: int, parts: tuple[str, ...], mode: int) -> None:
    folder = descend(root, list(parts))
    try:
        os.fchmod(folder, mode)
    finally:
        os.close(folder)
