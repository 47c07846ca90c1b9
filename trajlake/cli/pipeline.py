"""`trajlake pipeline run`."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from trajlake.cli.options import FormatOption, HomeOption, find_home
from trajlake.cli.rows import put_rows

if TYPE_CHECKING:
    from pipelines.run import EpochDone, Totals
    from trajlake.home import Home

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Bring the log's records into tables.")


@app.callback()
def _group() -> None:
    """A group of its own, so that `run` is a word of the command."""


@app.command()
def run(
    ctx: typer.Context,
    beam_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- BEAM OPTIONS]", help="Options for Beam, after two dashes.")
    ] = None,
    home: HomeOption = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="STAGES", help="Some of ingest,verify,project,compact, with commas.")
    ] = None,
    accept_gap: Annotated[
        bool, typer.Option("--accept-gap", help="Go on over records that the log no longer has; leaves a note.")
    ] = False,
    how: FormatOption = "table",
) -> None:
    """Run ingest, verify, project and compact until nothing is left to do, or on and on."""
    from pipelines.run import STAGES, Pipelines, Urls

    found = find_home(ctx, home)
    stages = STAGES if only is None else tuple(stage.strip() for stage in only.split(","))
    pipelines = Pipelines(
        Urls(found.lake_url, found.log_url, found.blobs_url),
        found.config.pipeline,
        only=stages,
        accept_gap=accept_gap,
        beam_options=beam_options or (),
        on_epoch=print_epoch,
    )
    if follow:
        with stopping() as stop:
            totals = pipelines.follow(stop)
    else:
        totals = pipelines.run_once()
    put_totals(totals, how)


def run_once(home: "Home") -> "Totals":
    """All pipelines until nothing is left to do; for commands that do so after their own work."""
    from pipelines.run import Pipelines, Urls

    urls = Urls(home.lake_url, home.log_url, home.blobs_url)
    return Pipelines(urls, home.config.pipeline, on_epoch=print_epoch).run_once()


def print_epoch(done: "EpochDone") -> None:
    """One line on standard error per increment."""
    counts = ", ".join(f"{value:,} {name.removeprefix('num_')}" for name, value in done.counters.items() if value)
    typer.echo(f"{done.stage}: {counts or 'nothing'} in {done.seconds:.1f} s", err=True)


def put_totals(totals: "Totals", how: FormatOption) -> None:
    """What was done, by stage and counter."""
    rows = [
        {"stage": key.partition(".")[0], "counter": key.partition(".")[2], "value": value}
        for key, value in totals.counters.items()
    ]
    if not rows and how == "table":
        typer.echo("nothing to do: every record of the log is in tables")
        return
    put_rows(rows, ["stage", "counter", "value"], how)


@contextmanager
def stopping() -> Iterator[Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one interrupts."""
    stop = Event()

    def handler(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        typer.echo("finishing the increment at work; once more to stop at once", err=True)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
