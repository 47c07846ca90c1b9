import time

import msgspec
import pytest

from schemas.events import BlobRef
from schemas.records import Limits, Task
from verify.test_suite import TestSuite, TestSuiteVerifier

GOLD = b"def double(x):\n    return 2 * x\n"
TESTS = {
    "small": "from solution import double\nassert double(2) == 4",
    "large": "from solution import double\nassert double(10**9) == 2 * 10**9",
    "file": "from solution import double\nassert str(double(1)) == open('expected.txt').read()",
}
SUITE = TestSuite(
    tests=TESTS, files={"expected.txt": b"2"}, limits=Limits(wall_seconds=2, cpu_seconds=2, memory_bytes=100 << 20)
)
TASK = Task(key="k", domain="d")


def verifier(suite=SUITE, **options):
    return TestSuiteVerifier("double", "1", lambda task: suite, **options)


@pytest.fixture
def grade(runtime, hand_in):
    def run(files, suite=SUITE, **options):
        return verifier(suite, **options).verify(TASK, hand_in(files), runtime)

    return run


def test_a_right_solution_passes_with_all_that_proves_it(grade):
    verdict = grade({"solution.py": GOLD})
    assert (verdict.outcome, verdict.score, verdict.reason) == ("pass", 1.0, None)
    assert verdict.expected_tests == verdict.seen_tests == verdict.passed_tests == ("small", "large", "file")
    assert verdict.tests_sha256 == SUITE.sha256
    assert verdict.sandbox_image_digest.startswith("sha256:")


def test_a_wrong_solution_fails_with_the_reason(grade):
    verdict = grade({"solution.py": b"def double(x):\n    return 4\n"})
    assert (verdict.outcome, verdict.score) == ("fail", 0.0)
    assert verdict.seen_tests == ("small", "large", "file")
    assert verdict.passed_tests == ("small",)
    assert "AssertionError" in verdict.reason
    assert "AssertionError" in verdict.evidence["failures"]["large"]


def test_partial_credit_is_the_share_of_expected_tests(grade):
    verdict = grade({"solution.py": b"def double(x):\n    return 4\n"}, partial=True)
    assert (verdict.outcome, verdict.score) == ("fail", 1 / 3)


def test_a_broken_file_fails(grade):
    verdict = grade({"solution.py": b"def double(x:\n"})
    assert (verdict.outcome, verdict.score) == ("fail", 0.0)
    assert "SyntaxError" in verdict.evidence["failures"]["small"]


@pytest.mark.parametrize("files", [None, {}, {"other.py": GOLD}])
def test_nothing_handed_in_fails(grade, files):
    verdict = grade(files)
    assert (verdict.outcome, verdict.score) == ("fail", 0.0)
    assert verdict.seen_tests == ()
    assert "nothing handed in" in verdict.reason


@pytest.mark.parametrize(
    "cheat",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "print('pass'); import os; os._exit(0)",
        "import os; [os.write(fd, b' pass') for fd in (1, 2)]; os._exit(0)",
        "import sys, os; os.write(1, sys.stdin.buffer.read()); os._exit(0)",
        "import os\nif os.fork(): os._exit(0)",
        "import atexit, os; atexit.register(os._exit, 0)\ndef double(x): return 0",
        "import threading, os, time\nthreading.Timer(0.01, os._exit, [0]).start()\ntime.sleep(5)",
        "__all__ = []\ndef double(x): raise SystemExit(0)",
    ],
)
def test_leaving_before_the_tests_is_no_pass(grade, cheat):
    verdict = grade({"solution.py": cheat.encode()})
    assert (verdict.outcome, verdict.score) == ("fail", 0.0)
    assert verdict.passed_tests == ()


def test_a_test_that_never_reports_has_not_been_seen(grade):
    verdict = grade({"solution.py": b"import os\ndef double(x):\n    return 2 * x if x < 9 else os._exit(0)\n"})
    assert verdict.score == 0.0
    assert verdict.expected_tests == ("small", "large", "file")
    assert verdict.seen_tests == ("small", "file")
    assert verdict.passed_tests == ("small", "file")


def test_a_task_without_tests_proves_nothing(grade):
    verdict = grade({"solution.py": GOLD}, suite=TestSuite(tests={}))
    assert (verdict.outcome, verdict.score) == ("fail", 0.0)
    assert verdict.reason == "the task has no tests"


def test_the_agents_copies_of_test_files_are_replaced(grade):
    assert grade({"solution.py": b"def double(x):\n    return 7\n", "expected.txt": b"7"}).score == 0.0


