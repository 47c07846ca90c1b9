"""`trajlake demo`."""

import logging
import time
from typing import TYPE_CHECKING, Annotated

import typer

from trajlake.cli.errors import FINDING
from trajlake.cli.options import HomeOption, find_home

if TYPE_CHECKING:
    from pathlib import Path

    from trajlake.demo import Check, DemoPlan, DemoResult, Listener, Update
    from trajlake.home import Home


def demo(
    ctx: typer.Context,
    home: HomeOption = None,
    max_updates: Annotated[int, typer.Option(min=1, help="Training steps at most.")] = 60,
    goal: Annotated[float, typer.Option(min=0, max=1, help="Mean held-out reward at which it ends.")] = 0.8,
) -> None:
    """Run the whole loop, small: rollouts in sandboxes, event log, pipelines, tables, learner, a better policy.

    Takes two to four minutes on 2 cores. Exit code 1: held-out reward did not reach the goal, or records are missing.
    """
    from trajlake.demo import DemoPlan, run_demo

    logging.getLogger("root").setLevel(logging.ERROR)
    found = find_home(ctx, home, must_exist=False)
    plan = DemoPlan(max_updates=max_updates, goal=goal)
    result = run_demo(found, plan, _listener())
    _report(found, plan, result)
    if not result.reached or not result.reconciliation.holds:
        raise typer.Exit(FINDING)


def _listener() -> "Listener":
    from trajlake.demo import Listener

    class Printer(Listener):
        """One line for each thing that somebody would wait for."""

        def __init__(self) -> None:
            self._began = time.monotonic()

        def _say(self, text: str) -> None:
            typer.echo(f"{time.monotonic() - self._began:5.0f} s  {text}")

        def note(self, text: str) -> None:
            self._say(text)

        def update(self, update: "Update", num_updates: int) -> None:
            reward = update.step.statistics["reward_mean"] or 0.0
            bar = "█" * round(reward * 30)
            self._say(
                f"update {num_updates:3}  reward {reward:.3f} {bar:30}  rollout {update.rollout_seconds:.1f} s, "
                f"pipelines {update.pipeline_seconds:.1f} s, learner {update.learner_seconds:.1f} s"
            )

        def check(self, check: "Check") -> None:
            self._say(
                f"held-out   reward {check.reward:.3f}  over {check.num_scored} tasks that are never trained on, "
                f"policy version {check.policy_version}"
            )

    return Printer()


def _report(home: "Home", plan: "DemoPlan", result: "DemoResult") -> None:
    from trajlake.demo import held_out_sql

    first, last = result.checks[0], result.checks[-1]
    typer.echo("\nrows per table")
    for name, rows in result.table_rows.items():
        typer.echo(f"  {name:14}{rows:>10,}")
    typer.echo(f"\nreconciliation: {result.reconciliation}")
    query = held_out_sql(result.run_id, last.round_idx)
    typer.echo(f"\na question in SQL\n  {query}\n  → reward {last.reward:.4f}, num_scored {last.num_scored}")
    typer.echo(f"\nreward curve: {_short(result.curve)}")
    typer.echo("\nwhat to try next")
    for command in next_commands(home, result):
        typer.echo(f"  {command}")
    verdict = "reached" if result.reached else "DID NOT REACH"
    typer.echo(
        f"\nheld-out reward {verdict} the goal of {plan.goal}: {first.reward:.3f} before training, "
        f"{last.reward:.3f} after {last.policy_version} updates; {result.seconds:.0f} s"
    )


def next_commands(home: "Home", result: "DemoResult") -> list[str]:
    """Three commands that work on what the demo left."""
    option = f" --home {_short(home.root)}"
    question = "SELECT domain, split, count(*), avg(reward) FROM trajectories GROUP BY domain, split"
    return [
        f'trajlake sql{option} "{question}"',
        f"trajlake status{option}",
        f"trajlake rebuild{option}",
    ]


def _short(path: "Path") -> "Path":
    from pathlib import Path

    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
