"""The command tree, and the one place where failures become exit codes."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trajlake.cli.demo import demo
from trajlake.cli.domains import domains
from trajlake.cli.errors import INTERRUPTED, explain
from trajlake.cli.import_ import import_
from trajlake.cli.init import init
from trajlake.cli.learn import learn
from trajlake.cli.noise import quiet_libraries
from trajlake.cli.pipeline import app as pipeline_app
from trajlake.cli.rollout import rollout
from trajlake.cli.show import show
from trajlake.cli.sql import sql
from trajlake.cli.status import status
from trajlake.cli.upkeep import compact, rebuild


class _Guarded(TyperGroup):
    """Turns expected failures into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Whoever read our rows (`head`, a pager) has enough. What is still buffered goes nowhere, in silence.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit from None
        except (KeyboardInterrupt, Exception) as error:
            explained = None if ctx.params.get("debug") else explain(error)
            if explained is None:
                raise
            line, code = explained
            prefix = "" if code == INTERRUPTED else "error: "
            typer.echo(f"{prefix}{line}", err=True)
            raise typer.Exit(code) from None


app = typer.Typer(
    cls=_Guarded,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="An event-sourced trajectory data lake for reinforcement learning of language-model agents.",
)


def _stop(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a command as Ctrl-C does, so that recorders and pipelines close what they hold."""
    raise KeyboardInterrupt


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(version("trajlake"))
        raise typer.Exit


@app.callback()
def _root(
    home: Annotated[
        Path | None, typer.Option(envvar="TRAJLAKE_HOME", help="The home folder (default: .trajlake).")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    signal.signal(signal.SIGTERM, _stop)
    quiet_libraries(debug)


app.command("init")(init)
app.command("demo")(demo)
app.command("rollout")(rollout)
app.add_typer(pipeline_app, name="pipeline")
app.command("learn")(learn)
app.command("import")(import_)
app.command("sql")(sql)
app.command("show")(show)
app.command("status")(status)
app.command("domains")(domains)
app.command("rebuild")(rebuild)
app.command("compact")(compact)
