"""The settling machine, branch by branch: every record is decided once, at one record, and null is never 0."""

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipelines.machine import (
    OWN_TYPES,
    RUN_TYPES,
    AttemptQuarantined,
    Decision,
    Duplicates,
    LogEvent,
    RecordAccepted,
    RecordQuarantined,
    Settled,
    SettlingMachine,
    misplaced,
    structural_violations,
)
from schemas.events import (
    BODY_TYPES,
    Annotation,
    AttemptAborted,
    Body,
    Envelope,
    ModelCall,
    Score,
    TrajectoryFinished,
    TrajectoryStarted,
    VerificationAbandoned,
)
from schemas.wire import sha256

STARTED = TrajectoryStarted(task_key="task", domain="d", primary_scorer="v")
FREE = TrajectoryStarted(task_key="task", domain="d")
DONE = TrajectoryFinished(status="completed", terminated=True)
INFRA = TrajectoryFinished(status="failed", failure_class="infra", error="sandbox died")
ABORT = AttemptAborted(reason="why", by="who")
PASS = Score(verifier_id="v", verifier_version="1", outcome="pass", score=1.0)
INFRA_SCORE = Score(verifier_id="v", verifier_version="1", outcome="infra_error", score=None)
OTHER_SCORE = Score(verifier_id="w", verifier_version="1", outcome="pass", score=1.0)
GIVEN_UP = VerificationAbandoned(verifier_id="v", verifier_version="1", tries=2, reason="broken")


class Log:
    """Feeds a machine with events of trajectory `t` and keeps what it decides."""

    def __init__(self) -> None:
        self.machine = SettlingMachine()
        self.offsets = itertools.count()
        self.decisions: list[Decision] = []
        self._heads: dict[str, tuple[int, bytes | None]] = {}

    def feed(self, body: Body, stream: str, attempt: int, seq: int | None = None, mark: bytes = b"") -> list[Decision]:
        following, previous = self._heads.get(stream, (0, None))
        offset = next(self.offsets)
        digest = sha256(stream.encode(), bytes([following if seq is None else seq]), mark)
        envelope = Envelope(
            event_id=f"e{offset}",
            run_id="run",
            trajectory_id="t",
            attempt=attempt,
            stream=stream,
            seq=following if seq is None else seq,
            producer_id="p",
            ts_ns=offset,
            prev_sha256=previous,
            body_sha256=sha256(repr(body).encode(), mark),
            type=str(type(body).__struct_config__.tag),
        )
        if seq is None:
            self._heads[stream] = following + 1, digest
        decided = self.machine.feed(LogEvent(offset, envelope, digest, body))
        self.decisions += decided
        return decided

    def own(self, body: Body, attempt: int = 0, seq: int | None = None, mark: bytes = b"") -> list[Decision]:
        return self.feed(body, f"t/{attempt}", attempt, seq, mark)

    def about(self, body: Body, attempt: int = 0, seq: int | None = None) -> list[Decision]:
        scorer = getattr(body, "verifier_id", "x")
        return self.feed(body, f"{scorer}@1/t/{attempt}", attempt, seq)

    @property
    def covered(self) -> int:
        """Records that a decision names."""
        return sum(map(num_records, self.decisions))


def num_records(decision: Decision) -> int:
    match decision:
        case Duplicates(count):
            return count
        case Settled() | AttemptQuarantined():
            return decision.num_events
        case _:
            return 1


def quarantined(decisions: list[Decision]) -> list[tuple[str, int]]:
    """(rule, records) of quarantine decisions."""
    found = (AttemptQuarantined, RecordQuarantined)
    return [(decision.rule, num_records(decision)) for decision in decisions if isinstance(decision, found)]


def settled(decisions: list[Decision]) -> list[Settled]:
    return [decision for decision in decisions if isinstance(decision, Settled)]


@pytest.fixture
def log() -> Log:
    return Log()


def test_an_open_attempt_decides_nothing(log: Log):
    assert log.own(STARTED) == log.own(ModelCall(call_id="c")) == []
    assert log.machine.waiting() is None


def test_it_settles_at_its_primary_score(log: Log):
    log.own(STARTED)
    assert log.own(DONE) == []
    accepted, decision = log.about(PASS)
    assert isinstance(accepted, RecordAccepted)
    assert isinstance(decision, Settled)
    assert (decision.verdict, decision.attempt, decision.num_events, decision.first_offset) == (PASS, 0, 2, 0)
    assert decision.at.offset == 2
    assert log.covered == 3


def test_it_settles_at_its_finish_without_a_scorer(log: Log):
    log.own(FREE)
    [decision] = settled(log.own(DONE))
    assert decision.verdict is None


def test_it_settles_at_its_finish_when_the_score_came_first(log: Log):
    log.own(STARTED)
    assert [type(decision) for decision in log.about(PASS)] == [RecordAccepted]
    [decision] = settled(log.own(DONE))
    assert decision.verdict == PASS


