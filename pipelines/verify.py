"""Verify: finished trajectories → verdicts of their domain's verifier → `score` events in the log.

Each is graded in a second, clean sandbox, from the workspace that its `trajectory_finished` names. An infrastructure
error is no reward: it is recorded, tried again, and after the last try the verification is abandoned by name. Progress
is kept as `txn` of `epochs`; a range that is verified twice gives scores that count as duplicates.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import apache_beam as beam
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.pvalue import PCollection

from domains.registry import load_domain
from ingest.recorder import Recorder
from ingest.streams import StreamPosition
from lake.events import read_history, read_range
from lake.open import Lake
from lake.table import Progress
from pipelines.assemble import RECORD_COLUMNS, machines
from pipelines.bookkeeping import EpochCounts, epochs_table
from pipelines.failpoints import reach
from pipelines.io.delta import commit_or_discard
from pipelines.machine import Waiting
from pipelines.plan import Ranges, in_batches, width
from pipelines.project import plan_within
from pipelines.runner import count, run_beam
from pipelines.warm import warm_lake, warm_log
from schemas.config.pipelines import PipelineConfig
from schemas.events import (
    Action,
    ModelCall,
    Observation,
    Reward,
    Score,
    TrajectoryFinished,
    TrajectoryStarted,
    VerificationAbandoned,
    stream_of_score,
)
from schemas.records import Task, Trajectory, Verdict
from schemas.wire import WireError, decode_event, encode_body
from storage.blobs import BlobStore
from verify.port import Verifier
from verify.runtime import SandboxRuntime

PIPELINE = "verify"
_BATCH = 32
"""Trajectories an element: coarse for Beam, small enough to spread and to hold."""
_MAX_VERDICT_BYTES = 4 * 1024 * 1024
"""Evidence is for people; what is larger belongs into the blob store."""


class Graded(NamedTuple):
    """A verdict with how long it took."""

    verdict: Verdict
    duration_ms: float


class Unverifiable(Exception):  # noqa: N818 - says what the trajectory is; caught here
    """No try can grade this trajectory here: its domain or task is not at hand."""


def trajectory_of(waiting: Waiting) -> Trajectory:
    """The attempt as a verifier sees it."""
    bodies = [event.body for event in waiting.events]
    envelope = waiting.events[0].envelope
    assert envelope.trajectory_id is not None, "an attempt belongs to a trajectory"
    return Trajectory(
        trajectory_id=envelope.trajectory_id,
        run_id=envelope.run_id,
        attempt=waiting.attempt,
        started=waiting.started,
        finished=next(body for body in reversed(bodies) if isinstance(body, TrajectoryFinished)),
        calls=tuple(body for body in bodies if isinstance(body, ModelCall)),
        actions=tuple(body for body in bodies if isinstance(body, Action)),
        observations=tuple(body for body in bodies if isinstance(body, Observation)),
        rewards=tuple(body.value for body in bodies if isinstance(body, Reward)),
    )


def verifier_for(waiting: Waiting) -> tuple[Verifier, Task]:
    """The verifier and the task, as they were when the trajectory was made.

    Raises:
        Unverifiable: the domain, its verifier, or this very task is not at hand.
    """
    started = waiting.started
    try:
        domain = load_domain(started.domain)
        task = domain.task(started.task_key)
    except (ValueError, LookupError) as error:
        raise Unverifiable(f"{error}") from error
    verifier = domain.verifier()
    if verifier is None or verifier.id != started.primary_scorer:
        raise Unverifiable(f"domain {started.domain!r} has no verifier {started.primary_scorer!r}")
    if started.task_sha256 not in (None, task.sha256):
        raise Unverifiable(f"task {task.key!r} has changed since the trajectory was made")
    return verifier, task


def grade(verifier: Verifier, task: Task, trajectory: Trajectory, runtime: SandboxRuntime) -> Graded:
    """One try. What a verifier throws, or says that no event can hold, is an infrastructure error, never a score."""
    begun = time.perf_counter()
    try:
        verdict = verifier.verify(task, trajectory, runtime)
        _require_recordable(score_of(verifier, Graded(verdict, 0.0)))
    except Exception as error:  # noqa: BLE001 - a verifier's own failure says nothing about the policy
        # Names of files that a policy made may hold bytes that are no text.
        reason = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
        verdict = Verdict(outcome="infra_error", score=None, reason=reason[:500])
    return Graded(verdict, (time.perf_counter() - begun) * 1000)


def _require_recordable(score: Score) -> None:
    """Raise if a verdict can't become an event: else one bad verdict would stop every later epoch."""
    data = encode_body(score)
    if len(data) > _MAX_VERDICT_BYTES:
        raise ValueError(f"a verdict of {len(data)} bytes; at most {_MAX_VERDICT_BYTES}")
    msgspec.msgpack.decode(data, type=Score)


