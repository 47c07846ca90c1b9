import hashlib

import pytest

from sandbox.open import open_sandbox
from schemas.events import TrajectoryFinished, TrajectoryStarted
from schemas.records import Trajectory
from storage.blobs import BlobStore
from verify.runtime import SandboxRuntime


@pytest.fixture
def blobs(tmp_path):
    return BlobStore(str(tmp_path / "blobs"))


@pytest.fixture
def runtime(blobs):
    return SandboxRuntime(blobs)


@pytest.fixture
def hand_in(blobs):
    """A finished trajectory whose workspace holds the given files; None: without a workspace."""

    def make(files):
        ref = None
        if files is not None:
            with open_sandbox() as sandbox:
                sandbox.write(files)
                workspace = sandbox.snapshot()
            ref = blobs.put(workspace.data)
            assert ref.sha256 == hashlib.sha256(workspace.data).hexdigest()
        return Trajectory(
            trajectory_id="t",
            run_id="r",
            attempt=0,
            started=TrajectoryStarted(task_key="k", domain="d"),
            finished=TrajectoryFinished(status="completed", workspace_ref=ref),
        )

    return make
