"""Bytes of an event: what a log stores and what hashes are taken over.

A record is an outer msgpack map `{envelope, salt, body}` whose `envelope` and `body` are themselves encoded
bytes, so that the exact stored bytes can be hashed without decoding them, and a body can be erased without
breaking the chain. Records may also arrive as JSON, from producers in other languages: then `envelope` and
`body` are strings of JSON and `salt` is base64.

    body_sha256  = SHA-256(salt + body bytes), the salt always 16 bytes
    prev_sha256  = SHA-256(envelope bytes of the stream's previous event)
"""

import hashlib
import secrets
from base64 import b64decode
from typing import Any, cast, get_type_hints

import msgspec

from schemas.events import BODY_TYPES, SCHEMA_VERSION, Body, Envelope, Event, EventBody
from schemas.upcast import upcast_body

SALT_BYTES = 16

MAX_DEPTH = 100
"""Deepest nesting of a free-form value (`messages`, `arguments`, `evidence`…). Explicit, because the interpreter's
recursion limit would make it depend on who decodes."""


class WireError(ValueError):
    """A record that can't be understood. `rule` is the quarantine rule's name."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class Record(msgspec.Struct, frozen=True):
    """The three byte strings of a stored event."""

    envelope: bytes
    salt: bytes
    body: bytes


class _JsonRecord(msgspec.Struct, frozen=True):
    envelope: str
    salt: str
    body: str


_encoder = msgspec.msgpack.Encoder()
_record_decoder = msgspec.msgpack.Decoder(Record)
_json_record_decoder = msgspec.json.Decoder(_JsonRecord)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_json_envelope_decoder = msgspec.json.Decoder(Envelope)
_body_decoder = msgspec.msgpack.Decoder(EventBody)
_json_body_decoder = msgspec.json.Decoder(EventBody)
_json_encoder = msgspec.json.Encoder()

_FREE_FORM: dict[type[Body], tuple[str, ...]] = {
    cls: tuple(name for name, hint in get_type_hints(cls).items() if "Any" in repr(hint)) for cls in BODY_TYPES.values()
}
"""Body class → its fields of free form, which types alone don't check."""

_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, LookupError, OverflowError, RecursionError)
"""What hostile bytes can raise in msgspec, or in an upcast that reads an ill-formed mapping."""


def sha256(*parts: bytes) -> bytes:
    """Digest (32 bytes) of the concatenated parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def new_salt() -> bytes:
    """A random salt, so that a body can't be guessed from its hash after it was erased."""
    return secrets.token_bytes(SALT_BYTES)


def encode_body(body: Body) -> bytes:
    """Msgpack bytes of a body, its type as tag."""
    return _encoder.encode(body)


def encode_envelope(envelope: Envelope) -> bytes:
    """Msgpack bytes of an envelope."""
    return _encoder.encode(envelope)


def encode_record(envelope: bytes, salt: bytes, body: bytes) -> bytes:
    """The bytes that go into the log."""
    return _encoder.encode(Record(envelope, salt, body))


def decode_record(value: bytes) -> Record:
    """Split stored bytes into their three parts.

    Raises:
        WireError: rule `undecodable`.
    """
    try:
        if value[:1] != b"{":
            return _record_decoder.decode(value)
        parts = _json_record_decoder.decode(value)
        return Record(parts.envelope.encode(), b64decode(parts.salt, validate=True), parts.body.encode())
    except _DECODE_ERRORS as error:
        raise WireError("undecodable", f"not an event record: {error}") from error


def decode_envelope(data: bytes) -> Envelope:
    """Decode envelope bytes.

    Raises:
        WireError: rules `undecodable`, `unknown_version`.
    """
    decoder = _json_envelope_decoder if data[:1] == b"{" else _envelope_decoder
    try:
        envelope = decoder.decode(data)
    except _DECODE_ERRORS as error:
        raise WireError("undecodable", f"bad envelope: {error}") from error
    if not 1 <= envelope.schema_version <= SCHEMA_VERSION:
        raise WireError(
            "unknown_version",
            f"schema_version {envelope.schema_version}; this trajlake reads 1 to {SCHEMA_VERSION}",
        )
    return envelope


def decode_body(envelope: Envelope, record: Record) -> EventBody:
    """Check the body's hash and decode it into the class that the envelope names.

    Raises:
        WireError: rules `body_hash_mismatch`, `unknown_type`, `undecodable_body`, `type_mismatch`.
    """
    if len(record.salt) != SALT_BYTES:
        # Else bytes could move between salt and body without changing the digest.
        raise WireError("body_hash_mismatch", f"the salt has {len(record.salt)} bytes instead of {SALT_BYTES}")
    if sha256(record.salt, record.body) != envelope.body_sha256:
        raise WireError("body_hash_mismatch", "the body does not have the hash that its envelope names")
    if envelope.type not in BODY_TYPES:
        raise WireError("unknown_type", f"unknown event type {envelope.type[:80]!r}")
    try:
        if envelope.schema_version < SCHEMA_VERSION:
            body: Any = upcast_body(envelope, record.body)
        elif record.body[:1] == b"{":
            body = _json_body_decoder.decode(record.body)
        else:
            body = _body_decoder.decode(record.body)
        _check_free_form(body, record.body)
    except _DECODE_ERRORS as error:
        raise WireError("undecodable_body", f"bad {envelope.type} body: {error}") from error
    if not isinstance(body, BODY_TYPES[envelope.type]):
        raise WireError("type_mismatch", f"the envelope says {envelope.type}, the body {type(body).__name__}")
    return cast(EventBody, body)


def _check_free_form(body: Body, data: bytes) -> None:
    """Free-form values end as JSON in tables and are told on in msgpack, so refuse what either can't say.

    Msgpack brings odd keys and extensions that JSON has no form for; JSON brings integers beyond 64 bits.

    Args:
        body: Decoded from `data`.
        data: Msgpack or JSON.

    Raises:
        TypeError: for a value that JSON has no form for.
        OverflowError: for an integer beyond 64 bits.
        ValueError: if it nests deeper than `MAX_DEPTH`.
    """
    is_json = data[:1] == b"{"
    for name in _FREE_FORM[type(body)]:
        value = getattr(body, name)
        if value is None:
            continue
        other = _encoder.encode(value) if is_json else _json_encoder.encode(value)
        # Brackets in JSON text bound the depth from above; only what has many of them is walked.
        text = data if is_json else other
        if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            raise ValueError(f"{name} nests deeper than {MAX_DEPTH}")


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        if not level:
            return False
        inner = [tuple(outer.values()) if isinstance(outer, dict) else outer for outer in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return bool(level)


def decode_event(value: bytes) -> Event:
    """Decode stored bytes into an event; for readers that want all or an error.

    Raises:
        WireError: with the rule's name.
    """
    record = decode_record(value)
    envelope = decode_envelope(record.envelope)
    return Event(envelope, decode_body(envelope, record))
