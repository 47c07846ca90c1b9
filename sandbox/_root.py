"""What a bubblewrap sandbox's root file system is made from: read-only parts of the host, and nothing else of it.

`/usr` and the links beside it, the Python that runs trajlake (its `sys.base_prefix`), and an `/etc` of our own. No
home, no repository, no `/var`, no `/sys`. `/proc` is read-only: the kernel lets host uid 0 write `/proc/sys` without
any capability, so a sandbox started by root could otherwise set `kernel.core_pattern` of the host.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
from functools import cache
from pathlib import Path

HOST_PARTS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Links into /usr on merged systems, folders on others."""

TOOLS = "/run/trajlake/bin"
"""Inside: a folder with `python` and `python3`, first on PATH."""

ENVIRONMENT = {
    "PATH": f"{TOOLS}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": "/tmp",  # noqa: S108 - inside the sandbox, where /tmp is private
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "USER": "sandbox",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
"""The whole environment of a command, before its own; nothing of the host's is passed on."""

_ETC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/tmp:/bin/sh\n",
    "group": "root:x:0:\nsandbox:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def make_etc(folder: Path) -> None:
    """Make the sandbox's /etc: synthetic accounts, the host's linker cache and `alternatives` links."""
    folder.mkdir()
    for name, content in _ETC_FILES.items():
        (folder / name).write_text(content)
    if Path("/etc/ld.so.cache").is_file():
        shutil.copyfile("/etc/ld.so.cache", folder / "ld.so.cache")
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():
        (folder / "alternatives").mkdir()
        for link in alternatives.iterdir():
            if link.is_symlink():
                (folder / "alternatives" / link.name).symlink_to(link.readlink())


@cache
def host_mounts() -> tuple[str, ...]:
    """Arguments of bwrap that mount the host's parts, always the same in one process."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for part in HOST_PARTS:
        if Path(part).is_symlink():
            arguments += ["--symlink", str(Path(part).readlink()), part]
        elif Path(part).is_dir():
            arguments += ["--ro-bind", part, part]
    prefix = os.path.realpath(sys.base_prefix)
    if not Path(prefix).is_relative_to("/usr"):
        arguments += ["--ro-bind", prefix, prefix]
    interpreter = os.path.realpath(sys.executable)
    for name in ("python", "python3"):
        arguments += ["--symlink", interpreter, f"{TOOLS}/{name}"]
    return tuple(arguments)


@cache
def image_digest(bwrap_version: str) -> str:
    """Stable digest of what the root is made from, as `sha256:HEX`.

    Over: the host's os-release, machine and Python version, bwrap's version, our /etc and the list of mounts. Not over
    every file of /usr, which would cost seconds: two hosts with one release and different packages share a digest.
    """
    release = Path("/etc/os-release")
    content = {
        "os_release": release.read_text() if release.is_file() else platform.platform(),
        "machine": platform.machine(),
        "python": sys.version,
        "bwrap": bwrap_version,
        "etc": _ETC_FILES,
        "environment": ENVIRONMENT,
        "mounts": host_mounts(),
    }
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
