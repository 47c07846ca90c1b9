"""What the formats' modules give to `import_file`, and how files are opened."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from msgspec import Struct

from schemas.events import Body, Score, TrajectoryStarted

CHUNK_BYTES = 1024 * 1024


class Conversation(Struct, frozen=True, kw_only=True):
    """One trajectory of a source, as bodies."""

    index: int
    """Place in the file, from 0: an array's index or a line's number."""
    ts_ns: int = 0
    started: TrajectoryStarted
    bodies: list[Body]
    """The rest of the attempt's own stream; the last one ends it."""
    score: Score | None = None


class BadRecord(Struct, frozen=True, kw_only=True):
    """A record of a source that makes no trajectory."""

    index: int
    reason: str
    """What kind of fault, for counting."""
    detail: str
    raw: bytes
    """As the source holds it."""


class SourceFile(Struct, frozen=True):
    """A file to import."""

    path: Path
    sha256: str
    """Hex digest of its bytes as stored."""
    size: int

    @property
    def label(self) -> str:
        """Names the file inside events; derived from its content, so that renaming it changes no event."""
        return f"sha256-{self.sha256[:16]}"


def source_file(path: Path) -> SourceFile:
    """Digest a file.

    Raises:
        ValueError: if it can't be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return SourceFile(path, digest, path.stat().st_size)
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror}") from error


@contextmanager
def opened(source: SourceFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(decompressed stream, file whose position tells the progress).

    Raises:
        ValueError: if the file can't be read or its compression is damaged.
    """
    try:
        with source.path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if is_gzip else file
            yield cast(BinaryIO, stream), file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{source.path}: damaged gzip file: {error}") from error
    except OSError as error:
        raise ValueError(f"{source.path}: can't be read: {error}") from error
