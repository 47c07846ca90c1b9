"""Read-only SQL over all tables of a lake, by DataFusion.

A query is one SELECT (or EXPLAIN, SHOW, DESCRIBE). Everything else is refused by DataFusion's planner before it runs:
DDL, DML, COPY, SET, CREATE EXTERNAL TABLE; no function reads files. Filters and projections reach the scan, which
prunes by table and row-group statistics.

Besides the tables there are three views: `trainable`, `trainable_groups`, `latest_scores` (see `VIEWS`).

Time travel, `at`: a version is one of `trajectories`, and every other table is read as of that version's commit. A
time means: each table as of the newest commit at or before it. An epoch commits `trajectories` last, so its other rows
are there.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from datafusion import RuntimeEnvBuilder, SessionConfig, SessionContext, SQLOptions

from lake.errors import QueryError, VersionGoneError
from lake.open import Lake
from lake.table import LakeTable
from schemas.tables import TABLES

MEMORY_BYTES = 512 * 1024 * 1024
"""Memory of a query's sorts, joins and aggregates; what is beyond spills to temporary files or fails."""

VIEWS = {
    "trainable": "SELECT * FROM trajectories WHERE trainable AND split = 'train'",
    "trainable_groups": """
        WITH expected AS (
            SELECT group_id, max(group_size) AS group_size FROM trajectories
            WHERE group_id IS NOT NULL AND group_size IS NOT NULL GROUP BY group_id
        ), gone AS (
            SELECT subject AS group_id, CAST(regexp_replace(part, '[^0-9]', '', 'g') AS BIGINT) AS sample_idx
            FROM (SELECT subject, unnest(string_to_array(
                      regexp_replace("value", '^.*"given_up": *\\[([^]]*)\\].*$', '\\1'), ',')) AS part
                  FROM annotations WHERE kind = 'group_closed' AND "value" IS NOT NULL)
            WHERE regexp_like(part, '[0-9]')
        ), members AS (
            SELECT group_id, CAST(sample_idx AS BIGINT) AS sample_idx FROM trajectories
            WHERE group_id IS NOT NULL AND sample_idx IS NOT NULL
            UNION
            SELECT group_id, sample_idx FROM gone
        ), complete AS (
            SELECT e.group_id FROM expected e JOIN members m ON e.group_id = m.group_id
            WHERE m.sample_idx < e.group_size
            GROUP BY e.group_id, e.group_size HAVING count(DISTINCT m.sample_idx) = e.group_size
        )
        SELECT t.* FROM trainable t WHERE t.group_id IN (SELECT group_id FROM complete)""",
    "latest_scores": """
        SELECT * EXCLUDE (newest) FROM (
            SELECT *, row_number() OVER (
                PARTITION BY trajectory_id, attempt, verifier_id
                ORDER BY log_id, "partition", "offset" DESC, seq DESC) AS newest
            FROM scores)
        WHERE newest = 1""",
}
"""View name → its query."""

_READ_ONLY = SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)


Moment = int | str | datetime | None
"""Version of `trajectories`, or a time, or either as text (see `parse_at`); None is the newest."""


def run_sql(lake: Lake, query: str, at: Moment = None, limit: int | None = None) -> pa.Table:
    """Run one read-only query; gives all its rows, so bound them (`limit`) or use `stream_sql`.

    Raises:
        QueryError: the query is wrong, failed, or is not read-only.
        VersionGoneError: `at` can't be read any more.
    """
    schema, batches = stream_sql(lake, query, at, limit)
    return pa.Table.from_batches(batches, schema)


