"""Domains of tasks: data, environment, verifier."""
