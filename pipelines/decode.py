"""From a batch of log records to rows of `events`: envelopes decoded, bytes kept as they are. Pure."""

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.garbage import collector_paused
from pipelines.rows import Columns, Row
from schemas.events import CLOSING_TYPES, Envelope
from schemas.tables import EVENTS
from schemas.wire import WireError, decode_envelope, decode_record, sha256

SORT = [("trajectory_id", "ascending"), ("partition", "ascending"), ("offset", "ascending")]
"""Order of rows in a file of `events`: a trajectory's rows lie together, found by row-group statistics."""


def events_table(log_id: str, partition: int, batch: pa.RecordBatch) -> pa.Table:
    """Rows of `events`, sorted.

    Args:
        log_id: The log.
        partition: The partition.
        batch: Records as `EventLog.read` gives them.
    """
    columns = Columns(EVENTS)
    offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
    with collector_paused():
        for offset, value in zip(offsets, values, strict=True):
            columns.add({"log_id": log_id, "partition": partition, "offset": offset, "value": value, **_decoded(value)})
    table = columns.table()
    return table.take(pc.sort_indices(table.select([name for name, _ in SORT]), sort_keys=SORT))


def _decoded(value: bytes) -> Row:
    """Columns of the envelope; none where it can't be decoded (project quarantines it, by name)."""
    try:
        record = decode_record(value)
        envelope = decode_envelope(record.envelope)
    except WireError:
        return {}
    return envelope_columns(envelope, record.envelope)


def envelope_columns(envelope: Envelope, stored: bytes) -> Row:
    """Columns of a decoded envelope and its stored bytes."""
    about_run = envelope.trajectory_id is None
    return {
        "type": envelope.type,
        "schema_version": envelope.schema_version,
        "event_id": envelope.event_id,
        "run_id": envelope.run_id,
        "trajectory_id": envelope.trajectory_id,
        "attempt": envelope.attempt,
        "stream": envelope.stream,
        "seq": envelope.seq,
        "producer_id": envelope.producer_id,
        "ts_ns": envelope.ts_ns,
        "prev_sha256": envelope.prev_sha256,
        "body_sha256": envelope.body_sha256,
        "envelope_sha256": sha256(stored),
        "is_closing": envelope.type in CLOSING_TYPES,
        "run_stream": envelope.stream if about_run else None,
        "run_seq": envelope.seq if about_run else None,
    }