def test_a_candidate_cannot_change_files_for_the_next_test(grade):
    spoiler = b"open('expected.txt', 'w').write('0')\ndef double(x):\n    return 2 * x\n"
    suite = msgspec.structs.replace(SUITE, tests={"first": "import solution", **TESTS})
    verdict = grade({"solution.py": spoiler}, suite=suite)
    assert verdict.passed_tests == ("first", "small", "large")  # `file` is spoiled by its own import of the candidate


def test_modules_beside_the_candidate_can_be_imported(grade):
    assert grade({"solution.py": b"from inner import double\n", "inner.py": GOLD}).score == 1.0


def test_what_the_candidate_prints_does_not_matter(grade):
    assert grade({"solution.py": GOLD + b"print('noise ' * 1000)\n"}).score == 1.0


def test_an_endless_loop_is_a_timeout_and_ends_the_grading(grade):
    started = time.monotonic()
    verdict = grade({"solution.py": b"while True: pass\n"})
    assert (verdict.outcome, verdict.score) == ("timeout", 0.0)
    assert time.monotonic() - started < 5


def test_a_memory_bomb_is_oom(grade):
    verdict = grade({"solution.py": b"x = []\nwhile True: x.append(bytearray(1 << 20))\n"})
    assert (verdict.outcome, verdict.score) == ("oom", 0.0)


def test_verdicts_repeat(runtime, hand_in):
    trajectory = hand_in({"solution.py": b"import random\ndef double(x):\n    return {2 * x, 'a', 'b'}.pop()\n"})
    verdicts = [verifier().verify(TASK, trajectory, runtime) for _ in range(4)]
    assert len({(verdict.score, verdict.passed_tests) for verdict in verdicts}) == 1


def test_a_sandbox_that_cannot_start_gives_no_score(hand_in, runtime, monkeypatch):
    trajectory = hand_in({"solution.py": GOLD})
    monkeypatch.setenv("TRAJLAKE_BWRAP", "/bin/false")
    verdict = verifier().verify(TASK, trajectory, runtime)
    assert (verdict.outcome, verdict.score) == ("infra_error", None)
    assert "SandboxUnavailableError" in verdict.reason


def test_a_sandbox_without_the_interpreter_gives_no_score(grade):
    suite = msgspec.structs.replace(SUITE, python=("no-such-python",))
    verdict = grade({"solution.py": GOLD}, suite=suite)
    assert (verdict.outcome, verdict.score) == ("infra_error", None)


def test_a_lost_or_damaged_workspace_gives_no_score(hand_in, runtime, blobs, tmp_path):
    trajectory = hand_in({"solution.py": GOLD})
    ref = trajectory.finished.workspace_ref
    stored = tmp_path / "blobs" / ref.sha256[:2] / ref.sha256[2:]
    stored.chmod(0o600)
    stored.write_bytes(b"damaged")
    assert verifier().verify(TASK, trajectory, runtime).outcome == "infra_error"
    stored.unlink()
    verdict = verifier().verify(TASK, trajectory, runtime)
    assert (verdict.outcome, verdict.score) == ("infra_error", None)


@pytest.mark.parametrize("sha256", ["0" * 64, "../../etc/passwd", ""])
def test_a_reference_to_nothing_gives_no_score(hand_in, runtime, sha256):
    trajectory = hand_in({})
    finished = msgspec.structs.replace(trajectory.finished, workspace_ref=BlobRef(sha256=sha256, size=1))
    verdict = verifier().verify(TASK, msgspec.structs.replace(trajectory, finished=finished), runtime)
    assert (verdict.outcome, verdict.score) == ("infra_error", None)


def test_suites_differ_in_digest_by_all_that_decides_a_verdict():
    changed = [
        {"tests": {"small": "pass"}},
        {"files": {"expected.txt": b"3"}},
        {"candidate": "other.py"},
        {"limits": Limits()},
        {"python": ("python3",)},
    ]
    digests = {msgspec.structs.replace(SUITE, **change).sha256 for change in changed} | {SUITE.sha256}
    assert len(digests) == 6


def test_a_sandbox_that_cannot_start_is_an_infrastructure_error(hand_in, runtime, monkeypatch):
    trajectory = hand_in({"solution.py": GOLD})
    monkeypatch.setenv("TRAJLAKE_BWRAP", "/bin/false")
    verdict = verifier().verify(TASK, trajectory, runtime)
    assert (verdict.outcome, verdict.score) == ("infra_error", None)


def test_a_verifiers_runtime_records_nothing(runtime, hand_in):
    with pytest.raises(ValueError, match="record no events"):
        runtime.record(hand_in(None).finished)
