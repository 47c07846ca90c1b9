"""Candidates through the quality gate: rows that may be written, and quarantine rows for the others.

A step that breaks a rule takes its whole trajectory along: half a trajectory is worse than none.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from pipelines.assemble import CHECK_FIELDS, Candidates
from pipelines.gate.rules import RULES
from pipelines.rows import Row, to_json
from schemas.tables import PROJECTIONS, SORT_KEYS

_RANK = {name: rank for rank, name in enumerate(RULES)}
_KNOWN = ("trajectory_id", "run_id", "attempt", "partition", "offset", "first_offset")
UNIT_TABLES = ("annotations", "policies", "consumption", "scores")
"""Tables whose rows are one record each."""


class Violation(Protocol):
    """A rule that a candidate row breaks."""

    @property
    def row_index(self) -> int:
        """Index of the candidate row."""

    @property
    def rule(self) -> str:
        """Name of the rule."""

    @property
    def reason(self) -> str:
        """What was seen."""


class Sifted(Struct, frozen=True):
    """What an epoch writes, and its count of records by outcome."""

    tables: dict[str, pa.Table]
    """Projection → rows in the table's order; every projection is there, perhaps empty."""
    num_records: int
    num_bytes: int
    accepted: int
    quarantined: int
    duplicates: int


Check = Callable[[str, pa.Table], Sequence[Violation]]


def sift(candidates: Candidates, check: Check) -> Sifted:
    """Take candidates out, through the gate.

    Args:
        candidates: From `assemble`.
        check: Gives the violations of a table's candidate rows.
    """
    tables = {name: candidates.columns[name].table() for name in PROJECTIONS if name != "quarantine"}
    broken: dict[str, list[tuple[str, str]]] = {}
    for name in ("trajectories", "steps"):
        ids = tables[name].column("trajectory_id")
        for violation in _check(check, name, tables[name]):
            trajectory_id = ids[violation.row_index].as_py()
            broken.setdefault(trajectory_id, []).append((violation.rule, violation.reason))
    of_scores = _check_scores(candidates, tables["scores"], check, broken)
    if broken:
        _take_out_trajectories(candidates, tables, broken)
    for name in UNIT_TABLES:
        violations = of_scores if name == "scores" else _check(check, name, tables[name])
        _take_out_records(candidates, tables, name, violations)
    tables["quarantine"] = candidates.columns["quarantine"].table()
    tables["steps"] = tables["steps"].drop_columns([field.name for field in CHECK_FIELDS])
    sifted = Sifted(
        tables={name: in_order(name, tables[name]) for name in PROJECTIONS},
        num_records=candidates.num_records,
        num_bytes=candidates.num_bytes,
        accepted=candidates.accepted,
        quarantined=candidates.quarantined,
        duplicates=candidates.duplicates,
    )
    candidates.clear_counts()
    return sifted


def in_order(name: str, table: pa.Table) -> pa.Table:
    """Rows in the table's own order (`SORT_KEYS`)."""
    keys = [(key, "ascending") for key in SORT_KEYS[name]]
    return table.sort_by(keys) if table.num_rows > 1 else table


def _check(check: Check, name: str, table: pa.Table) -> Sequence[Violation]:
    return check(name, table) if table.num_rows else ()


def _check_scores(
    candidates: Candidates, scores: pa.Table, check: Check, broken: dict[str, list[tuple[str, str]]]
) -> Sequence[Violation]:
    """Violations of `scores`; those of a verdict, checked in the same call, break the trajectory that it rewards."""
    verdicts = candidates.verdicts.table()
    violations = _check(check, "scores", pa.concat_tables([scores, verdicts]))
    ids = verdicts.column("trajectory_id")
    for violation in violations:
        if violation.row_index >= scores.num_rows:
            trajectory_id = ids[violation.row_index - scores.num_rows].as_py()
            broken.setdefault(trajectory_id, []).append((violation.rule, f"its verdict: {violation.reason}"))
    return [violation for violation in violations if violation.row_index < scores.num_rows]


def _take_out_trajectories(
    candidates: Candidates, tables: dict[str, pa.Table], broken: dict[str, list[tuple[str, str]]]
) -> None:
    taken = pa.array(sorted(broken), pa.string())
    for row in _matching(tables["trajectories"], taken).to_pylist():
        candidates.accepted -= row["num_events"]
        candidates.quarantine(row["num_events"], _quarantine_row(row, "trajectory", broken[row["trajectory_id"]]))
    for name in ("trajectories", "steps"):
        table = tables[name]
        tables[name] = table.filter(pc.invert(pc.is_in(table.column("trajectory_id"), value_set=taken)))


def _matching(table: pa.Table, trajectory_ids: pa.Array) -> pa.Table:
    return table.filter(pc.is_in(table.column("trajectory_id"), value_set=trajectory_ids))


def _take_out_records(
    candidates: Candidates, tables: dict[str, pa.Table], name: str, violations: Sequence[Violation]
) -> None:
    if not violations:
        return
    table = tables[name]
    by_index: dict[int, list[tuple[str, str]]] = {}
    for violation in violations:
        by_index.setdefault(violation.row_index, []).append((violation.rule, violation.reason))
    for index in sorted(by_index):
        row = table.slice(index, 1).to_pylist()[0]
        candidates.accepted -= 1
        candidates.quarantine(1, _quarantine_row({"first_offset": row["offset"], **row}, "record", by_index[index]))
    keep = [index for index in range(table.num_rows) if index not in by_index]
    tables[name] = table.take(pa.array(keep, pa.int64()))


def _quarantine_row(row: Row, scope: str, violations: list[tuple[str, str]]) -> Row:
    (rule, reason), *others = sorted(violations, key=lambda found: (_RANK[found[0]], found[1]))
    known = {name: row.get(name) for name in _KNOWN}
    return {
        **known,
        "rule": rule,
        "reason": reason,
        "other_rules": [other for other in dict.fromkeys(name for name, _ in others) if other != rule],
        "scope": scope,
        "row": to_json(row),
    }
