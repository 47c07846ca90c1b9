"""`trajlake show`."""

import sys
from typing import Annotated, Literal

import typer

from trajlake.cli.options import HomeOption, find_home

_STYLES = {
    "title": "bold",
    "step": "cyan",
    "action": "green",
    "observation": "default",
    "note": "yellow",
    "bad": "red",
    "plain": "default",
}


def show(
    ctx: typer.Context,
    trajectory_id: Annotated[str, typer.Argument(metavar="ID", help="A trajectory's id, or the beginning of it.")],
    home: HomeOption = None,
    full: Annotated[bool, typer.Option("--full", help="Whole payloads instead of their beginnings.")] = False,
    how: Annotated[Literal["table", "json"], typer.Option("--format", help="A view, or one JSON object.")] = "table",
) -> None:
    """Show one trajectory: where it stands, its steps, scores and quarantine rows."""
    import pyarrow as pa

    from lake.sql import session
    from trajlake.show import find_trajectory, lines, load

    context = session(find_home(ctx, home).open_lake())

    def query(sql: str) -> pa.Table:
        return context.sql(sql).to_arrow_table()

    shown = load(query, find_trajectory(query, trajectory_id))
    if how == "json":
        from trajlake.output import to_json

        sys.stdout.write(to_json([shown]) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 4096, soft_wrap=True)
    for style, text in lines(shown, full):
        console.print(Text(text, style=_STYLES[style]))
