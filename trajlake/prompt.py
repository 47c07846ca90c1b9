"""A prompt for statements that end with a semicolon, with line editing, history and completion of names.

Leaves out: what a statement does (a function is passed in).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Ask = Callable[[str], str]

HELP = "Statements end with ; and are read-only. \\d lists the tables, \\d TABLE its columns, \\q (or Ctrl-D) ends."
HISTORY_LINES = 1_000


def statements(ask: Ask, name: str = "trajlake") -> Iterator[str]:
    """Statements and backslash commands, as they are entered; Ctrl-C drops what was begun.

    Args:
        ask: Shows a prompt and gives a line; raises EOFError at the end.
        name: Shown before the cursor.
    """
    begun: list[str] = []
    while True:
        try:
            line = ask(f"{name}> " if not begun else f"{'':>{len(name)}}| ")
        except KeyboardInterrupt:
            begun = []
            continue
        except EOFError:
            return
        if not begun and line.strip().startswith("\\"):
            if line.strip() in ("\\q", "\\quit"):
                return
            yield line.strip()
            continue
        if not begun and line.strip().lower() in ("exit", "quit"):
            return
        if line.strip() or begun:
            begun.append(line)
        if line.rstrip().endswith(";"):
            yield "\n".join(begun).strip().removesuffix(";")
            begun = []


def edit_lines(history: Path, words: Sequence[str]) -> Callable[[], None]:
    """Turn on line editing; gives a function that keeps the history."""
    try:
        import readline  # noqa: PLC0415 - changes what `input` does, so only for a prompt
    except ImportError:  # Python built without it: the prompt then takes plain lines
        return lambda: None
    readline.set_history_length(HISTORY_LINES)
    if history.exists():
        readline.read_history_file(history)

    def complete(text: str, state: int) -> str | None:
        found = [word for word in words if word.lower().startswith(text.lower())]
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")

    def keep() -> None:
        readline.write_history_file(history)

    return keep
