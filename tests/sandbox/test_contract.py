"""What every sandbox does: outcomes, limits, isolation, hostile workspaces, long-running processes.

Nothing here knows how a sandbox is made; another backend passes it unchanged.
"""

import hashlib
import io
import os
import signal
import socket
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox.port import SandboxError, SandboxPathError, WorkspaceLimitError
from schemas.records import Command, Limits, Workspace

MIB = 1 << 20


def python(code, **limits):
    return Command(argv=("python3", "-S", "-c", code), limits=Limits(**limits))


# Outcomes


def test_success_is_ok_with_output_and_usage(sh):
    result = sh("echo out; echo err >&2; sleep 0.1")
    assert (result.outcome, result.exit_code) == ("ok", 0)
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    assert (result.stdout_truncated, result.stderr_truncated) == (False, False)
    assert result.error is None
    assert 0.1 <= result.usage.wall_seconds < 5
    assert result.usage.peak_memory_bytes > 100_000


def test_exit_code_is_kept(sh):
    result = sh("exit 3")
    assert (result.outcome, result.exit_code) == ("non_zero", 3)


def test_unknown_program_is_the_commands_failure_not_the_sandboxes(sandbox):
    result = sandbox.execute(Command(argv=("no-such-program",)))
    assert (result.outcome, result.exit_code) == ("non_zero", 127)
    assert "no-such-program" in result.error


def test_program_that_is_not_executable_is_the_commands_failure(sandbox):
    sandbox.write({"data.txt": b"not a program"})
    assert sandbox.execute(Command(argv=("./data.txt",))).outcome == "non_zero"


def test_missing_working_folder_is_the_commands_failure(sandbox):
    result = sandbox.execute(Command(argv=("true",), cwd="no/such/folder"))
    assert result.outcome == "non_zero"
    assert "no/such/folder" in result.error


@pytest.mark.parametrize("argument", ["a\0b", "x" * 3_000_000])
def test_arguments_that_no_kernel_takes_are_the_commands_failure(sandbox, argument):
    result = sandbox.execute(Command(argv=("echo", argument)))
    assert result.outcome == "non_zero"
    assert "argument" in result.error


def test_death_by_signal_is_killed_without_exit_code(sh):
    result = sh("kill -SEGV $$")
    assert (result.outcome, result.exit_code) == ("killed", None)
    assert "SIGSEGV" in result.error


def test_wall_time_ends_in_timeout_with_partial_output(sh):
    started = time.monotonic()
    result = sh("echo early; sleep 30", wall_seconds=0.3)
    assert (result.outcome, result.exit_code, result.stdout) == ("timeout", None, b"early\n")
    assert 0.3 <= time.monotonic() - started < 3


def test_cpu_time_ends_in_timeout(sh):
    result = sh("while :; do :; done", wall_seconds=30, cpu_seconds=1)
    assert result.outcome == "timeout"
    assert "CPU" in result.error


def test_cpu_time_of_many_processes_together_ends_in_timeout(sh):
    result = sh("for i in 1 2 3 4; do (while :; do :; done) & done; wait", wall_seconds=30, cpu_seconds=1)
    assert result.outcome == "timeout"
    assert "CPU" in result.error


def test_memory_ends_in_oom(sandbox):
    result = sandbox.execute(python("x = []\nwhile True: x.append(bytearray(1 << 20))", memory_bytes=64 * MIB))
    assert (result.outcome, result.exit_code) == ("oom", None)
    assert result.usage.peak_memory_bytes > 64 * MIB


def test_memory_of_many_processes_together_ends_in_oom(sandbox):
    code = """
import os, time
for _ in range(7):
    if not os.fork():
        x = b"x" * (16 << 20)
        break
time.sleep(20)
"""
    assert sandbox.execute(python(code, memory_bytes=64 * MIB)).outcome == "oom"


