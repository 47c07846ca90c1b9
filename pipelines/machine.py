"""The settling machine: what becomes of each record of one trajectory. Pure; no I/O, no Arrow.

Records are fed in log order. Each feed returns decisions; every record is named by exactly one decision, at exactly
one record, whatever the epochs are. So the same log gives the same projections, however the work is cut.

An attempt's own records stay open until the attempt closes:

    trajectory_finished, failure infra    → quarantined `infra_failure`
    attempt_aborted                       → quarantined `attempt_aborted`
    trajectory_finished, another has won  → quarantined `late_attempt`
    trajectory_finished, the first        → wins; the trajectory settles when it is scored

A trajectory settles once, at the first record at which it has a winner and either a decisive score of the winner's
primary scorer, or that scorer's `verification_abandoned`, or no primary scorer at all. Losing attempts that are open
then are quarantined `late_attempt`; own records that come later are quarantined one by one.
"""

from msgspec import Struct

from schemas.events import (
    AttemptAborted,
    Envelope,
    EventBody,
    Score,
    TrajectoryFinished,
    TrajectoryStarted,
    VerificationAbandoned,
)

OWN_TYPES = frozenset(
    {
        "trajectory_started",
        "model_call",
        "action",
        "observation",
        "context_rewritten",
        "reward",
        "trajectory_finished",
    }
)
"""Types that belong to an attempt's own stream and nowhere else; `attempt_aborted` may stand in either."""

SUBJECT_TYPES = frozenset({"score", "verification_abandoned"})
"""Types about one attempt, in a stream named after it."""

RUN_TYPES = frozenset({"policy_published", "consumed", "step_trained"})
"""Types about a run as a whole."""


class LogEvent(Struct, frozen=True):
    """A decoded record at its place in a partition."""

    offset: int
    envelope: Envelope
    envelope_sha256: bytes
    body: EventBody


class Settled(Struct, frozen=True):
    """The trajectory settles: `events` are the winning attempt's records by seq, forks left out."""

    at: LogEvent
    attempt: int
    events: list[LogEvent]
    num_events: int
    """With forks, which the row covers too."""
    first_offset: int
    verdict: Score | VerificationAbandoned | None
    """The primary scorer's; null where there is none."""
    violations: list[tuple[str, str]]
    """(rule, reason): structural rules that the attempt breaks."""


class AttemptQuarantined(Struct, frozen=True):
    """An attempt closes without winning."""

    at: LogEvent
    attempt: int
    rule: str
    reason: str
    num_events: int
    first_offset: int


class RecordQuarantined(Struct, frozen=True):
    """One record is quarantined by itself."""

    at: LogEvent
    rule: str
    reason: str


class RecordAccepted(Struct, frozen=True):
    """One record of a stream about the trajectory makes a row of its own."""

    at: LogEvent


class Duplicates(Struct, frozen=True):
    """Records whose identity was there before."""

    count: int


class Waiting(Struct, frozen=True):
    """An attempt that has won and is not scored."""

    attempt: int
    started: TrajectoryStarted
    events: list[LogEvent]
    heads: dict[str, tuple[int, bytes]]
    """Streams about the trajectory → (next seq, digest of the last envelope): where a scorer goes on."""


Decision = Settled | AttemptQuarantined | RecordQuarantined | RecordAccepted | Duplicates


def misplaced(envelope: Envelope) -> str | None:
    """Why an envelope's stream doesn't fit its type; None where it fits. Rule `bad_stream`."""
    kind = envelope.type
    if kind in OWN_TYPES:
        return None if envelope.is_own else f"{kind} outside its attempt's own stream"
    if kind in RUN_TYPES:
        return None if envelope.trajectory_id is None else f"{kind} is about a run, but names a trajectory"
    if envelope.is_own:
        return None if kind == "attempt_aborted" else f"{kind} inside an attempt's own stream"
    if kind in SUBJECT_TYPES or kind == "attempt_aborted":
        subject = f"/{envelope.trajectory_id}/{envelope.attempt}"
        if envelope.trajectory_id is None or envelope.attempt is None or not envelope.stream.endswith(subject):
            return f"{kind} in a stream that is not named after the attempt it is about"
    return None


