"""Round trips of every event type, and bytes that are no events."""

import json
import struct
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import inspect as types

from schemas.events import BODY_TYPES, SCHEMA_VERSION, Body, Envelope, Event
from schemas.wire import (
    MAX_DEPTH,
    WireError,
    decode_envelope,
    decode_event,
    decode_record,
    encode_body,
    encode_envelope,
    encode_record,
    sha256,
)

SALT = bytes(range(16))
WIRE_RULES = {
    "undecodable",
    "unknown_version",
    "body_hash_mismatch",
    "unknown_type",
    "undecodable_body",
    "type_mismatch",
}
FAST = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def strategy(kind: types.Type) -> st.SearchStrategy[Any]:
    """Values of a wire type, its bounds included."""
    return STRATEGIES[type(kind)](kind)


def _struct(kind: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind.cls, **{field.name: strategy(field.type) for field in kind.fields})


STRATEGIES: dict[type[types.Type], Callable[[Any], st.SearchStrategy[Any]]] = {
    types.AnyType: lambda _: JSON_VALUES,
    types.NoneType: lambda _: st.none(),
    types.BoolType: lambda _: st.booleans(),
    types.IntType: lambda kind: st.integers(kind.ge, kind.le),
    types.FloatType: lambda _: st.floats(allow_nan=False, allow_infinity=False),
    types.StrType: lambda kind: st.text(min_size=kind.min_length or 0, max_size=12),
    types.BytesType: lambda kind: st.binary(min_size=kind.min_length or 0, max_size=kind.max_length),
    types.LiteralType: lambda kind: st.sampled_from(kind.values),
    types.ListType: lambda kind: st.lists(strategy(kind.item_type), max_size=3),
    types.TupleType: lambda kind: st.tuples(*map(strategy, kind.item_types)),
    types.DictType: lambda kind: st.dictionaries(strategy(kind.key_type), strategy(kind.value_type), max_size=3),
    types.UnionType: lambda kind: st.one_of(*map(strategy, kind.types)),
    types.StructType: _struct,
}


ENVELOPES = strategy(types.type_info(Envelope))
BODIES = {name: strategy(types.type_info(cls)) for name, cls in BODY_TYPES.items()}


def sealed(envelope: Envelope, body: bytes, kind: str, version: int = SCHEMA_VERSION) -> Envelope:
    return msgspec.structs.replace(envelope, body_sha256=sha256(SALT, body), type=kind, schema_version=version)


def an_envelope(**fields: Any) -> Envelope:
    given_fields: dict[str, Any] = {
        "event_id": "e", "run_id": "r", "trajectory_id": "t", "attempt": 0, "stream": "t/0", "seq": 0,
        "producer_id": "p", "ts_ns": 1, "prev_sha256": None, "body_sha256": bytes(32), "type": "reward",
    }  # fmt: skip
    return Envelope(**{**given_fields, **fields})


def a_record(kind: str, body: bytes, **fields: Any) -> bytes:
    envelope = sealed(an_envelope(**fields), body, kind, fields.get("schema_version", SCHEMA_VERSION))
    return encode_record(encode_envelope(envelope), SALT, body)


def rule_of(value: bytes) -> str | None:
    """The rule that refuses the bytes; None where they decode. Anything but a `WireError` fails the test."""
    try:
        decode_event(value)
    except WireError as error:
        return error.rule
    return None


def refusal(value: bytes) -> str:
    with pytest.raises(WireError) as refused:
        decode_event(value)
    return refused.value.rule


@pytest.mark.parametrize("kind", BODY_TYPES)
@FAST
@given(data=st.data())
def test_every_type_comes_back_from_msgpack_as_it_was_written(kind: str, data: st.DataObject):
    body: Body = data.draw(BODIES[kind])
    encoded = encode_body(body)
    envelope = sealed(data.draw(ENVELOPES), encoded, kind)

    assert decode_event(encode_record(encode_envelope(envelope), SALT, encoded)) == Event(envelope, body)


@pytest.mark.parametrize("kind", BODY_TYPES)
@FAST
@given(data=st.data())
def test_every_type_comes_back_from_a_json_record(kind: str, data: st.DataObject):
    body: Body = data.draw(BODIES[kind])
    text = msgspec.json.encode(body)
    envelope = sealed(data.draw(ENVELOPES), text, kind)
    record = {
        "envelope": msgspec.json.encode(envelope).decode(),
        "salt": b64encode(SALT).decode(),
        "body": text.decode(),
    }

    assert decode_event(json.dumps(record).encode()) == Event(envelope, body)


