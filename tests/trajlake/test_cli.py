"""The command as a user runs it: processes, exit codes, what is printed where."""

import csv
import io
import json
import resource
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet
import pytest

COMMANDS = ("init", "demo", "rollout", "pipeline", "learn", "import", "sql", "show", "status", "domains", "rebuild")
HEAVY = ("torch", "apache_beam", "great_expectations", "deltalake", "datafusion", "pyarrow", "pandas", "rich")


def cpu_seconds_of_children():
    """Not the wall clock: a busy machine would say nothing about us."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_instant_and_loads_nothing_heavy():
    code = (
        "import sys, trajlake.cli\nsys.argv = ['trajlake', '--help']\n"
        "try: trajlake.cli.main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    seconds = []
    for _ in range(3):
        before = cpu_seconds_of_children()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds.append(cpu_seconds_of_children() - before)
        assert done.stderr.strip() == "[]"
    assert min(seconds) < 0.3


def test_every_command_has_help_that_says_what_it_does(cli):
    listing = cli("--help").out
    for name in [
        "init",
        "demo",
        "rollout",
        "pipeline",
        "learn",
        "import",
        "sql",
        "show",
        "status",
        "domains",
        "rebuild",
        "compact",
    ]:
        assert f"  {name} " in listing
        assert cli(name, "--help").code == 0


def test_a_home_is_made_once_and_then_left_as_it_is(cli, tmp_path):
    first = cli("init", "--partitions", "3", cwd=tmp_path)
    assert (first.code, "event log, 10 tables" in first.out) == (0, True)
    before = {path: path.read_bytes() for path in (tmp_path / ".trajlake").glob("*.*") if path.is_file()}
    again = cli("init", cwd=tmp_path)
    assert "everything is there already" in again.out
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / ".trajlake/home.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("place", ["option", "root option", "variable"])
def test_the_home_is_named_by_option_or_variable(cli, tmp_path, place):
    folder = tmp_path / "elsewhere"
    arguments = {"option": ["init", "--home", folder], "root option": ["--home", folder, "init"], "variable": ["init"]}
    variables = {"TRAJLAKE_HOME": str(folder)} if place == "variable" else {}
    assert cli(*arguments[place], cwd=tmp_path, **variables).code == 0
    assert (folder / "trajlake.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["nonsense"], {}, ["No such command"]),
        (["sql", "SELECT 1", "--format", "xml"], {}, ["--format"]),
        (["status"], {}, ["there is no home here", "trajlake init"]),
        (["init"], {"TRAJLAKE_LAEK": "x"}, ["TRAJLAKE_LAEK", "did you mean 'TRAJLAKE_LAKE'"]),
        (["init"], {"TRAJLAKE_LOG": "mysql://x/y"}, ["mysql"]),
    ],
)
def test_wrong_use_is_one_clear_line_and_exit_code_2(cli, tmp_path, arguments, variables, words):
    outcome = cli(*arguments, cwd=tmp_path, **variables)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sql", "SELEC 1"], ["SELEC"]),
        (["sql", "DROP TABLE events"], ["only read-only"]),
        (["sql", "SELECT * FROM trajectoriez"], ["'trajectoriez'", "trajectories"]),
        (["sql", "SELECT 1", "--at", "yesterday"], ["--at", "yesterday"]),
        (["show", "zzz"], ["'zzz'", "trajlake pipeline run"]),
        (["import", "nonsense", "x.json"], ["'nonsense'", "tau-bench"]),
        (["import", "tau-bench", "/nowhere/x.json"], ["/nowhere/x.json"]),
        (["pipeline", "run", "--only", "ingest,projct"], ["'projct'", "project"]),
        (["rollout", "--domain", "unwarp", "--policy", "torch", "--num", "1"], ["'unwarp'", "unwrap"]),
        (["rollout", "--domain", "unwrap", "--policy", "gpt", "--num", "1"], ["'gpt'", "reference"]),
        (["learn", "--run-id", "r", "--domain", "humaneval"], ["humaneval", "vocabulary"]),
        (["learn", "--run-id", "r", "--domain", "unwrap", "--config", "/nowhere.toml"], ["/nowhere.toml"]),
    ],
)
def test_mistakes_name_what_and_the_remedy(cli, home, arguments, words):
    outcome = cli(*arguments, "--home", home)
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


def test_debug_shows_where_a_mistake_was_noticed(home, spawn):
    with spawn("--debug", "sql", "SELEC 1", "--home", home) as process:
        assert "Traceback" in process.communicate(timeout=60)[1]


QUERY = "SELECT reward, count(*) AS num FROM trajectories GROUP BY reward ORDER BY reward"


def test_sql_answers_in_every_format(cli, home, tmp_path):
    expected = cli("sql", QUERY, "--home", home, "--format", "json").rows
    assert sum(row["num"] for row in expected) == 8
    out = cli("sql", QUERY, "--home", home, "--format", "csv").out
    assert [
        {"reward": float(row["reward"]), "num": int(row["num"])} for row in csv.DictReader(io.StringIO(out))
    ] == expected
    assert "reward" in cli("sql", QUERY, "--home", home).out
    for how in ("parquet", "arrow"):
        path = tmp_path / how
        with path.open("wb") as file:
            subprocess.run(
                [sys.executable, "-m", "trajlake", "sql", QUERY, "--home", home, "--format", how],
                stdout=file,
                check=True,
            )
        table = pa.parquet.read_table(path) if how == "parquet" else pa.ipc.open_stream(path.read_bytes()).read_all()
        assert table.to_pylist() == expected


def test_sql_reads_a_query_from_a_pipe(cli, home):
    assert cli("sql", "--home", home, "--format", "json", stdin="SELECT 1 AS one").rows == [{"one": 1}]


def test_sql_sees_the_tables_as_they_were(cli, home):
    counts = [
        cli("sql", "SELECT count(*) AS n FROM steps", "--home", home, "--at", version, "--format", "json").rows[0]["n"]
        for version in ("0", "1")
    ]
    assert counts[0] == 0
    assert counts[1] > 0


def test_a_reader_that_has_enough_is_no_failure(home, spawn):
    with spawn("sql", "SELECT * FROM steps", "--home", home, "--format", "json") as producer:
        producer.stdout.read(10)
        producer.stdout.close()
        assert (producer.wait(60), producer.stderr.read()) == (0, "")


def test_show_tells_one_trajectory_from_the_beginning_of_its_id(cli, home):
    row = cli("sql", "SELECT * FROM trajectories LIMIT 1", "--home", home, "--format", "json").rows[0]
    text = cli("show", row["trajectory_id"][:23], "--home", home).out
    assert text.startswith(f"{row['trajectory_id']}  settled")
    assert f"reward {row['reward']:g}" in text
    assert text.count("\nstep ") == row["num_steps"]
    assert "  → " in text
    assert "  ← " in text
    (shown,) = cli("show", row["trajectory_id"], "--home", home, "--format", "json").rows
    assert shown["trajectory"] == row
    assert len(shown["steps"]) == row["num_steps"]


def test_show_asks_which_where_several_begin_alike(cli, home):
    outcome = cli("show", "0", "--home", home)
    assert outcome.code == 2
    assert outcome.err.count("\n  0") == 8


def test_status_accounts_for_every_record(cli, home):
    rows = {(row["section"], row["name"]): row for row in cli("status", "--home", home, "--format", "json").rows}
    assert rows["table", "trajectories"]["value"] == 8
    assert rows["lag", "ingest"]["value"] == rows["lag", "project"]["value"] == 0
    assert rows["reconciliation", "log records"]["value"] == rows["table", "events"]["value"]
    text = cli("status", "--home", home).out
    assert "log records = " in text
    assert "up to date" in text


def test_importing_again_adds_duplicates_and_no_rows(cli, tmp_path, tau_bench_file):
    cli("init", "--home", tmp_path / "h")
    events = []
    for _ in range(2):
        outcome = cli(
            "import", "tau-bench", tau_bench_file, "--home", tmp_path / "h", "--events-only", "--format", "json"
        )
        assert outcome.code == 0
        events.append(outcome.rows[0]["num_events"])
    assert cli("pipeline", "run", "--home", tmp_path / "h").code == 0
    rows = {
        (row["section"], row["name"]): row for row in cli("status", "--home", tmp_path / "h", "--format", "json").rows
    }
    assert rows["table", "trajectories"]["value"] == 8
    assert rows["table", "events"]["value"] == 2 * events[0] == 2 * events[1]
    again = cli("pipeline", "run", "--home", tmp_path / "h")
    assert "nothing to do" in again.out


def test_a_record_that_makes_no_trajectory_is_a_finding(cli, tmp_path, tau_bench_file):
    cli("init", "--home", tmp_path / "h")
    results = [*json.loads(tau_bench_file.read_text())[:1], {"task_id": 7}]
    (tmp_path / "bad.json").write_text(json.dumps(results))
    outcome = cli("import", "tau-bench", tmp_path / "bad.json", "--home", tmp_path / "h", "--format", "json")
    assert outcome.code == 1
    assert "record 2" in outcome.err
    assert (outcome.rows[0]["num_imported"], outcome.rows[0]["num_rejected"]) == (1, 1)
    (row,) = cli("sql", "SELECT * FROM quarantine", "--home", tmp_path / "h", "--format", "json").rows
    shown = cli("show", row["trajectory_id"], "--home", tmp_path / "h").out
    assert "quarantined" in shown.splitlines()[0]
    assert row["rule"] in shown


def test_domains_are_listed_with_their_tasks(cli):
    rows = {row["domain"]: row for row in cli("domains", "--format", "json").rows}
    assert rows["humaneval"]["eval"] == 164
    assert rows["unwrap"]["train"] > 0


def wait_for(process, text):
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return
    pytest.fail("".join(lines))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_following_pipeline_ends_cleanly_when_it_is_told_to(cli, tmp_path, tau_bench_file, spawn, number):
    home = tmp_path / "h"
    cli("init", "--home", home)
    cli("import", "tau-bench", tau_bench_file, "--home", home, "--events-only")
    with spawn("pipeline", "run", "--follow", "--only", "ingest", "--home", home) as process:
        wait_for(process, "ingest: ")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "num_records" in out
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_ends_a_command_with_a_line_and_130(cli, spawn, tmp_path):
    home = tmp_path / "h"
    cli("init", "--home", home)
    with spawn("learn", "--run-id", "nobody", "--domain", "unwrap", "--home", home) as process:
        deadline = time.monotonic() + 60
        while not list((home / "checkpoints").glob("nobody/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_a_sandbox_that_can_not_run_is_named_before_anything_is_played(cli, home):
    arguments = ("rollout", "--domain", "unwrap", "--policy", "reference", "--num", "1", "--home", home)
    outcome = cli(*arguments, TRAJLAKE_BWRAP="/nowhere/bwrap")
    assert outcome.code == 1
    assert "Remedy" in outcome.err
    rows = {(row["section"], row["name"]): row for row in cli("status", "--home", home, "--format", "json").rows}
    assert rows["lag", "ingest"]["value"] == 0


def test_the_second_of_two_pipelines_says_who_runs(cli, tmp_path, tau_bench_file, spawn):
    home = tmp_path / "h"
    cli("init", "--home", home)
    cli("import", "tau-bench", tau_bench_file, "--home", home, "--events-only")
    with spawn("pipeline", "run", "--follow", "--only", "ingest", "--home", home) as process:
        wait_for(process, "ingest: ")
        second = cli("pipeline", "run", "--only", "ingest", "--home", home)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert second.code == 1
    assert f"pid {process.pid}" in second.err


def test_a_rollout_is_graded_and_told_by_show(cli, tmp_path):
    home = tmp_path / "h"
    cli("init", "--home", home)
    arguments = ("rollout", "--domain", "unwrap", "--policy", "reference", "--num", "2", "--split", "eval")
    outcome = cli(*arguments, "--home", home, "--format", "json")
    assert (outcome.code, outcome.rows[0]["num_trajectories"]) == (0, 2)
    assert cli("pipeline", "run", "--home", home).code == 0
    rows = cli("sql", "SELECT trajectory_id, reward FROM trajectories", "--home", home, "--format", "json").rows
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert "score 1  pass by unwrap@" in cli("show", rows[0]["trajectory_id"], "--home", home).out
