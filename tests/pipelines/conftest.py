"""Shared by the tests of pipelines: homes on disk, event streams with every field at will, and one eventful log."""

import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ingest.open import create_log, open_log
from ingest.port import RECORD_SCHEMA, EventLog
from lake.content import lake_hashes
from lake.open import Lake
from lake.reconcile import Reconciliation, reconcile
from pipelines.assemble import RECORD_COLUMNS
from pipelines.decode import events_table
from pipelines.run import STAGES, Pipelines, Totals, Urls
from schemas.config.pipelines import PipelineConfig
from schemas.events import (
    Action,
    Annotation,
    AttemptAborted,
    Body,
    Consumed,
    Envelope,
    GroupClosed,
    LeaseGranted,
    ModelCall,
    Observation,
    PolicyPublished,
    Reward,
    Score,
    StepTrained,
    TrajectoryFinished,
    TrajectoryStarted,
    VerificationAbandoned,
    stream_of_abort,
    stream_of_attempt,
    stream_of_score,
)
from schemas.records import ProducerRecord
from schemas.tables import PROJECTIONS, SORT_KEYS
from schemas.wire import encode_body, encode_envelope, encode_record, sha256

DECIDED = ("events", *PROJECTIONS)
"""Tables that are functions of the log alone."""


class Tape:
    """Events in the order of a log, chained like a recorder's, deterministic, and with every field at will."""

    def __init__(self, run_id: str = "run", as_json: bool = False) -> None:
        self.run_id, self.as_json = run_id, as_json
        self.records: list[ProducerRecord] = []
        self._heads: dict[str, tuple[int, bytes | None]] = {}
        self._num_events = 0

    def add(
        self,
        body: Body | bytes,
        stream: str,
        trajectory_id: str | None = None,
        attempt: int | None = None,
        seq: int | None = None,
        **fields: Any,
    ) -> bytes:
        """Append an event; without `seq` the stream's next one. `fields` overrides fields of the envelope."""
        value = self.make(body, stream, trajectory_id, attempt, seq, **fields)
        return self.put(trajectory_id or stream, value)

    def put(self, key: str, value: bytes) -> bytes:
        """Append bytes as they are."""
        self.records.append(ProducerRecord(key, value))
        return value

    def make(
        self,
        body: Body | bytes,
        stream: str,
        trajectory_id: str | None = None,
        attempt: int | None = None,
        seq: int | None = None,
        **fields: Any,
    ) -> bytes:
        """Bytes of an event, not appended; the stream's head moves only for events without `seq`."""
        following, previous = self._heads.get(stream, (0, None))
        self._num_events += 1
        salt = self._num_events.to_bytes(16, "big")
        data = body if isinstance(body, bytes) else msgspec.json.encode(body) if self.as_json else encode_body(body)
        content: dict[str, Any] = {
            "event_id": f"event-{self._num_events}",
            "run_id": self.run_id,
            "trajectory_id": trajectory_id,
            "attempt": attempt,
            "stream": stream,
            "seq": following if seq is None else seq,
            "producer_id": "producer",
            "ts_ns": self._num_events,
            "prev_sha256": previous,
            "body_sha256": sha256(salt, data),
            "type": "score" if isinstance(body, bytes) else str(type(body).__struct_config__.tag),
        }
        event = Envelope(**(content | fields))
        envelope = msgspec.json.encode(event) if self.as_json else encode_envelope(event)
        if seq is None:
            self._heads[stream] = following + 1, sha256(envelope)
        return json_record(envelope, salt, data) if self.as_json else encode_record(envelope, salt, data)

    def own(
        self, trajectory_id: str, body: Body | bytes, attempt: int = 0, seq: int | None = None, **fields: Any
    ) -> bytes:
        """An event of an attempt's own stream."""
        return self.add(body, stream_of_attempt(trajectory_id, attempt), trajectory_id, attempt, seq, **fields)

    def start(self, trajectory_id: str, attempt: int = 0, **columns: Any) -> None:
        """`trajectory_started`, scored by `env:return` unless `columns` says otherwise."""
        body = TrajectoryStarted(**{"task_key": "task", "domain": "d", "primary_scorer": "env:return"} | columns)
        self.own(trajectory_id, body, attempt)

    def turns(self, trajectory_id: str, attempt: int = 0, num: int = 2, **columns: Any) -> None:
        """Model calls that a learner can train on, each with an action, an observation and a reward."""
        for turn in range(num):
            self.own(trajectory_id, call(turn, **columns), attempt)
            self.own(trajectory_id, Action(action_id=f"a{turn}", call_id=f"c{turn}", name="sh"), attempt)
            self.own(trajectory_id, Observation(action_id=f"a{turn}", content="x" * 50, duration_ms=1.5), attempt)
            self.own(trajectory_id, Reward(value=0.25), attempt)

    def finish(self, trajectory_id: str, attempt: int = 0, **columns: Any) -> None:
        """`trajectory_finished`, completed unless `columns` says otherwise."""
        body = TrajectoryFinished(**{"status": "completed", "terminated": True} | columns)
        self.own(trajectory_id, body, attempt)

    def score(
        self,
        trajectory_id: str,
        score: float | None = 1.0,
        attempt: int = 0,
        scorer: str = "env:return",
        **columns: Any,
    ) -> None:
        """The next try of a scorer."""
        outcome = "infra_error" if score is None else "pass" if score > 0 else "fail"
        body = Score(**{"verifier_id": scorer, "verifier_version": "1", "outcome": outcome, "score": score} | columns)
        self.add(body, stream_of_score(scorer, "1", trajectory_id, attempt), trajectory_id, attempt)

    def abandon(self, trajectory_id: str, attempt: int = 0, scorer: str = "env:return") -> None:
        """`verification_abandoned`."""
        body = VerificationAbandoned(verifier_id=scorer, verifier_version="1", tries=1, reason="broken")
        self.add(body, stream_of_score(scorer, "1", trajectory_id, attempt), trajectory_id, attempt)

    def whole(self, trajectory_id: str, score: float = 1.0, num: int = 2, **columns: Any) -> None:
        """A trajectory from its start to its score."""
        self.start(trajectory_id, **columns)
        self.turns(trajectory_id, num=num)
        self.finish(trajectory_id)
        self.score(trajectory_id, score)


