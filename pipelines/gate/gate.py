"""The quality gate: candidate rows in, violations and quality results out. One call per table and epoch.

    Gate().check("steps", candidates)

Leaves out what follows from a violation: one bad row quarantines what its rule's scope says (see `pipelines.assemble`).

    GateError(RuntimeError)    Great Expectations itself failed; nothing was checked, so nothing may be written
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec import Struct

from pipelines.gate.frame import check_frame
from pipelines.gate.rules import RULES, Rule, rules_for
from pipelines.gate.suites import load_great_expectations, row_suite_for, suite_for

if TYPE_CHECKING:
    import pandas as pd
    from great_expectations.core import ExpectationSuite
    from great_expectations.core.batch_definition import BatchDefinition

_MAX_SHOWN = 80
"""Characters of a quoted value in a reason."""


class GateError(RuntimeError):
    """Great Expectations failed, so the rows count as unchecked. Never a row's fault."""


class Violation(Struct, frozen=True):
    """One row that breaks one rule."""

    row_index: int
    rule: str
    reason: str


class QualityResult(Struct, frozen=True):
    """What one expectation found, as in table `quality`."""

    rule: str
    expectation: str
    success: bool
    num_checked: int
    num_unexpected: int


class GateResult(Struct, frozen=True):
    """Everything that the gate found about one table's candidates."""

    violations: list[Violation]
    """By row, then by precedence of the rules."""
    quality: list[QualityResult]
    """One per content rule of the table, in precedence order; empty for no rows."""


class Gate:
    """Great Expectations over candidate rows.

    Holds a context, which doesn't pickle: make one per process, in `DoFn.setup`.
    """

    def __init__(self) -> None:
        self._definition: BatchDefinition[Any] | None = None
        self._suites: dict[str, ExpectationSuite] = {}

    def prepare(self) -> None:
        """Load Great Expectations ahead of the first check; it takes seconds."""
        self._batch_definition()

    def check(self, table_name: str, candidates: pa.Table) -> GateResult:
        """Check candidate rows of a table.

        Args:
            table_name: Table that the rows are meant for.
            candidates: Rows with the table's columns, and `_check_` columns (see `pipelines.gate.frame`).

        Raises:
            GateError: if an expectation raised or went missing.
        """
        rules = rules_for(table_name)
        if not rules or not candidates.num_rows:
            return GateResult([], [])
        frame = check_frame(table_name, candidates)
        if table_name not in self._suites:
            self._suites[table_name] = suite_for(table_name)
        verdicts = self._validate(self._suites[table_name], frame, rules)
        failed = [rule for rule in rules if not verdicts[rule.name]["success"]]
        indices = self._failed_rows(table_name, frame, failed)
        quality = [_quality(rule, verdicts[rule.name], len(frame), indices) for rule in rules]
        return GateResult(_violations(candidates, frame, indices), quality)

    def _failed_rows(self, table: str, frame: "pd.DataFrame", failed: Sequence[Rule]) -> dict[str, list[int]]:
        if not failed:
            return {}
        verdicts = self._validate(row_suite_for(table, failed), frame, failed)
        indices = {rule.name: verdicts[rule.name]["result"]["unexpected_index_list"] for rule in failed}
        for name, rows in indices.items():
            if not rows:
                raise GateError(f"rule {name}: the column fails, but no row does")
        return indices

    def _validate(
        self, suite: "ExpectationSuite", frame: "pd.DataFrame", rules: Sequence[Rule]
    ) -> dict[str, dict[str, Any]]:
        """Results by rule name, each an expectation's JSON."""
        batch = self._batch_definition().get_batch(batch_parameters={"dataframe": frame})
        results = batch.validate(suite, result_format="COMPLETE").results
        found = {}
        for result in results:
            config = result.expectation_config
            if config is None or _raised(result.exception_info):
                raise GateError(f"{suite.name}: {config and config.type} raised: {result.exception_info}")
            found[config.meta["rule"]] = {"success": result.success, "result": result.result, "type": config.type}
        missing = {rule.name for rule in rules} - set(found)
        if missing:
            raise GateError(f"{suite.name}: no result for {sorted(missing)}")
        return found

    def _batch_definition(self) -> "BatchDefinition[Any]":
        if self._definition is None:
            self._definition = _new_batch_definition()
        return self._definition


def _new_batch_definition() -> "BatchDefinition[Any]":
    gx = load_great_expectations()
    from great_expectations.data_context.types.base import ProgressBarsConfig  # noqa: PLC0415 - takes seconds

    context = gx.get_context(mode="ephemeral")
    context.enable_analytics(False)  # 1.24 ships nothing that sends; a later release may
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    asset = context.data_sources.add_pandas("candidates").add_dataframe_asset("frame")
    return asset.add_batch_definition_whole_dataframe("whole")


def _raised(info: Any) -> bool:
    """Whether an `exception_info` tells of an exception; it is one record, or one per metric."""
    if not info:
        return False
    if "raised_exception" in info:
        return bool(info["raised_exception"])
    return any(_raised(inner) for inner in info.values())


def _quality(rule: Rule, verdict: dict[str, Any], num_rows: int, indices: dict[str, list[int]]) -> QualityResult:
    return QualityResult(
        rule=rule.name,
        expectation=verdict["type"],
        success=verdict["success"],
        num_checked=num_rows,
        num_unexpected=len(indices.get(rule.name, ())),
    )


def _violations(candidates: pa.Table, frame: "pd.DataFrame", indices: dict[str, list[int]]) -> list[Violation]:
    found = [
        Violation(row, name, reason)
        for name, rows in indices.items()
        for row, reason in zip(rows, _reasons(candidates, frame, RULES[name], rows), strict=True)
    ]
    # Rules come in precedence order, and the sort keeps it within a row.
    return sorted(found, key=lambda violation: violation.row_index)


def _reasons(candidates: pa.Table, frame: "pd.DataFrame", rule: Rule, rows: list[int]) -> Iterator[str]:
    """Per broken row: the rule's sentence, how often it is broken, and the values that it looked at."""
    sentence = rule.doc.removesuffix(".")
    shown = candidates.select([name for name in rule.shown if name in candidates.column_names]).take(rows)
    columns = {name: shown.column(name).to_pylist() for name in shown.column_names}
    for position, count in enumerate(frame[rule.name].take(rows).tolist()):
        values = ((name, column[position]) for name, column in columns.items())
        quoted = [f"{name}={str(value)[:_MAX_SHOWN]}" for name, value in values if value is not None]
        yield f"{sentence} ({', '.join([f'{count}x', *quoted])})"
