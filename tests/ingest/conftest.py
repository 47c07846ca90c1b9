"""Event log backends for the contract suite: a new backend adds itself to `BACKENDS` and changes no test."""

import uuid

import pytest

from ingest.open import create_log


def _sqlite_url(tmp_path):
    return f"sqlite://{tmp_path}/{uuid.uuid4()}/log.sqlite"


BACKENDS = {"sqlite": _sqlite_url}


@pytest.fixture(params=BACKENDS)
def new_url(request, tmp_path):
    """Makes the URL of a log that doesn't exist yet."""
    return lambda: BACKENDS[request.param](tmp_path)


@pytest.fixture
def url(new_url):
    return new_url()


@pytest.fixture
def log(url):
    """A new log of 2 partitions."""
    with create_log(url) as log:
        yield log
