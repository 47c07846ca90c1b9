"""docs/quarantine.md has one entry per rule, and says what the registry says."""

import re
from pathlib import Path

import pytest

from pipelines.gate import RULES, Rule

PAGE = Path(__file__).parents[2] / "docs" / "quarantine.md"
ENTRIES = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def test_every_rule_has_one_entry_in_precedence_order():
    headings = re.findall(r"^### `(\w+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == list(RULES)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_an_entry_says_what_the_registry_says_and_what_to_do(rule: Rule):
    entry = ENTRIES[rule.name]
    assert rule.doc in entry
    assert f"**Origin:** {rule.origin}." in entry
    checked = ", ".join(f"`{table}`" for table in rule.tables) or "structure of the log"
    assert f"**Checked on:** {checked}." in entry
    assert f"**Covers:** one {rule.scope} at least." in entry
    assert re.search(r"\*\*Do:\*\* \w.{20,}", entry), "what is a reader to do?"
