"""Follow one run's events of some types through a partition of the log, going on where the last look ended."""

from collections.abc import Iterator

from ingest.port import EventLog
from schemas.events import Event
from schemas.wire import WireError, decode_body, decode_envelope, decode_record

_READ_BYTES = 8 * 1024 * 1024


def follow_run(
    log: EventLog, partition: int, positions: dict[int, int], run_id: str, types: frozenset[str]
) -> Iterator[Event]:
    """Events after a partition's position, up to the log's end as it is now.

    Args:
        log: where to look.
        partition: one of its partitions.
        positions: partition → next offset to look at; this partition's moves on once all was taken.
        run_id: the run.
        types: event types; bodies of others are never decoded.

    Raises:
        LogUnavailableError: if the log can't be read.
    """
    bounds = log.bounds(partition)
    start = max(positions.get(partition, 0), bounds.first)
    for batch in log.read(partition, start, bounds.next, _READ_BYTES):
        for value in batch["value"]:
            event = _decode(value.as_py(), run_id, types)
            if event is not None:
                yield event
    positions[partition] = bounds.next


def _decode(value: bytes, run_id: str, types: frozenset[str]) -> Event | None:
    try:
        record = decode_record(value)
        envelope = decode_envelope(record.envelope)
        if envelope.run_id != run_id or envelope.type not in types:
            return None
        return Event(envelope, decode_body(envelope, record))
    except WireError:
        return None  # not ours to judge: the gate quarantines it