def call(turn: int, **columns: Any) -> ModelCall:
    """A model call that a learner can train on; `prefix_sha256` fits a chain of calls made by this function."""
    prompt, response = [turn * 10 + 1, turn * 10 + 2], [turn * 10 + 3, turn * 10 + 4, turn * 10 + 5]
    prefix = [t * 10 + k for t in range(turn) for k in range(1, 6)] + prompt
    content: dict[str, Any] = {
        "call_id": f"c{turn}",
        "parent_call_id": f"c{turn - 1}" if turn else None,
        "prompt_token_ids": prompt,
        "response_token_ids": response,
        "sampled_run_lengths": [2, 1],
        "logprobs": [-0.5, -0.25, -1.0],
        "policy_id": "p",
        "policy_version_runs": [(3, 2), (4, 1)],
        "prefix_sha256": hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in prefix)).hexdigest(),
        "messages": [{"role": "assistant", "content": "hello"}],
        "temperature": 1.0,
    }
    return ModelCall(**(content | columns))


def json_record(envelope: bytes, salt: bytes, body: bytes) -> bytes:
    """A record as a producer in another language writes it."""
    parts = {"envelope": envelope.decode(), "salt": b64encode(salt).decode(), "body": body.decode()}
    return msgspec.json.encode(parts)


def add_run_events(tape: Tape) -> None:
    """Run-level events: with a second copy of each, and a broken first copy before a good one."""
    policies, learner = "run/policy/p", "run/learner/l"
    published = PolicyPublished(policy_id="p", version=1, checkpoint_uri="file:///c", sha256="ab" * 32)
    broken = tape.make(published, policies, body_sha256=bytes(32))
    tape.put(policies, broken)
    tape.add(published, policies, seq=0)
    tape.add(published, policies, seq=0)
    tape.add(PolicyPublished(policy_id="p", version=2, checkpoint_uri="file:///d", sha256="not hex"), policies, seq=1)
    consumed = Consumed(
        learner_id="l",
        train_step=0,
        policy_id="p",
        policy_version=1,
        trajectory_ids=["t-00"],
        row_sha256s=["cd" * 32],
        advantages=[0.5],
    )
    tape.add(consumed, learner, seq=0)
    trained = StepTrained(
        learner_id="l", train_step=0, policy_id="p", policy_version=1, statistics={"loss": 0.1, "kl": None}
    )
    tape.add(trained, learner, seq=1)
    tape.add(consumed, learner, seq=0)
    tape.add(GroupClosed(group_id="g", given_up=[3]), "run/scheduler/g/3")
    tape.add(LeaseGranted(task_key="task", holder="h", expires_ns=5), "run/scheduler/leases")


