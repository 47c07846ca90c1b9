"""`trajlake learn`."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trajlake.cli.options import HomeOption, find_home

if TYPE_CHECKING:
    from learner.trainer import TrainedStep


def learn(
    ctx: typer.Context,
    run_id: Annotated[str, typer.Option(help="Run whose rows are trained on.")],
    domain_name: Annotated[str, typer.Option("--domain", help="Domain that the run plays.")],
    home: HomeOption = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings file with a [learner] section (default: the home's own).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps (default: until Ctrl-C).")] = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Seconds to wait for a batch.")] = 600.0,
) -> None:
    """Train: tail the tables, update the policy, publish it as an event that actors follow.

    Exit code 1: no batch came within the timeout.
    """
    from domains.registry import load_domain
    from learner.trainer import Trainer
    from trajlake.policies import vocabulary_of

    found = find_home(ctx, home, config)
    vocabulary = vocabulary_of(load_domain(domain_name))
    with (
        closing(found.open_log()) as log,
        Trainer(
            found.config.learner,
            run_id=run_id,
            log=log,
            lake=found.open_lake(),
            checkpoints=found.checkpoints_folder,
            vocabulary=vocabulary,
        ) as trainer,
    ):
        done = 0
        while steps is None or done < steps:
            _print(trainer.train(trainer.wait_for_batch(timeout)))
            done += 1


def _print(step: "TrainedStep") -> None:
    shown = ("reward_mean", "loss", "clip_fraction", "staleness_mean", "update_seconds")
    facts = [f"{name} {value:.4g}" for name in shown if (value := step.statistics.get(name)) is not None]
    typer.echo(f"step {step.train_step}: {', '.join(facts)}; published {step.published.checkpoint_uri}")
