"""Leases: one process per pipeline and lake, and the loser learns who holds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.lease import LeaseHeldError, lease

HOLD = """
import sys
from pipelines.lease import lease
with lease(sys.argv[1], ("project", "ingest")):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_loser_learns_who_holds_it(tmp_path: Path):
    with (
        lease(str(tmp_path), ("ingest", "project")),
        pytest.raises(
            LeaseHeldError, match=rf"'project' of this lake is being run by pid {os.getpid()} on .* since 20.* UTC"
        ),
        lease(f"file://{tmp_path}", ("project",)),
    ):
        raise AssertionError("held twice")


def test_other_pipelines_and_other_lakes_are_free(tmp_path: Path):
    (tmp_path / "other").mkdir()
    with (
        lease(str(tmp_path), ("ingest",)),
        lease(str(tmp_path), ("project",)),
        lease(str(tmp_path / "other"), ("ingest",)),
    ):
        pass


def test_a_loser_keeps_none_of_the_locks(tmp_path: Path):
    with lease(str(tmp_path), ("project",)):
        with pytest.raises(LeaseHeldError), lease(str(tmp_path), ("ingest", "project", "verify")):
            raise AssertionError("held twice")
        with lease(str(tmp_path), ("ingest", "verify")):
            pass
    with lease(str(tmp_path), ("ingest", "project", "verify")):
        pass


def test_an_error_inside_frees_it(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), lease(str(tmp_path), ("ingest",)):
        _ = 1 / 0
    with lease(str(tmp_path), ("ingest",)):
        pass


def test_a_killed_holder_frees_it(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LeaseHeldError, match=f"pid {holder.pid} "), lease(str(tmp_path), ("ingest",)):
            raise AssertionError("held twice")
        holder.kill()
        holder.wait()
    with lease(str(tmp_path), ("ingest", "project")):
        pass


def test_an_object_store_has_no_lease(tmp_path: Path):
    with lease("s3://bucket/lake", ("ingest",)), lease("s3://bucket/lake", ("ingest",)):
        pass
