"""What every event log backend does; see `conftest.BACKENDS`."""

import signal
import subprocess
import sys
import threading
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.open import create_log, open_log
from ingest.port import (
    RECORD_SCHEMA,
    LogError,
    LogExistsError,
    LogNotFoundError,
    OffsetTruncatedError,
    RecordTooLargeError,
)
from schemas.records import Bounds, ProducerRecord

PRODUCER = """
import sys
from ingest.open import open_log
from schemas.records import ProducerRecord

url, name, num_batches = sys.argv[1], sys.argv[2], int(sys.argv[3])
log = open_log(url)
for batch in range(num_batches):
    log.append([ProducerRecord(f"{name}-{i % 3}", b"%s %d %d" % (name.encode(), batch, i)) for i in range(10)])
    print(batch, flush=True)
"""


def rows(log, partition, max_bytes=1 << 20):
    bounds = log.bounds(partition)
    batches = log.read(partition, bounds.first, bounds.next, max_bytes)
    return [row for batch in batches for row in batch.to_pylist()]


def values(log):
    return [row["value"] for partition in log.partitions() for row in rows(log, partition)]


def records(num, key="k", size=0):
    return [ProducerRecord(key, b"%d" % i + b"." * size) for i in range(num)]


def start_producer(url, name, num_batches):
    command = [sys.executable, "-c", PRODUCER, url, name, str(num_batches)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_new_log_is_empty(log):
    assert [log.bounds(partition) for partition in log.partitions()] == [Bounds(0, 0), Bounds(0, 0)]
    assert values(log) == []


def test_appended_records_are_read_back_with_rising_offsets(log):
    log.append(records(100))
    partition = log.partition_of("k")
    read = rows(log, partition)
    assert [(row["key"], row["value"]) for row in read] == [("k", b"%d" % i) for i in range(100)]
    offsets = [row["offset"] for row in read]
    assert offsets == sorted(set(offsets))
    assert log.bounds(partition).next > offsets[-1]


def test_an_empty_append_changes_nothing(log):
    log.append([])
    assert values(log) == []


def test_values_may_be_empty_or_arbitrary_bytes(log):
    log.append([ProducerRecord("k", b""), ProducerRecord("k", bytes(range(256)))])
    assert values(log) == [b"", bytes(range(256))]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(
        st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=5), st.binary(max_size=50)), max_size=20),
        max_size=5,
    )
)
def test_records_of_one_key_keep_their_order_whatever_the_batches(new_url, batches):
    with create_log(new_url()) as log:
        expected = {}
        for batch in batches:
            log.append([ProducerRecord(key, value) for key, value in batch])
            for key, value in batch:
                expected.setdefault(key, []).append(value)
        actual = {}
        for partition in log.partitions():
            for row in rows(log, partition, max_bytes=64):
                actual.setdefault(row["key"], []).append(row["value"])
                assert log.partition_of(row["key"]) == partition
        assert actual == expected


def test_a_keys_partition_is_its_crc32_in_every_process(new_url):
    with create_log(new_url(), partitions=5) as log:
        assert list(log.partitions()) == [0, 1, 2, 3, 4]
        for key in ("", "a", "ключ", "0198aaaa-bbbb-7ccc-dddd-eeeeffff0000"):
            assert log.partition_of(key) == zlib.crc32(key.encode()) % 5


def test_keys_spread_over_all_partitions(log):
    log.append([ProducerRecord(f"key-{i}", b"") for i in range(200)])
    assert min(log.bounds(partition).next for partition in log.partitions()) > 50


def test_batches_have_the_ports_schema_and_stay_within_max_bytes(log):
    log.append(records(100, size=1000))
    partition = log.partition_of("k")
    batches = list(log.read(partition, 0, log.bounds(partition).next, 10_000))
    assert all(batch.schema.equals(RECORD_SCHEMA) for batch in batches)
    assert len(batches) > 9
    assert all(sum(len(value.as_py()) for value in batch["value"]) <= 10_000 for batch in batches)
    assert sum(batch.num_rows for batch in batches) == 100


def test_a_record_above_max_bytes_comes_alone(log):
    log.append([ProducerRecord("k", b"a"), ProducerRecord("k", b"b" * 5000), ProducerRecord("k", b"c")])
    partition = log.partition_of("k")
    batches = list(log.read(partition, 0, log.bounds(partition).next, 100))
    assert [batch.num_rows for batch in batches] == [1, 1, 1]


def test_read_gives_exactly_the_range(log):
    log.append(records(50))
    partition = log.partition_of("k")
    offsets = [row["offset"] for row in rows(log, partition)]
    batches = log.read(partition, offsets[10], offsets[20], 1 << 20)
    assert [row["offset"] for batch in batches for row in batch.to_pylist()] == offsets[10:20]


def test_an_empty_range_gives_no_batch(log):
    log.append(records(5))
    partition = log.partition_of("k")
    assert list(log.read(partition, 3, 3, 100)) == []
    next_offset = log.bounds(partition).next
    assert list(log.read(partition, next_offset, next_offset + 10, 100)) == []


def test_an_append_during_a_read_neither_blocks_nor_shows_before_its_offset(log):
    log.append(records(10, size=100))
    partition = log.partition_of("k")
    end = log.bounds(partition).next
    reading = log.read(partition, 0, end, 200)
    first = next(reading)
    log.append(records(10, size=100))
    assert first.num_rows + sum(batch.num_rows for batch in reading) == 10


