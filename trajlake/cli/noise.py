"""Keeps what libraries say to themselves off a user's terminal."""

import logging
import os

_POINTLESS = ("apitools not found",)
"""Beginnings of messages that call for nothing: Beam says so wherever Google Cloud is not used."""


class _Pointless(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_POINTLESS)


def quiet_libraries(debug: bool) -> None:
    """Warnings go to standard error, remarks only with `--debug`; progress bars of libraries are off."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.DEBUG if debug else logging.WARNING)
    handler.addFilter(_Pointless())
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], force=True)
    os.environ.setdefault("TQDM_DISABLE", "1")