def score_of(verifier: Verifier, graded: Graded) -> Score:
    """The event of a verdict."""
    verdict = graded.verdict
    return Score(
        verifier_id=verifier.id,
        verifier_version=verifier.version,
        outcome=verdict.outcome,
        score=verdict.score,
        expected_tests=None if verdict.expected_tests is None else list(verdict.expected_tests),
        seen_tests=None if verdict.seen_tests is None else list(verdict.seen_tests),
        passed_tests=None if verdict.passed_tests is None else list(verdict.passed_tests),
        tests_sha256=verdict.tests_sha256,
        sandbox_image_digest=verdict.sandbox_image_digest,
        reason=verdict.reason,
        evidence=verdict.evidence,
        duration_ms=graded.duration_ms,
    )


def judge(
    waiting: Waiting, runtime: SandboxRuntime, config: PipelineConfig
) -> Iterator[tuple[str, int, Score | VerificationAbandoned]]:
    """(stream, seq, body) of each try, ending in a decisive score or an abandonment."""
    trajectory = trajectory_of(waiting)
    subject = trajectory.trajectory_id, waiting.attempt
    try:
        verifier, task = verifier_for(waiting)
    except Unverifiable as why:
        scorer = waiting.started.primary_scorer or "none"
        body = VerificationAbandoned(verifier_id=scorer, verifier_version="none", tries=0, reason=str(why))
        yield stream_of_score(scorer, "none", *subject), 0, body
        return
    stream = stream_of_score(verifier.id, verifier.version, *subject)
    reason: str | None = None
    first = waiting.heads.get(stream, (0, b""))[0]
    for attempt in range(first, max(config.verify_tries, first + 1)):
        if attempt > first:
            time.sleep(config.verify_retry_seconds * 2 ** (attempt - first - 1))
        graded = grade(verifier, task, trajectory, runtime)
        yield stream, attempt, score_of(verifier, graded)
        if graded.verdict.outcome != "infra_error":
            return
        reason = graded.verdict.reason
    tries = max(config.verify_tries, first + 1)
    abandoned = VerificationAbandoned(
        verifier_id=verifier.id, verifier_version=verifier.version, tries=tries, reason=reason or "infrastructure error"
    )
    yield stream, tries, abandoned


def find_waiting(lake: Lake, log_id: str, partition: int, start: int, end: int) -> Iterator[Waiting]:
    """Trajectories that finished in a range and wait for a verifier of ours at its end."""
    events = lake.table("events")
    found = read_range(events, log_id, partition, start, end, ["offset", "type", "trajectory_id"])
    finished = found.filter(pc.equal(found.column("type"), "trajectory_finished")).column("trajectory_id")
    for finished_ids in in_batches(sorted(set(finished.to_pylist())), _BATCH * 128):
        columns, is_start = ["trajectory_id", "value"], pc.field("type") == "trajectory_started"
        starts = read_history(events, log_id, partition, finished_ids, end, columns, only=is_start)
        for ids in in_batches(sorted(_to_verify(starts)), _BATCH * 8):
            for _, machine in machines(read_history(events, log_id, partition, ids, end, RECORD_COLUMNS)):
                waiting = machine.waiting()
                if waiting is not None and _is_ours(waiting.started):
                    yield waiting


def _to_verify(starts: pa.Table) -> set[str]:
    """Trajectories with a start that names a verifier of ours: only these need their whole history."""
    ids, values = starts.column("trajectory_id").to_pylist(), starts.column("value").to_pylist()
    return {trajectory_id for trajectory_id, value in zip(ids, values, strict=True) if _names_ours(value)}


def _names_ours(value: bytes) -> bool:
    try:
        body = decode_event(value).body
    except WireError:
        return False  # quarantined by itself, so no attempt begins with it
    return isinstance(body, TrajectoryStarted) and _is_ours(body)


def _is_ours(started: TrajectoryStarted) -> bool:
    """A score by an environment or an importer comes from them, not from us."""
    return started.primary_scorer is not None and not started.primary_scorer.startswith(("env:", "import:"))


class FindFn(beam.DoFn):
    """Offset range of a partition → batches of waiting trajectories, each with a key of its own to spread them by."""

    def __init__(self, lake_url: str, log_id: str) -> None:
        self._lake_url = lake_url
        self._log_id = log_id

    def process(self, shard: tuple[int, int, int]) -> Iterator[tuple[str, list[Waiting]]]:
        """Elements of at most `_BATCH` trajectories; an empty one makes sure that the range is committed."""
        lake = warm_lake(self._lake_url)
        lake.table("events").refresh()
        waiting = find_waiting(lake, self._log_id, *shard)
        yield "", []
        for batch in in_batches(waiting, _BATCH):
            yield batch[0].events[0].envelope.stream, batch