def test_infra_errors_and_other_scorers_do_not_settle_it(log: Log):
    log.own(STARTED)
    log.own(DONE)
    for body in (INFRA_SCORE, OTHER_SCORE):
        assert [type(decision) for decision in log.about(body)] == [RecordAccepted]
    assert log.machine.waiting() is not None
    [decision] = settled(log.about(PASS))
    assert decision.verdict == PASS


def test_an_abandonment_settles_it_and_a_later_score_changes_nothing(log: Log):
    log.own(STARTED)
    log.own(DONE)
    [decision] = settled(log.about(GIVEN_UP))
    assert decision.verdict == GIVEN_UP
    assert [type(later) for later in log.about(PASS)] == [RecordAccepted]


def test_the_first_decisive_word_of_the_scorer_counts(log: Log):
    log.own(STARTED)
    log.about(GIVEN_UP)
    log.about(PASS)
    [decision] = settled(log.own(DONE))
    assert decision.verdict == GIVEN_UP


def test_a_score_of_another_attempt_does_not_settle_the_winner(log: Log):
    log.own(STARTED)
    log.own(STARTED, 1)
    log.own(DONE, 1)
    assert settled(log.about(PASS, 0)) == []
    [decision] = settled(log.about(PASS, 1))
    assert decision.attempt == 1


def test_waiting_tells_where_a_scorer_goes_on(log: Log):
    log.own(STARTED)
    log.own(DONE)
    log.about(INFRA_SCORE)
    waiting = log.machine.waiting()
    assert waiting is not None
    assert [event.body for event in waiting.events] == [STARTED, DONE]
    assert waiting.heads["v@1/t/0"][0] == 1
    log.about(PASS)
    assert log.machine.waiting() is None


def test_an_infra_failure_never_wins(log: Log):
    log.own(STARTED)
    assert quarantined(log.own(INFRA)) == [("infra_failure", 2)]
    log.own(FREE, 1)
    [decision] = settled(log.own(DONE, 1))
    assert decision.attempt == 1


def test_an_abort_of_its_own_closes_it(log: Log):
    log.own(STARTED)
    assert quarantined(log.own(ABORT)) == [("attempt_aborted", 2)]
    assert quarantined(log.own(ModelCall(call_id="c"))) == [("late_event", 1)]


def test_an_abort_by_another_closes_it_and_counts_itself(log: Log):
    log.own(STARTED)
    assert quarantined(log.feed(ABORT, "o/abort/t/0", 0)) == [("attempt_aborted", 2)]
    assert quarantined(log.feed(ABORT, "p/abort/t/0", 0)) == [("late_event", 1)]
    assert log.feed(ABORT, "o/abort/t/0", 0, seq=0) == [Duplicates(1)]
    assert quarantined(log.own(DONE)) == [("late_event", 1)]
    assert log.covered == 5


def test_an_abort_of_an_attempt_without_records(log: Log):
    assert quarantined(log.feed(ABORT, "o/abort/t/3", 3)) == [("attempt_aborted", 1)]


def test_an_abort_after_the_finish_is_late(log: Log):
    log.own(STARTED)
    log.own(DONE)
    assert quarantined(log.feed(ABORT, "o/abort/t/0", 0)) == [("late_event", 1)]
    assert len(settled(log.about(PASS))) == 1


def test_a_second_finisher_is_late(log: Log):
    log.own(STARTED)
    log.own(STARTED, 1)
    log.own(DONE, 1)
    assert quarantined(log.own(DONE)) == [("late_attempt", 2)]


def test_open_attempts_are_late_when_the_trajectory_settles(log: Log):
    log.own(FREE)
    log.own(STARTED, 1)
    log.own(STARTED, 2)
    assert quarantined(log.own(DONE)) == [("late_attempt", 1), ("late_attempt", 1)]
    assert quarantined(log.own(DONE, 1)) == [("late_event", 1)]
    assert quarantined(log.own(STARTED, 3)) == [("late_attempt", 1)]
    assert log.covered == 6


def test_duplicates_wait_for_what_they_repeat(log: Log):
    log.own(STARTED)
    assert log.own(STARTED, seq=0) == []
    log.own(DONE)
    assert log.own(DONE, seq=1) == []
    _, decision, duplicates = log.about(PASS)
    assert isinstance(decision, Settled)
    assert duplicates == Duplicates(2)
    assert log.own(DONE, seq=1) == log.own(STARTED, seq=0) == [Duplicates(1)]
    assert log.covered == 7


def test_a_fork_is_a_violation_and_its_copy_a_duplicate(log: Log):
    log.own(FREE)
    log.own(ModelCall(call_id="c"))
    log.own(ModelCall(call_id="c"), seq=1, mark=b"other")
    log.own(ModelCall(call_id="c"), seq=1, mark=b"other")
    decision, duplicates = log.own(DONE)
    assert isinstance(decision, Settled)
    assert [rule for rule, _ in decision.violations] == ["fork"]
    assert (decision.num_events, duplicates) == (4, Duplicates(1))