@pytest.mark.parametrize("kind", BODY_TYPES)
@FAST
@given(data=st.data())
def test_damaged_bytes_raise_nothing_but_a_wire_error_with_a_rule(kind: str, data: st.DataObject):
    encoded = encode_body(data.draw(BODIES[kind]))
    envelope = sealed(data.draw(ENVELOPES), encoded, kind)
    value = bytearray(encode_record(encode_envelope(envelope), SALT, encoded))
    for _ in range(20):
        damaged = bytearray(value)
        position = data.draw(st.integers(0, len(value) - 1))
        damage = data.draw(st.sampled_from(["flip", "cut", "drop", "insert"]))
        if damage == "flip":
            damaged[position] ^= 1 << data.draw(st.integers(0, 7))
        elif damage == "cut":
            del damaged[position:]
        elif damage == "drop":
            del damaged[position]
        else:
            damaged.insert(position, data.draw(st.integers(0, 255)))
        assert rule_of(bytes(damaged)) in {None, *WIRE_RULES}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda tail: b"{" + tail))
def test_random_bytes_are_undecodable(value: bytes):
    assert refusal(value) == "undecodable"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(BODY_TYPES)), st.binary(max_size=40))
def test_random_bodies_under_a_right_hash_are_refused_by_rule(kind: str, body: bytes):
    assert refusal(a_record(kind, body)) in {"undecodable_body", "type_mismatch"}


def test_a_flipped_bit_anywhere_in_a_body_is_found_by_its_hash():
    encoded = encode_body(BODY_TYPES["reward"](value=0.5, source="env", call_id="c"))  # type: ignore[call-arg]
    envelope = encode_envelope(sealed(an_envelope(), encoded, "reward"))
    for position in range(len(encoded) * 8):
        flipped = bytearray(encoded)
        flipped[position // 8] ^= 1 << position % 8
        assert refusal(encode_record(envelope, SALT, bytes(flipped))) == "body_hash_mismatch"


def test_bytes_cannot_move_between_salt_and_body():
    inner = encode_body(BODY_TYPES["reward"](value=1.0))  # type: ignore[call-arg]
    outer = b"padding" + inner
    envelope = encode_envelope(sealed(an_envelope(), outer, "reward"))

    assert refusal(encode_record(envelope, SALT, outer)) == "undecodable_body"
    assert refusal(encode_record(envelope, SALT + b"padding", inner)) == "body_hash_mismatch"


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, 2**31 - 1])
def test_versions_that_this_code_does_not_know_are_named(version: int):
    body = encode_body(BODY_TYPES["reward"](value=0.5))  # type: ignore[call-arg]
    assert refusal(a_record("reward", body, schema_version=version)) == "unknown_version"


def test_unknown_types_and_mismatched_types_are_named():
    body = encode_body(BODY_TYPES["reward"](value=0.5))  # type: ignore[call-arg]
    assert refusal(a_record("no_such_type", body)) == "unknown_type"
    assert refusal(a_record("score", body)) == "type_mismatch"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def action_with(arguments: bytes) -> bytes:
    """Msgpack body of an action whose `arguments` are the given msgpack bytes."""
    encode = msgspec.msgpack.encode
    fixed = ("type", "action", "action_id", "a", "name", "n", "arguments")
    return b"\x84" + b"".join(map(encode, fixed)) + arguments


def test_free_form_values_may_nest_to_the_limit_and_no_deeper():
    at_limit = action_with(msgspec.msgpack.encode({"deep": nested(MAX_DEPTH - 1)}))
    assert decode_event(a_record("action", at_limit)).body.arguments == {"deep": nested(MAX_DEPTH - 1)}
    assert refusal(a_record("action", action_with(msgspec.msgpack.encode({"deep": nested(MAX_DEPTH)})))) == (
        "undecodable_body"
    )


def test_many_brackets_in_text_are_not_depth():
    body = action_with(msgspec.msgpack.encode({"code": "[" * 500, "rows": [[1]] * 500}))
    assert decode_event(a_record("action", body)).body.arguments["code"] == "[" * 500


HOSTILE_ARGUMENTS = {
    "deep arrays": b"\x81\xa1k" + b"\x91" * 100_000 + b"\xc0",
    "deep maps": b"\x81\xa1k" + b"\x81\xa1k" * 100_000 + b"\xc0",
    "an array of 2^32 that isn't there": b"\x81\xa1k\xdd\xff\xff\xff\xff",
    "a map of 2^32 that isn't there": b"\x81\xa1k\xdf\xff\xff\xff\xff",
    "text of 4 GiB that isn't there": b"\x81\xa1k\xdb\xff\xff\xff\xff",
    "text that is no UTF-8": b"\x81\xa1k\xa2\xff\xfe",
    "a lone surrogate": b"\x81\xa1k\xa3\xed\xa0\x80",
    "an extension type": b"\x81\xa1k\xc7\x03\x05abc",
    "a null key": b"\x81\xa1k\x81\xc0\x01",
    "a boolean key": b"\x81\xa1k\x81\xc3\x01",
    "an array as key": b"\x81\xa1k\x81\x92\x01\x02\x01",
    "a map as key": b"\x81\xa1k\x81\x80\x01",
    "an integer key at the top": b"\x81\x01\x01",
}


