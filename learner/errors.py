"""Errors of `learner`.

LearnerError
└── StarvedError   no batch came within the time that was allowed
"""


class LearnerError(Exception):
    """Base of this package's errors."""


class StarvedError(LearnerError):
    """No batch came in time; the message says what was dropped and what waits."""
