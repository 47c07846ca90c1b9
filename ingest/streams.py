"""Positions in streams: where a producer that restarts goes on."""

from msgspec import Struct
from pyarrow import compute

from ingest.port import EventLog
from schemas.wire import WireError, decode_envelope, decode_record, sha256

_WINDOW_OFFSETS = 4096
_WINDOW_BYTES = 8 * 1024 * 1024


class StreamPosition(Struct, frozen=True):
    """Where a stream goes on."""

    seq: int = 0
    """Of the next event."""
    prev_sha256: bytes | None = None
    """Digest of the last event's envelope bytes; None at the start."""


def last_of_stream(log: EventLog, stream: str, key: str) -> StreamPosition | None:
    """Position after a stream's last event in the log; None if the log holds none of it.

    Scans the key's partition backwards, so it costs as much as what was appended since. Events that retention
    has taken are not found.

    Args:
        log: where to look.
        stream: name of the stream.
        key: its events' log key: the trajectory id, or the stream's name where there is no trajectory.

    Raises:
        LogUnavailableError: if the log can't be read.
    """
    partition = log.partition_of(key)
    bounds = log.bounds(partition)
    end = bounds.next
    while end > bounds.first:
        start = max(bounds.first, end - _WINDOW_OFFSETS)
        position = None
        for batch in log.read(partition, start, end, _WINDOW_BYTES):
            for value in batch.filter(compute.equal(batch["key"], key))["value"]:
                position = _position_after(value.as_py(), stream) or position
        if position is not None:
            return position
        end = start
    return None


def _position_after(value: bytes, stream: str) -> StreamPosition | None:
    try:
        record = decode_record(value)
        envelope = decode_envelope(record.envelope)
    except WireError:
        return None  # not ours to judge: the gate quarantines it
    if envelope.stream != stream:
        return None
    return StreamPosition(envelope.seq + 1, sha256(record.envelope))
