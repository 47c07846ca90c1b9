"""What is particular to bubblewrap: nothing is left behind, whoever dies; speed; settings."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sandbox.bubblewrap import BubblewrapSandbox
from sandbox.open import open_sandbox
from sandbox.port import SandboxError, SandboxUnavailableError
from schemas.records import Command, Limits

OWNER = """
import sys, time
from sandbox.open import open_sandbox
from schemas.records import Command
sandbox = open_sandbox()
process = sandbox.start(Command(argv=("sh", "-c", "sleep 987 & sleep 987 & echo up; wait")))
assert process.read_until(b"up\\n", 10)[1]
print("ready", flush=True)
try:
    sandbox.execute(Command(argv=("sleep", "654")))
except KeyboardInterrupt:
    assert sandbox.execute(Command(argv=("true",))).outcome == "ok"
    sandbox.close()
    print("clean", flush=True)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Sandboxes of processes started by the test live here."""
    monkeypatch.setenv("TRAJLAKE_SANDBOX_DIR", str(tmp_path / "sandboxes"))
    return tmp_path / "sandboxes"


@pytest.fixture
def owner(folder):
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def processes_in(folder):
    """bwrap processes whose command line names the folder, and what they started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in argument for argument in process.info["cmdline"] or ()):
            found += [process, *process.children(recursive=True)]
    return found


def wait_until_dead(processes):
    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    return len(gone)


def test_a_killed_owner_leaves_no_process(owner, folder):
    processes = processes_in(folder)
    assert len(processes) >= 6
    owner.kill()
    wait_until_dead(processes)


def test_a_dead_owners_files_are_removed_at_the_next_start(owner, folder):
    owner.kill()
    owner.wait()
    assert [path for path in folder.iterdir() if path.is_dir()]
    subprocess.run([sys.executable, "-c", "from sandbox.open import open_sandbox; open_sandbox()"], check=True)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_living_owners_files_are_kept(owner, folder):
    subprocess.run([sys.executable, "-c", "from sandbox.open import open_sandbox; open_sandbox()"], check=True)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
    assert owner.poll() is None


def test_ctrl_c_is_the_owners_to_handle(owner, folder):
    processes = processes_in(folder)
    os.killpg(owner.pid, signal.SIGINT)
    assert owner.stdout.readline() == "clean\n"
    assert owner.wait(10) == 0
    wait_until_dead(processes)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_nothing_is_left_after_closing():
    open_sandbox().close()  # what belongs to the process, not to a sandbox: its folder's lock
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    children = len(psutil.Process().children())
    mounts = Path("/proc/self/mountinfo").read_text()
    with open_sandbox() as sandbox:
        folder = sandbox._folder
        assert folder.is_dir()
        sandbox.execute(Command(argv=("sh", "-c", "echo x > f; setsid sleep 100 &")))
        sandbox.execute(Command(argv=("sleep", "10"), limits=Limits(wall_seconds=0.1)))
        sandbox.execute(Command(argv=("no-such-program",)))
        sandbox.start(Command(argv=("sleep", "100")))
    assert not folder.exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert len(psutil.Process().children()) == children
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_a_binary_that_is_no_bwrap_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv("TRAJLAKE_BWRAP", "/bin/false")
    with pytest.raises(SandboxUnavailableError, match="TRAJLAKE_BWRAP"):
        open_sandbox()


def test_a_bwrap_that_fails_later_is_an_infrastructure_error(tmp_path, monkeypatch):
    """A wrapper of the real one that refuses after it was found to work, as at a limit on namespaces."""
    real = BubblewrapSandbox()._bwrap
    switch, wrapper = tmp_path / "broken", tmp_path / "bwrap"
    wrapper.write_text(
        f"#!/bin/sh\nif [ -e {switch} ]; then echo 'bwrap: no space left' >&2; exit 1; fi\nexec {real} \"$@\"\n"
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("TRAJLAKE_BWRAP", str(wrapper))
    with open_sandbox() as sandbox:
        assert sandbox.execute(Command(argv=("true",))).outcome == "ok"
        switch.touch()
        result = sandbox.execute(Command(argv=("true",)))
        assert (result.outcome, result.exit_code) == ("infra_error", None)
        assert "no space left" in result.error
        with pytest.raises(SandboxError, match="no space left"):
            sandbox.start(Command(argv=("true",)))


def test_a_workspace_that_vanished_is_an_infrastructure_error():
    with open_sandbox() as sandbox:
        sandbox._workspace.rmdir()
        result = sandbox.execute(Command(argv=("true",)))
        assert result.outcome == "infra_error"
        assert "bwrap" in result.error


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="bubblewrap"):
        open_sandbox("dokcer")


def test_a_small_command_costs_milliseconds():
    with open_sandbox() as sandbox:
        times = []
        for _ in range(30):
            started = time.perf_counter()
            sandbox.execute(Command(argv=("sh", "-c", "true")))
            times.append(time.perf_counter() - started)
    assert min(times) < 0.02