def add_attempts(tape: Tape) -> None:
    """Every way in which an attempt can end, and what can come after its end."""
    tape.start("a-aborted")
    tape.turns("a-aborted", num=1)
    tape.own("a-aborted", AttemptAborted(reason="Ctrl-C", by="producer"))
    tape.own("a-aborted", call(7), seq=50)
    tape.start("a-dead")
    tape.turns("a-dead", num=1)
    abort = AttemptAborted(reason="its process died", by="other")
    tape.add(abort, stream_of_abort("other", "a-dead", 0), "a-dead", 0)
    tape.add(abort, stream_of_abort("other", "a-dead", 0), "a-dead", 0, seq=0)
    tape.add(abort, stream_of_abort("third", "a-dead", 0), "a-dead", 0)
    tape.start("a-dead", attempt=1)
    tape.finish("a-dead", attempt=1)
    tape.score("a-dead", 0.0, attempt=1)
    tape.start("a-infra")
    tape.finish("a-infra", status="failed", terminated=False, failure_class="infra", error="sandbox died")
    tape.start("a-infra", attempt=1)
    tape.turns("a-infra", attempt=1)
    tape.score("a-infra", None, attempt=1)
    tape.start("a-infra", attempt=2)  # open when attempt 1 settles
    tape.finish("a-infra", attempt=1)
    tape.score("a-infra", 1.0, attempt=1)
    tape.turns("a-infra", attempt=2, num=1)  # late
    tape.start("a-infra", attempt=3)  # later still, twice
    tape.records.append(tape.records[-1])
    tape.score("a-infra", 0.0, attempt=1, scorer="second-opinion")
    tape.start("a-loses")
    tape.start("a-loses", attempt=1)
    tape.finish("a-loses", attempt=1)
    tape.finish("a-loses")
    tape.score("a-loses", attempt=1)


def add_verdicts(tape: Tape) -> None:
    """Trajectories that settle late, early, without a scorer, or not yet."""
    tape.start("a-unscored")
    tape.turns("a-unscored")
    tape.finish("a-unscored")
    tape.score("a-unscored", None)
    tape.abandon("a-unscored")
    tape.score("a-unscored", 1.0, scorer="other")
    tape.start("a-imported", primary_scorer=None)
    tape.finish("a-imported")
    tape.start("a-early", primary_scorer="import:x")
    tape.score("a-early", 0.5, scorer="import:x")
    tape.finish("a-early", status="truncated", truncated=True, terminated=False)
    tape.start("a-waits")
    tape.turns("a-waits", num=1)
    tape.finish("a-waits")
    late = tape.own("a-waits", call(9), seq=77)
    tape.put("a-waits", late)  # a late event of an attempt that still waits, twice
    tape.start("a-open")
    tape.turns("a-open", num=1)
    tape.add(Annotation(kind="tag", author="me", value={"good": True}), "a-open/notes", "a-open")
    tape.add(Annotation(kind="tag", author="me"), "a-open/7", "a-open", 0)


