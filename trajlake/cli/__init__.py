"""The `trajlake` command: one thin module per command, no logic of its own.

Modules here import only typer at import time, so that `trajlake --help` is instant; the heavy libraries come in once
the arguments have been understood. Exit codes: 0 done, 1 a finding, a failed check or a failure on the way, 2 wrong
use, 130 interrupted.
"""

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from trajlake.cli.app import app

        app(prog_name="trajlake")
    except KeyboardInterrupt:  # before the command's own guard is there, while libraries are imported
        sys.stderr.write("interrupted\n")
        sys.exit(130)