@pytest.mark.parametrize("partition", [-1, 2])
def test_an_unknown_partition_is_refused(log, partition):
    with pytest.raises(ValueError, match="partition"):
        log.bounds(partition)
    with pytest.raises(ValueError, match="partition"):
        log.read(partition, 0, 1, 100)


def test_a_record_too_large_appends_nothing(log):
    with pytest.raises(RecordTooLargeError):
        log.append([ProducerRecord("k", b"fits"), ProducerRecord("k", bytes(log.max_record_bytes + 1))])
    assert values(log) == []


def test_the_largest_record_is_taken(log):
    log.append([ProducerRecord("k", bytes(log.max_record_bytes))])
    assert [len(value) for value in values(log)] == [log.max_record_bytes]


def test_a_reopened_log_is_the_same_log(url, log):
    log.append(records(10))
    with open_log(url) as again:
        assert again.log_id == log.log_id
        assert values(again) == values(log)
        again.append(records(1))
    assert len(values(log)) == 11


def test_two_logs_have_two_ids(new_url):
    with create_log(new_url()) as one, create_log(new_url()) as two:
        assert one.log_id != two.log_id


def test_creating_over_a_log_is_refused_and_leaves_it(url, log):
    log.append(records(3))
    with pytest.raises(LogExistsError):
        create_log(url)
    assert len(values(log)) == 3


def test_a_missing_log_is_not_found(new_url):
    with pytest.raises(LogNotFoundError, match="trajlake init"):
        open_log(new_url())


def test_close_is_idempotent_and_ends_use(url):
    log = create_log(url)
    log.close()
    log.close()
    with pytest.raises(LogError):
        log.append(records(1))
    with pytest.raises(LogError):
        log.bounds(0)


def test_retention_forgets_below_the_offset_and_keeps_the_rest(log):
    log.append(records(100))
    partition = log.partition_of("k")
    offsets = [row["offset"] for row in rows(log, partition)]
    log.truncate_before(partition, offsets[40])
    assert log.bounds(partition).first == offsets[40]
    assert [row["offset"] for row in rows(log, partition)] == offsets[40:]
    log.truncate_before(partition, offsets[20])
    assert log.bounds(partition).first == offsets[40], "what is forgotten stays so"


def test_offsets_are_not_reused_after_everything_was_forgotten(url, log):
    log.append(records(10))
    partition = log.partition_of("k")
    end = log.bounds(partition).next
    log.truncate_before(partition, end)
    assert log.bounds(partition) == Bounds(end, end)
    with open_log(url) as again:
        again.append(records(1))
    assert [row["offset"] for row in rows(log, partition)] == [end]


def test_retention_beyond_the_end_is_refused(log):
    with pytest.raises(ValueError, match="offset 1 "):
        log.truncate_before(0, 1)


def test_a_read_of_forgotten_records_says_so_instead_of_skipping(log):
    log.append(records(100, size=100))
    partition = log.partition_of("k")
    offsets = [row["offset"] for row in rows(log, partition)]
    reading = log.read(partition, 0, offsets[-1], 500)
    next(reading)
    log.truncate_before(partition, offsets[60])
    with pytest.raises(OffsetTruncatedError, match=f"{offsets[60]}"):
        list(reading)
    with pytest.raises(OffsetTruncatedError):
        list(log.read(partition, 0, 10, 500))


def test_threads_may_share_a_log(log):
    def produce(name):
        for batch in range(20):
            log.append([ProducerRecord(name, b"%s %d %d" % (name.encode(), batch, i)) for i in range(5)])

    threads = [threading.Thread(target=produce, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        mine = [value for value in values(log) if value.startswith(b"t%d " % i)]
        assert mine == [b"t%d %d %d" % (i, batch, j) for batch in range(20) for j in range(5)]


def test_four_processes_append_at_once_and_nothing_is_lost_or_reordered(url, log):
    producers = [start_producer(url, f"p{i}", 25) for i in range(4)]
    for producer in producers:
        producer.communicate(timeout=60)
        assert producer.returncode == 0
    read = [(row["key"], row["value"]) for partition in log.partitions() for row in rows(log, partition)]
    assert len(read) == 4 * 25 * 10
    for i in range(4):
        for key in (f"p{i}-{j}" for j in range(3)):
            places = [tuple(map(int, value.split()[1:])) for k, value in read if k == key]
            assert places == sorted(places)


def test_what_was_acknowledged_survives_kill_9(url, log):
    producers = [start_producer(url, f"p{i}", 1_000_000) for i in range(2)]
    acknowledged = []
    for producer in producers:
        lines = [producer.stdout.readline() for _ in range(15)]
        producer.send_signal(signal.SIGKILL)
        lines += producer.stdout.readlines()
        producer.wait(timeout=30)
        producer.stdout.close()
        acknowledged.append(max(int(line) for line in lines if line.endswith("\n")))
    with open_log(url) as again:
        read = values(again)
    for i, last in enumerate(acknowledged):
        mine = {tuple(map(int, value.split()[1:])) for value in read if value.startswith(b"p%d " % i)}
        assert mine >= {(batch, j) for batch in range(last + 1) for j in range(10)}
        assert len(mine) % 10 == 0, "an append is all or nothing"