class _Attempt:
    """What is known of one attempt."""

    def __init__(self) -> None:
        self.by_seq: dict[int, LogEvent] = {}
        self.forks: list[LogEvent] = []
        self.num_duplicates = 0
        self.finished: TrajectoryFinished | None = None
        self.closed = False
        self.verdicts: dict[str, Score | VerificationAbandoned] = {}
        """Verifier id → its first decisive word."""

    @property
    def num_events(self) -> int:
        return len(self.by_seq) + len(self.forks)

    @property
    def started(self) -> TrajectoryStarted | None:
        first = self.by_seq.get(0)
        return first.body if first is not None and isinstance(first.body, TrajectoryStarted) else None

    def first_offset(self, default: int) -> int:
        return min((event.offset for event in self.by_seq.values()), default=default)

    def take_duplicates(self) -> list[Decision]:
        count, self.num_duplicates = self.num_duplicates, 0
        return [Duplicates(count)] if count else []


class SettlingMachine:
    """Decides about the records of one trajectory, fed in log order."""

    def __init__(self) -> None:
        self._attempts: dict[int, _Attempt] = {}
        self._seen: set[tuple[str, int]] = set()
        self._heads: dict[str, tuple[int, bytes]] = {}
        self._late_seen: set[tuple[int, int, bytes]] = set()
        self.winner: int | None = None
        self.settled = False

    def feed(self, event: LogEvent) -> list[Decision]:
        """Take the next record; its envelope passed `misplaced`."""
        if event.envelope.is_own:
            return self._own(event)
        identity = (event.envelope.stream, event.envelope.seq)
        if identity in self._seen:
            return [Duplicates(1)]
        self._seen.add(identity)
        if event.envelope.seq >= self._heads.get(event.envelope.stream, (0, b""))[0]:
            self._heads[event.envelope.stream] = event.envelope.seq + 1, event.envelope_sha256
        if isinstance(event.body, AttemptAborted):
            return self._aborted_by_other(event)
        return [RecordAccepted(event), *self._judged(event)]

    def waiting(self) -> Waiting | None:
        """The winner, where it waits for its primary scorer."""
        if self.winner is None or self.settled:
            return None
        attempt = self._attempts[self.winner]
        assert attempt.started is not None, "without a start there is no scorer to wait for"
        return Waiting(self.winner, attempt.started, self.events_of(self.winner), dict(self._heads))

    def events_of(self, attempt: int) -> list[LogEvent]:
        """Records of an attempt by seq."""
        by_seq = self._attempts[attempt].by_seq
        return [by_seq[seq] for seq in sorted(by_seq)]

    def _attempt(self, number: int) -> _Attempt:
        return self._attempts.setdefault(number, _Attempt())

    def _own(self, event: LogEvent) -> list[Decision]:
        number, seq = event.envelope.attempt, event.envelope.seq
        assert number is not None, "an own stream has an attempt"
        attempt = self._attempt(number)
        known = attempt.by_seq.get(seq)
        over = attempt.closed or attempt.finished is not None
        if known is not None:
            return self._again(event, attempt, known, over)
        if over or self.settled:
            return self._late(event, number, attempt)
        attempt.by_seq[seq] = event
        if isinstance(event.body, TrajectoryFinished):
            return self._finished(event, number, attempt, event.body)
        if isinstance(event.body, AttemptAborted):
            return self._quarantine(event, number, attempt, "attempt_aborted", _why(event.body))
        return []

    def _again(self, event: LogEvent, attempt: _Attempt, known: LogEvent, over: bool) -> list[Decision]:
        if event.envelope.body_sha256 == known.envelope.body_sha256 or any(
            event.envelope.body_sha256 == fork.envelope.body_sha256 for fork in attempt.forks
        ):
            return self._duplicate(attempt)
        if over or self.settled:
            return [
                RecordQuarantined(event, "fork", f"another body for seq {event.envelope.seq}, after the attempt's end")
            ]
        attempt.forks.append(event)
        return []

    def _late(self, event: LogEvent, number: int, attempt: _Attempt) -> list[Decision]:
        identity = (number, event.envelope.seq, event.envelope.body_sha256)
        if identity in self._late_seen:
            return self._duplicate(attempt)
        self._late_seen.add(identity)
        if self.settled and number != self.winner and not attempt.by_seq:
            return [
                RecordQuarantined(event, "late_attempt", f"attempt {self.winner} had settled the trajectory before")
            ]
        return [RecordQuarantined(event, "late_event", f"attempt {number} had ended before")]

    def _duplicate(self, attempt: _Attempt) -> list[Decision]:
        """Counted at once where the attempt is closed, else together with what it repeats."""
        if attempt.closed or self.settled:
            return [Duplicates(1)]
        attempt.num_duplicates += 1
        return []

    def _finished(self, event: LogEvent, number: int, attempt: _Attempt, body: TrajectoryFinished) -> list[Decision]:
        if body.failure_class == "infra":
            return self._quarantine(event, number, attempt, "infra_failure", body.error or "infrastructure failed")
        if self.winner is not None:
            reason = f"attempt {self.winner} had finished before"
            return self._quarantine(event, number, attempt, "late_attempt", reason)
        attempt.finished = body
        self.winner = number
        return self._settle_if_decided(event)

    def _aborted_by_other(self, event: LogEvent) -> list[Decision]:
        number = event.envelope.attempt
        assert number is not None, "checked by misplaced()"
        attempt = self._attempt(number)
        if attempt.closed or attempt.finished is not None or self.settled:
            return [RecordQuarantined(event, "late_event", f"attempt {number} had ended before it was aborted")]
        assert isinstance(event.body, AttemptAborted)
        return self._quarantine(event, number, attempt, "attempt_aborted", _why(event.body))

    def _judged(self, event: LogEvent) -> list[Decision]:
        body, number = event.body, event.envelope.attempt
        if self.settled or number is None or not isinstance(body, Score | VerificationAbandoned):
            return []
        if isinstance(body, Score) and body.outcome == "infra_error":
            return []
        self._attempt(number).verdicts.setdefault(body.verifier_id, body)
        return self._settle_if_decided(event)

    def _settle_if_decided(self, event: LogEvent) -> list[Decision]:
        if self.winner is None:
            return []
        attempt = self._attempts[self.winner]
        scorer = attempt.started.primary_scorer if attempt.started else None
        verdict = attempt.verdicts.get(scorer) if scorer else None
        if scorer is not None and verdict is None:
            return []
        return self._settle(event, self.winner, attempt, verdict)

    def _settle(
        self, event: LogEvent, number: int, attempt: _Attempt, verdict: Score | VerificationAbandoned | None
    ) -> list[Decision]:
        self.settled = attempt.closed = True
        events = self.events_of(number)
        settled = Settled(
            at=event,
            attempt=number,
            events=events,
            num_events=attempt.num_events,
            first_offset=attempt.first_offset(event.offset),
            verdict=verdict,
            violations=structural_violations(events, attempt.forks),
        )
        decisions: list[Decision] = [settled, *attempt.take_duplicates()]
        for other_number, other in sorted(self._attempts.items()):
            if not other.closed and other.num_events:
                reason = f"attempt {number} settled the trajectory"
                decisions += self._quarantine(event, other_number, other, "late_attempt", reason)
            other.closed = True
        return decisions

    @staticmethod
    def _quarantine(event: LogEvent, number: int, attempt: _Attempt, rule: str, reason: str) -> list[Decision]:
        attempt.closed = True
        # The abort by somebody else is no record of the attempt's own stream, but this row covers it.
        count = attempt.num_events + (not event.envelope.is_own and isinstance(event.body, AttemptAborted))
        first = attempt.first_offset(event.offset)
        return [AttemptQuarantined(event, number, rule, reason, count, first), *attempt.take_duplicates()]


