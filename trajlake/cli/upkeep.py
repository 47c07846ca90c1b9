"""`trajlake rebuild` and `trajlake compact`."""

import typer

from trajlake.cli.options import FormatOption, HomeOption, find_home
from trajlake.cli.rows import put_rows


def rebuild(ctx: typer.Context, home: HomeOption = None, how: FormatOption = "table") -> None:
    """Make every projection again from events, with the same content; runs no sandbox."""
    from pipelines.rebuild import rebuild as rebuild_lake

    found = find_home(ctx, home)
    rows = rebuild_lake(found.lake_url, found.config.pipeline)
    put_rows([{"table": name, "rows": count} for name, count in rows.items()], ["table", "rows"], how)


def compact(ctx: typer.Context, home: HomeOption = None) -> None:
    """Join small files of every table; rows stay as they are."""
    from pipelines.compact import compact_lake
    from pipelines.lease import lease
    from pipelines.run import STAGES

    found = find_home(ctx, home)
    with lease(found.lake_url, STAGES):
        counters = compact_lake(found.open_lake(), found.config.pipeline)
    if counters:
        typer.echo(f"{counters['files_before']} files became {counters['files_after']}")
    else:
        least = found.config.pipeline.compact_min_files
        typer.echo(f"nothing to join: no table has {least} small files (compact_min_files in [pipeline])")
