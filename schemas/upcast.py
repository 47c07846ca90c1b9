"""Upcasts: bodies of older schema versions, brought to the present one while they are read.

`UPCASTS[(type, from_version)]` maps the decoded mapping of a body to the mapping of the next version. There is
only version 1 so far, so the table is empty; the chain that walks it is tested with a made-up version.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from schemas.events import SCHEMA_VERSION, Envelope, EventBody

Upcast = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTS: dict[tuple[str, int], Upcast] = {}


def upcast_mapping(
    type_name: str, version: int, body: dict[str, Any], target: int, upcasts: Mapping[tuple[str, int], Upcast]
) -> dict[str, Any]:
    """Walk a body's mapping from `version` up to `target`; a type without an upcast is left as it is."""
    for step in range(version, target):
        upcast = upcasts.get((type_name, step))
        body = upcast(body) if upcast else body
    return body


def upcast_body(envelope: Envelope, body: bytes) -> EventBody:
    """Decode a body of an older version into the present class.

    Raises:
        msgspec.MsgspecError: if the bytes or the upcast result do not fit.
    """
    if body[:1] == b"{":
        mapping = msgspec.json.decode(body, type=dict[str, Any])
    else:
        mapping = msgspec.msgpack.decode(body, type=dict[str, Any])
    mapping = upcast_mapping(envelope.type, envelope.schema_version, mapping, SCHEMA_VERSION, UPCASTS)
    return cast(EventBody, msgspec.convert(mapping, EventBody))
