"""A home with real trajectories, and the command: in this process, or as a process of its own."""

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

DATA = Path(__file__).parents[1] / "data" / "tau-bench" / "gpt-4o-airline.json.gz"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self):
        return json.loads(self.out)


def environment(**variables):
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TRAJLAKE_")}
    return {**ours, "COLUMNS": "200", **variables}


@contextmanager
def unchanged_process():
    """The command sets up logging and signals for a process of its own; here it is a guest."""
    root, handler = logging.getLogger(), signal.getsignal(signal.SIGTERM)
    handlers, level, folder = root.handlers[:], root.level, Path.cwd()
    try:
        yield
    finally:
        root.handlers[:], root.level = handlers, level
        signal.signal(signal.SIGTERM, handler)
        os.chdir(folder)


def trajlake(*arguments, stdin="", cwd=None, **variables):
    """Run the command in this process: the libraries' imports cost seconds in each new one."""
    from trajlake.cli.app import app

    gone = {name: None for name in os.environ if name.startswith("TRAJLAKE_")}
    with unchanged_process():
        os.chdir(cwd or Path.cwd())
        done = CliRunner().invoke(
            app, [str(argument) for argument in arguments], input=stdin, env={**gone, "COLUMNS": "200", **variables}
        )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Outcome(done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def cli():
    return trajlake


@pytest.fixture(scope="session")
def spawn():
    """The command as a process, killed at the end of its block."""

    @contextmanager
    def start(*arguments):
        argv, pipe = [sys.executable, "-m", "trajlake", *map(str, arguments)], subprocess.PIPE
        with subprocess.Popen(argv, env=environment(), text=True, stdout=pipe, stderr=pipe) as process:
            try:
                yield process
            finally:
                process.kill()

    return start


@pytest.fixture(scope="session")
def tau_bench_file(tmp_path_factory):
    """Two tasks with four trials each: small, and still whole groups."""
    results = json.loads(gzip.decompress(DATA.read_bytes()))
    path = tmp_path_factory.mktemp("data") / "airline.json"
    path.write_text(json.dumps([result for result in results if result["task_id"] in (0, 1)]))
    return path


@pytest.fixture(scope="session")
def home(tmp_path_factory, tau_bench_file):
    """A home after `init` and one `import`; for reading."""
    folder = tmp_path_factory.mktemp("home") / "h"
    made = trajlake("init", "--home", folder)
    assert made.code == 0, made.err
    imported = trajlake("import", "tau-bench", tau_bench_file, "--home", folder, "--format", "json")
    assert imported.code == 0, imported.err
    assert imported.rows[0]["num_imported"] == 8
    return folder
