"""`trajlake import`."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from trajlake.cli.errors import FINDING
from trajlake.cli.options import FormatOption, HomeOption, find_home
from trajlake.cli.rows import put_rows

_COLUMNS = ("path", "run_id", "num_read", "num_imported", "num_scored", "num_rejected", "num_events")


def import_(
    ctx: typer.Context,
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help="tau-bench or openai-chat.")],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files, plain or gzipped.")],
    home: HomeOption = None,
    run_id: Annotated[
        str | None, typer.Option(help="Run that the events belong to (default: named after format and content).")
    ] = None,
    events_only: Annotated[
        bool, typer.Option("--events-only", help="Stop at the log; the pipelines are run later.")
    ] = False,
    how: FormatOption = "table",
) -> None:
    """Bring files of other tools in: events in the log, then rows in tables.

    Importing a file twice adds nothing to the tables. Exit code 1: some records of a file make no trajectory; they
    are in quarantine, whole.
    """
    from ingest.importers import import_file
    from trajlake.progress import Progress

    found = find_home(ctx, home)
    blobs, key = found.blobs(), found.key()
    reports = []
    with closing(found.open_log()) as log, Progress() as progress:
        for path in paths:

            def on_progress(done: int, total: int, path: Path = path) -> None:
                progress(f"{path.name} (bytes)", done, total)

            reports.append(import_file(format_name, path, log, blobs, key, run_id=run_id, progress=on_progress))
    for report in reports:
        for rejection in report.rejections:
            where = f"{report.path}: record {rejection.place}"
            typer.echo(f"{where}: {rejection.reason}: {rejection.detail}", err=True)
    if not events_only:
        from trajlake.cli.pipeline import run_once

        run_once(found)
    rows = [
        {**{name: getattr(report, name, None) for name in _COLUMNS}, "num_rejected": report.rejected.total()}
        for report in reports
    ]
    put_rows(rows, _COLUMNS, how)
    if any(report.rejected for report in reports):
        raise typer.Exit(FINDING)
