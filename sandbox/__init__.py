"""Isolated execution of hostile code.

`sandbox.open.open_sandbox` makes a sandbox; `sandbox.probe.check_available` says first whether one can run here.
"""
