"""From records of `events` to candidate rows of every projection. Pure but for the history it asks for.

One call takes the records of an offset range of one partition. What it gives depends on the log alone, not on where
ranges begin and end: a decision about a record is made at one record (see `pipelines.machine`), and what lies before
the range is looked up where a decision needs it. Candidates then go through `pipelines.sift`, the quality gate.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

import pyarrow as pa
from msgspec import Struct

from pipelines.machine import (
    OWN_TYPES,
    AttemptQuarantined,
    Decision,
    Duplicates,
    LogEvent,
    RecordAccepted,
    RecordQuarantined,
    Settled,
    SettlingMachine,
    misplaced,
)
from pipelines.rows import (
    Columns,
    Row,
    reference_violations,
    score_columns,
    split_steps,
    step_rows,
    stream_row,
    to_json,
    trajectory_row,
)
from schemas.events import Envelope, Score, VerificationAbandoned
from schemas.tables import PROJECTIONS, TABLES
from schemas.wire import WireError, decode_body, decode_envelope, decode_record

RECORD_COLUMNS = ["offset", "type", "trajectory_id", "stream", "seq", "envelope_sha256", "is_closing", "value"]
"""Columns of `events` that an assembly reads."""

CHECK_FIELDS = (pa.field("_check_prefix_ok", pa.bool_()), pa.field("_check_mask_ok", pa.bool_()))
"""What only the gate sees of a step."""

FULL_BYTES = 64 * 1024 * 1024
"""Bytes of records behind candidates at which they are taken out: a range's trajectories may be far larger than it."""

_LOOKUP_BYTES = 32 * 1024 * 1024
"""About what one look-up of earlier records may bring."""
_FIRST_LOOKUP, _MAX_LOOKUP = 8, 4096
"""Trajectories of the first look-up, when their size is not known, and of any."""


class History(Protocol):
    """Looks at records of the same partition before the range."""

    def closed(self, trajectory_ids: Sequence[str]) -> set[str]:
        """Those with a record of a closing type."""

    def of(self, trajectory_ids: Sequence[str]) -> pa.Table:
        """All their records (`RECORD_COLUMNS`), by offset."""

    def of_run(self, streams: Mapping[str, tuple[int, int]]) -> pa.Table:
        """Run-level records (`RECORD_COLUMNS`) of streams, from the lowest to the highest seq asked for."""


class Candidates:
    """Rows before the gate, with the count of records by outcome.

    Args:
        log_id: The log.
        on_full: Takes the rows and counts out (`pipelines.sift`), between two trajectories, so that memory is bounded.
    """

    def __init__(self, log_id: str, on_full: "Callable[[Candidates], object]" = lambda _: None) -> None:
        self.log_id = log_id
        self.on_full = on_full
        self._num_held_bytes = 0
        self.partition = 0
        self.columns = {name: Columns(TABLES[name], CHECK_FIELDS if name == "steps" else ()) for name in PROJECTIONS}
        self.verdicts = Columns(TABLES["scores"])
        """Scores that gave a trajectory its reward: checked with it, since they may lie in an earlier range."""
        self.clear_counts()

    def clear_counts(self) -> None:
        """Begin to count anew; columns are emptied where their rows are taken out."""
        self.num_records = 0
        self.num_bytes = 0
        self.accepted = 0
        self.quarantined = 0
        self.duplicates = 0

    def end_trajectory(self, num_bytes: int) -> None:
        """A trajectory with so many bytes of records is dealt with."""
        self._num_held_bytes += num_bytes
        if self._num_held_bytes >= FULL_BYTES:
            self._num_held_bytes = 0
            self.on_full(self)

    def add(self, table: str, row: Row) -> None:
        """Add a row at a place in the log."""
        row["log_id"] = self.log_id
        row.setdefault("partition", self.partition)
        self.columns[table].add(row)

    def quarantine(self, num_events: int, row: Row) -> None:
        """Add a row of `quarantine` that covers `num_events` records."""
        self.quarantined += num_events
        self.add("quarantine", {"other_rules": [], **row, "num_events": num_events})


