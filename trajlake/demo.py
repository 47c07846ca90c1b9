"""The demo: the real loop, small. From rollouts in sandboxes to a better policy, in one warm process.

Actors play a round, the pipelines bring its records into tables, the learner trains on the rows that the tables gained
and publishes a policy, which the actors find in the log. Every few rounds they also play held-out tasks, and the demo
ends when those reach the goal. All figures are read back from the tables.

On two cores the stages take turns: side by side in one process they only wait for each other.

Leaves out: how it is printed (see `trajlake.cli.demo`).
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uuid_utils
from msgspec import Struct
from msgspec.structs import replace

from trajlake.home import Home

if TYPE_CHECKING:
    from ingest.port import EventLog
    from lake.open import Lake
    from lake.reconcile import Reconciliation
    from learner.trainer import TrainedStep, Trainer
    from pipelines.run import EpochDone, Pipelines
    from rollout.run import RolloutSession

DOMAIN = "unwrap"
_BARREN_ROUNDS = 3


class DemoError(Exception):
    """The loop can't go on; the message says where to look."""


class DemoPlan(Struct, frozen=True, kw_only=True):
    """How much the demo does at most."""

    max_updates: int = 60
    """Training steps; it ends earlier when the goal is reached."""
    goal: float = 0.8
    """Mean held-out reward."""
    rounds_per_check: int = 5
    """Rounds between two looks at held-out tasks."""
    held_out_tasks: int = 64
    """Tasks of a look, each played once."""


class Check(Struct, frozen=True, kw_only=True):
    """One look at held-out tasks, from the tables."""

    round_idx: int
    policy_version: int
    """Oldest that sampled any of it."""
    reward: float
    """Mean over what was scored."""
    num_scored: int


class Update(Struct, frozen=True, kw_only=True):
    """One training step, with where its time went."""

    step: "TrainedStep"
    rollout_seconds: float
    pipeline_seconds: float
    learner_seconds: float


class DemoResult(Struct, frozen=True, kw_only=True):
    """What came of it."""

    run_id: str
    updates: list[Update]
    checks: list[Check]
    reached: bool
    """Whether held-out reward reached the goal."""
    table_rows: dict[str, int]
    reconciliation: "Reconciliation"
    curve: Path
    seconds: float


class Listener:
    """Told of what goes on; does nothing by itself."""

    def note(self, text: str) -> None:
        """A new phase."""

    def update(self, update: Update, num_updates: int) -> None:
        """A training step is done."""

    def check(self, check: Check) -> None:
        """A look at held-out tasks is in the tables."""

    def epoch(self, done: "EpochDone") -> None:
        """A pipeline increment is done."""


def run_demo(home: Home, plan: DemoPlan, listener: Listener) -> DemoResult:
    """Run the loop in a home, which is created where it is missing; each call is a run of its own.

    Raises:
        SandboxUnavailableError: no sandbox can run here; nothing was played.
        DemoError: rounds gave nothing to train on.
    """
    began = time.monotonic()
    run_id = str(uuid_utils.uuid7())
    listener.note("loading Beam, Great Expectations and PyTorch, checking that sandboxes run")
    with ExitStack() as stack:
        parts = stack.enter_context(_warm_parts(home, run_id, listener))
        updates, checks = _Loop(parts, listener).play(plan)
        listener.note("counting what is where")
        return DemoResult(
            run_id=run_id,
            updates=updates,
            checks=checks,
            reached=bool(checks) and checks[-1].reward >= plan.goal,
            table_rows=_table_rows(parts.lake),
            reconciliation=_reconcile(parts.lake, parts.log),
            curve=_plot(home, run_id, plan, updates, checks),
            seconds=time.monotonic() - began,
        )


class _Parts(NamedTuple):
    """What the loop runs over, warm."""

    run_id: str
    groups: int
    log: "EventLog"
    lake: "Lake"
    session: "RolloutSession"
    pipelines: "Pipelines"
    trainer: "Trainer"