def stream_sql(
    lake: Lake, query: str, at: Moment = None, limit: int | None = None
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Like `run_sql`, but gives the schema and the rows batch by batch, as they are computed."""
    context = session(lake, at)
    try:
        frame = context.sql_with_options(query, _READ_ONLY)
        if limit is not None:
            frame = frame.limit(limit)
        reader = pa.RecordBatchReader.from_stream(frame)
    except Exception as error:  # DataFusion's planner raises bare Exceptions
        raise QueryError(explain_error(str(error))) from error
    schema = pa.schema([field.with_type(_plain(field.type)) for field in reader.schema])
    return schema, _plain_batches(reader, schema)


def session(lake: Lake, at: Moment = None) -> SessionContext:
    """A context with every table and view registered, for code of ours; user SQL goes through `run_sql`."""
    config = SessionConfig().with_information_schema(True)
    runtime = RuntimeEnvBuilder().with_disk_manager_os().with_fair_spill_pool(MEMORY_BYTES)
    context = SessionContext(config, runtime)
    for name, dataset in snapshots(lake, at).items():
        context.register_dataset(name, _never_empty(dataset))
    for name, query in VIEWS.items():
        context.register_view(name, context.sql(query))
    return context


def _never_empty(dataset: pads.FileSystemDataset) -> pads.FileSystemDataset:
    """The same rows, in at least one fragment whatever a filter leaves out: DataFusion can't sort none at all."""
    file = pa.BufferOutputStream()
    pq.write_table(dataset.schema.empty_table(), file)
    no_rows = dataset.format.make_fragment(pa.BufferReader(file.getvalue()))
    fragments = [*dataset.get_fragments(), no_rows]
    return pads.FileSystemDataset(fragments, dataset.schema, dataset.format, dataset.filesystem)


def snapshots(lake: Lake, at: Moment) -> dict[str, pads.FileSystemDataset]:
    """A dataset per table at one point of time."""
    if isinstance(at, str):
        at = parse_at(at)
    tables = [lake.table(name) for name in TABLES]
    for table in tables:
        table.refresh()
    if at is None:
        return {table.name: table.snapshot() for table in tables}
    trajectories = lake.table("trajectories")
    if isinstance(at, datetime):
        time_ms = int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
        at = version_at(trajectories, time_ms)
        if _is_after(trajectories, at, time_ms):
            raise VersionGoneError(f"there was no lake yet at {datetime.fromtimestamp(time_ms / 1000, UTC)}")
    else:
        time_ms = commit_time_ms(trajectories, at)
    return {t.name: t.snapshot(at if t.name == "trajectories" else version_at(t, time_ms)) for t in tables}


def parse_at(text: str) -> int | datetime:
    """`--at`: a version number or an ISO 8601 time (UTC where it names no zone).

    Raises:
        QueryError: it is neither.
    """
    if text.isdigit():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise QueryError(
            f"--at takes a version number or an ISO time such as 2026-01-31T12:00, not {text!r}"
        ) from error


def commit_time_ms(table: LakeTable, version: int) -> int:
    """When a version was committed, milliseconds since the epoch, as the commit itself says.

    Raises:
        VersionGoneError: there is no such version (any more).
    """
    if not 0 <= version <= table.version:
        raise VersionGoneError(f"{table.name} has versions 0 to {table.version}, not {version}")
    return max(int(a["commitInfo"]["timestamp"]) for a in table.log_actions(version) if "commitInfo" in a)


def version_at(table: LakeTable, time_ms: int) -> int:
    """Newest version that was committed at or before a time; 0, which is empty, where the table came later."""
    low, high = 0, table.version
    while low < high:
        middle = (low + high + 1) // 2
        if _is_after(table, middle, time_ms):
            high = middle - 1
        else:
            low = middle
    return low


def _is_after(table: LakeTable, version: int, time_ms: int) -> bool:
    """Cleaned-up versions count as before: they are older than all that are left."""
    try:
        return commit_time_ms(table, version) > time_ms
    except VersionGoneError:
        return False


def explain_error(message: str) -> str:
    """A planner's message in our words, with the nearest names where one is unknown."""
    if found := re.search(r"not supported: (\w[\w ]*)", message):
        return f"only read-only queries are allowed; {found[1].strip()} is refused"
    if found := re.search(r"table '(?:datafusion\.public\.)?([^']*)' not found", message):
        return f"no table {found[1]!r}{_nearest(found[1], [*TABLES, *VIEWS])}"
    if found := re.search(r"No field named ([^\s]+?)\.(?:\s|$)", message):
        name = found[1].rsplit(".", 1)[-1].strip('"')
        columns = re.findall(r'\.?"?(\w+)"?(?:,|\.$|$)', message.partition("Valid fields are ")[2])
        return f"no column {name!r}{_nearest(name, columns)}"
    if "single SQL statement" in message:
        return "one statement at a time"
    return message


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, dict.fromkeys(known), n=3)
    return f"; did you mean {', '.join(near)}?" if near else f"; there are {', '.join(dict.fromkeys(known))}"


def _plain_batches(reader: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows with plain string and binary columns instead of views, which many readers don't know."""
    try:
        for batch in reader:
            yield batch.cast(schema)
    except (pa.ArrowException, OSError) as error:
        if "FileNotFoundError" in str(error):
            raise VersionGoneError(f"a file of that version was cleaned up: {error}") from error
        raise QueryError(f"the query failed: {error}") from error


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    return kind