def assemble(candidates: Candidates, partition: int, records: Iterable[pa.RecordBatch], history: History) -> None:
    """Decide about every record of a range.

    Args:
        candidates: Takes the rows; may hold those of other partitions.
        partition: The partition.
        records: Rows of `events` (`RECORD_COLUMNS`) of the range, in any order.
        history: Looks before the range.
    """
    candidates.partition = partition
    by_trajectory: dict[str, list[_Raw]] = {}
    run_level: list[_Raw] = []
    for batch in records:
        candidates.num_records += batch.num_rows
        candidates.num_bytes += batch.column("value").nbytes
        for raw in _raws(batch):
            if raw.type is None:
                _quarantine_undecodable(candidates, raw)
            elif raw.trajectory_id is None:
                run_level.append(raw)
            else:
                by_trajectory.setdefault(raw.trajectory_id, []).append(raw)
    for raws in (run_level, *by_trajectory.values()):
        raws.sort(key=_by_offset)
    _assemble_run_level(candidates, run_level, history)
    deciding, waiting = _split_by_need(by_trajectory, history)
    for trajectory_id in waiting:
        for raw in by_trajectory[trajectory_id]:
            _decode_or_quarantine(candidates, raw)
    for trajectory_id, earlier in _with_history(sorted(deciding), history):
        raws = by_trajectory.pop(trajectory_id)
        _assemble_trajectory(candidates, earlier, raws)
        candidates.end_trajectory(sum(len(raw.value) for raw in (*earlier, *raws)))


class _Raw(Struct, frozen=True):
    """A row of `events`, its bytes not yet decoded; fields in the order of `RECORD_COLUMNS`."""

    offset: int
    type: str | None
    trajectory_id: str | None
    stream: str
    seq: int
    envelope_sha256: bytes
    is_closing: bool
    value: bytes

    def decode(self) -> LogEvent:
        """Decode and check what one record alone can show.

        Raises:
            WireError: with the rule that it breaks.
        """
        record = decode_record(self.value)
        envelope = decode_envelope(record.envelope)
        body = decode_body(envelope, record)
        why = misplaced(envelope)
        if why is not None:
            raise WireError("bad_stream", why)
        return LogEvent(self.offset, envelope, self.envelope_sha256, body)


_by_offset = attrgetter("offset")


def _raws(records: pa.Table | pa.RecordBatch) -> Iterator[_Raw]:
    columns = [records.column(name).to_pylist() for name in RECORD_COLUMNS]
    return map(_Raw, *columns)


def _split_by_need(by_trajectory: Mapping[str, list[_Raw]], history: History) -> tuple[set[str], list[str]]:
    """(trajectories about which something is decided here, those that merely go on)."""
    deciding = {
        trajectory_id
        for trajectory_id, raws in by_trajectory.items()
        if any(raw.is_closing or raw.type not in OWN_TYPES for raw in raws)
    }
    going_on = [trajectory_id for trajectory_id in by_trajectory if trajectory_id not in deciding]
    deciding |= history.closed(going_on) if going_on else set()
    return deciding, [trajectory_id for trajectory_id in going_on if trajectory_id not in deciding]


