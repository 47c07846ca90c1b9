"""`trajlake sql`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trajlake.cli.errors import explain
from trajlake.cli.options import FormatName, FormatOption, HomeOption, find_home
from trajlake.cli.rows import put_batches, put_rows

if TYPE_CHECKING:
    from lake.open import Lake
    from trajlake.home import Home


def sql(
    ctx: typer.Context,
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="One SELECT; - or a pipe reads it from standard input.")
    ] = None,
    home: HomeOption = None,
    at: Annotated[
        str | None, typer.Option(metavar="VERSION|TIME", help="The tables as they were at a version or time.")
    ] = None,
    how: FormatOption = "table",
) -> None:
    """Run read-only SQL over all tables; without a query, a prompt."""
    found = find_home(ctx, home)
    lake = found.open_lake()
    if query == "-" or (query is None and not sys.stdin.isatty()):
        query = sys.stdin.read()
    if query is not None:
        _run(lake, query, at, how)
    else:
        _prompt(found, lake, at, how)


def _run(lake: "Lake", query: str, at: str | None, how: FormatName) -> None:
    from lake.sql import stream_sql

    put_batches(*stream_sql(lake, query, at), how=how)


def _prompt(home: "Home", lake: "Lake", at: str | None, how: FormatName) -> None:
    from schemas.tables import TABLES
    from trajlake.prompt import HELP, edit_lines, statements

    columns = {name for schema in TABLES.values() for name in schema.names}
    keep = edit_lines(home.root / "sql_history", sorted({*TABLES, *columns}))
    typer.echo(HELP)
    try:
        for statement in statements(input):
            try:
                if statement.startswith("\\"):
                    _describe(statement)
                else:
                    _run(lake, statement, at, how)
            except Exception as error:
                explained = explain(error)
                if explained is None:
                    raise
                typer.echo(f"error: {explained[0]}", err=True)
    finally:
        keep()


def _describe(command: str) -> None:
    from schemas.tables import TABLES
    from trajlake.prompt import HELP

    word, _, name = command.partition(" ")
    if word != "\\d" or (name and name not in TABLES):
        typer.echo(HELP if word != "\\d" else f"no table {name!r}; there is {', '.join(TABLES)}", err=True)
    elif not name:
        put_rows(
            [{"table": table, "columns": len(schema)} for table, schema in TABLES.items()],
            ["table", "columns"],
            "table",
        )
    else:
        rows = [
            {"column": field.name, "type": str(field.type), "meaning": field.metadata[b"comment"].decode()}
            for field in TABLES[name]
        ]
        put_rows(rows, ["column", "type", "meaning"], "table")
