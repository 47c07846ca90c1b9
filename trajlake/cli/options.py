"""Options that several commands share, and the home that they name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from trajlake.home import Home

HomeOption = Annotated[Path | None, typer.Option(help="The home folder (default: TRAJLAKE_HOME, else .trajlake).")]
FormatName = Literal["table", "json", "csv", "parquet", "arrow"]
FormatOption = Annotated[FormatName, typer.Option("--format", help="How rows come out.")]


def find_home(ctx: typer.Context, home: Path | None, config: Path | None = None, *, must_exist: bool = True) -> "Home":
    """The home that a command's own `--home`, the root's `--home` or the environment names.

    Raises:
        ConfigError: if its settings can't be used.
        HomeNotFoundError: if it must exist and does not.
    """
    from trajlake.home import Home

    found = Home.find(home or ctx.find_root().params.get("home"), config=config)
    return found.require() if must_exist else found
