import gzip
import json
import tracemalloc
import uuid
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.importers import FORMATS, import_file
from ingest.importers._derive import derived_uuid, digest_of
from ingest.open import create_log
from schemas.wire import decode_event, decode_record, sha256
from storage.blobs import BlobStore

AIRLINE = Path(__file__).parents[1] / "data" / "tau-bench" / "gpt-4o-airline.json.gz"
KEY = b"k" * 32
CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


@pytest.fixture
def blobs(tmp_path):
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def bring(log, blobs):
    """Imports into the log; (format, path, key) → report."""
    return lambda format_name, path, key=KEY, **options: import_file(format_name, path, log, blobs, key, **options)


def stored(log):
    return [
        value
        for partition in log.partitions()
        for batch in log.read(partition, 0, log.bounds(partition).next, 1 << 22)
        for value in batch["value"].to_pylist()
    ]


def streams(log):
    """stream → its events, in log order."""
    result = {}
    for value in stored(log):
        event = decode_event(value)
        result.setdefault(event.envelope.stream, []).append(event)
    return result


def bodies(source, kind):
    """Bodies of a type in a log, or in the streams of one."""
    by_stream = source if isinstance(source, dict) else streams(source)
    return [event.body for stream in by_stream.values() for event in stream if event.envelope.type == kind]


@pytest.fixture
def write(tmp_path):
    """Writes a JSONL file of mappings or raw lines."""

    def write(*lines, name="chat.jsonl"):
        path = tmp_path / name
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(raw) + b"\n")
        return path

    return write


@pytest.fixture
def write_tau(tmp_path):
    def write(*elements):
        path = tmp_path / "results.json"
        path.write_text(json.dumps(elements))
        return path

    return write