@pytest.mark.parametrize("name", HOSTILE_ARGUMENTS)
def test_hostile_free_form_values_are_undecodable_bodies(name: str):
    assert refusal(a_record("action", action_with(HOSTILE_ARGUMENTS[name]))) == "undecodable_body"


@pytest.mark.parametrize(
    "text",
    [
        '{"k": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"k": ' + '{"k":' * 100_000 + "1" + "}" * 100_000 + "}",
        '{"k": "\\ud800 lone"}',
        '{"k": NaN}',
        '{"k": 1e999}',
        '{"k": ' + "9" * 5000 + "}",
        '{"k": 18446744073709551616}',
        '{"k": -9223372036854775809}',
        '{"k": 1',
    ],
    ids=["deep arrays", "deep objects", "lone surrogate", "NaN", "1e999", "5000 digits", "2^64", "-2^63-1", "cut"],
)
def test_hostile_json_bodies_are_undecodable(text: str):
    body = b'{"type":"action","action_id":"a","name":"n","arguments":' + text.encode() + b"}"
    assert refusal(a_record("action", body)) == "undecodable_body"


def test_whatever_free_form_value_decodes_can_be_written_as_json():
    value = {"big": 2**64 - 1, "nan": float("nan"), "bytes": b"\xff", "keys": {1: 2, b"b": 3, 0.5: 4}}
    body = decode_event(a_record("action", action_with(msgspec.msgpack.encode(value)))).body
    assert json.loads(msgspec.json.encode(body))["arguments"]["big"] == 2**64 - 1


BOUNDED = [
    ("trajectory_started", "seed", 2**63),
    ("trajectory_started", "seed", -(2**63) - 1),
    ("trajectory_started", "group_size", 2**31),
    ("trajectory_started", "sample_idx", -(2**31) - 1),
    ("model_call", "top_k", 2**31),
    ("model_call", "prompt_token_ids", [2**31]),
    ("model_call", "response_token_ids", [1, 2**63]),
    ("model_call", "sampled_run_lengths", [2**31]),
    ("model_call", "policy_version_runs", [[2**63, 1]]),
    ("model_call", "policy_version_runs", [[1, 2**31]]),
    ("trajectory_finished", "final_observation_ids", [-(2**31) - 1]),
    ("policy_published", "version", 2**63),
    ("policy_published", "version", -1),
    ("consumed", "train_step", 2**64),
    ("step_trained", "policy_version", 10**30),
]
REQUIRED: dict[str, dict[str, Any]] = {
    "trajectory_started": {"task_key": "k", "domain": "d"},
    "model_call": {"call_id": "c"},
    "trajectory_finished": {"status": "completed"},
    "policy_published": {"policy_id": "p", "version": 1, "checkpoint_uri": "u", "sha256": "s"},
    "consumed": {"learner_id": "l", "train_step": 1, "policy_id": "p", "policy_version": 1, "trajectory_ids": [],
                 "row_sha256s": [], "advantages": []},
    "step_trained": {"learner_id": "l", "train_step": 1, "policy_id": "p", "policy_version": 1, "statistics": {}},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value"), BOUNDED)
def test_integers_that_no_column_can_hold_are_refused(kind: str, field: str, value: Any):
    good = {"type": kind, **REQUIRED[kind]}
    assert decode_event(a_record(kind, json.dumps(good).encode())).envelope.type == kind
    assert refusal(a_record(kind, json.dumps({**good, field: value}).encode())) == "undecodable_body"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", 2**63),
        ("seq", -1),
        ("attempt", 2**31),
        ("ts_ns", 2**63),
        ("schema_version", 2**31),
        ("run_id", ""),
        ("prev_sha256", b"short"),
        ("body_sha256", bytes(33)),
        ("stream", "x" * 513),
    ],
)
def test_envelope_fields_out_of_range_are_undecodable(field: str, value: Any):
    with pytest.raises(WireError, match=field) as refused:
        decode_envelope(encode_envelope(an_envelope(**{field: value})))
    assert refused.value.rule == "undecodable"


def test_bad_base64_in_a_json_record_is_undecodable():
    record = {"envelope": "{}", "salt": "not base64!", "body": "{}"}
    with pytest.raises(WireError) as refused:
        decode_record(json.dumps(record).encode())
    assert refused.value.rule == "undecodable"


def test_doubles_keep_every_bit():
    value = struct.unpack("<d", bytes.fromhex("010000000000f03f"))[0]
    body = encode_body(BODY_TYPES["reward"](value=value))  # type: ignore[call-arg]
    assert struct.pack("<d", decode_event(a_record("reward", body)).body.value).hex() == "010000000000f03f"
