import gc
import math
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.open import open_log
from ingest.port import LogError, RecordTooLargeError
from ingest.recorder import (
    AttemptClosedError,
    AttemptOpenError,
    PayloadUnavailableError,
    Recorder,
    StreamPosition,
    last_of_stream,
)
from ingest.sqlite_log import SqliteLog
from schemas.events import (
    Action,
    Annotation,
    ModelCall,
    Observation,
    PolicyPublished,
    Reward,
    Score,
    TrajectoryFinished,
    TrajectoryStarted,
    stream_of_score,
)
from schemas.records import ProducerRecord
from schemas.wire import decode_event, decode_record, sha256
from storage.blobs import BlobStore

STARTED = TrajectoryStarted(task_key="t", domain="d")
FINISHED = TrajectoryFinished(status="completed")


@pytest.fixture
def blobs(tmp_path):
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def recorder(log, blobs):
    with Recorder(log, blobs, run_id="run", producer_id="me") as recorder:
        yield recorder


def stored(log):
    """Raw values of the whole log, partition by partition."""
    for partition in log.partitions():
        bounds = log.bounds(partition)
        for batch in log.read(partition, bounds.first, bounds.next, 1 << 22):
            yield from batch["value"].to_pylist()


def events(log, stream=None):
    decoded = [decode_event(value) for value in stored(log)]
    return [event for event in decoded if stream in (None, event.envelope.stream)]


def types(log, stream=None):
    return [event.envelope.type for event in events(log, stream)]


def assert_chained(log):
    """Every stream is dense from 0 and each event holds the digest of the stored envelope before it."""
    last = {}
    for value in stored(log):
        envelope = decode_event(value).envelope
        seq, digest = last.get(envelope.stream, (-1, None))
        assert (envelope.seq, envelope.prev_sha256) == (seq + 1, digest)
        last[envelope.stream] = envelope.seq, sha256(decode_record(value).envelope)


def test_an_attempt_is_recorded_as_a_dense_chained_stream(log, recorder):
    with recorder.trajectory(STARTED, trajectory_id="t1") as attempt:
        attempt.record(Observation(content="hello"))
        attempt.record(ModelCall(call_id="0", response_token_ids=[1, 2], logprobs=[-0.5, -1.0]))
        attempt.record(Action(action_id="a", name="move", arguments={"x": 1}))
        attempt.record(Reward(value=0.5))
        attempt.finish(FINISHED)
    recorder.flush()
    assert types(log, "t1/0") == [
        "trajectory_started",
        "observation",
        "model_call",
        "action",
        "reward",
        "trajectory_finished",
    ]
    assert_chained(log)
    first = events(log)[0].envelope
    assert (first.run_id, first.producer_id, first.trajectory_id, first.attempt) == ("run", "me", "t1", 0)
    assert abs(first.ts_ns - time.time_ns()) < 60e9
    ids = [event.envelope.event_id for event in events(log)]
    assert ids == sorted(set(ids)), "ids are unique and time-ordered"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8"), max_size=50),
            st.lists(st.integers(0, 2**31 - 1), max_size=5),
            st.lists(st.floats(width=64), max_size=5),
        ),
        max_size=10,
    )
)
def test_bodies_come_back_as_they_were_recorded(log, recorder, contents):
    bodies = [
        body
        for text, ids, logprobs in contents
        for body in (
            Observation(content=text),
            ModelCall(call_id="c", response_token_ids=ids, logprobs=logprobs),
            Action(action_id="a", name=text, arguments={"x": text}),
        )
    ]
    with recorder.trajectory(STARTED) as attempt:
        for body in bodies:
            attempt.record(body)
        attempt.finish(FINISHED)
    recorder.flush()
    read = [event.body for event in events(log, f"{attempt.trajectory_id}/0")]
    assert repr(read) == repr([STARTED, *bodies, FINISHED])  # by text: NaN is not equal to itself