def test_memory_shared_by_forks_is_counted_once(sandbox):
    code = """
import os, time
x = b"x" * (30 << 20)
for _ in range(5):
    if not os.fork():
        break
time.sleep(0.3)
"""
    assert sandbox.execute(python(code, memory_bytes=100 * MIB)).outcome == "ok"


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_files_held_in_memory_count_as_memory(sh, folder):
    assert sh(f"head -c 60000000 /dev/zero > {folder}/big; sleep 5", memory_bytes=40 * MIB).outcome == "oom"


def test_address_space_that_cannot_be_had_is_an_ordinary_failure(sandbox):
    result = sandbox.execute(python("x = bytearray(1 << 40)"))
    assert (result.outcome, result.exit_code) == ("non_zero", 1)
    assert b"MemoryError" in result.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_over_the_limit_is_cut_and_marked(sh, stream):
    result = sh("yes" if stream == "stdout" else "yes >&2", output_bytes=1000)
    assert (result.outcome, result.exit_code) == ("output_limit", None)
    assert getattr(result, stream) == b"y\n" * 500
    assert getattr(result, f"{stream}_truncated")


def test_output_at_the_limit_is_whole(sh):
    result = sh("head -c 1000 /dev/zero", output_bytes=1000)
    assert (result.outcome, len(result.stdout), result.stdout_truncated) == ("ok", 1000, False)


def test_one_large_file_ends_in_disk_limit(sh):
    assert sh("cat /dev/zero > f", disk_bytes=MIB).outcome == "disk_limit"


def test_many_files_end_in_disk_limit(sh):
    result = sh("i=0; while :; do i=$((i+1)); head -c 4000 /dev/zero > f$i; done", disk_bytes=MIB)
    assert result.outcome == "disk_limit"


def test_a_limit_that_was_passed_just_before_the_end_is_seen(sh):
    assert sh("for i in 1 2 3; do head -c 40000 /dev/zero > f$i; done", disk_bytes=100_000).outcome == "disk_limit"


def test_a_fork_bomb_ends_in_process_limit_soon(sandbox):
    started = time.monotonic()
    result = sandbox.execute(python("import os\nwhile True:\n try: os.fork()\n except OSError: pass", processes=20))
    assert result.outcome == "process_limit"
    assert time.monotonic() - started < 10


def test_as_many_processes_as_the_limit_are_fine(sh):
    assert sh("for i in 1 2 3 4 5; do sleep 0.2 & done; wait", processes=6).outcome == "ok"


def test_stdin_is_fed_and_ended(sh):
    payload = os.urandom(2 * MIB)
    result = sh("sha256sum", stdin=payload)
    assert result.stdout.split()[0].decode() == hashlib.sha256(payload).hexdigest()


def test_stdin_that_nobody_reads_blocks_nothing(sh):
    assert sh("exit 0", stdin=b"x" * 10 * MIB).outcome == "ok"


def test_output_and_input_larger_than_a_pipe_pass_at_once(sh):
    payload = b"x" * 900_000
    assert sh("cat", stdin=payload).stdout == payload


def test_background_processes_die_with_the_command(sh):
    started = time.monotonic()
    result = sh("(sleep 20; echo late > late) & setsid sleep 20 & echo done")
    assert (result.outcome, result.stdout) == ("ok", b"done\n")
    assert time.monotonic() - started < 5


# Isolation


def test_there_is_no_network(sandbox):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code = (
            f"import socket\nfor host in ('127.0.0.1', '1.1.1.1'):\n try: socket.create_connection((host, {port}), 2)"
        )
        result = sandbox.execute(python(code + "\n except OSError as e: print(e.errno)"))
    assert result.outcome == "ok"
    assert len(result.stdout.split()) == 2


@pytest.mark.parametrize(
    "path", ["/root/.ssh", "/home", "/etc/shadow", "/etc/hostname", "/var", "/sys/kernel", "/boot"]
)
def test_the_hosts_files_are_invisible(sh, path):
    assert sh(f"ls -a {path}/. 2>&1 || test -e {path}").outcome == "non_zero"


