"""Identity derived from the source, so that a second import repeats the first one byte by byte.

Ids are hashes of the file's digest and the place inside the file; salts are HMACs with the home's key, so that they
repeat and still can't be guessed by somebody who lacks the key. A file keeps its trajectories when it is renamed.
"""

import hashlib
import hmac
import uuid

from ingest._payload import encode_claim_checked, type_name_of
from schemas.events import Body, Envelope
from schemas.records import ProducerRecord
from schemas.wire import SALT_BYTES, encode_envelope, encode_record, sha256
from storage.blobs import BlobStore


def digest_of(*parts: str | bytes | int) -> bytes:
    """SHA-256 over the parts, each with its length before it."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def derived_uuid(ts_ns: int, digest: bytes) -> str:
    """A UUID in the layout of version 7 (RFC 9562, 5.7) whose random bits come from a digest.

    Args:
        ts_ns: the source's time in nanoseconds; 0 where it is unknown.
        digest: at least 10 bytes.
    """
    milliseconds = max(ts_ns, 0) // 1_000_000 & (1 << 48) - 1
    value = milliseconds << 80 | int.from_bytes(digest[:10], "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


class DerivedStream:
    """Encodes the events of one stream, in order."""

    def __init__(  # noqa: PLR0913 - the columns of an envelope
        self,
        *,
        run_id: str,
        producer_id: str,
        stream: str,
        trajectory_id: str,
        attempt: int,
        ts_ns: int,
        home_key: bytes,
        blobs: BlobStore | None,
    ) -> None:
        self._run_id, self._producer_id, self._stream = run_id, producer_id, stream
        self._trajectory_id, self._attempt, self._ts_ns = trajectory_id, attempt, ts_ns
        self._home_key, self._blobs = home_key, blobs
        self._seq = 0
        self._prev: bytes | None = None

    def encode(self, body: Body) -> ProducerRecord:
        """The stream's next event, its large payload durable in the blob store.

        Raises:
            ValueError: if a field has a wrong type.
            PayloadUnavailableError: if the blob store fails.
        """
        data = encode_claim_checked(body, self._blobs)
        place = digest_of(self._stream, self._seq)
        salt = hmac.digest(self._home_key, digest_of(place, data), "sha256")[:SALT_BYTES]
        envelope = encode_envelope(
            Envelope(
                event_id=derived_uuid(self._ts_ns, place),
                run_id=self._run_id,
                trajectory_id=self._trajectory_id,
                attempt=self._attempt,
                stream=self._stream,
                seq=self._seq,
                producer_id=self._producer_id,
                ts_ns=self._ts_ns,
                prev_sha256=self._prev,
                body_sha256=sha256(salt, data),
                type=type_name_of(body),
            )
        )
        self._prev = sha256(envelope)
        self._seq += 1
        return ProducerRecord(self._trajectory_id, encode_record(envelope, salt, data))
