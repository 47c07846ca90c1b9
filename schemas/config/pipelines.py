"""`[pipeline]`: how much one increment takes, how verification is tried, when files are compacted."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
PositiveSeconds = Annotated[float, Meta(gt=0)]


class PipelineConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One process that brings the log's records into tables."""

    max_epoch_records: Positive = 200_000
    """Most log records that one epoch (one commit of a table) takes, over all partitions."""
    max_epoch_bytes: Positive = 96 * 1024 * 1024
    """Most bytes of records that one epoch of project or verify takes, about; its memory is some seven times that.
    One larger record still passes, alone. Ingest streams: its memory doesn't follow its epochs."""
    num_workers: Annotated[int, Meta(ge=1, le=256)] = 2
    """Worker threads or processes of Beam's in-process runner, and sandboxes that verify at once."""
    verify_tries: Positive = 3
    """Tries of a verification that ends as an infrastructure error, before it is abandoned by name."""
    verify_retry_seconds: PositiveSeconds = 1.0
    """Pause before the second try; it doubles with every further one."""
    follow_seconds: PositiveSeconds = 0.5
    """Pause between increments that found nothing new, with `--follow`."""
    compact_min_files: Annotated[int, Meta(ge=2)] = 32
    """Small files of a table from which on `compact` joins them."""
    target_file_bytes: Positive = 128 * 1024 * 1024
    """Size that compaction joins files up to."""
