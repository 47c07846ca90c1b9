"""Importers: foreign files → events in the log.

Every field of an event is derived from the source and the home's key, so a second import appends the same bytes
again: more records in the log, nothing new in the tables. An import that was interrupted is resumed by running it
again. A record of the source that makes no trajectory is kept as an aborted attempt that holds it whole, so it ends
as a row in `quarantine`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from ingest._payload import put_payload
from ingest.importers import openai_chat, tau_bench
from ingest.importers._derive import DerivedStream, derived_uuid, digest_of
from ingest.importers._source import BadRecord, Conversation, SourceFile, source_file
from ingest.port import EventLog
from schemas.events import (
    AttemptAborted,
    Body,
    Observation,
    Score,
    TrajectoryStarted,
    stream_of_attempt,
    stream_of_score,
)
from schemas.records import ProducerRecord
from storage.blobs import BlobStore

__all__ = ["FORMATS", "ImportReport", "Rejection", "import_file"]

_FORMATS: dict[str, Callable[[SourceFile], Iterator[tuple[Conversation | BadRecord, int]]]] = {
    tau_bench.NAME: tau_bench.conversations,
    openai_chat.NAME: openai_chat.conversations,
}
FORMATS = tuple(_FORMATS)
"""Names that `import_file` takes."""

MAX_REJECTIONS = 100
"""So many are listed in a report one by one; all are counted."""
_BATCH_BYTES = 4 * 1024 * 1024
_BATCH_RECORDS = 1_000
_INLINE_RAW_BYTES = 64 * 1024

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes of the file)."""


class Rejection(Struct, frozen=True):
    """A record of the source that made no trajectory."""

    place: int
    """Line, or element of the array, from 1."""
    reason: str
    detail: str


class ImportReport(Struct, kw_only=True):
    """What an import did."""

    format_name: str
    path: str
    run_id: str
    num_read: int = 0
    """Records of the source."""
    num_imported: int = 0
    """Trajectories."""
    num_scored: int = 0
    """Trajectories that came with a reward."""
    num_events: int = 0
    """Appended to the log, those of rejected records included."""
    rejected: Counter[str] = msgspec.field(default_factory=Counter)
    """Reason → number of records."""
    rejections: list[Rejection] = msgspec.field(default_factory=list)
    """The first `MAX_REJECTIONS` of them."""


