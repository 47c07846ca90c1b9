"""A thousand damaged events, made from trajectories that real actors recorded: each ends under the right rule.

Every damaged event lies in a trajectory of its own. A damage says what has to become of it: the trajectory's fate
(`accepted`, `open`, or the rule of its quarantine row), the rules of records that are quarantined by themselves, and
the number of duplicates. Damages of random bits may end in several ways; what they may never do is crash, get lost, or
change a trajectory that is accepted.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from domains.unwrap import Unwrap
from models.transformer import TransformerConfig, new_transformer
from rollout.run import RolloutSession
from rollout.torch_policy import TorchPolicy
from schemas.config.rollout import RolloutConfig
from schemas.events import (
    Action,
    AttemptAborted,
    Body,
    ModelCall,
    Reward,
    Score,
    TrajectoryFinished,
    TrajectoryStarted,
    stream_of_abort,
    stream_of_attempt,
    stream_of_score,
)
from schemas.records import ProducerRecord
from schemas.wire import decode_event, encode_body
from storage.blobs import BlobStore

NUM_DAMAGED = 1000
NAN, INFINITY = float("nan"), float("inf")


class Fate(Struct):
    """What has to become of a damaged trajectory."""

    trajectory: str | None = "accepted"
    """accepted, open, a rule, or None where any is right."""
    records: tuple[str, ...] | None = ()
    """Rules of its records that are quarantined by themselves; None where any is right."""
    duplicates: int | None = 0


class Recorded:
    """Events of one attempt as an actor recorded them, to be written again under another id, with damage."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        first = bodies[0]
        assert isinstance(first, TrajectoryStarted)
        self.bodies: list[Any] = [replace(first, primary_scorer="env:return"), *bodies[1:]]

    def index_of(self, kind: type[Body], last: bool = False) -> int:
        found = [index for index, body in enumerate(self.bodies) if isinstance(body, kind)]
        return found[-1 if last else 0]

    def write(
        self, tape: Any, name: str, changed: dict[int, Any] | None = None, score: Any = None, **fields: Any
    ) -> None:
        """Write all events, some of them changed, then the score.

        Args:
            tape: Takes them.
            name: The trajectory's new id.
            changed: Index → another body, or bytes with the type in `fields`.
            score: Another body for the score; False for none.
            fields: Envelope fields of the changed events.
        """
        for index, body in enumerate(self.bodies):
            if changed is not None and index in changed:
                kind = str(type(body).__struct_config__.tag)
                own = {"type": kind, "trajectory_id": name, "attempt": 0} | fields
                tape.add(changed[index], stream_of_attempt(name, 0), **own)
            else:
                tape.own(name, body)
        if score is not False:
            tape.add(score or SCORE, stream_of_score("env:return", "1", name, 0), name, 0)


SCORE = Score(verifier_id="env:return", verifier_version="1", outcome="pass", score=1.0)
Damage = Callable[[Any, Recorded, str, random.Random], Fate]
DAMAGES: dict[str, Damage] = {}


def damage(function: Damage) -> Damage:
    DAMAGES[function.__name__] = function
    return function


# ---- values that are present and wrong ----


