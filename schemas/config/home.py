"""`[home]`: where the log, the lake and the blobs are."""

from typing import Annotated

from msgspec import Meta, Struct

Url = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9+.-]*://")]


class HomeConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Places by URL. What is not set lies in the home folder itself, so that a home can be moved."""

    log: Url | None = None
    """URL of the event log, such as `sqlite:///srv/run/log.sqlite`. Default: `log.sqlite` in the home folder."""
    lake: Url | None = None
    """URL of the folder that holds one Delta table a folder. Default: `lake` in the home folder."""
    blobs: Url | None = None
    """URL of the content-addressed blob store. Default: `blobs` in the home folder."""
    checkpoints: Url | None = None
    """URL of the folder for published policies. Default: `checkpoints` in the home folder."""
    partitions: Annotated[int, Meta(ge=1, le=64)] = 2
    """Partitions of a log that `trajlake init` creates; fixed from then on."""