def import_file(
    format_name: str,
    path: str | Path,
    log: EventLog,
    blobs: BlobStore | None,
    home_key: bytes,
    *,
    run_id: str | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Append a file's trajectories to the log; memory is bounded by the largest record.

    Args:
        format_name: one of `FORMATS`.
        path: the file, plain or gzipped.
        log: where events go.
        blobs: where large payloads go.
        home_key: the home's secret, from which salts are derived.
        run_id: the run that events belong to; by default named after format and content.
        progress: called now and then.

    Raises:
        ValueError: for an unknown format, or a file that can't be read to its end; what was read before is in the
            log, and importing the mended file is another import.
        LogUnavailableError: the log failed; run the import again.
        PayloadUnavailableError: the blob store failed; run the import again.
    """
    if format_name not in _FORMATS:
        raise ValueError(f"unknown format {format_name!r}; known: {', '.join(FORMATS)}")
    source = source_file(Path(path))
    run_id = run_id or f"import-{format_name}-{source.sha256[:16]}"
    report = ImportReport(format_name=format_name, path=str(path), run_id=run_id)
    encoder = _Encoder(format_name, source, run_id, log.max_record_bytes, home_key, blobs)
    batch: list[ProducerRecord] = []
    try:
        for item, position in _FORMATS[format_name](source):
            batch += _records(encoder, item, report)
            if len(batch) >= _BATCH_RECORDS or sum(len(record.value) for record in batch) >= _BATCH_BYTES:
                _append(log, batch, report)
                batch = []
            if progress is not None:
                progress(position, source.size)
    except ValueError:
        _append(log, batch, report)  # the source is damaged from here on; what came before is good
        raise
    _append(log, batch, report)
    return report


def _append(log: EventLog, batch: list[ProducerRecord], report: ImportReport) -> None:
    log.append(batch)
    report.num_events += len(batch)


def _records(encoder: "_Encoder", item: Conversation | BadRecord, report: ImportReport) -> list[ProducerRecord]:
    report.num_read += 1
    if isinstance(item, Conversation):
        try:
            records = encoder.conversation(item)
        except ValueError as error:
            raw = msgspec.json.encode(item)
            item = BadRecord(index=item.index, reason="wrong values", detail=str(error), raw=raw)
        else:
            report.num_imported += 1
            report.num_scored += item.score is not None
            return records
    report.rejected[item.reason] += 1
    if len(report.rejections) < MAX_REJECTIONS:
        report.rejections.append(Rejection(item.index + 1, item.reason, item.detail))
    return encoder.bad_record(item)


class _Encoder:
    """Encodes what a source holds as log records."""

    def __init__(
        self,
        format_name: str,
        source: SourceFile,
        run_id: str,
        max_record_bytes: int,
        home_key: bytes,
        blobs: BlobStore | None,
    ) -> None:
        self._format_name, self._source, self._run_id = format_name, source, run_id
        self._max_record_bytes, self._home_key, self._blobs = max_record_bytes, home_key, blobs

    def conversation(self, item: Conversation) -> list[ProducerRecord]:
        """All records of one trajectory.

        Raises:
            ValueError: if a value can't be encoded or an event is too large for the log.
        """
        trajectory_id = self._trajectory_id(item.index, item.ts_ns)
        own = self._stream(stream_of_attempt(trajectory_id, 0), trajectory_id, item.ts_ns)
        records = [own.encode(body) for body in (item.started, *item.bodies)]
        if item.score is not None:
            records.append(self._score(item.score, trajectory_id, item.ts_ns))
        for record in records:
            if len(record.value) > self._max_record_bytes:
                raise ValueError(f"an event of {len(record.value)} bytes; the log takes {self._max_record_bytes}")
        return records

    def bad_record(self, item: BadRecord) -> list[ProducerRecord]:
        """An attempt that begins, holds the record as the source has it, and is aborted with the reason."""
        trajectory_id = self._trajectory_id(item.index, 0)
        own = self._stream(stream_of_attempt(trajectory_id, 0), trajectory_id, 0)
        place = f"{self._format_name}:{self._source.label}#{item.index}"
        bodies: tuple[Body, ...] = (
            TrajectoryStarted(task_key=f"rejected/{item.index}", domain=self._format_name, source=place),
            self._raw(item.raw),
            AttemptAborted(
                reason=f"{place}: {item.reason}: {item.detail[:500]}", by=self._producer_id, failure_class=None
            ),
        )
        return [own.encode(body) for body in bodies]

    def _raw(self, raw: bytes) -> Observation:
        """The record as text where it is short text, and byte for byte in a blob where not."""
        if len(raw) <= _INLINE_RAW_BYTES or self._blobs is None:
            try:
                return Observation(content=raw.decode())
            except UnicodeDecodeError:
                if self._blobs is None:
                    return Observation(content=raw.decode(errors="backslashreplace"))
        return Observation(content_ref=put_payload(self._blobs, raw))

    @property
    def _producer_id(self) -> str:
        return f"import:{self._format_name}"

    def _trajectory_id(self, index: int, ts_ns: int) -> str:
        return derived_uuid(ts_ns, digest_of(self._format_name, self._source.sha256, "trajectory", index))

    def _score(self, score: Score, trajectory_id: str, ts_ns: int) -> ProducerRecord:
        name = stream_of_score(score.verifier_id, score.verifier_version, trajectory_id, 0)
        return self._stream(name, trajectory_id, ts_ns).encode(score)

    def _stream(self, name: str, trajectory_id: str, ts_ns: int) -> DerivedStream:
        return DerivedStream(
            run_id=self._run_id,
            producer_id=self._producer_id,
            stream=name,
            trajectory_id=trajectory_id,
            attempt=0,
            ts_ns=ts_ns,
            home_key=self._home_key,
            blobs=self._blobs,
        )
