"""Beam pipelines: from the log to the tables."""