def add_violations(tape: Tape) -> None:
    """Streams and values that break rules."""
    for name, columns in {
        "nan": {"logprobs": [-0.5, float("nan"), -1.0]},
        "length": {"logprobs": [-0.5]},
        "mask": {"sampled_run_lengths": [2]},
        "prefix": {"prefix_sha256": "00" * 32},
        "runs": {"policy_version_runs": [(1, 1)]},
    }.items():
        tape.start(f"v-{name}")
        tape.own(f"v-{name}", call(0, **columns))
        tape.finish(f"v-{name}")
        tape.score(f"v-{name}")
    tape.start("v-fork")
    tape.own("v-fork", call(0))
    tape.own("v-fork", call(0, temperature=0.5), seq=1)
    tape.own("v-fork", call(0, temperature=0.5), seq=1)
    tape.finish("v-fork")
    tape.score("v-fork")
    tape.start("v-gap")
    tape.own("v-gap", call(0), seq=2)
    tape.own("v-gap", TrajectoryFinished(status="completed"), seq=3)
    tape.score("v-gap")
    tape.start("v-chain")
    tape.own("v-chain", call(0), prev_sha256=bytes(32))
    tape.finish("v-chain")
    tape.score("v-chain")
    tape.start("v-reference")
    tape.own("v-reference", call(1))
    tape.finish("v-reference")
    tape.score("v-reference")
    tape.start("v-start")
    tape.start("v-start")
    tape.finish("v-start")
    tape.score("v-start")
    tape.own("v-nostart", call(0))
    tape.finish("v-nostart")
    tape.start("v-verdict")
    tape.finish("v-verdict")
    tape.score("v-verdict", expected_tests=["t1", "t2"], seen_tests=["t1"], passed_tests=["t1"])
    tape.start("v-score")
    tape.finish("v-score")
    tape.score("v-score", float("nan"), outcome="pass")


def add_bad_records(tape: Tape) -> None:
    """Bytes that are no events, and events that contradict themselves."""
    tape.put("junk", b"\xff\x00 no event")
    tape.put("junk", b"")
    tape.put("junk", b'{"envelope": 1}')
    tape.own("b-body", TrajectoryStarted(task_key="task", domain="d"), body_sha256=bytes(32))
    tape.own("b-version", TrajectoryStarted(task_key="task", domain="d"), schema_version=99)
    tape.own("b-type", TrajectoryStarted(task_key="task", domain="d"), type="no_such_type")
    tape.own("b-mismatch", TrajectoryStarted(task_key="task", domain="d"), type="model_call")
    tape.own("b-score", Score(verifier_id="v", verifier_version="1", outcome="pass", score=1.0))
    tape.add(Score(verifier_id="v", verifier_version="1", outcome="pass", score=1.0), "elsewhere", "b-score", 0)
    tape.own("b-bytes", b"\x81\xa4type\xa5score", type="score")


def eventful(num_whole: int = 12, seed: int = 5) -> list[ProducerRecord]:
    """One fixed log: whole trajectories, every kind of end, violation, bad record and run-level event, interleaved."""
    tapes = []
    for adder in (add_run_events, add_attempts, add_verdicts, add_violations, add_bad_records):
        tapes.append(Tape())
        adder(tapes[-1])
    for index in range(num_whole):
        tapes.append(Tape(as_json=index == 5))
        tapes[-1].whole(
            f"t-{index:02}", float(index % 2), group_id=f"g{index // 4}", group_size=4, sample_idx=index % 4
        )
        if index % 3 == 0:
            tapes[-1].records += tapes[-1].records[1:4]  # duplicates after it has settled
    return interleave([tape.records for tape in tapes], seed)


def interleave(tapes: Sequence[Sequence[ProducerRecord]], seed: int) -> list[ProducerRecord]:
    """The tapes mixed at random, each in its own order."""
    generator = random.Random(seed)
    order = [index for index, tape in enumerate(tapes) for _ in tape]
    generator.shuffle(order)
    sources = [iter(tape) for tape in tapes]
    return [next(sources[index]) for index in order]


