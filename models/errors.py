"""Errors of `models`.

ModelError
└── CheckpointError
"""


class ModelError(Exception):
    """Base of this package's errors."""


class CheckpointError(ModelError):
    """A checkpoint that can't be used; the message names the file."""