def tau(**changes):
    turns = [
        {"role": "system", "content": "# Retail agent policy\n"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Bye"},
        {"role": "user", "content": "###STOP###"},
    ]
    return {"task_id": 3, "trial": 0, "reward": 1.0, "info": {"task": {"x": 1}}, "traj": turns, **changes}


@pytest.fixture(scope="module")
def airline(tmp_path_factory):
    """(streams of the airline file, report), imported once."""
    folder = tmp_path_factory.mktemp("airline")
    with create_log(f"sqlite://{folder}/log.sqlite") as log:
        report = import_file("tau-bench", AIRLINE, log, BlobStore(folder / "blobs"), KEY)
        return streams(log), report


def test_the_airline_file_gives_200_trajectories_in_50_groups_of_4(airline):
    imported, report = airline
    assert (report.num_read, report.num_imported, report.num_scored) == (200, 200, 200)
    assert not report.rejected
    assert report.num_events == sum(map(len, imported.values()))
    assert Counter(score.score for score in bodies(imported, "score")) == {1.0: 84, 0.0: 116}
    assert Counter(score.outcome for score in bodies(imported, "score")) == {"pass": 84, "fail": 116}
    groups = {}
    for started in bodies(imported, "trajectory_started"):
        assert started.primary_scorer == "import:tau-bench"
        assert started.task_key.startswith("airline/")
        assert started.group_size == 4
        groups.setdefault(started.group_id, []).append(started.sample_idx)
    assert len(groups) == 50
    assert all(sorted(members) == [0, 1, 2, 3] for members in groups.values())
    assert Counter(body.stop_reason for body in bodies(imported, "trajectory_finished")) == {
        "user_stop": 147,
        "transfer_to_human_agents": 48,
        "max_steps": 5,
    }


def test_every_message_of_the_airline_file_is_an_event_and_every_call_a_delta(airline):
    imported, _ = airline
    source = [message for element in json.loads(gzip.decompress(AIRLINE.read_bytes())) for message in element["traj"]]
    roles = Counter(message["role"] for message in source)
    calls = bodies(imported, "model_call")
    observations = bodies(imported, "observation")
    assert len(calls) == roles["assistant"]
    assert len(bodies(imported, "action")) == roles["tool"] == sum(o.action_id is not None for o in observations)
    assert sum(o.action_id is None for o in observations) == roles["user"]
    shown = sum(len(call.messages) for call in calls)
    trailing = len(source) - shown
    assert 0 <= trailing <= 200, "all but what came after the last call"
    assert all(call.response_token_ids is None and call.logprobs is None for call in calls)


def test_actions_and_their_results_are_linked_even_where_ids_repeat(airline):
    imported, _ = airline
    for events in imported.values():
        actions = {event.body.action_id: event.body for event in events if event.envelope.type == "action"}
        results = [
            event.body.action_id
            for event in events
            if event.envelope.type == "observation" and event.body.action_id is not None
        ]
        assert len(results) == len(set(results)), "one result each"
        assert set(results) == set(actions)


@pytest.mark.parametrize("format_name", FORMATS)
def test_streams_are_dense_and_chained(log, bring, write, format_name):
    bring(format_name, AIRLINE if format_name == "tau-bench" else write(CHAT, {**CHAT, "reward": 0.5}, b"bad"))
    last = {}
    for value in stored(log):
        envelope = decode_event(value).envelope
        seq, digest = last.get(envelope.stream, (-1, None))
        assert (envelope.seq, envelope.prev_sha256) == (seq + 1, digest)
        last[envelope.stream] = envelope.seq, sha256(decode_record(value).envelope)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_second_import_repeats_the_first_byte_by_byte(log, bring, write, format_name):
    path = AIRLINE if format_name == "tau-bench" else write(CHAT, {**CHAT, "reward": 1}, b"bad", b"\xff\xfe{")
    first = bring(format_name, path)
    values = stored(log)
    assert len(set(values)) == len(values)
    assert bring(format_name, path) == first
    assert Counter(stored(log)) == Counter(values * 2)


def test_a_renamed_file_is_the_same_source(log, bring, write):
    bring("openai-chat", write(CHAT, name="a.jsonl"))
    bring("openai-chat", write(CHAT, name="b.jsonl"))
    assert len(set(stored(log))) * 2 == len(stored(log))


def test_another_homes_key_gives_other_salts_and_the_same_ids(log, bring, write):
    path = write(CHAT)
    bring("openai-chat", path)
    first = set(streams(log))
    bring("openai-chat", path, key=b"other" * 8)
    assert set(streams(log)) == first
    salts = [decode_record(value).salt for value in stored(log)]
    assert len(set(salts)) == len(salts)


def test_an_interrupted_import_is_resumed_by_running_it_again(new_url, blobs):
    class StopError(Exception):
        pass

    def stop(position, _):
        if position > 200_000:
            raise StopError

    with create_log(new_url()) as log:
        with pytest.raises(StopError):
            import_file("tau-bench", AIRLINE, log, blobs, KEY, progress=stop)
        part = len(stored(log))
        report = import_file("tau-bench", AIRLINE, log, blobs, KEY)
        assert 0 < part < report.num_events
        assert len(set(stored(log))) == report.num_events


def test_progress_ends_at_the_files_size(bring):
    seen = []
    bring("tau-bench", AIRLINE, progress=lambda *pair: seen.append(pair))
    assert seen == sorted(seen)
    assert seen[-1] == (AIRLINE.stat().st_size,) * 2


def test_the_run_is_named_after_the_content_or_as_wanted(log, bring, write):
    report = bring("openai-chat", write(CHAT))
    assert report.run_id.startswith("import-openai-chat-")
    assert bring("openai-chat", write(CHAT), run_id="mine").run_id == "mine"
    assert {decode_event(value).envelope.run_id for value in stored(log)} == {report.run_id, "mine"}


def test_an_unknown_format_is_refused_with_the_known_ones(bring):
    with pytest.raises(ValueError, match="known: tau-bench, openai-chat"):
        bring("csv", AIRLINE)


def test_a_missing_file_is_refused(bring, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json"):
        bring("tau-bench", tmp_path / "nothing.json")


@pytest.mark.parametrize("text", ["", "{}", "null", "not json", '{"task_id": 1}\n{"task_id": 2}'])
def test_tau_bench_takes_only_arrays(bring, tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: not"):
        bring("tau-bench", path)


def test_an_empty_array_imports_nothing(bring, write_tau):
    assert bring("tau-bench", write_tau()).num_read == 0


def test_a_cut_off_file_fails_loudly(bring, tmp_path):
    path = tmp_path / "cut.json"
    path.write_bytes(gzip.decompress(AIRLINE.read_bytes())[:500_000])
    with pytest.raises(ValueError, match=r"cut\.json"):
        bring("tau-bench", path)
    path = tmp_path / "cut.json.gz"
    path.write_bytes(AIRLINE.read_bytes()[:200_000])
    with pytest.raises(ValueError, match=r"cut\.json\.gz: damaged gzip"):
        bring("tau-bench", path)


def test_a_broken_down_run_is_an_infrastructure_failure_without_a_reward(log, bring, write_tau):
    bring("tau-bench", write_tau(tau(traj=[], reward=0.0, info={"error": "timeout", "traceback": "…"})))
    [finished] = bodies(log, "trajectory_finished")
    assert (finished.status, finished.failure_class, finished.error) == ("failed", "infra", "timeout")
    assert bodies(log, "trajectory_started")[0].primary_scorer is None
    assert bodies(log, "score") == []


def test_a_result_without_reward_has_no_scorer(log, bring, write_tau):
    bring("tau-bench", write_tau(tau(reward=None)))
    assert bodies(log, "trajectory_started")[0].primary_scorer is None
    assert bodies(log, "score") == []


def test_numbers_beyond_64_bits_fail_loudly(bring, write_tau):
    with pytest.raises(ValueError, match="integer overflow"):
        bring("tau-bench", write_tau(tau(info={"task": 10**30})))


def test_groups_are_counted_and_samples_numbered_where_trials_are_missing(log, bring, write_tau):
    elements = [tau(trial=None), tau(trial=None), tau(task_id=4, trial=None)]
    bring("tau-bench", write_tau(*elements))
    started = bodies(log, "trajectory_started")
    assert sorted((s.task_key, s.group_size, s.sample_idx) for s in started) == [
        ("retail/3", 2, 0),
        ("retail/3", 2, 1),
        ("retail/4", 1, 0),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        5,
        {"task_id": 1},
        tau(reward="1.0"),
        tau(traj=[{"role": "alien", "content": ""}]),
        tau(traj=[{"role": "user", "content": "never answered"}]),
        tau(traj=[]),
    ],
)
def test_a_bad_element_is_kept_whole_as_an_aborted_attempt(log, bring, write_tau, bad):
    report = bring("tau-bench", write_tau(tau(), bad, tau(trial=1)))
    assert (report.num_read, report.num_imported) == (3, 2)
    assert sum(report.rejected.values()) == 1
    assert report.rejections[0].place == 2
    [aborted] = bodies(log, "attempt_aborted")
    assert "#1: " in aborted.reason
    [rejected] = [events for events in streams(log).values() if events[-1].body == aborted]
    assert rejected[1].body.content, "what the source holds"


def test_a_chat_line_becomes_a_trajectory(log, bring, write):
    line = {
        "id": "q1",
        "model": "m",
        "created": 1_700_000_000,
        "reward": 0.25,
        "metadata": {"a": 1},
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "image_url", "image_url": {}}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                    {"id": "y", "type": "function", "function": {"name": "add", "arguments": "oops"}},
                ],
            },
            {"role": "tool", "tool_call_id": "y", "content": "error"},
            {"role": "tool", "tool_call_id": "x", "content": "2"},
            {"role": "assistant", "content": "2", "weight": 0},
        ],
    }
    bring("openai-chat", write(line))
    [started] = bodies(log, "trajectory_started")
    assert (started.task_key, started.model_id, started.primary_scorer) == ("openai-chat/q1", "m", "import:openai-chat")
    assert started.tool_definitions == line["tools"]
    first, second = bodies(log, "model_call")
    assert first.messages == line["messages"][:3]
    assert second.messages == line["messages"][3:]
    assert (first.parent_call_id, second.parent_call_id) == (None, first.call_id)
    assert (first.trainable, second.trainable) == (True, False)
    add, bad = bodies(log, "action")
    assert (add.arguments, bad.arguments) == ({"a": 1}, {"unparsed": "oops"})
    user, error, result = bodies(log, "observation")
    assert (user.content, user.action_id) == ("1+1", None)
    assert (error.action_id, result.action_id) == (bad.action_id, add.action_id)
    [score] = bodies(log, "score")
    assert (score.score, score.outcome, score.evidence) == (0.25, "fail", {"a": 1})
    [own] = [events for name, events in streams(log).items() if name.endswith("/0") and "@" not in name]
    assert own[0].envelope.ts_ns == 1_700_000_000_000_000_000
    assert uuid.UUID(own[0].envelope.trajectory_id).version == 7


