"""`trajlake status`."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trajlake.cli.errors import FINDING
from trajlake.cli.options import FormatOption, HomeOption, find_home
from trajlake.cli.rows import put_rows

if TYPE_CHECKING:
    from trajlake.status import StatusRow

_TITLES = {
    "table": "Tables",
    "log": "Event log",
    "lag": "Records that a pipeline has still to take",
    "reconciliation": "Reconciliation",
    "trajectories": "Trajectories",
    "quarantine": "Quarantine, rows by rule",
    "epoch": "Last commits (milliseconds)",
}


def status(ctx: typer.Context, home: HomeOption = None, how: FormatOption = "table") -> None:
    """Show what a home holds, how far its pipelines are, and whether every record is accounted for.

    Exit code 1: the reconciliation does not hold.
    """
    from trajlake.status import COLUMNS, collect

    found = find_home(ctx, home)
    with closing(found.open_log()) as log:
        rows, holds = collect(found.open_lake(), log)
    if how == "table":
        _print(found.root, rows)
    else:
        put_rows([row.as_row() for row in rows], COLUMNS, how)
    if not holds:
        raise typer.Exit(FINDING)


def _print(root: Path, rows: "list[StatusRow]") -> None:
    typer.echo(str(root))
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            typer.echo(f"\n{_TITLES[section]}")
        value = "null" if row.value is None else f"{row.value:,}"
        typer.echo(f"  {row.name:<24} {value:>14}  {row.detail}".rstrip())
