"""Checked body bytes, with large payloads moved to the blob store first (claim check)."""

from typing import Any

import msgspec

from ingest.port import LogError
from schemas.events import BODY_TYPES, Action, BlobRef, Body, ModelCall, Observation
from schemas.wire import encode_body
from storage.blobs import BlobError, BlobStore

INLINE_BYTES = 64 * 1024
"""Payloads above this go to the blob store."""

_PAYLOADS: dict[type[Body], tuple[str, str]] = {
    Action: ("arguments", "arguments_ref"),
    ModelCall: ("messages", "messages_ref"),
    Observation: ("content", "content_ref"),
}
"""Body class → the field that may be large, and the one that refers to it."""

_decoders = {cls: msgspec.msgpack.Decoder(cls) for cls in BODY_TYPES.values()}


class PayloadUnavailableError(LogError):
    """A large payload could not be stored, so its event was not recorded."""


_type_names = {cls: name for name, cls in BODY_TYPES.items()}


def type_name_of(body: Body) -> str:
    """An envelope's `type` for a body."""
    return _type_names[type(body)]


def encode_checked(body: Body) -> bytes:
    """Encode a body and decode it again: msgspec checks types only while it decodes.

    Raises:
        ValueError: if a field has a wrong type or value; not for NaN or infinities, which the gate quarantines.
    """
    decoder = _decoders.get(type(body))
    if decoder is None:
        raise ValueError(f"not an event body: {type(body).__name__}; see schemas.events.EventBody")
    try:
        data = encode_body(body)
        decoder.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(body).__name__}: {error}") from error
    return data


def encode_claim_checked(body: Body, blobs: BlobStore | None, inline_bytes: int = INLINE_BYTES) -> bytes:
    """Encode a body; a payload above `inline_bytes` is durable in `blobs` before this returns.

    Text is stored as UTF-8, everything else as JSON.

    Raises:
        ValueError: if a field has a wrong type.
        PayloadUnavailableError: if the blob store fails.
    """
    data = encode_checked(body)
    if len(data) <= inline_bytes or blobs is None or type(body) not in _PAYLOADS:
        return data
    field, ref_field = _PAYLOADS[type(body)]
    payload = _payload_bytes(getattr(body, field))
    if len(payload) <= inline_bytes:
        return data
    return encode_body(msgspec.structs.replace(body, **{field: None, ref_field: put_payload(blobs, payload)}))


def _payload_bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)


def put_payload(blobs: BlobStore, payload: bytes) -> BlobRef:
    """Store a payload durably.

    Raises:
        PayloadUnavailableError: if the blob store fails.
    """
    try:
        return blobs.put(payload)
    except BlobError as error:
        raise PayloadUnavailableError(str(error)) from error
