"""Verifiers: from a finished attempt to a verdict."""