def test_a_line_without_reward_has_no_scorer(log, bring, write):
    bring("openai-chat", write(CHAT))
    assert bodies(log, "trajectory_started")[0].primary_scorer is None
    assert bodies(log, "score") == []


def test_the_same_prompt_has_the_same_task_key(log, bring, write):
    other = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "5"}]}
    third = {"messages": [{"role": "user", "content": "3+3?"}, CHAT["messages"][1]]}
    bring("openai-chat", write(CHAT, other, third))
    keys = Counter(started.task_key for started in bodies(log, "trajectory_started"))
    assert sorted(keys.values()) == [1, 2]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "not JSON"),
        (b'{"messages": [], "reward": NaN}', "not JSON"),
        (b'{"messages": [\xff]}', "not JSON"),
        (b"[]", "wrong shape"),
        (b'{"prompt": "x"}', "wrong shape"),
        (b'{"messages": []}', "wrong shape"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "wrong shape"),
        (b'{"messages": [{"role": "assistant", "content": 5}]}', "wrong shape"),
        (b'{"messages": [{"role": "assistant", "content": "x"}], "reward": "good"}', "wrong shape"),
        (b'{"messages": [{"role": "assistant", "content": "x", "n": 1e400}]}', "wrong shape"),
        (b'{"messages": [{"role": "assistant", "content": "x"}], "id": ""}', None),
    ],
)
def test_a_bad_line_is_reported_with_its_number_and_kept(log, bring, write, blobs, bad, reason):
    report = bring("openai-chat", write(CHAT, b"", bad, CHAT))
    if reason is None:
        assert report.num_imported == 3
        return
    assert (report.num_read, report.num_imported) == (3, 2)
    assert report.rejected == {reason: 1}
    assert (report.rejections[0].place, report.rejections[0].reason) == (3, reason)
    [aborted] = bodies(log, "attempt_aborted")
    assert reason in aborted.reason
    [rejected] = [events for events in streams(log).values() if events[-1].body == aborted]
    kept = rejected[1].body
    assert (blobs.get(kept.content_ref) if kept.content_ref else kept.content.encode()) == bad


