"""Published events of version 1 decode as they did on the day they were written. The file is never regenerated."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas import upcast, wire
from schemas.events import BODY_TYPES, Envelope, Reward
from schemas.upcast import upcast_mapping
from schemas.wire import WireError, decode_event, decode_record, encode_envelope, encode_record, sha256

GOLDEN = Path(__file__).parents[1] / "data" / "events_v1.jsonl"
LINES: list[dict[str, Any]] = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
IDS = [f"{line['encoding']}-{line['type']}" for line in LINES]


@pytest.mark.parametrize("line", LINES, ids=IDS)
def test_an_event_of_version_1_decodes_exactly(line: dict[str, Any]):
    event = decode_event(bytes.fromhex(line["hex"]))

    assert json.loads(msgspec.json.encode(event.envelope)) == line["envelope"]
    assert json.loads(msgspec.json.encode(event.body)) == line["body"]


def test_every_type_of_version_1_has_a_golden_event_in_both_encodings():
    assert {(line["encoding"], line["type"]) for line in LINES} >= {
        (encoding, kind) for encoding in ("msgpack", "json") for kind in BODY_TYPES
    }


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_the_golden_events_form_a_hash_chain(encoding: str):
    previous = None
    for line in (line for line in LINES if line["encoding"] == encoding):
        value = bytes.fromhex(line["hex"])
        assert decode_event(value).envelope.prev_sha256 == previous
        previous = sha256(decode_record(value).envelope)


def test_upcasts_are_walked_version_by_version():
    upcasts = {
        ("reward", 1): lambda body: {**body, "value": body["value"] * 2},
        ("reward", 3): lambda body: {**body, "source": f"{body['source']}, now known"},
        ("score", 1): lambda body: {"wrong": True},
    }
    old = {"type": "reward", "value": 1.5, "source": "env"}

    assert upcast_mapping("reward", 1, old, 4, upcasts) == {"type": "reward", "value": 3.0, "source": "env, now known"}
    assert upcast_mapping("reward", 3, old, 4, upcasts)["value"] == 1.5
    assert upcast_mapping("reward", 4, old, 4, upcasts) == old


def _record_of(version: int, body: bytes) -> bytes:
    envelope = Envelope(
        schema_version=version, event_id="e", run_id="r", trajectory_id="t", attempt=0, stream="t/0", seq=0,
        producer_id="p", ts_ns=0, prev_sha256=None, body_sha256=sha256(bytes(16), body), type="reward",
    )  # fmt: skip
    return encode_record(encode_envelope(envelope), bytes(16), body)


@pytest.fixture
def version_2(monkeypatch: pytest.MonkeyPatch):
    """A made-up version 2, which renamed `amount` to `value`."""
    for module in (wire, upcast):
        monkeypatch.setattr(module, "SCHEMA_VERSION", 2)
    monkeypatch.setitem(
        upcast.UPCASTS, ("reward", 1), lambda body: {"type": "reward", "value": body["amount"], "source": "old"}
    )


@pytest.mark.usefixtures("version_2")
@pytest.mark.parametrize("encode", [msgspec.msgpack.encode, msgspec.json.encode])
def test_an_old_event_is_upcast_while_it_is_read(encode: Any):
    event = decode_event(_record_of(1, encode({"type": "reward", "amount": 0.5})))

    assert event.body == Reward(value=0.5, source="old")
    assert event.envelope.schema_version == 1


@pytest.mark.usefixtures("version_2")
@pytest.mark.parametrize("old", [{"type": "reward"}, {"type": "reward", "amount": "much"}, [1], 7])
def test_an_old_event_that_its_upcast_cannot_read_is_an_undecodable_body(old: Any):
    with pytest.raises(WireError) as refused:
        decode_event(_record_of(1, msgspec.msgpack.encode(old)))
    assert refused.value.rule == "undecodable_body"


@pytest.mark.usefixtures("version_2")
def test_the_present_version_is_not_upcast():
    body = msgspec.msgpack.encode(Reward(value=2.0))
    assert decode_event(_record_of(2, body)).body == Reward(value=2.0)


def test_a_version_to_come_is_refused_by_name():
    with pytest.raises(WireError, match="reads 1 to 1") as refused:
        decode_event(_record_of(2, msgspec.msgpack.encode(Reward(value=2.0))))
    assert refused.value.rule == "unknown_version"