class _Loop:
    """The loop over the parts."""

    def __init__(self, parts: _Parts, listener: Listener) -> None:
        self._parts = parts
        self._listener = listener

    def play(self, plan: DemoPlan) -> tuple[list[Update], list[Check]]:
        """Rounds until the goal is reached or the updates are used up."""
        self._listener.note(
            f"playing: actors → event log → ingest, verify, project → learner, until held-out reward ≥ {plan.goal}"
        )
        updates: list[Update] = []
        checks: list[Check] = []
        round_idx = barren = 0
        while True:
            rollout_seconds = self._round(plan, round_idx)
            pipeline_seconds = self._into_tables()
            if round_idx % plan.rounds_per_check == 0:
                checks.append(self._check(round_idx))
                self._listener.check(checks[-1])
            if checks[-1].reward >= plan.goal or len(updates) >= plan.max_updates:
                return updates, checks
            trained = list(self._train(rollout_seconds, pipeline_seconds, len(updates)))
            updates += trained
            barren = 0 if trained else barren + 1
            if barren >= _BARREN_ROUNDS:
                raise DemoError(f"{barren} rounds in a row gave no batch to train on: see table quarantine")
            round_idx += 1

    def _round(self, plan: DemoPlan, round_idx: int) -> float:
        """Play one round, held-out tasks first where it is time; gives its seconds."""
        began = time.monotonic()
        if round_idx % plan.rounds_per_check == 0:
            self._parts.session.run("eval", plan.held_out_tasks, round_idx=round_idx)
        self._parts.session.run("train", self._parts.groups, round_idx=round_idx)
        return time.monotonic() - began

    def _into_tables(self) -> float:
        began = time.monotonic()
        self._parts.pipelines.run_once()
        return time.monotonic() - began

    def _train(self, rollout_seconds: float, pipeline_seconds: float, num_before: int) -> Iterator[Update]:
        while (batch := self._parts.trainer.next_batch()) is not None:
            began = time.monotonic()
            update = Update(
                step=self._parts.trainer.train(batch),
                rollout_seconds=rollout_seconds,
                pipeline_seconds=pipeline_seconds,
                learner_seconds=time.monotonic() - began,
            )
            num_before += 1
            self._listener.update(update, num_before)
            yield update

    def _check(self, round_idx: int) -> Check:
        """Held-out reward of a round, by SQL over the tables. Rewards that are not known are left out, not zero."""
        from lake.sql import run_sql  # noqa: PLC0415 - heavy

        found = run_sql(self._parts.lake, held_out_sql(self._parts.run_id, round_idx)).to_pylist()[0]
        if not found["num_scored"]:
            raise DemoError(f"no held-out trajectory of round {round_idx} was scored: see table quarantine")
        return Check(round_idx=round_idx, **found)


def held_out_sql(run_id: str, round_idx: int) -> str:
    """The query behind a check."""
    return (
        "SELECT avg(reward) AS reward, count(reward) AS num_scored, min(min_policy_version) AS policy_version "  # noqa: S608 - ids of ours
        f"FROM trajectories WHERE run_id = '{run_id}' AND group_id LIKE '{run_id}/eval-{round_idx}/%'"
    )


@contextmanager
def _warm_parts(home: Home, run_id: str, listener: Listener) -> Iterator[_Parts]:
    from domains.registry import load_domain  # noqa: PLC0415 - heavy, like all that follow
    from learner.trainer import Trainer  # noqa: PLC0415 - as above
    from pipelines.run import Pipelines, Urls  # noqa: PLC0415 - as above
    from rollout.run import RolloutSession  # noqa: PLC0415 - as above
    from sandbox.open import open_sandbox  # noqa: PLC0415 - as above
    from trajlake.policies import make_policy, vocabulary_of  # noqa: PLC0415 - as above

    open_sandbox().close()  # says what is wrong before anything is played
    home.init()
    domain, lake = load_domain(DOMAIN), home.open_lake()
    with ExitStack() as stack:
        log = home.open_log()
        stack.callback(log.close)
        trainer = stack.enter_context(
            Trainer(
                home.config.learner,
                run_id=run_id,
                log=log,
                lake=lake,
                checkpoints=home.checkpoints_folder,
                vocabulary=vocabulary_of(domain),
            )
        )
        policy, policy_id = make_policy("torch", domain, home.config)
        # Rounds are short: a version that is a second late would be a whole round late.
        config = replace(home.config.rollout, policy_poll_seconds=0.05)
        session = stack.enter_context(
            RolloutSession(domain, policy, log, home.blobs(), config, run_id=run_id, policy_id=policy_id)
        )
        urls = Urls(home.lake_url, home.log_url, home.blobs_url)
        pipelines = Pipelines(urls, home.config.pipeline, on_epoch=listener.epoch)
        yield _Parts(run_id, home.config.learner.groups_per_step, log, lake, session, pipelines, trainer)


def _table_rows(lake: "Lake") -> dict[str, int]:
    from schemas.tables import TABLES  # noqa: PLC0415 - pyarrow

    rows = {}
    for name in TABLES:
        table = lake.table(name)
        table.refresh()
        rows[name] = sum(file.num_records for file in table.data_files())
    return rows


def _reconcile(lake: "Lake", log: "EventLog") -> "Reconciliation":
    from lake.reconcile import reconcile  # noqa: PLC0415 - heavy

    return reconcile(lake, log.log_id, {partition: log.bounds(partition) for partition in log.partitions()})


def _plot(home: Home, run_id: str, plan: DemoPlan, updates: list[Update], checks: list[Check]) -> Path:
    from learner.plot import Curve, plot_rewards  # noqa: PLC0415 - matplotlib

    trained = [(float(update.step.train_step), update.step.statistics["reward_mean"] or 0.0) for update in updates]
    held_out = [(float(check.policy_version), check.reward) for check in checks]
    curves = [Curve(label="training tasks", points=trained), Curve(label="held-out tasks", points=held_out)]
    return plot_rewards(
        home.root / f"reward-{run_id[:13]}.png", curves, title=f"unwrap, run {run_id[:13]}", goal=plan.goal
    )
