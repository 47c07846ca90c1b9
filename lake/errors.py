"""Errors of the lake.

LakeError
├── LakeNotFoundError (also ValueError)   no lake, or no such table, at a URL
├── CommitConflictError                   somebody else moved the table's progress
├── VersionGoneError                      versions or files that a reader needs were cleaned up
└── QueryError (also ValueError)          a query that is wrong or refused
"""


class LakeError(Exception):
    """Base of the lake's errors."""


class LakeNotFoundError(LakeError, ValueError):
    """There is no lake or table where one was expected."""


class CommitConflictError(LakeError):
    """The table's progress is not where the plan began, or another commit won the race. Plan again."""


class VersionGoneError(LakeError):
    """A range of versions can't be read any more: its log entries or files were cleaned up."""


class QueryError(LakeError, ValueError):
    """A query that can't be parsed, names something unknown, or is not read-only."""