def _why(body: AttemptAborted) -> str:
    return f"aborted by {body.by}: {body.reason}"


def structural_violations(events: list[LogEvent], forks: list[LogEvent]) -> list[tuple[str, str]]:
    """Rules that an attempt's stream breaks as a stream, whatever its rows say.

    Args:
        events: The attempt's records by rising seq.
        forks: Records with the seq of one of them and another body.
    """
    violations = []
    if forks:
        seqs = sorted({fork.envelope.seq for fork in forks})
        violations.append(("fork", f"two bodies for seq {seqs[:5]}"))
    gap = _first_gap(events)
    if gap is not None:
        violations.append(("gap", f"seq {gap} is missing"))
    elif not isinstance(events[0].body, TrajectoryStarted):
        violations.append(("no_start", f"the first event is {events[0].envelope.type}"))
    starts = sum(isinstance(event.body, TrajectoryStarted) for event in events)
    if starts > 1:
        violations.append(("second_start", f"{starts} trajectory_started in one attempt"))
    broken = _first_broken_link(events)
    if broken is not None:
        violations.append(("chain_broken", f"prev_sha256 of seq {broken} is not its predecessor's digest"))
    return violations


def _first_gap(events: list[LogEvent]) -> int | None:
    for expected, event in enumerate(events):
        if event.envelope.seq != expected:
            return expected
    return None


def _first_broken_link(events: list[LogEvent]) -> int | None:
    previous: LogEvent | None = None
    for event in events:
        follows = previous is not None and previous.envelope.seq == event.envelope.seq - 1
        expected = previous.envelope_sha256 if previous is not None and follows else None
        if event.envelope.prev_sha256 != expected and (follows or event.envelope.seq == 0):
            return event.envelope.seq
        previous = event
    return None