def test_a_fork_after_the_end_is_quarantined_by_itself(log: Log):
    log.own(STARTED)
    log.own(DONE)
    assert quarantined(log.own(DONE, seq=1, mark=b"other")) == [("fork", 1)]
    [decision] = settled(log.about(PASS))
    assert decision.violations == []


def test_copies_of_late_events_of_a_waiting_attempt_wait_with_it(log: Log):
    log.own(STARTED)
    log.own(DONE)
    assert quarantined(log.own(ModelCall(call_id="c"), seq=5)) == [("late_event", 1)]
    assert log.own(ModelCall(call_id="c"), seq=5) == []
    log.about(PASS)
    assert log.own(ModelCall(call_id="c"), seq=5) == [Duplicates(1)]
    assert log.covered == 6


def test_other_streams_take_the_first_of_an_identity(log: Log):
    note = Annotation(kind="tag", author="me")
    assert [type(decision) for decision in log.feed(note, "notes", 0)] == [RecordAccepted]
    assert log.feed(Annotation(kind="tag", author="you"), "notes", 0, seq=0) == [Duplicates(1)]


def events_of(*bodies: Body, seqs: list[int] | None = None) -> list[LogEvent]:
    log = Log()
    for index, body in enumerate(bodies):
        log.own(body, seq=None if seqs is None else seqs[index])
    return log.machine.events_of(0)


@pytest.mark.parametrize(
    ("events", "rules"),
    [
        (events_of(STARTED, DONE), []),
        (events_of(STARTED, DONE, seqs=[0, 2]), ["gap"]),
        (events_of(DONE, seqs=[1]), ["gap"]),
        (events_of(ModelCall(call_id="c"), DONE), ["no_start"]),
        (events_of(STARTED, STARTED, DONE), ["second_start"]),
    ],
)
def test_structural_violations(events: list[LogEvent], rules: list[str]):
    assert [rule for rule, _ in structural_violations(events, []) if rule != "chain_broken"] == rules


def test_the_chain_is_checked_link_by_link():
    assert structural_violations(events_of(STARTED, ModelCall(call_id="c"), DONE), []) == []
    broken = events_of(STARTED, ModelCall(call_id="c"), DONE, seqs=[0, 1, 2])
    assert structural_violations(broken, []) == [
        ("chain_broken", "prev_sha256 of seq 1 is not its predecessor's digest")
    ]


OWN = {"stream": "t/0", "trajectory_id": "t", "attempt": 0}


def envelope(kind: str, stream: str = "s", trajectory_id: str | None = None, attempt: int | None = None) -> Envelope:
    return Envelope(
        event_id="e",
        run_id="r",
        trajectory_id=trajectory_id,
        attempt=attempt,
        stream=stream,
        seq=0,
        producer_id="p",
        ts_ns=0,
        prev_sha256=None,
        body_sha256=bytes(32),
        type=kind,
    )


@pytest.mark.parametrize("kind", sorted(BODY_TYPES))
def test_every_type_has_its_place(kind: str):
    own = misplaced(envelope(kind, **OWN))
    assert (own is None) == (kind in OWN_TYPES or kind == "attempt_aborted")
    of_run = misplaced(envelope(kind))
    assert (of_run is None) == (kind in RUN_TYPES or kind in {"annotation", "group_closed", "lease_granted"})
    about = misplaced(envelope(kind, "x/t/0", "t", 0))
    assert (about is None) == (kind not in OWN_TYPES and kind not in RUN_TYPES)


@pytest.mark.parametrize("kind", ["score", "verification_abandoned", "attempt_aborted"])
@pytest.mark.parametrize(("stream", "attempt"), [("x/t/1", 0), ("x/u/0", 0), ("x/t", None), ("t0", 0)])
def test_what_is_about_an_attempt_is_in_a_stream_named_after_it(kind: str, stream: str, attempt: int | None):
    assert misplaced(envelope(kind, stream, "t", attempt)) is not None


BODIES = st.sampled_from([STARTED, FREE, ModelCall(call_id="c"), DONE, INFRA, ABORT])
ABOUT = st.sampled_from([PASS, INFRA_SCORE, OTHER_SCORE, GIVEN_UP, ABORT, Annotation(kind="k", author="a")])
STEPS = st.one_of(
    st.tuples(st.just("own"), BODIES, st.integers(0, 2), st.integers(0, 3), st.sampled_from([b"", b"fork"])),
    st.tuples(st.just("about"), ABOUT, st.integers(0, 2), st.integers(0, 1), st.just(b"")),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_every_record_is_decided_at_most_once_and_none_is_left_after_the_end(steps: list[Any]):
    log = Log()
    for num_fed, (kind, body, attempt, seq, mark) in enumerate(steps, 1):
        if kind == "own":
            log.own(body, attempt, seq, mark)
        else:
            log.about(body, attempt, seq)
        assert log.covered <= num_fed, "decided twice"
    machine = log.machine
    open_records = (
        0
        if machine.settled
        else sum(
            attempt.num_events + attempt.num_duplicates for attempt in machine._attempts.values() if not attempt.closed
        )
    )
    assert log.covered + open_records == len(steps)
    assert len(settled(log.decisions)) == machine.settled
