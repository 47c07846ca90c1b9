"""Great Expectations suites over check frames: one per table, one expectation per rule.

Two forms of the same rules. The suite of a table uses column aggregates (the largest number of violations in a row is
0), which cost a third of row-wise expectations. Only rules that fail are asked again row by row, for the indices.
`docs/design/quality-gate.md` has the figures behind that.
"""

import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from pipelines.gate.rules import Rule, rules_for

if TYPE_CHECKING:
    from great_expectations.core import ExpectationSuite


def load_great_expectations() -> ModuleType:
    """Import Great Expectations. It takes seconds and warns of deprecations that are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import great_expectations  # noqa: PLC0415 - takes seconds
    return great_expectations


def suite_for(table: str) -> "ExpectationSuite":
    """The table's suite: one aggregate expectation per content rule, its name in `meta["rule"]`."""
    load_great_expectations()
    from great_expectations.core import ExpectationSuite  # noqa: PLC0415 - takes seconds
    from great_expectations.expectations.core.expect_column_max_to_be_between import ExpectColumnMaxToBeBetween  # noqa: PLC0415 - takes seconds

    expectations = [
        ExpectColumnMaxToBeBetween(column=rule.name, max_value=0, meta=_meta(rule)) for rule in rules_for(table)
    ]
    return ExpectationSuite(name=table, expectations=expectations)


def row_suite_for(table: str, rules: Iterable[Rule]) -> "ExpectationSuite":
    """Row-wise expectations for some rules of a table, for the indices of the rows that break them."""
    load_great_expectations()
    from great_expectations.core import ExpectationSuite  # noqa: PLC0415 - takes seconds
    from great_expectations.expectations.core.expect_column_values_to_be_between import ExpectColumnValuesToBeBetween  # noqa: PLC0415 - takes seconds

    expectations = [ExpectColumnValuesToBeBetween(column=rule.name, max_value=0, meta=_meta(rule)) for rule in rules]
    return ExpectationSuite(name=f"{table}_rows", expectations=expectations)


def _meta(rule: Rule) -> dict[str, str]:
    return {"rule": rule.name, "notes": rule.doc}
