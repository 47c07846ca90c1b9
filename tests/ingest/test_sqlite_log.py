"""What is special about the SQLite backend: files, locks, damage."""

import multiprocessing
import resource
import sqlite3
import subprocess
import sys

import pytest

from ingest.open import create_log, open_log
from ingest.port import LogError, LogFormatError, LogUnavailableError
from ingest.sqlite_log import SqliteLog
from schemas.records import ProducerRecord


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.sqlite"


@pytest.mark.parametrize("url", ["redis://host/0", "", "no-scheme", "file:///tmp/x"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(url):
    with pytest.raises(ValueError, match="known: sqlite:///"):
        open_log(url)


def test_a_relative_url_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"sqlite:///data/log\.sqlite"):
        create_log("sqlite://log.sqlite")


@pytest.mark.parametrize("partitions", [0, -1, 65])
def test_a_bad_number_of_partitions_is_refused(path, partitions):
    with pytest.raises(ValueError, match="partitions"):
        SqliteLog.create(path, partitions=partitions)
    assert not path.exists()


def test_plain_paths_and_special_characters_work(tmp_path):
    path = tmp_path / "a b?c#d%20" / "log.sqlite"
    with SqliteLog.create(path) as log:
        log.append([ProducerRecord("k", b"v")])
    assert path.is_file()
    with SqliteLog.open(str(path)) as log:
        assert log.bounds(log.partition_of("k")).next == 1


def test_a_file_that_is_no_database_is_refused_and_left(path):
    path.write_bytes(b"hello, this is text and long enough to be looked at" * 100)
    before = path.read_bytes()
    for function in (SqliteLog.open, SqliteLog.create):
        with pytest.raises(LogFormatError, match=r"log\.sqlite"):
            function(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused_and_left(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE precious (x)")
    connection.close()
    before = path.read_bytes()
    for function in (SqliteLog.open, SqliteLog.create):
        with pytest.raises(LogFormatError):
            function(path)
    assert path.read_bytes() == before


def test_a_newer_format_is_refused(path):
    SqliteLog.create(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(LogFormatError, match="format 99"):
        SqliteLog.open(path)


def test_an_empty_file_becomes_a_log(path):
    path.touch()
    with pytest.raises(LogFormatError):
        SqliteLog.open(path)
    SqliteLog.create(path).close()
    SqliteLog.open(path).close()


def test_commits_are_synced(path):
    with SqliteLog.create(path) as log:
        assert log._writer.execute("PRAGMA synchronous").fetchone() == (2,)
        assert log._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_lock_held_too_long_is_a_typed_error_and_passes(path):
    SqliteLog.create(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    with SqliteLog.open(path, busy_seconds=0.1) as log:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LogUnavailableError, match="locked"):
            log.append([ProducerRecord("k", b"v")])
        assert log.bounds(0).next == 0, "readers are not held up"
        other.execute("ROLLBACK")
        log.append([ProducerRecord("k", b"v")])
        assert log.bounds(log.partition_of("k")).next == 1
    other.close()


def test_a_file_that_cannot_be_made_is_a_typed_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LogUnavailableError, match="file"):
        SqliteLog.create(tmp_path / "file" / "log.sqlite")


FILL = """
import resource, signal, sys
from ingest.port import LogUnavailableError
from ingest.sqlite_log import SqliteLog
from schemas.records import ProducerRecord

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = SqliteLog.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
num = 0
try:
    for _ in range(100):
        log.append([ProducerRecord("k", bytes(50_000)), ProducerRecord("k", bytes(50_000))])
        num += 2
except LogUnavailableError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.append([ProducerRecord("k", b"there is room again")])
    print(num + 1)
"""


def test_a_full_disk_is_a_typed_error_loses_nothing_and_passes(path):
    """A file size limit makes write(2) fail as a full disk does."""
    SqliteLog.create(path).close()
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(path)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    with SqliteLog.open(path) as log:
        partition = log.partition_of("k")
        batches = list(log.read(partition, 0, log.bounds(partition).next, 1 << 20))
        assert sum(batch.num_rows for batch in batches) == int(done.stdout) > 3
        assert batches[-1]["value"][-1].as_py() == b"there is room again"


def _append_in_child(log, results):
    try:
        log.append([ProducerRecord("k", b"v")])
    except LogError as error:
        results.put(str(error))
    else:
        results.put("appended")


def test_use_after_a_fork_is_refused(path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with SqliteLog.create(path) as log:
        child = context.Process(target=_append_in_child, args=(log, results))
        child.start()
        child.join(timeout=30)
        assert "fork" in results.get()
        log.append([ProducerRecord("k", b"v")])


def test_retention_of_many_records_goes_in_small_transactions(path):
    with SqliteLog.create(path) as log:
        log.append([ProducerRecord("k", b"v") for _ in range(12_000)])
        partition = log.partition_of("k")
        log.truncate_before(partition, 11_999)
        count = log._reader.execute(f"SELECT count(*) FROM records_{partition}").fetchone()
        assert count == (1,)
