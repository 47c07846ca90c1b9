"""A content-addressed blob store by URL: payloads too large for an event.

A blob's name is its SHA-256, laid out as `ab/cdef…`. A put returns once the blob is durable, so an event that
names it can be appended right after. Local folders are written here, because durability needs an fsync before the
rename; everything else, and all reading, goes through obstore.

Errors:
    BlobError
    ├── BlobNotFoundError (LookupError)
    ├── BlobCorruptError (LookupError)
    └── BlobStoreUnavailableError

Leaves out: deletion and listing, which belong to vacuum and erasure.
"""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, ObjectStore, from_url

from schemas.events import BlobRef

PREVIEW_CHARS = 200


class BlobError(Exception):
    """Base of blob store errors."""


class BlobNotFoundError(BlobError, LookupError):
    """No blob has this digest."""


class BlobCorruptError(BlobError, LookupError):
    """The stored bytes no longer have the digest that names them."""


class BlobStoreUnavailableError(BlobError):
    """The store can't be reached or written; a later try may work."""


def preview(data: bytes, limit: int = PREVIEW_CHARS) -> str:
    """The first `limit` characters of UTF-8 text; empty for bytes that aren't text."""
    head = data[: 4 * limit]
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        cut_inside_a_character = len(head) < len(data) and error.start > len(head) - 4
        if not cut_inside_a_character:
            return ""
        text = head[: error.start].decode()
    return "" if "\0" in text else text[:limit]


def blob_path(sha256: str) -> str:
    """Path of a blob inside its store.

    Raises:
        ValueError: if this is no hex SHA-256 digest, so that no digest can name a path outside the store.
    """
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise ValueError(f"not a hex SHA-256 digest: {sha256[:80]!r}")
    return f"{sha256[:2]}/{sha256[2:]}"


def local_root(url: str) -> Path | None:
    """Folder of a `file://` URL or a plain path; None for URLs of other schemes.

    Raises:
        ValueError: for a `file://` URL that names another host.
    """
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{url}: a file URL has three slashes, as in file:///data/blobs")
    return Path(unquote(parts.path))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BlobStore:
    """Blobs under one URL: a plain path, `file:///…`, `s3://bucket/prefix`, or whatever else obstore opens.

    Safe to use from several threads and processes at once.

    Args:
        url: where the blobs are; a local folder is created.
        options: configuration for obstore (endpoint, credentials…); the environment fills the rest.

    Raises:
        ValueError: if the URL can't be understood.
        BlobStoreUnavailableError: if a local folder can't be made.
    """

    def __init__(self, url: str | Path, **options: Any) -> None:
        self.url = str(url)
        self._root = local_root(self.url)
        try:
            self._store = self._open(options)
        except BaseError as error:
            raise ValueError(f"{self.url}: not a blob store URL: {str(error).splitlines()[0]}") from error
        except OSError as error:
            raise BlobStoreUnavailableError(f"{self.url}: {error}") from error

    def _open(self, options: dict[str, Any]) -> ObjectStore:
        if self._root is None:
            return from_url(self.url, **options)
        self._root.mkdir(parents=True, exist_ok=True)
        self._root = self._root.resolve()
        return LocalStore(self._root)

    def put(self, data: bytes) -> BlobRef:
        """Store bytes durably; a second put of the same bytes changes nothing.

        Raises:
            BlobStoreUnavailableError: the bytes may or may not be stored.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        path = blob_path(sha256)
        try:
            if self._root is None:
                self._put_remote(path, data)
            else:
                _put_local(self._root / path, data)
        except (BaseError, OSError) as error:
            raise BlobStoreUnavailableError(f"{self.url}: can't store blob {sha256}: {error}") from error
        return BlobRef(sha256=sha256, size=len(data), preview=preview(data))

    def _put_remote(self, path: str, data: bytes) -> None:
        with suppress(AlreadyExistsError):  # the name is the content
            self._store.put(path, data, mode="create")

    def get(self, ref: BlobRef | str) -> bytes:
        """Bytes of a blob, by reference or hex digest, checked against the digest.

        Raises:
            BlobNotFoundError: nothing is stored under this digest.
            BlobCorruptError: what is stored has another digest.
            BlobStoreUnavailableError: the store can't be read.
        """
        sha256 = ref if isinstance(ref, str) else ref.sha256
        path = blob_path(sha256)
        try:
            data = bytes(self._store.get(path).bytes())
        except (NotFoundError, FileNotFoundError) as error:
            raise BlobNotFoundError(f"{self.url}: no blob {sha256}") from error
        except (BaseError, OSError) as error:
            raise BlobStoreUnavailableError(f"{self.url}: can't read blob {sha256}: {error}") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BlobCorruptError(f"{self.url}: blob {sha256} holds other bytes than its name says")
        return data


def _put_local(path: Path, data: bytes) -> None:
    """Write under a temporary name, sync, rename, sync the folders: a name never shows unfinished bytes."""
    if not (path.exists() and path.stat().st_size == len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
    # Also where the blob was there: its writer may be another process, still before its own sync.
    _sync_folder(path.parent)
    _sync_folder(path.parent.parent)


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".put-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).rename(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