def test_this_repository_and_our_secrets_are_invisible(sh, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAJLAKE_TEST_SECRET", "hush")
    (tmp_path / "secret").write_text("hush")
    assert sh(f"cat {tmp_path}/secret").outcome == "non_zero"
    assert sh(f"ls {Path(__file__).parent}").outcome == "non_zero"
    assert b"hush" not in sh("env; cat /proc/*/environ").stdout


def test_processes_of_the_host_are_invisible(sh):
    pids = sh("ls /proc | grep '^[0-9]' | wc -l").stdout
    assert int(pids) < 10


def test_the_system_is_read_only(sh):
    for path in (
        "/usr/x",
        "/etc/x",
        "/x",
        "/dev/x",
        "/bin/x",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/drop_caches",
    ):
        assert sh(f"test -w {path} || : >> {path}").outcome == "non_zero", path


def test_the_code_has_no_privileges(sh):
    result = sh("grep -E '^Cap(Eff|Prm|Bnd|Inh|Amb)' /proc/self/status; id -u; ls /proc/self/fd")
    lines = result.stdout.decode().split("\n")
    assert all(int(line.split()[1], 16) == 0 for line in lines if line.startswith("Cap"))
    assert "1000" in lines
    assert sum(line.isdigit() for line in lines) == 1 + 4, "no descriptor of ours: 0, 1, 2 and that of ls"


def test_no_new_user_namespace_can_be_made(sh):
    assert sh("unshare --user true").outcome == "non_zero"


def test_the_environment_is_the_commands_own(sandbox):
    result = sandbox.execute(Command(argv=("env",), env={"LD_PRELOAD": "/workspace/evil.so", "MINE": "1"}))
    assert b"MINE=1" in result.stdout
    assert b"VIRTUAL_ENV" not in result.stdout
    assert b"HOME=/tmp" in result.stdout


def test_two_sandboxes_share_nothing(make_sandbox):
    one, other = make_sandbox(), make_sandbox()
    one.execute(Command(argv=("sh", "-c", "echo x > here; echo x > /tmp/there")))
    result = other.execute(Command(argv=("sh", "-c", "ls -A . /tmp")))
    assert b"here" not in result.stdout
    assert other.get_state().files == {}


def test_files_outside_the_workspace_do_not_last(sh):
    sh("echo x > /tmp/x; echo x > kept")
    assert sh("cat kept; ls /tmp").stdout == b"x\n"


def test_python_is_there_with_its_library(sandbox):
    result = sandbox.execute(Command(argv=("python3", "-c", "import json, ssl, sqlite3, ctypes; print('fine')")))
    assert (result.outcome, result.stdout) == ("ok", b"fine\n")


# Workspace: hostile reads, writes


def test_files_are_written_and_read(sandbox, sh):
    sandbox.write({"a.txt": b"one", "deep/er/b.bin": b"\0two"})
    assert sh("cat a.txt deep/er/b.bin").stdout == b"one\0two"
    sh("echo back > deep/c")
    assert sandbox.read("deep/c", 100) == b"back\n"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", ".", "a\0b"])
def test_paths_outside_the_workspace_are_refused(sandbox, path):
    with pytest.raises(SandboxPathError):
        sandbox.read(path, 100)
    with pytest.raises(SandboxPathError):
        sandbox.write({path: b"x"})


@pytest.mark.parametrize(
    "make",
    [
        "ln -s /etc/passwd x",
        "ln -s /proc/self/environ x",
        "echo secret > y; ln -s y x",
        "mkfifo x",
        "mkdir x",
        "python3 -S -c \"import socket; socket.socket(socket.AF_UNIX).bind('x')\"",
        "true",
    ],
)
def test_only_regular_files_are_read(sandbox, sh, make):
    assert sh(make).outcome == "ok"
    with pytest.raises(SandboxPathError):
        sandbox.read("x", 100)


def test_a_folder_that_is_a_link_is_not_followed(sandbox, sh):
    sh("ln -s /etc d; mkdir real; echo x > real/f; ln -s real r")
    for path in ("d/passwd", "r/f"):
        with pytest.raises(SandboxPathError):
            sandbox.read(path, 1000)


def test_larger_files_than_asked_for_are_refused(sandbox):
    sandbox.write({"f": b"12345"})
    assert sandbox.read("f", 5) == b"12345"
    with pytest.raises(SandboxPathError, match="more than 4"):
        sandbox.read("f", 4)


def test_writing_replaces_what_stands_in_the_way(sandbox, sh, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    sh(f"ln -s {victim} d; ln -s {victim}/f l; mkfifo p; mkdir -p tree/x; echo x > file")
    sandbox.write({"d/f": b"1", "l": b"2", "p": b"3", "tree": b"4", "file/inner": b"5"})
    assert list(victim.iterdir()) == []
    assert sh("cat d/f l p tree file/inner").stdout == b"12345"


def test_files_made_unreadable_are_still_snapshot_and_removed(make_sandbox):
    sandbox = make_sandbox()
    script = "mkdir -p d/e; echo x > d/e/f; chmod 000 d/e/f d/e d; chmod 000 ."
    assert sandbox.execute(Command(argv=("sh", "-c", script))).outcome == "ok"
    assert sandbox.get_state().files["d/e/f"].size == 2
    assert sandbox.snapshot().data
    sandbox.close()


def test_state_lists_the_tree(sandbox, sh):
    sh("mkdir d; printf abc > d/f; chmod 750 d/f; ln -s /etc/passwd l; mkfifo p")
    files = sandbox.get_state().files
    assert sorted(files) == ["d", "d/f", "l"]
    assert files["d"].kind == "directory"
    assert (files["d/f"].kind, files["d/f"].size, files["d/f"].mode) == ("file", 3, 0o750)
    assert files["d/f"].sha256 == hashlib.sha256(b"abc").hexdigest()
    assert (files["l"].kind, files["l"].target, files["l"].sha256) == ("symlink", "/etc/passwd", None)


# Snapshots


def test_equal_trees_have_equal_snapshots(make_sandbox):
    one, other = make_sandbox(), make_sandbox()
    one.write({"a": b"1", "d/b": b"2"})
    other.write({"d/b": b"2"})
    other.execute(Command(argv=("sh", "-c", "sleep 0.01; printf 1 > a; chmod 644 a; touch -d 2001-01-01 d/b")))
    assert one.snapshot() == other.snapshot()
    assert one.snapshot().ref.sha256 == hashlib.sha256(one.snapshot().data).hexdigest()


def test_snapshots_differ_with_content_and_mode(sandbox, sh):
    sandbox.write({"a": b"1"})
    digests = {sandbox.snapshot().sha256}
    sh("chmod 755 a")
    digests.add(sandbox.snapshot().sha256)
    sandbox.write({"a": b"2"})
    digests.add(sandbox.snapshot().sha256)
    assert len(digests) == 3


def test_a_snapshot_comes_back_elsewhere(make_sandbox):
    one, other = make_sandbox(), make_sandbox()
    script = (
        "mkdir -p d/empty 'odd name'; echo x > d/f; chmod 755 d/f; ln -s f d/l; ln -s /usr/bin/env e; ln d/f hard; "
        "echo y > 'odd name/ünï'; chmod 555 d; printf x > \"$(printf '\\377')\""
    )
    one.execute(Command(argv=("sh", "-c", script)))
    other.write({"old": b"gone"})
    other.restore(one.snapshot())
    assert other.snapshot() == one.snapshot()
    assert "old" not in other.get_state().files
    assert other.execute(Command(argv=("sh", "-c", "cat d/l hard; test -x d/f"))).stdout == b"x\nx\n"


def test_what_is_no_file_is_left_out_with_a_note(sandbox, sh):
    sh("mkfifo pipe; echo x > f")
    with tarfile.open(fileobj=io.BytesIO(sandbox.snapshot().data)) as archive:
        assert archive.getnames() == ["f"]
        assert "pipe" in archive.pax_headers["comment"]


def test_a_snapshot_with_a_wrong_digest_is_refused(sandbox):
    good = sandbox.snapshot()
    with pytest.raises(SandboxError, match="digest"):
        sandbox.restore(Workspace(sha256=good.sha256, data=good.data + b"\0"))


def archive_of(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, content if kind != tarfile.REGTYPE else "", 0
            data = content.encode() if kind == tarfile.REGTYPE else b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    data = buffer.getvalue()
    return Workspace(sha256=hashlib.sha256(data).hexdigest(), data=data)


@pytest.mark.parametrize(
    "member",
    [
        ("../escape", tarfile.REGTYPE, "x"),
        ("/abs", tarfile.REGTYPE, "x"),
        ("a/../../escape", tarfile.REGTYPE, "x"),
        ("hard", tarfile.LNKTYPE, "/etc/passwd"),
        ("device", tarfile.CHRTYPE, ""),
        ("pipe", tarfile.FIFOTYPE, ""),
    ],
)
def test_archives_that_no_snapshot_makes_are_refused(sandbox, member):
    with pytest.raises(SandboxError):
        sandbox.restore(archive_of(member))


def test_an_archive_cannot_write_through_its_own_links(sandbox, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    sandbox.restore(archive_of(("d", tarfile.SYMTYPE, str(victim)), ("d/f", tarfile.REGTYPE, "x")))
    assert list(victim.iterdir()) == []
    assert sandbox.read("d/f", 10) == b"x"


def test_a_workspace_over_the_disk_limit_is_not_taken_out(make_sandbox):
    sandbox = make_sandbox(Limits(disk_bytes=50_000))
    sandbox.write({"f": b"x" * 60_000})
    with pytest.raises(WorkspaceLimitError):
        sandbox.snapshot()
    with pytest.raises(WorkspaceLimitError):
        sandbox.get_state()


def test_a_tree_of_any_depth_is_refused_and_removed(make_sandbox):
    sandbox = make_sandbox()
    code = "import os\nfor i in range(3000):\n os.mkdir('d' * 200); os.chdir('d' * 200)"
    assert sandbox.execute(python(code)).outcome == "disk_limit"
    with pytest.raises(WorkspaceLimitError, match="deep"):
        sandbox.snapshot()
    sandbox.close()


# Long-running processes


def test_a_shell_answers_many_times_and_keeps_its_state(sandbox):
    shell = sandbox.start(Command(argv=("sh",)))
    shell.write(b"cd /tmp; x=5\n")
    for number in range(50):
        shell.write(b"echo $PWD $((x + %d)); echo END\n" % number)
        assert shell.read_until(b"END\n", 5) == (b"/tmp %d\nEND\n" % (5 + number), True)
    assert shell.poll() is None
    shell.write(b"exit 4\n")
    result = shell.wait()
    assert (result.outcome, result.exit_code) == ("non_zero", 4)
    assert shell.poll() == 4


def test_a_round_trip_is_fast(sandbox):
    shell = sandbox.start(Command(argv=("sh",)))
    times = []
    for _ in range(300):
        started = time.perf_counter()
        shell.write(b"echo END\n")
        assert shell.read_until(b"END\n", 5)[1]
        times.append(time.perf_counter() - started)
    assert sorted(times)[len(times) // 2] < 0.002


def test_reading_ends_in_time_and_goes_on_later(sandbox):
    shell = sandbox.start(Command(argv=("sh", "-c", "echo a; sleep 0.5; echo END")))
    started = time.monotonic()
    assert shell.read_until(b"END\n", 0.2) == (b"a\n", False)
    assert time.monotonic() - started < 0.45
    assert shell.read_until(b"END\n", 5) == (b"END\n", True)


def test_a_marker_split_between_reads_is_found(sandbox):
    shell = sandbox.start(Command(argv=("sh", "-c", "printf aaEN; sleep 0.1; printf 'D rest'; sleep 5")))
    assert shell.read_until(b"END", 5) == (b"aaEND", True)
    assert shell.read_until(b"rest", 5) == (b" rest", True)


def test_reading_an_ended_process_says_so(sandbox):
    shell = sandbox.start(Command(argv=("sh", "-c", "echo last")))
    assert shell.read_until(b"never", 5) == (b"last\n", False)
    shell.write(b"into the void\n" * 100_000)
    assert shell.wait().outcome == "ok"


def test_unread_output_over_the_limit_ends_it(sandbox):
    process = sandbox.start(Command(argv=("yes",), limits=Limits(output_bytes=1000)))
    data, found = process.read_until(b"never", 10)
    assert (data, found) == (b"y\n" * 500, False)
    assert process.wait().outcome == "output_limit"


def test_signals_reach_the_command(sandbox):
    process = sandbox.start(
        Command(argv=("sh", "-c", "trap 'echo got; exit 7' TERM; echo up; while :; do sleep 0.05; done"))
    )
    assert process.read_until(b"up\n", 5)[1]
    process.signal(signal.SIGTERM)
    result = process.wait(5)
    assert (result.outcome, result.exit_code, result.stdout) == ("non_zero", 7, b"got\n")


def test_waiting_is_bounded(sandbox):
    process = sandbox.start(Command(argv=("sleep", "30")))
    started = time.monotonic()
    assert process.wait(0.2).outcome == "timeout"
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("script", "limits", "outcome"),
    [
        ("sleep 30", {"wall_seconds": 0.3}, "timeout"),
        ("while :; do :; done", {"cpu_seconds": 1}, "timeout"),
        ("python3 -S -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'", {"memory_bytes": 64 * MIB}, "oom"),
        ("for i in 1 2 3 4 5 6 7 8 9; do sleep 20 & done; wait", {"processes": 5}, "process_limit"),
        ("while :; do head -c 100000 /dev/zero >> f; done", {"disk_bytes": MIB}, "disk_limit"),
    ],
)
def test_limits_hold_while_nobody_looks(sandbox, script, limits, outcome):
    process = sandbox.start(Command(argv=("sh", "-c", script), limits=Limits(**limits)))
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.wait(0.1).outcome == outcome


def test_a_process_outlives_the_thread_that_started_it(sandbox):
    started = []
    thread = threading.Thread(target=lambda: started.append(sandbox.start(Command(argv=("sh",)))))
    thread.start()
    thread.join()
    time.sleep(0.1)
    started[0].write(b"echo alive\n")
    assert started[0].read_until(b"alive\n", 5)[1]


def test_closing_the_sandbox_ends_its_processes(make_sandbox):
    sandbox = make_sandbox()
    process = sandbox.start(Command(argv=("sleep", "30")))
    sandbox.close()
    sandbox.close()
    assert process.poll() is not None
    with pytest.raises(SandboxError):
        sandbox.start(Command(argv=("true",)))


def test_many_threads_run_at_once(make_sandbox):
    def work(number):
        sandbox = make_sandbox()
        sandbox.write({"n": str(number).encode()})
        return [int(sandbox.execute(Command(argv=("cat", "n"))).stdout) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(24))) == [[number] * 5 for number in range(24)]


def test_the_image_has_a_stable_digest(make_sandbox):
    digests = {make_sandbox().image_digest for _ in range(2)}
    assert len(digests) == 1
    assert next(iter(digests)).startswith("sha256:")


def test_starting_under_load_breaks_no_limit(make_sandbox):
    """A sandbox that is not set up yet must not be taken for one that holds the host's processes."""

    def work(_):
        sandbox = make_sandbox()
        return {sandbox.execute(Command(argv=("true",), limits=Limits(processes=8))).outcome for _ in range(10)}

    with ThreadPoolExecutor(16) as pool:
        assert set.union(*pool.map(work, range(32))) == {"ok"}


def test_an_end_in_time_that_is_asked_for_late_is_no_timeout(sandbox):
    process = sandbox.start(Command(argv=("true",), limits=Limits(wall_seconds=0.5)))
    time.sleep(1)
    assert process.wait().outcome == "ok"
