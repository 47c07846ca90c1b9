import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.events import BlobRef
from storage.blobs import BlobCorruptError, BlobError, BlobNotFoundError, BlobStore, BlobStoreUnavailableError, preview


@pytest.fixture(params=["path", "file", "memory"])
def store(request, tmp_path):
    urls = {"path": f"{tmp_path}/new/blobs", "file": f"file://{tmp_path}/new/blobs", "memory": "memory:///"}
    return BlobStore(urls[request.param])


@pytest.fixture
def local(tmp_path):
    return BlobStore(tmp_path)


def stored_path(tmp_path, ref):
    return tmp_path / ref.sha256[:2] / ref.sha256[2:]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=2000))
def test_what_is_put_comes_back_by_reference_and_by_digest(store, data):
    ref = store.put(data)
    assert (ref.sha256, ref.size) == (hashlib.sha256(data).hexdigest(), len(data))
    assert store.get(ref) == store.get(ref.sha256) == data


def test_a_second_put_changes_nothing(local, tmp_path):
    first = local.put(b"payload")
    before = stored_path(tmp_path, first).stat()
    assert local.put(b"payload") == first
    after = stored_path(tmp_path, first).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_names_are_laid_out_by_digest_and_nothing_else_is_left(local, tmp_path):
    ref = local.put(b"payload")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [stored_path(tmp_path, ref)]
    assert files[0].read_bytes() == b"payload"


def test_a_missing_blob_is_not_found(store):
    with pytest.raises(BlobNotFoundError) as caught:
        store.get("0" * 64)
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, BlobError)


def test_changed_bytes_are_corrupt(local, tmp_path):
    ref = local.put(b"payload")
    stored_path(tmp_path, ref).write_bytes(b"PAYLOAD")
    with pytest.raises(BlobCorruptError):
        local.get(ref)


def test_a_shortened_blob_is_mended_by_the_next_put(local, tmp_path):
    ref = local.put(b"payload")
    stored_path(tmp_path, ref).write_bytes(b"pay")
    local.put(b"payload")
    assert local.get(ref) == b"payload"


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 62 + "/."])
def test_only_digests_name_blobs(local, name):
    with pytest.raises(ValueError, match="not a hex SHA-256 digest"):
        local.get(BlobRef(sha256=name, size=1))


@pytest.mark.parametrize("url", ["bogus://x", "file://host/path"])
def test_a_url_that_cannot_be_understood_is_refused(url):
    with pytest.raises(ValueError, match=url):
        BlobStore(url)


def test_s3_urls_open_without_a_connection():
    assert BlobStore("s3://bucket/prefix", region="eu-central-1").url == "s3://bucket/prefix"


def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BlobStoreUnavailableError):
        BlobStore(tmp_path / "file" / "blobs")


def test_a_folder_that_cannot_be_written_is_unavailable(local, tmp_path):
    sha256 = hashlib.sha256(b"payload").hexdigest()
    (tmp_path / sha256[:2]).touch()
    with pytest.raises(BlobStoreUnavailableError, match=sha256):
        local.put(b"payload")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ""),
        (b"text", "text"),
        (("ä" * 500).encode(), "ä" * 200),
        (b"x" + "😀".encode() * 300, "x" + "😀" * 199),
        (b"\xff\xfe", ""),
        (b"a\0b", ""),
    ],
)
def test_previews_are_the_first_characters_of_text(data, expected):
    assert preview(data) == expected


def _put_many(path):
    store = BlobStore(path)
    for i in range(50):
        store.put(b"shared %d" % i)


def test_processes_may_put_the_same_blobs_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_put_many, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 50


WRITER = """
import sys
from storage.blobs import BlobStore
store = BlobStore(sys.argv[1])
for i in range(1_000_000):
    print(store.put(b"%d." % i * 20_000).sha256, flush=True)
"""


def test_a_name_never_shows_unfinished_bytes_after_kill_9(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    acknowledged = [process.stdout.readline().strip() for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    store = BlobStore(tmp_path)
    for sha256 in acknowledged:
        store.get(sha256)
    for folder in tmp_path.iterdir():
        for path in folder.iterdir():
            if not path.name.startswith(".put-"):
                store.get(folder.name + path.name)
