"""Progress: silent when short, sparse lines in a file, bars on a terminal."""

import io

import pytest

from trajlake import progress as module
from trajlake.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


def test_short_work_shows_nothing(clock):
    stream = io.StringIO()
    with Progress(stream) as progress:
        clock.now = 1.9
        progress("import", 1, 2)
    assert stream.getvalue() == ""


def test_long_work_gives_a_line_now_and_then(clock):
    stream = io.StringIO()
    with Progress(stream) as progress:
        for second in range(40):
            clock.now = float(second)
            progress("import", second, 40)
    assert stream.getvalue().splitlines() == [
        "import: 10 of 40 after 10 s",
        "import: 20 of 40 after 20 s",
        "import: 30 of 40 after 30 s",
    ]


def test_a_terminal_gets_a_bar(clock):
    stream = Terminal()
    with Progress(stream) as progress:
        clock.now = 3.0
        progress("import", 1, 2)
        progress("import", 2, 2)
    assert "import" in stream.getvalue()
    assert "2/2" in stream.getvalue()
