"""The prompt of `trajlake sql`: what counts as a statement, and a real session on a terminal."""

import os
import pty
import subprocess
import sys
import time

import pytest

from trajlake.prompt import statements


def typed(*lines):
    """An `ask` that gives these lines; exceptions among them are raised."""
    left = iter(lines)

    def ask(_prompt):
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return list(statements(ask))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["SELECT 1;"], ["SELECT 1"]),
        (["SELECT", "", "1 ;", "SELECT 2;"], ["SELECT\n\n1 ", "SELECT 2"]),
        (["\\d events", "SELECT 1;"], ["\\d events", "SELECT 1"]),
        (["SELECT", KeyboardInterrupt(), "SELECT 2;"], ["SELECT 2"]),
        (["SELECT 1;", "\\q", "SELECT 2;"], ["SELECT 1"]),
        (["exit", "SELECT 2;"], []),
        (["", "  ", "SELECT"], []),
    ],
)
def test_statements_end_with_a_semicolon(lines, expected):
    assert typed(*lines) == expected


def converse(home, *lines):
    """A session on a pseudo-terminal; gives all that was shown."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trajlake", "sql", "--home", str(home)],
        stdin=follower, stdout=follower, stderr=follower, env=env, close_fds=True,
    )  # fmt: skip
    os.close(follower)
    shown = b""
    try:
        for line in (*lines, "\\q"):
            shown += read_until(leader, b"trajlake> ")
            os.write(leader, line.encode() + b"\n")
        shown += read_until(leader, None)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return shown.decode()


def read_until(descriptor, marker):
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline and (marker is None or marker not in shown):
        try:
            data = os.read(descriptor, 4096)
        except OSError:  # the other side has ended
            break
        if not data:
            break
        shown += data
    return shown


def test_a_session_answers_survives_mistakes_and_keeps_its_history(home):
    shown = converse(home, "SELECT count(*) AS num_rows FROM trajectories;", "SELEC 1;", "\\d steps", "SELECT 41+1;")
    assert "num_rows" in shown
    assert "error: " in shown
    assert "prompt_token_ids" in shown
    assert "42" in shown
    assert "SELECT 41+1;" in (home / "sql_history").read_text()
