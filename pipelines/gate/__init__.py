"""The quality gate: named rules over candidate rows."""