def _with_history(trajectory_ids: Sequence[str], history: History) -> Iterator[tuple[str, list[_Raw]]]:
    """Each trajectory with its records before the range, looked up many at a time: the smaller, the more."""
    size, done = _FIRST_LOOKUP, 0
    while done < len(trajectory_ids):
        batch = trajectory_ids[done : done + size]
        done += len(batch)
        found = history.of(batch)
        size = max(1, min(_MAX_LOOKUP, 4 * size, size * _LOOKUP_BYTES // max(1, found.nbytes)))
        earlier: dict[str, list[_Raw]] = {}
        for raw in _raws(found):
            assert raw.trajectory_id is not None, "looked up by trajectory"
            earlier.setdefault(raw.trajectory_id, []).append(raw)
        for trajectory_id in batch:
            yield trajectory_id, earlier.pop(trajectory_id, [])


def replay(raws: Iterable[_Raw]) -> SettlingMachine:
    """A machine fed with records whose decisions were made before."""
    machine = SettlingMachine()
    for raw in raws:
        try:
            machine.feed(raw.decode())
        except WireError:
            continue  # was quarantined by itself, at its own offset
    return machine


def machines(records: pa.Table) -> Iterator[tuple[str, SettlingMachine]]:
    """(trajectory id, its machine) for whole histories, e.g. to see which attempts wait for their score."""
    by_trajectory: dict[str, list[_Raw]] = {}
    for raw in _raws(records):
        if raw.trajectory_id is not None:
            by_trajectory.setdefault(raw.trajectory_id, []).append(raw)
    for trajectory_id, raws in by_trajectory.items():
        yield trajectory_id, replay(raws)


def _assemble_trajectory(candidates: Candidates, earlier: list[_Raw], raws: list[_Raw]) -> None:
    machine = replay(earlier)
    for raw in raws:
        event = _decode_or_quarantine(candidates, raw)
        for decision in machine.feed(event) if event else ():
            _apply(candidates, decision)


def _assemble_run_level(candidates: Candidates, raws: list[_Raw], history: History) -> None:
    asked: dict[str, tuple[int, int]] = {}
    for raw in raws:
        low, high = asked.get(raw.stream, (raw.seq, raw.seq))
        asked[raw.stream] = min(low, raw.seq), max(high, raw.seq)
    seen = _accepted_identities(history.of_run(asked)) if asked else set()
    for raw in raws:
        event = _decode_or_quarantine(candidates, raw)
        if event is None:
            continue
        identity = (raw.stream, raw.seq)
        _apply(candidates, Duplicates(1) if identity in seen else RecordAccepted(event))
        seen.add(identity)


def _accepted_identities(records: pa.Table) -> set[tuple[str, int]]:
    """What was quarantined by itself has not taken its identity: a good copy may still come."""
    identities = set()
    for raw in _raws(records):
        try:
            raw.decode()
        except WireError:
            continue
        identities.add((raw.stream, raw.seq))
    return identities


def _decode_or_quarantine(candidates: Candidates, raw: _Raw) -> LogEvent | None:
    try:
        return raw.decode()
    except WireError as error:
        row = {"rule": error.rule, "reason": str(error), "type": raw.type, "offset": raw.offset}
        envelope = decode_envelope(decode_record(raw.value).envelope)
        candidates.quarantine(1, {**row, **_subject(envelope), "scope": "record", "first_offset": raw.offset})
        return None


def _quarantine_undecodable(candidates: Candidates, raw: _Raw) -> None:
    try:
        decode_envelope(decode_record(raw.value).envelope)
        rule, reason = "undecodable", "the ingesting version could not decode it"
    except WireError as error:
        rule, reason = error.rule, str(error)
    row = {"rule": rule, "reason": reason, "scope": "record", "offset": raw.offset, "first_offset": raw.offset}
    candidates.quarantine(1, row)


def _subject(envelope: Envelope) -> Row:
    return {
        "trajectory_id": envelope.trajectory_id,
        "run_id": envelope.run_id,
        "attempt": envelope.attempt,
        "type": envelope.type,
    }


def _apply(candidates: Candidates, decision: Decision) -> None:
    match decision:
        case Duplicates(count):
            candidates.duplicates += count
        case RecordAccepted(event):
            table, row = stream_row(event)
            candidates.accepted += 1
            candidates.add(table, row)
        case RecordQuarantined(event, rule, reason):
            row = {**_subject(event.envelope), "rule": rule, "reason": reason, "scope": "record"}
            candidates.quarantine(1, {**row, "offset": event.offset, "first_offset": event.offset})
        case AttemptQuarantined(event, attempt, rule, reason, num_events, first_offset):
            row = {**_subject(event.envelope), "attempt": attempt, "rule": rule, "reason": reason, "scope": "attempt"}
            candidates.quarantine(num_events, {**row, "offset": event.offset, "first_offset": first_offset})
        case Settled():
            _settle(candidates, decision)


def _settle(candidates: Candidates, settled: Settled) -> None:
    violations = list(settled.violations)
    if violations:
        _quarantine_settled(candidates, settled, violations, None)
        return
    steps = split_steps(settled.events)
    started = settled.events[0].body
    envelope = settled.events[0].envelope
    common = {
        "trajectory_id": envelope.trajectory_id,
        "run_id": envelope.run_id,
        "attempt": settled.attempt,
        "offset": settled.at.offset,
        "group_id": getattr(started, "group_id", None),
        "split": getattr(started, "split", None),
        "domain": getattr(started, "domain", None),
    }
    rows = step_rows(steps, common)
    policies = {step.call.policy_id for step in steps if step.call.role == "policy"}
    trajectory = trajectory_row(settled, rows, policies)
    violations = reference_violations(settled.events)
    if isinstance(settled.verdict, VerificationAbandoned):
        violations.append(("unscored_infra", f"{settled.verdict.verifier_id}: {settled.verdict.reason}"))
    if violations:
        _quarantine_settled(candidates, settled, violations, trajectory)
        return
    if isinstance(settled.verdict, Score):
        candidates.verdicts.add({"trajectory_id": envelope.trajectory_id, **score_columns(settled.verdict)})
    candidates.accepted += settled.num_events
    candidates.add("trajectories", trajectory)
    for row in rows:
        candidates.add("steps", row)


def _quarantine_settled(
    candidates: Candidates, settled: Settled, violations: list[tuple[str, str]], trajectory: Row | None
) -> None:
    (rule, reason), *others = violations
    row = {
        **_subject(settled.at.envelope),
        "attempt": settled.attempt,
        "rule": rule,
        "reason": reason,
        "other_rules": [name for name, _ in others],
        "scope": "trajectory",
        "offset": settled.at.offset,
        "first_offset": settled.first_offset,
        "row": to_json(trajectory),
    }
    candidates.quarantine(settled.num_events, row)
