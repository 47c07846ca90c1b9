"""Runs the pipelines: increments until everything is in tables, or on and on with `follow`.

    ingest → verify → (their scores are records of the log again) → project, and compact now and then

Every increment is a bounded Beam pipeline. All stages live in one warm process here; each can
also run alone (`only`).
"""

import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import NamedTuple

from msgspec import Struct

from pipelines.bookkeeping import known_partitions
from pipelines.compact import compact_lake
from pipelines.ingest import ingest_epoch
from pipelines.lease import lease
from pipelines.project import project_epoch
from pipelines.verify import Home, verify_epoch
from pipelines.warm import warm_gate, warm_lake, warm_log
from schemas.config.pipelines import PipelineConfig

STAGES = ("ingest", "verify", "project", "compact")
"""Names for `only`, in the order in which they run."""

_MAX_CONFLICTS = 20
_EPOCHS_PER_COMPACTION = 64


class Urls(NamedTuple):
    """Where the pipelines work."""

    lake: str
    log: str
    blobs: str


class EpochDone(Struct, frozen=True):
    """One increment of one stage."""

    stage: str
    counters: dict[str, int]
    seconds: float


class Totals(Struct):
    """Sums over a run."""

    epochs: dict[str, int] = {}
    """Stage → increments."""
    counters: dict[str, int] = {}
    """`stage.counter` → sum."""

    def add(self, done: EpochDone) -> None:
        """Take an increment in."""
        self.epochs[done.stage] = self.epochs.get(done.stage, 0) + 1
        for name, value in done.counters.items():
            key = f"{done.stage}.{name}"
            self.counters[key] = self.counters.get(key, 0) + value


OnEpoch = Callable[[EpochDone], None]


class ConflictError(Exception):
    """Another process keeps committing to the same tables."""


class Pipelines:
    """The stages over one home.

    Args:
        urls: Where lake, log and blobs are.
        config: Bounds, tries, pauses.
        only: Stages to run.
        accept_gap: Let ingestion go on over removed records; leaves a note in `epochs`.
        beam_options: Beam's own options, e.g. `--runner=…`.
        on_epoch: Told of every increment.
    """

    def __init__(
        self,
        urls: Urls,
        config: PipelineConfig | None = None,
        *,
        only: Sequence[str] = STAGES,
        accept_gap: bool = False,
        beam_options: Sequence[str] = (),
        on_epoch: OnEpoch | None = None,
    ) -> None:
        unknown = sorted(set(only) - set(STAGES))
        if unknown:
            raise ValueError(f"unknown stage {unknown[0]!r}; stages are {', '.join(STAGES)}")
        log = warm_log(urls.log)
        self._config = config or PipelineConfig()
        self._home = Home(warm_lake(urls.lake).url, urls.log, urls.blobs, log.log_id)
        self._partitions = list(log.partitions())
        self._only = tuple(stage for stage in STAGES if stage in only)
        self._accept_gap = accept_gap
        self._beam_options = tuple(beam_options)
        self._on_epoch = on_epoch or (lambda done: None)
        self._known: set[str] | None = None
        self._unfinished: dict[str, list[int]] = {}
        """Logs to project; others than the present one until they are done."""
        self._conflicts = 0
        self._since_compaction = 0

    def run_once(self) -> Totals:
        """Run increments until nothing is left to do.

        Raises:
            LeaseHeldError: another process runs one of the stages.
            GapError: the log lacks records.
        """
        totals = Totals()
        with lease(self._home.lake, self._only):
            while self.step(totals):
                pass
            if "compact" in self._only:
                self._compact(totals)
        return totals

    def follow(self, stop: Event) -> Totals:
        """Run increments until `stop` is set; the one at work then is finished first.

        Raises:
            LeaseHeldError: another process runs one of the stages.
            GapError: the log lacks records.
        """
        totals = Totals()
        with lease(self._home.lake, self._only):
            while not stop.is_set():
                if not self.step(totals, stop):
                    if "project" in self._only:
                        warm_gate().prepare()  # seconds, once: better while nothing waits than before the first row
                    stop.wait(self._config.follow_seconds)
                if "compact" in self._only and self._since_compaction >= _EPOCHS_PER_COMPACTION:
                    self._compact(totals)
        return totals

    def step(self, totals: Totals, stop: Event | None = None) -> bool:
        """One increment of every stage that has something to do; False when none had."""
        worked = False
        for stage in ("ingest", "verify", "project"):
            if stage not in self._only or (stop is not None and stop.is_set()):
                continue
            counters = self._increment(stage, totals)
            worked = worked or counters is not None
            if stage == "verify" and counters and counters.get("verdicts") and "ingest" in self._only:
                # Verdicts are new records: with them at hand, project settles in one increment instead of two.
                self._increment("ingest", totals)
        return worked

    def _increment(self, stage: str, totals: Totals) -> dict[str, int] | None:
        begun = time.monotonic()
        counters = self._epoch(stage)
        if counters is not None:
            self._since_compaction += 1
            self._watch_conflicts(stage, counters)
            self._report(totals, EpochDone(stage, counters, time.monotonic() - begun))
        return counters

    def _epoch(self, stage: str) -> dict[str, int] | None:
        home, config, options = self._home, self._config, self._beam_options
        if stage == "ingest":
            if self._known is None:
                self._known = set(known_partitions(warm_lake(home.lake)))
            accept_gap = self._accept_gap
            return ingest_epoch(
                home.lake, home.log, config, known=self._known, accept_gap=accept_gap, beam_options=options
            )
        if stage == "verify":
            return verify_epoch(home, self._partitions, config, options)
        return self._project()

    def _project(self) -> dict[str, int] | None:
        """The next epoch; what was ingested from a log that was replaced since is finished first."""
        if not self._unfinished:
            known = known_partitions(warm_lake(self._home.lake))
            self._unfinished = known | {self._home.log_id: self._partitions}
        for log_id, partitions in list(self._unfinished.items()):
            counters = project_epoch(self._home.lake, log_id, partitions, self._config, self._beam_options)
            if counters is not None:
                return counters
            if log_id != self._home.log_id:
                del self._unfinished[log_id]
        return None

    def _watch_conflicts(self, stage: str, counters: dict[str, int]) -> None:
        self._conflicts = self._conflicts + 1 if counters.get("conflicts") else 0
        if self._conflicts > _MAX_CONFLICTS:
            raise ConflictError(
                f"{stage}: {self._conflicts} increments in a row lost against another process's commits; "
                "run one pipeline process per lake"
            )

    def _compact(self, totals: Totals) -> None:
        begun = time.monotonic()
        self._since_compaction = 0
        counters = compact_lake(warm_lake(self._home.lake), self._config)
        if counters:
            self._report(totals, EpochDone("compact", counters, time.monotonic() - begun))

    def _report(self, totals: Totals, done: EpochDone) -> None:
        totals.add(done)
        self._on_epoch(done)