class GradeFn(beam.DoFn):
    """Waiting trajectories → score events in the log; gives the number of verdicts."""

    def __init__(self, log_url: str, blobs_url: str, config: PipelineConfig) -> None:
        self._log_url = log_url
        self._blobs_url = blobs_url
        self._config = config

    def setup(self) -> None:
        """What can't be pickled."""
        self._runtime = SandboxRuntime(BlobStore(self._blobs_url))

    def process(self, keyed: tuple[str, Iterable[list[Waiting]]]) -> Iterator[tuple[int, int]]:
        """Grade side by side; durable in the log before the element is done."""
        for batch in keyed[1]:
            if batch:
                self._grade(batch)
            yield 0, len(batch)

    def _grade(self, batch: list[Waiting]) -> None:
        with ThreadPoolExecutor(self._config.num_workers) as pool:
            judged = list(pool.map(self._judge, batch))
        reach("verify.scores.before_append")
        by_run: dict[str, list[int]] = {}
        for index, waiting in enumerate(batch):
            by_run.setdefault(waiting.events[0].envelope.run_id, []).append(index)
        for run_id, indices in by_run.items():
            with Recorder(warm_log(self._log_url), run_id=run_id, producer_id=PIPELINE) as recorder:
                for index in indices:
                    count("verdicts", _record(recorder, batch[index], judged[index]))
                recorder.flush()
        reach("verify.scores.after_append")

    def _judge(self, waiting: Waiting) -> list[tuple[str, int, Score | VerificationAbandoned]]:
        return list(judge(waiting, self._runtime, self._config))


def _record(
    recorder: Recorder, waiting: Waiting, judged: Sequence[tuple[str, int, Score | VerificationAbandoned]]
) -> int:
    """Record verdicts; gives their number, 0 where ids are so long that no stream can be named after them."""
    stream, first, _ = judged[0]
    _, previous = waiting.heads.get(stream, (0, b""))
    try:
        writer = recorder.stream(
            stream,
            trajectory_id=waiting.events[0].envelope.trajectory_id,
            attempt=waiting.attempt,
            after=StreamPosition(first, previous or None),
        )
    except ValueError:
        return 0  # nobody could score it: it stays open, where reconciliation shows it
    for _, _, body in judged:
        writer.record(body)
    return len(judged)


class CommitFn(beam.DoFn):
    """All verdicts are durable: commit the range as verified."""

    def __init__(self, lake_url: str, log_id: str, ranges: Ranges, started: float) -> None:
        self._lake_url = lake_url
        self._progress = Progress(PIPELINE, log_id, ranges)
        self._started = started

    def process(self, element: tuple[int, Iterable[int]]) -> Iterator[int]:
        """One commit of `epochs`; gives its version."""
        graded = sum(element[1])
        yield commit_verified(warm_lake(self._lake_url), self._progress, graded, self._started)
        count("num_records", graded)


def commit_verified(lake: Lake, progress: Progress, graded: int, started: float) -> int:
    """Note in `epochs` that a range was verified; gives the table's version.

    Raises:
        CommitConflictError: another process was faster.
    """
    table = lake.table("epochs")
    table.refresh()
    file = table.write_file(epochs_table(progress, EpochCounts(num_records=graded), {}, started))
    version = commit_or_discard(table, [file], progress, {"pipeline": PIPELINE}).version
    reach("verify.epochs.after_commit")
    return version


class Home(NamedTuple):
    """Where a verify pipeline works."""

    lake: str
    log: str
    blobs: str
    log_id: str


def build(
    pipeline: beam.Pipeline, home: Home, ranges: Ranges, config: PipelineConfig, started: float
) -> PCollection[int]:
    """The Beam pipeline of one epoch."""
    shards = [(partition, *span) for partition, span in ranges.items() if span[0] < span[1]]
    return (
        pipeline
        | "Ranges" >> beam.Create(shards, reshuffle=False)
        | "Find finished" >> beam.ParDo(FindFn(home.lake, home.log_id))
        # Each transform costs a small epoch 10 ms: a Reshuffle, which is five, isn't needed to spread batches.
        | "Spread" >> beam.GroupByKey()
        | "Grade" >> beam.ParDo(GradeFn(home.log, home.blobs, config))
        | "To one committer" >> beam.GroupByKey()
        | "Commit" >> beam.ParDo(CommitFn(home.lake, home.log_id, ranges, started))
    )


def verify_epoch(
    home: Home, partitions: Sequence[int], config: PipelineConfig, beam_options: Sequence[str] = ()
) -> dict[str, int] | None:
    """Run one epoch.

    Returns:
        Counters by name, or None when there was nothing to do.
    """
    lake = warm_lake(home.lake)
    events, epochs = lake.table("events"), lake.table("epochs")
    events.refresh()
    epochs.refresh()
    starts = epochs.progress(PIPELINE, home.log_id, partitions)
    ends = events.progress("ingest", home.log_id, partitions)
    ranges = plan_within(events, home.log_id, starts, ends, config)
    if not width(ranges):
        return None
    started = time.time()
    if not any(_finishes(lake, home.log_id, partition, *span) for partition, span in ranges.items()):
        # Nothing to grade is the common case in a follower; it isn't worth a Beam job.
        commit_verified(lake, Progress(PIPELINE, home.log_id, ranges), 0, started)
        return {"num_records": 0}
    return run_beam(lambda pipeline: build(pipeline, home, ranges, config, started), beam_options)


def _finishes(lake: Lake, log_id: str, partition: int, start: int, end: int) -> bool:
    """Whether any trajectory finished in a range."""
    types = read_range(lake.table("events"), log_id, partition, start, end, ["offset", "type"]).column("type")
    return bool(pc.any(pc.equal(types, "trajectory_finished")).as_py())