def test_streams_of_many_threads_stay_chained(log, recorder):
    def act(number):
        for i in range(20):
            with recorder.trajectory(STARTED, trajectory_id=f"t{number}-{i}") as attempt:
                for _ in range(5):
                    attempt.record(Observation(content="x" * 500))
                attempt.finish(FINISHED)

    threads = [threading.Thread(target=act, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.flush()
    assert len(events(log)) == recorder.acknowledged == 6 * 20 * 7
    assert_chained(log)


def test_an_exception_aborts_the_attempt_and_goes_on(log, recorder):
    attempt = recorder.trajectory(STARTED, trajectory_id="t1")
    with pytest.raises(ZeroDivisionError), attempt:
        raise ZeroDivisionError("by zero")
    recorder.flush()
    assert types(log) == ["trajectory_started", "attempt_aborted"]
    last = events(log)[-1].body
    assert (last.reason, last.by) == ("ZeroDivisionError: by zero", "me")
    assert attempt.closed
    assert_chained(log)


def test_a_forgotten_finish_aborts_the_attempt(log, recorder):
    with recorder.trajectory(STARTED):
        pass
    recorder.flush()
    assert types(log) == ["trajectory_started", "attempt_aborted"]
    assert events(log)[-1].body.reason == "left without a finish"


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_an_ended_attempt_takes_no_more_events(log, recorder, end):
    with recorder.trajectory(STARTED) as attempt:
        attempt.finish(FINISHED) if end == "finish" else attempt.abort("enough")
        for late in (
            lambda: attempt.record(Observation(content="late")),
            lambda: attempt.finish(FINISHED),
            lambda: attempt.abort("late"),
        ):
            with pytest.raises(AttemptClosedError):
                late()
    recorder.flush()
    assert len(events(log)) == 2


def test_the_same_attempt_cannot_be_opened_twice_in_a_process(log, blobs, recorder):
    with recorder.trajectory(STARTED, trajectory_id="t1") as attempt:
        attempt.finish(FINISHED)
    with Recorder(log, blobs) as other, pytest.raises(AttemptOpenError):
        other.trajectory(STARTED, trajectory_id="t1")
    with recorder.trajectory(STARTED, trajectory_id="t1", attempt=1) as attempt:
        attempt.finish(FINISHED)
    recorder.flush()
    assert types(log, "t1/1") == ["trajectory_started", "trajectory_finished"]
    assert len(events(log)) == 4


def test_closing_the_recorder_aborts_what_is_open(log, blobs):
    with Recorder(log, blobs) as recorder:
        open_attempt = recorder.trajectory(STARTED, trajectory_id="t1")
        open_attempt.record(Observation(content="x"))
    assert types(log, "t1/0") == ["trajectory_started", "observation", "attempt_aborted"]
    assert recorder.unacknowledged == 0
    recorder.close()
    with pytest.raises(LogError, match="closed"):
        open_attempt.record(Observation(content="x"))
    with pytest.raises(LogError, match="closed"):
        recorder.flush()


def test_a_recorder_that_is_dropped_still_writes_everything(log):
    recorder = Recorder(log)
    recorder.trajectory(STARTED, trajectory_id="t1")
    del recorder
    gc.collect()
    assert types(log) == ["trajectory_started", "attempt_aborted"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (Observation(content=5), "content"),
        (ModelCall(call_id=""), "call_id"),
        (ModelCall(call_id="0", logprobs=["-1"]), "logprobs"),
        (ModelCall(call_id="0", response_token_ids=[1.5]), "response_token_ids"),
        (ModelCall(call_id="0", usage={"big": 2**70}), "ModelCall"),
        (Observation(content="\ud800"), "Observation"),
        (Action(action_id="a", name="x", arguments={"f": print}), "Action"),
        ("no body", "not an event body|doesn't belong"),
        (FINISHED, "doesn't belong"),
        (STARTED, "doesn't belong"),
    ],
)
def test_wrong_types_are_refused_when_they_are_recorded(log, recorder, body, message):
    with recorder.trajectory(STARTED) as attempt:
        with pytest.raises(ValueError, match=message):
            attempt.record(body)
        attempt.finish(FINISHED)
    recorder.flush()
    assert types(log) == ["trajectory_started", "trajectory_finished"]
    assert_chained(log)


def test_nan_and_infinities_are_recorded_as_they_are(log, recorder):
    with recorder.trajectory(STARTED) as attempt:
        attempt.record(ModelCall(call_id="0", logprobs=[math.nan, -math.inf]))
        attempt.finish(FINISHED)
    recorder.flush()
    nan, infinity = events(log)[1].body.logprobs
    assert math.isnan(nan)
    assert infinity == -math.inf


@pytest.mark.parametrize("producer_id", ["", "x" * 600, 5])
def test_a_malformed_name_is_refused_at_the_start(log, producer_id):
    with pytest.raises(ValueError, match="producer_id"):
        Recorder(log, producer_id=producer_id)


def test_large_payloads_go_to_blobs_before_their_event(log, blobs, recorder):
    text, arguments = "é" * 40_000, {"code": "x" * 70_000}
    messages = [{"role": "user", "content": "m" * 70_000}]
    with recorder.trajectory(STARTED) as attempt:
        attempt.record(Observation(content=text))
        attempt.record(Action(action_id="a", name="run", arguments=arguments))
        attempt.record(ModelCall(call_id="0", messages=messages))
        attempt.record(Observation(content="x" * 60_000))
        attempt.finish(FINISHED)
    recorder.flush()
    observation, action, call, small = (event.body for event in events(log)[1:5])
    assert observation.content is action.arguments is call.messages is None
    assert blobs.get(observation.content_ref).decode() == text
    assert observation.content_ref.preview == "é" * 200
    assert observation.content_ref.size == 80_000
    assert b'{"code":"xxx' in blobs.get(action.arguments_ref)
    assert b'[{"role":"user"' in blobs.get(call.messages_ref)
    assert (small.content, small.content_ref) == ("x" * 60_000, None)


def test_the_threshold_can_be_set(log, blobs):
    with Recorder(log, blobs, inline_bytes=10) as recorder, recorder.trajectory(STARTED) as attempt:
        attempt.record(Observation(content="x" * 11))
        attempt.record(Observation(content="x" * 10))
        attempt.finish(FINISHED)
    first, second = (event.body for event in events(log)[1:3])
    assert (first.content, second.content) == (None, "x" * 10)


def test_a_payload_that_cannot_be_stored_is_an_error_of_its_record(log, blobs, recorder, tmp_path):
    text = "x" * 70_000
    blocked = blobs.put(text.encode()).sha256[:2]
    (tmp_path / "blobs" / blocked).rename(tmp_path / "away")
    (tmp_path / "blobs" / blocked).touch()
    with recorder.trajectory(STARTED) as attempt:
        with pytest.raises(PayloadUnavailableError):
            attempt.record(Observation(content=text))
        attempt.finish(FINISHED)
    recorder.flush()
    assert types(log) == ["trajectory_started", "trajectory_finished"]


def test_an_event_too_large_for_the_log_is_refused(log, recorder):
    with recorder.trajectory(STARTED) as attempt:
        with pytest.raises(RecordTooLargeError):
            attempt.record(Observation(state_change={"x": "x" * log.max_record_bytes}))
        attempt.record(Observation(state_change={"x": "x" * (log.max_record_bytes - 20_000)}))
        attempt.finish(FINISHED)
    recorder.flush()
    assert len(events(log)) == 3


def test_flush_returns_once_everything_before_is_durable(url, log, recorder):
    for number in range(50):
        with recorder.trajectory(STARTED) as attempt:
            attempt.finish(FINISHED)
        recorder.flush()
        assert recorder.unacknowledged == 0
        assert recorder.acknowledged == 2 * (number + 1)
        with open_log(url) as other:
            assert sum(1 for _ in stored(other)) == 2 * (number + 1)


def test_streams_beside_attempts_are_dense_each(log, recorder):
    for version in range(3):
        body = PolicyPublished(policy_id="p", version=version, checkpoint_uri="file:///c", sha256="0" * 64)
        recorder.emit(body, stream="run/policy/p")
    recorder.emit(Annotation(kind="tag", author="me"), stream="notes", trajectory_id="t1", attempt=0)
    recorder.flush()
    assert [event.envelope.seq for event in events(log, "run/policy/p")] == [0, 1, 2]
    [note] = events(log, "notes")
    assert (note.envelope.key, note.envelope.seq) == ("t1", 0)
    assert_chained(log)


def test_a_scores_tries_carry_their_own_seq(log, recorder):
    stream = stream_of_score("v", "1", "t1", 0)
    score = Score(verifier_id="v", verifier_version="1", outcome="infra_error", score=None)
    recorder.emit(score, stream=stream, trajectory_id="t1", attempt=0, seq=0)
    recorder.flush()
    position = last_of_stream(log, stream, "t1")
    assert position.seq == 1
    recorder.emit(
        score, stream=stream, trajectory_id="t1", attempt=0, seq=position.seq, prev_sha256=position.prev_sha256
    )
    recorder.flush()
    assert_chained(log)


def test_an_attempts_own_stream_is_not_open_to_emit(recorder):
    with pytest.raises(ValueError, match="own stream"):
        recorder.emit(Observation(content="x"), stream="t1/0", trajectory_id="t1", attempt=0)


def test_a_stream_goes_on_after_a_restart(log):
    body = Annotation(kind="tag", author="me")
    for _ in range(3):
        with Recorder(log) as recorder:
            writer = recorder.stream("notes", after=last_of_stream(log, "notes", "notes"))
            writer.record(body)
            writer.record(body)
            for number in range(3000):
                recorder.emit(body, stream=f"other-{number}", seq=0)
    assert [event.envelope.seq for event in events(log, "notes")] == list(range(6))
    assert last_of_stream(log, "notes", "notes").seq == 6
    assert last_of_stream(log, "unknown", "unknown") is None


def test_resuming_passes_over_records_that_are_no_events(log):
    with Recorder(log) as recorder:
        recorder.emit(Annotation(kind="tag", author="me"), stream="notes")
    log.append([ProducerRecord("notes", b"\xc1garbage"), ProducerRecord("notes", b"{}")])
    assert last_of_stream(log, "notes", "notes").seq == 1
    assert StreamPosition() == StreamPosition(0, None)


class Held:
    """Holds the log file's write lock from another connection."""

    def __init__(self, path):
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.connection.execute("BEGIN IMMEDIATE")

    def release(self):
        self.connection.execute("ROLLBACK")
        self.connection.close()


@pytest.fixture
def impatient(tmp_path):
    """A log that gives up on a lock at once."""
    SqliteLog.create(tmp_path / "held.sqlite").close()
    with SqliteLog.open(tmp_path / "held.sqlite", busy_seconds=0.05) as log:
        yield log


def test_an_append_is_retried_until_the_log_is_back(impatient):
    held = Held(impatient.path)
    with Recorder(impatient) as recorder:
        with recorder.trajectory(STARTED) as attempt:
            attempt.finish(FINISHED)
        time.sleep(0.5)
        assert (recorder.acknowledged, recorder.unacknowledged) == (0, 2)
        held.release()
        recorder.flush()
        assert recorder.acknowledged == 2
    assert_chained(impatient)


def test_an_outage_longer_than_the_retries_is_raised_by_every_call(impatient):
    held = Held(impatient.path)
    recorder = Recorder(impatient, retry_seconds=0.3)
    attempt = recorder.trajectory(STARTED, trajectory_id="t1")
    with pytest.raises(LogError, match=r"1 recorded events are not acknowledged.*locked"):
        recorder.flush()
    for call in (
        lambda: attempt.record(Observation(content="x")),
        lambda: attempt.finish(FINISHED),
        lambda: recorder.trajectory(STARTED),
        recorder.flush,
        recorder.close,
    ):
        with pytest.raises(LogError, match="not acknowledged"):
            call()
    held.release()
    assert types(impatient) == []


def test_an_exception_of_the_user_is_not_hidden_by_the_logs(impatient):
    held = Held(impatient.path)
    recorder = Recorder(impatient, retry_seconds=0.1)
    with pytest.raises(ZeroDivisionError) as caught, recorder, recorder.trajectory(STARTED):
        raise ZeroDivisionError
    assert "not acknowledged" in caught.value.__notes__[0]
    held.release()


def test_a_full_buffer_makes_record_wait(impatient):
    held = Held(impatient.path)
    recorder = Recorder(impatient, max_buffer_bytes=1_000_000)
    attempt = recorder.trajectory(STARTED)
    num_recorded = 0

    def produce():
        nonlocal num_recorded
        for _ in range(500):
            attempt.record(Observation(content="x" * 9_400))
            num_recorded += 1

    thread = threading.Thread(target=produce)
    thread.start()
    time.sleep(0.7)
    assert 90 <= num_recorded <= 101, "10 KB each, 1 MB at most"
    assert thread.is_alive()
    held.release()
    thread.join(timeout=30)
    attempt.finish(FINISHED)
    recorder.close()
    assert recorder.acknowledged == 502
    assert_chained(impatient)


def test_a_full_buffer_does_not_hold_up_an_abort(impatient):
    held = Held(impatient.path)
    recorder = Recorder(impatient, max_buffer_records=3)
    attempt = recorder.trajectory(STARTED)
    attempt.record(Observation(content="x"))
    attempt.record(Observation(content="x"))
    begun = time.monotonic()
    attempt.abort("no room")
    assert time.monotonic() - begun < 1
    held.release()
    recorder.close()
    assert types(impatient)[-1] == "attempt_aborted"


ACTOR = """
import sys, time
from ingest.open import open_log
from ingest.recorder import Recorder
from schemas.events import *

with Recorder(open_log(sys.argv[1]), producer_id="actor") as recorder:
    for number in range(1_000_000):
        with recorder.trajectory(TrajectoryStarted(task_key="t", domain="d"), trajectory_id=f"t{number}") as attempt:
            for i in range(5):
                attempt.record(Observation(content=str(i) * 500))
            recorder.flush()
            print(number, flush=True)
            attempt.record(Observation(content="after"))
            attempt.finish(TrajectoryFinished(status="completed"))
"""


def start_actor(url, source=ACTOR):
    command = [sys.executable, "-c", source, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_kill_9_of_an_actor_loses_nothing_that_was_flushed(url, log):
    actor = start_actor(url)
    lines = [actor.stdout.readline() for _ in range(30)]
    actor.send_signal(signal.SIGKILL)
    rest, _ = actor.communicate(timeout=30)
    last = max(int(line) for line in [*lines, *rest.splitlines(keepends=True)] if line.endswith("\n"))
    assert_chained(log)
    for number in range(last + 1):
        assert types(log, f"t{number}/0")[:6] == ["trajectory_started"] + ["observation"] * 5
    open_streams = [number for number in range(last) if types(log, f"t{number}/0")[-1] not in {"trajectory_finished"}]
    assert open_streams == [], "only the last one may be half-open"


def test_ctrl_c_aborts_the_attempt_and_ends_the_process_cleanly(url, log):
    for _ in range(3):
        actor = start_actor(url, ACTOR.replace('f"t{number}"', "None"))
        for _ in range(20):
            actor.stdout.readline()
        actor.send_signal(signal.SIGINT)
        _, errors = actor.communicate(timeout=30)
        assert errors.strip().endswith("KeyboardInterrupt"), errors
        assert errors.count("Traceback") == 1, errors
        assert actor.returncode == -signal.SIGINT
    assert_chained(log)
    ends = {event.envelope.stream: event for event in events(log)}
    kinds = [event.envelope.type for event in ends.values()]
    assert set(kinds) <= {"trajectory_finished", "attempt_aborted"}, "no attempt is left half-open"
    assert kinds.count("attempt_aborted") <= 3


ABANDONED = """
import sys
from ingest.open import open_log
from ingest.recorder import Recorder
from schemas.events import *

recorder = Recorder(open_log(sys.argv[1]))
attempt = recorder.trajectory(TrajectoryStarted(task_key="t", domain="d"))
attempt.record(Observation(content="never flushed"))
"""


def test_the_interpreters_exit_writes_what_was_recorded(url, log):
    actor = start_actor(url, ABANDONED)
    _, errors = actor.communicate(timeout=30)
    assert (actor.returncode, errors) == (0, "")
    assert types(log) == ["trajectory_started", "observation", "attempt_aborted"]
