"""`trajlake rollout`."""

import json
from contextlib import closing
from typing import Annotated, Literal

import typer

from trajlake.cli.errors import FINDING
from trajlake.cli.options import FormatOption, HomeOption, find_home
from trajlake.cli.rows import put_rows

_COLUMNS = ("run_id", "num_trajectories", "num_played", "num_aborted", "statuses", "given_up", "seconds")


def rollout(
    ctx: typer.Context,
    domain_name: Annotated[str, typer.Option("--domain", help="Domain of tasks; trajlake domains lists them.")],
    policy_name: Annotated[str, typer.Option("--policy", help="torch (the tiny model), reference or empty.")],
    num: Annotated[int, typer.Option(min=1, help="Tasks; in split train each is played group_size times.")],
    home: HomeOption = None,
    run_id: Annotated[
        str | None, typer.Option(help="Run; one that was interrupted is taken up again (default: a new one).")
    ] = None,
    split: Annotated[
        Literal["train", "eval", "probe"] | None,
        typer.Option(help="Whose tasks (default: train, where there are some)."),
    ] = None,
    round_idx: Annotated[int, typer.Option("--round", min=0, help="Number of the round; chooses other tasks.")] = 0,
    how: FormatOption = "table",
) -> None:
    """Run actors: a policy plays tasks in sandboxes, and everything that happens is an event in the log.

    Exit code 1: the infrastructure of some trajectories failed too often.
    """
    from domains.registry import load_domain
    from rollout.run import RolloutSession
    from sandbox.open import open_sandbox
    from trajlake.policies import default_split, make_policy
    from trajlake.progress import Progress

    found = find_home(ctx, home)
    domain = load_domain(domain_name)
    chosen = split or default_split(domain)
    policy, policy_id = make_policy(policy_name, domain, found.config)
    open_sandbox().close()  # says what is wrong before anything is played
    with (
        closing(found.open_log()) as log,
        RolloutSession(
            domain, policy, log, found.blobs(), found.config.rollout, run_id=run_id, policy_id=policy_id
        ) as session,
        Progress() as progress,
    ):
        summary = session.run(
            chosen, num, round_idx=round_idx, on_progress=lambda done, total: progress("trajectories", done, total)
        )
    row = {name: getattr(summary, name) for name in _COLUMNS}
    row |= {"statuses": json.dumps(summary.statuses), "given_up": json.dumps(summary.given_up)}
    put_rows([row], _COLUMNS, how)
    if summary.given_up:
        raise typer.Exit(FINDING)