class Home:
    """A lake, a log and blobs in one folder."""

    def __init__(self, folder: Path, partitions: int = 2) -> None:
        self.folder = folder
        self.urls = Urls(str(folder / "lake"), f"sqlite://{folder}/log.sqlite", str(folder / "blobs"))
        self.log: EventLog = (
            open_log(self.urls.log) if (folder / "log.sqlite").exists() else create_log(self.urls.log, partitions)
        )
        self.lake = Lake(self.urls.lake)
        self.lake.create()

    def copy(self, folder: Path) -> "Home":
        """The same log (same id) with a new lake."""
        folder.mkdir(parents=True)
        for path in self.folder.glob("log.sqlite*"):
            shutil.copy(path, folder)
        return Home(folder)

    def run(self, only: Sequence[str] = STAGES, accept_gap: bool = False, **config: Any) -> Totals:
        """Run pipelines until nothing is left to do."""
        settings = PipelineConfig(**({"verify_tries": 2, "verify_retry_seconds": 0.01} | config))
        return Pipelines(self.urls, settings, only=only, accept_gap=accept_gap).run_once()

    def order(self, failpoint: str | None = None, **order: Any) -> dict[str, Any]:
        """What `Zygote.run` is told for this home."""
        env = {"TRAJLAKE_FAILPOINT": failpoint} if failpoint else {}
        return {**self.urls._asdict(), "env": env, **order}

    def rows(self, table: str) -> list[dict[str, Any]]:
        """All rows, in the table's order."""
        handle = self.lake.table(table)
        handle.refresh()
        rows = handle.read_files(handle.data_files())
        keys = [("log_id", "ascending"), *((key, "ascending") for key in SORT_KEYS.get(table, ()))]
        return rows.sort_by(keys).to_pylist()

    def projections(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of every table that is a function of the log."""
        return {name: comparable(self.rows(name)) for name in DECIDED}

    def hashes(self) -> dict[str, str]:
        """Content hashes of the same tables."""
        return lake_hashes(self.lake)

    def reconciliation(self) -> Reconciliation:
        """Where every record is."""
        return reconcile(self.lake, self.log.log_id, {p: self.log.bounds(p) for p in self.log.partitions()})

    def rules(self) -> dict[str, str]:
        """Trajectory → rule of its quarantine row, for trajectories and attempts."""
        return {row["trajectory_id"]: row["rule"] for row in self.rows("quarantine") if row["scope"] != "record"}


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in which NaN equals NaN."""
    return [
        {name: "NaN" if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        for row in rows
    ]


class MemoryHistory:
    """`pipelines.assemble.History` over events in memory: what tables give, without tables."""

    def __init__(self, events: pa.Table, before: int) -> None:
        self._events = events.filter(pc.less(events.column("offset"), before)).sort_by("offset")

    def closed(self, trajectory_ids: Sequence[str]) -> set[str]:
        found = self.of(trajectory_ids)
        return set(found.filter(found.column("is_closing")).column("trajectory_id").to_pylist())

    def of(self, trajectory_ids: Sequence[str]) -> pa.Table:
        wanted = pa.array(list(trajectory_ids), pa.string())
        return self._events.filter(pc.is_in(self._events.column("trajectory_id"), value_set=wanted)).select(
            RECORD_COLUMNS
        )

    def of_run(self, streams: Mapping[str, tuple[int, int]]) -> pa.Table:
        wanted = pa.array(list(streams), pa.string())
        return self._events.filter(pc.is_in(self._events.column("run_stream"), value_set=wanted)).select(RECORD_COLUMNS)


def table_of_events(values: Sequence[bytes]) -> pa.Table:
    """Rows of `events` of one partition, by offset."""
    offsets = pa.array(range(len(values)), pa.int64())
    batch = pa.record_batch([offsets, pa.array(["k"] * len(values)), pa.array(values, pa.binary())], RECORD_SCHEMA)
    return events_table("log", 0, batch).sort_by("offset")


@pytest.fixture
def new_home(tmp_path: Path) -> Callable[..., Home]:
    """Makes homes with the records given."""

    def make(records: Sequence[ProducerRecord] = (), name: str = "home", partitions: int = 2) -> Home:
        folder = tmp_path / name
        folder.mkdir()
        home = Home(folder, partitions)
        home.log.append(list(records))
        return home

    return make


@pytest.fixture(scope="session")
def eventful_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The eventful log after an undisturbed run in one epoch; not to be changed."""
    folder = tmp_path_factory.mktemp("eventful")
    home = Home(folder)
    home.log.append(eventful())
    home.run()
    return home


class Zygote:
    """Pipeline processes that may be killed, forked from one that has imported everything; see `zygote.py`."""

    def __init__(self, errors: IO[str]) -> None:
        script = Path(__file__).with_name("zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert self._read() == {"ready": True}

    def run(self, *orders: dict[str, Any]) -> list[dict[str, Any]]:
        """Run orders side by side, each in a process of its own; gives how they ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()
        return list(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote died"
        return json.loads(line)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Runs pipelines in processes of their own."""
    with (tmp_path_factory.mktemp("zygote") / "stderr").open("w") as errors:
        running = Zygote(errors)
        yield running
        running.close()


@pytest.fixture
def tape() -> Tape:
    """An empty tape."""
    return Tape()


@pytest.fixture(scope="session")
def kit() -> Any:
    """This module: its builders, for tests to use."""
    return sys.modules[__name__]
