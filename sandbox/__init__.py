"""Isolated execution of hostile code."""
