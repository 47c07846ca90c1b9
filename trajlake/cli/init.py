"""`trajlake init`."""

from typing import Annotated

import typer

from trajlake.cli.options import HomeOption, find_home


def init(
    ctx: typer.Context,
    home: HomeOption = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, max=64, help="Partitions of the log; fixed from then on (default: 2).")
    ] = None,
) -> None:
    """Make a home: settings, event log and tables. What is there stays as it is."""
    found = find_home(ctx, home, must_exist=False)
    created = found.init(partitions)
    typer.echo(f"{found.root}: " + (f"made {', '.join(created)}" if created else "everything is there already"))
