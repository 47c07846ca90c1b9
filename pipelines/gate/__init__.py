"""The quality gate: named rules over candidate rows.

`RULES` names every rule; `Gate.check` applies the content rules with Great Expectations. Everything heavy is imported
at the first check.
"""

from pipelines.gate.gate import Gate, GateError, GateResult, QualityResult, Violation
from pipelines.gate.rules import RULES, Rule, by_precedence, rules_for

__all__ = [
    "RULES",
    "Gate",
    "GateError",
    "GateResult",
    "QualityResult",
    "Rule",
    "Violation",
    "by_precedence",
    "rules_for",
]