def _bad_call(rule: str, **columns: Any) -> Damage:
    def write(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
        index = recorded.index_of(ModelCall, last=rng.random() < 0.5)
        call = recorded.bodies[index]
        new = {key: value(call, rng) if callable(value) else value for key, value in columns.items()}
        recorded.write(tape, name, {index: replace(call, **new)})
        return Fate(rule)

    return write


def _with_one(value: float) -> Callable[[ModelCall, random.Random], list[float]]:
    def make(call: ModelCall, rng: random.Random) -> list[float]:
        logprobs = list(call.logprobs or ())
        logprobs[rng.randrange(len(logprobs))] = value
        return logprobs

    return make


def _response(call: ModelCall) -> list[int]:
    return list(call.response_token_ids or ())


DAMAGES |= {
    "nan_logprob": _bad_call("logprobs_finite", logprobs=_with_one(NAN)),
    "infinite_logprob": _bad_call("logprobs_finite", logprobs=_with_one(-INFINITY)),
    "positive_logprob": _bad_call("logprobs_positive", logprobs=_with_one(0.5)),
    "logprob_too_many": _bad_call("logprobs_length", logprobs=lambda call, _: [*(call.logprobs or ()), -0.5]),
    "logprob_too_few": _bad_call("logprobs_length", logprobs=lambda call, _: list(call.logprobs or ())[:-1]),
    "mask_too_long": _bad_call("loss_mask_length", sampled_run_lengths=lambda call, _: [len(_response(call)) + 1]),
    "mask_negative": _bad_call("loss_mask_length", sampled_run_lengths=lambda call, _: [len(_response(call)) + 1, -1]),
    "versions_too_short": _bad_call("version_runs_length", policy_version_runs=[(1, 100)]),
    "version_negative": _bad_call(
        "policy_version_valid", policy_version_runs=lambda call, _: [(-1, len(_response(call)))]
    ),
    "token_negative": _bad_call(
        "token_ids_valid", response_token_ids=lambda call, _: [*_response(call)[:-1], -5], prefix_sha256=None
    ),
    "prefix_wrong": _bad_call(
        "prefix_mismatch", prefix_sha256=lambda _, rng: hashlib.sha256(rng.randbytes(4)).hexdigest()
    ),
    "hash_ill_formed": _bad_call("prefix_mismatch", prefix_sha256="no hash"),
    "temperature_negative": _bad_call("sampling_parameters", temperature=-1.0),
    "top_p_above_one": _bad_call("sampling_parameters", top_p=1.5),
    "duration_nan": _bad_call("durations_valid", llm_ms=NAN),
    "duration_negative": _bad_call("durations_valid", llm_ms=-1.0),
    "parent_unknown": _bad_call("bad_reference", parent_call_id="nobody"),
}


def _bad_start(rule: str, **columns: Any) -> Damage:
    def write(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
        recorded.write(tape, name, {0: replace(recorded.bodies[0], **columns)})
        return Fate(rule)

    return write


def _bad_finish(rule: str, **columns: Any) -> Damage:
    def write(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
        last = len(recorded.bodies) - 1
        recorded.write(tape, name, {last: replace(recorded.bodies[last], **columns)})
        return Fate(rule)

    return write


def _bad_score(record_rule: str, rule: str, **columns: Any) -> Damage:
    def write(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
        recorded.write(tape, name, score=replace(SCORE, **columns))
        return Fate(rule, (record_rule,))

    return write


DAMAGES |= {
    "group_empty": _bad_start("group_index", group_size=0, sample_idx=None),
    "group_exceeded": _bad_start("group_index", group_size=2, sample_idx=2),
    "task_hash": _bad_start("hash_format", task_sha256="ABC"),
    "truncated_and_completed": _bad_finish(
        "truncated_not_completed", status="completed", truncated=True, terminated=False
    ),
    "observation_token_negative": _bad_finish("token_ids_valid", final_observation_ids=[1, -1]),
    "score_nan": _bad_score("score_finite", "reward_finite", score=NAN),
    "score_infinite": _bad_score("score_finite", "reward_finite", score=INFINITY),
    "pass_without_score": _bad_score("outcome_score_consistency", "outcome_score_consistency", score=None),
    "pass_with_missing_test": _bad_score(
        "tests_consistency", "tests_consistency", expected_tests=["a", "b"], passed_tests=["a"], seen_tests=["a"]
    ),
    "score_hash": _bad_score("hash_format", "hash_format", tests_sha256="xyz"),
}


@damage
def infra_error_with_a_score(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    recorded.write(tape, name, score=replace(SCORE, outcome="infra_error", score=0.0))
    return Fate("open", ("outcome_score_consistency",))


@damage
def reward_nan(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    bad = Reward(value=rng.choice([NAN, INFINITY, -INFINITY]))
    place = rng.randrange(2, len(recorded.bodies))
    Recorded([*recorded.bodies[:place], bad, *recorded.bodies[place:]]).write(tape, name)
    return Fate("reward_finite")


@damage
def call_id_twice(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    index = recorded.index_of(ModelCall)
    extra = Recorded([*recorded.bodies[: index + 1], *recorded.bodies[index:]])
    extra.write(tape, name)
    return Fate("bad_reference")


@damage
def second_start(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    Recorded([recorded.bodies[0], *recorded.bodies]).write(tape, name)
    return Fate("second_start")


# ---- bodies that can't be decoded ----


def _bad_bytes(change: Callable[[dict[str, Any], random.Random], Any]) -> Damage:
    def write(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
        index = recorded.index_of(ModelCall)
        mapping = msgspec.msgpack.decode(encode_body(recorded.bodies[index]))
        changed = change(mapping, rng)
        data = changed if isinstance(changed, bytes) else msgspec.msgpack.encode(mapping)
        recorded.write(tape, name, {index: data})
        return Fate("gap", ("undecodable_body",))

    return write


def _put(name: str, value: Any) -> Callable[[dict[str, Any], random.Random], None]:
    return lambda mapping, _: mapping.__setitem__(name, value)


DAMAGES |= {
    "type_of_list": _bad_bytes(_put("logprobs", "high")),
    "type_of_element": _bad_bytes(_put("response_token_ids", ["1"])),
    "null_token": _bad_bytes(_put("response_token_ids", [None])),
    "huge_token": _bad_bytes(_put("response_token_ids", [2**31])),
    "huge_version": _bad_bytes(_put("policy_version_runs", [[2**63, 1]])),
    "unknown_role": _bad_bytes(_put("role", "chef")),
    "no_call_id": _bad_bytes(lambda mapping, _: mapping.pop("call_id") and None),
    "empty_call_id": _bad_bytes(_put("call_id", "")),
    "no_mapping": _bad_bytes(lambda *_: msgspec.msgpack.encode([1, 2])),
    "cut_body": _bad_bytes(lambda mapping, rng: msgspec.msgpack.encode(mapping)[: -rng.randint(1, 8)]),
    "appended_body": _bad_bytes(lambda mapping, rng: msgspec.msgpack.encode(mapping) + b"\x00"),
    "random_body": _bad_bytes(lambda _, rng: b"\xc1" + rng.randbytes(20)),
    "deep_nest": _bad_bytes(lambda mapping, _: mapping.__setitem__("messages", [{"a": _nest(200)}])),
}


def _nest(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@damage
def unknown_field(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    index = recorded.index_of(ModelCall)
    mapping = msgspec.msgpack.decode(encode_body(recorded.bodies[index])) | {"from_the_future": 1}
    recorded.write(tape, name, {index: msgspec.msgpack.encode(mapping)})
    return Fate("accepted")


# ---- envelopes that contradict ----


def _bad_envelope(record_rule: str, then: str, **fields: Any) -> Damage:
    def write(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
        index = recorded.index_of(Action)
        recorded.write(tape, name, {index: recorded.bodies[index]}, **fields)
        return Fate(then, (record_rule,) if record_rule else ())

    return write


DAMAGES |= {
    "wrong_body_hash": _bad_envelope("body_hash_mismatch", "gap", body_sha256=bytes(32)),
    "unknown_type": _bad_envelope("unknown_type", "gap", type="telepathy"),
    "another_type": _bad_envelope("type_mismatch", "gap", type="observation"),
    "score_in_own_stream": _bad_envelope("type_mismatch", "gap", type="score"),
    "wrong_attempt": _bad_envelope("bad_stream", "gap", attempt=5),
    "no_attempt": _bad_envelope("bad_stream", "gap", attempt=None),
    "broken_chain": _bad_envelope("", "chain_broken", prev_sha256=bytes(32)),
    "no_previous": _bad_envelope("", "chain_broken", prev_sha256=None),
}


@damage
def future_version(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    index = recorded.index_of(Action)
    recorded.write(tape, name, {index: recorded.bodies[index]}, schema_version=rng.choice([0, 2, 99]))
    return Fate("gap", None)  # its row names no trajectory: see the count of `unknown_version`


# ---- what a log that delivers at least once, or actors that die, can do ----


@damage
def copies(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    before = len(tape.records)
    recorded.write(tape, name)
    written = tape.records[before:]
    again = [rng.choice(written) for _ in range(rng.randint(1, 3))]
    for record in again:
        tape.records.insert(rng.randint(_place_of(tape, record), len(tape.records)), record)
    return Fate("accepted", duplicates=len(again))


def _place_of(tape: Any, record: ProducerRecord) -> int:
    return next(index for index, known in enumerate(tape.records) if known is record) + 1


@damage
def fork(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    index = recorded.index_of(Action)
    for position, body in enumerate(recorded.bodies):
        tape.own(name, body)
        if position == index:
            tape.own(name, replace(body, name="another"), seq=index)
    tape.add(SCORE, stream_of_score("env:return", "1", name, 0), name, 0)
    return Fate("fork")


@damage
def gap(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    before = len(tape.records)
    recorded.write(tape, name)
    del tape.records[before + rng.randrange(len(recorded.bodies) - 1)]
    return Fate("gap")


@damage
def lost_finish(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    before = len(tape.records)
    recorded.write(tape, name)
    del tape.records[before + len(recorded.bodies) - 1]
    return Fate("open")


@damage
def no_score_yet(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    recorded.write(tape, name, score=False)
    return Fate("open")


@damage
def other_order(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    before = len(tape.records)
    recorded.write(tape, name)
    inner = tape.records[before : before + len(recorded.bodies) - 1]
    rng.shuffle(inner)
    tape.records[before : before + len(inner)] = inner
    return Fate("accepted")


@damage
def late_attempt(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    recorded.write(tape, name)
    for body in recorded.bodies:
        tape.own(name, body, attempt=1)
    return Fate("accepted", ("late_attempt",) * len(recorded.bodies))


@damage
def late_event(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    recorded.write(tape, name)
    tape.own(name, Action(action_id="late", name="ls"))
    return Fate("accepted", ("late_event",))


@damage
def late_fork(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    recorded.write(tape, name)
    tape.own(name, Action(action_id="other", name="ls"), seq=1)
    return Fate("accepted", ("fork",))


@damage
def second_verdict(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    recorded.write(tape, name)
    tape.add(replace(SCORE, score=0.0, outcome="fail"), stream_of_score("env:return", "1", name, 0), name, 0, seq=0)
    return Fate("accepted", duplicates=1)


@damage
def aborted(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    for body in recorded.bodies[:-1]:
        tape.own(name, body)
    tape.add(AttemptAborted(reason="lease", by="o"), stream_of_abort("o", name, 0), name, 0)
    tape.own(name, recorded.bodies[-1])
    return Fate("attempt_aborted", ("late_event",))


@damage
def infra_failure(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    for body in recorded.bodies[:-1]:
        tape.own(name, body)
    tape.own(name, TrajectoryFinished(status="failed", failure_class="infra", error="no sandbox"))
    return Fate("infra_failure")


@damage
def from_another_language(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    tape.as_json = True
    recorded.write(tape, name)
    tape.as_json = False
    return Fate("accepted")


# ---- bits and bytes ----


def _written(tape: Any, recorded: Recorded, name: str) -> list[ProducerRecord]:
    before = len(tape.records)
    recorded.write(tape, name)
    return tape.records[before:]


def _swap(tape: Any, record: ProducerRecord, value: bytes) -> None:
    tape.records[_place_of(tape, record) - 1] = ProducerRecord(record.key, value)


@damage
def bit_flip_in_a_body(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    victim = rng.choice(_written(tape, recorded, name)[1:-2])
    body = msgspec.msgpack.decode(victim.value)["body"]
    start = victim.value.rindex(body)
    _swap(tape, victim, flipped(victim.value, start + rng.randrange(len(body)), rng))
    return Fate("gap", ("body_hash_mismatch",))


@damage
def bit_flip_in_a_salt(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    victim = rng.choice(_written(tape, recorded, name)[1:-2])
    salt = msgspec.msgpack.decode(victim.value)["salt"]
    _swap(tape, victim, flipped(victim.value, victim.value.index(salt) + rng.randrange(16), rng))
    return Fate("gap", ("body_hash_mismatch",))


@damage
def bit_flip_anywhere(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    victim = rng.choice(_written(tape, recorded, name))
    _swap(tape, victim, flipped(victim.value, rng.randrange(len(victim.value)), rng))
    return Fate(None, None, None)


@damage
def cut_record(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    victim = rng.choice(_written(tape, recorded, name)[1:-2])
    _swap(tape, victim, victim.value[: rng.randrange(len(victim.value))])
    return Fate("gap", None)  # its row names no trajectory: see the count of `undecodable`


@damage
def noise(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    victim = rng.choice(_written(tape, recorded, name)[1:-2])
    _swap(tape, victim, rng.randbytes(rng.randrange(200)))
    return Fate("gap", None)


@damage
def json_noise(tape: Any, recorded: Recorded, name: str, rng: random.Random) -> Fate:
    victim = rng.choice(_written(tape, recorded, name)[1:-2])
    texts = [b"{", b"{}", b'{"envelope":"","salt":"","body":""}', b'{"envelope":1e999}', b'{"envelope":"\\ud800"}']
    _swap(tape, victim, rng.choice(texts))
    return Fate("gap", None)


def flipped(value: bytes, position: int, rng: random.Random) -> bytes:
    """The bytes with one bit turned."""
    turned = bytearray(value)
    turned[position] ^= 1 << rng.randrange(8)
    return bytes(turned)


# ---- the log, and what it became ----


class Fuzzed(Struct):
    """A damaged log and what has to become of it."""

    records: list[ProducerRecord]
    fates: dict[str, Fate]
    sources: dict[str, Recorded]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, kit: Any) -> list[Recorded]:
    """Trajectories that actors recorded: a torch policy in real shells."""
    folder = tmp_path_factory.mktemp("recorded")
    home, domain = kit.Home(folder), Unwrap()
    words = domain.vocabulary
    config = TransformerConfig(vocabulary_size=len(words.words), num_outputs=len(words.outputs), width=32)
    policy = TorchPolicy(new_transformer(config, 0), words, policy_id="p")
    with RolloutSession(domain, policy, home.log, BlobStore(home.urls.blobs), RolloutConfig(group_size=4)) as session:
        session.run("train", num_groups=3)
    home.run(only=["ingest"])
    by_stream: dict[str, list[Body]] = {}
    for row in sorted(home.rows("events"), key=lambda row: row["seq"]):
        if row["stream"] == f"{row['trajectory_id']}/{row['attempt']}":
            by_stream.setdefault(row["stream"], []).append(decode_event(row["value"]).body)
    return [Recorded(bodies) for bodies in by_stream.values()]


@pytest.fixture(scope="module")
def fuzzed(recorded: list[Recorded], kit: Any) -> Fuzzed:
    """One damaged event each in `NUM_DAMAGED` trajectories, all mixed."""
    rng = random.Random(20_250)
    tapes, fates, sources = [], {}, {}
    kinds = list(DAMAGES)
    for index in range(NUM_DAMAGED):
        kind = kinds[index % len(kinds)]
        name, tape, source = f"{index:04}-{kind}", kit.Tape(), rng.choice(recorded)
        fates[name] = DAMAGES[kind](tape, source, name, rng)
        sources[name] = source
        tapes.append(tape.records)
    return Fuzzed(kit.interleave(tapes, 7), fates, sources)


@pytest.fixture(scope="module")
def home(fuzzed: Fuzzed, kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """After a run in one epoch."""
    made = kit.Home(tmp_path_factory.mktemp("fuzzed"))
    made.log.append(fuzzed.records)
    made.run()
    return made


def kind_of(name: str) -> str:
    return name.partition("-")[2]


def test_recorded_trajectories_without_damage_are_accepted(
    recorded: list[Recorded], kit: Any, new_home: Any, tape: Any
):
    assert len(recorded) > 3
    for index, source in enumerate(recorded):
        source.write(tape, f"t{index:02}")
    whole = new_home(tape.records)
    whole.run()
    assert whole.rows("quarantine") == []
    assert [row["reward"] for row in whole.rows("trajectories")] == [1.0] * len(recorded)
    assert all(row["trainable"] for row in whole.rows("trajectories"))


def test_every_record_is_accounted_for(home: Any, fuzzed: Fuzzed):
    found = home.reconciliation()
    assert found.holds, str(found)
    assert found.log_records == len(fuzzed.records)


def test_each_trajectory_has_the_right_fate(home: Any, fuzzed: Fuzzed):
    accepted = {row["trajectory_id"] for row in home.rows("trajectories")}
    quarantined = home.rules()
    assert not accepted & set(quarantined)
    wrong = {}
    for name, fate in fuzzed.fates.items():
        became = "accepted" if name in accepted else quarantined.get(name, "open")
        if fate.trajectory not in (None, became):
            wrong[name] = (fate.trajectory, became)
    assert wrong == {}


def test_each_bad_record_is_quarantined_under_the_right_rule(home: Any, fuzzed: Fuzzed):
    rules: dict[str, list[str]] = {name: [] for name in fuzzed.fates}
    for row in home.rows("quarantine"):
        if row["scope"] == "record" and row["trajectory_id"] in rules:
            rules[row["trajectory_id"]].append(row["rule"])
    wrong = {
        name: (fate.records, rules[name])
        for name, fate in fuzzed.fates.items()
        if fate.records is not None and Counter(fate.records) != Counter(rules[name])
    }
    assert wrong == {}


def test_what_names_no_trajectory_is_quarantined_as_many_times_as_it_was_made(home: Any, fuzzed: Fuzzed):
    nameless = Counter(row["rule"] for row in home.rows("quarantine") if row["trajectory_id"] is None)
    made = Counter(map(kind_of, fuzzed.fates))
    assert nameless["unknown_version"] >= made["future_version"] > 0
    expected = made["cut_record"] + made["noise"] + made["json_noise"]
    assert expected <= nameless["undecodable"] <= expected + made["bit_flip_anywhere"]


def test_duplicates_are_counted_one_by_one(home: Any, fuzzed: Fuzzed):
    expected = sum(fate.duplicates or 0 for fate in fuzzed.fates.values())
    slack = sum(fate.duplicates is None for fate in fuzzed.fates.values())
    assert expected <= home.reconciliation().duplicates <= expected + slack
    assert expected > 0


def test_what_is_accepted_is_what_was_recorded(home: Any, fuzzed: Fuzzed):
    """Damage is found or leaves the row alone: no accepted row has another content than its actor recorded."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for row in home.rows("steps"):
        steps.setdefault(row["trajectory_id"], []).append(row)
    for row in home.rows("trajectories"):
        calls = [body for body in fuzzed.sources[row["trajectory_id"]].bodies if isinstance(body, ModelCall)]
        found = steps[row["trajectory_id"]]
        assert [step["response_token_ids"] for step in found] == [call.response_token_ids for call in calls]
        assert [step["logprobs"] for step in found] == [call.logprobs for call in calls]
        assert row["reward"] == 1.0


@pytest.mark.slow
def test_small_epochs_give_the_same_content(home: Any, tmp_path: Any):
    other = home.copy(tmp_path / "home")
    other.run(max_epoch_records=900)
    assert other.hashes() == home.hashes()
    assert other.reconciliation() == home.reconciliation()


def test_a_thousand_events_were_damaged(fuzzed: Fuzzed):
    assert len(fuzzed.fates) == NUM_DAMAGED == 1000
    assert len(DAMAGES) > 60
