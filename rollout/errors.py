"""Errors of `rollout`.

RolloutError
├── PolicyError          the policy could not answer: a failure of class policy
└── RolloutStoppedError  somebody asked the run to stop: attempts in flight end as aborted
"""


class RolloutError(Exception):
    """Base of this package's errors."""


class PolicyError(RolloutError):
    """A policy could not give a move."""


class RolloutStoppedError(RolloutError):
    """The run was asked to stop."""