def test_an_event_too_large_for_the_log_rejects_its_trajectory(log, bring, write):
    huge = {"messages": [{"role": "assistant", "content": ""}], "tools": [{"x": "y" * log.max_record_bytes}]}
    report = bring("openai-chat", write(CHAT, huge))
    assert report.rejected == {"wrong values": 1}
    assert report.num_imported == 1


def test_large_messages_go_to_blobs(log, blobs, bring, write):
    text = "x" * 100_000
    bring("openai-chat", write({"messages": [{"role": "user", "content": text}, CHAT["messages"][1]]}))
    assert blobs.get(bodies(log, "observation")[0].content_ref) == text.encode()
    assert text.encode() in blobs.get(bodies(log, "model_call")[0].messages_ref)


def test_overlong_lines_are_rejected_and_the_next_is_read(log, bring, write, monkeypatch):
    monkeypatch.setattr("ingest.importers.openai_chat.MAX_LINE_BYTES", 1000)
    report = bring("openai-chat", write(CHAT, b'{"x": "' + b"y" * 5_000_000 + b'"}', CHAT))
    assert (report.num_imported, report.rejected) == (2, {"line too long": 1})
    assert report.rejections[0].place == 2


def test_gzip_and_byte_order_marks_are_understood(bring, tmp_path):
    path = tmp_path / "chat.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps(CHAT).encode()))
    assert bring("openai-chat", path).num_imported == 1


def test_memory_is_bounded_by_the_largest_record(bring, tmp_path):
    path = tmp_path / "long.jsonl"
    line = json.dumps({"messages": [{"role": "user", "content": "x" * 20_000}, CHAT["messages"][1]]}) + "\n"
    path.write_text(line * 800)
    tracemalloc.start()
    try:
        assert bring("openai-chat", path).num_imported == 800
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 16_000_000
    assert peak < 12_000_000


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.binary(max_size=200).filter(lambda line: b"\n" not in line and line[:2] != b"\x1f\x8b"))
def test_no_line_whatever_its_bytes_is_dropped_or_crashes(new_url, blobs, tmp_path, line):
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(line + b"\n")
    with create_log(new_url()) as log:
        report = import_file("openai-chat", path, log, blobs, KEY)
        assert report.num_read == report.num_imported + sum(report.rejected.values())
        assert len(streams(log)) == report.num_read


@given(ts_ns=st.integers(-1, 2**63), seed=st.binary(max_size=8))
def test_derived_ids_are_version_7_uuids_of_their_time(ts_ns, seed):
    value = uuid.UUID(derived_uuid(ts_ns, digest_of(seed)))
    assert (value.version, value.variant) == (7, uuid.RFC_4122)
    assert value.int >> 80 == max(ts_ns, 0) // 1_000_000 % (1 << 48)


def test_digests_tell_parts_apart():
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of(1, 2) == digest_of("1", "2")
