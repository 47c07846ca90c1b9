"""Domains by name, from the entry point group `trajlake.domains`: ours and those of any installed package.

[project.entry-points."trajlake.domains"]
mydomain = "mypackage.mydomain:MyDomain"
"""

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from domains.port import Domain

GROUP = "trajlake.domains"


def domain_names() -> tuple[str, ...]:
    """Names of all installed domains, sorted; nothing of them is imported."""
    return tuple(sorted(_entry_points()))


def load_domain(name: str) -> Domain:
    """A new instance of a domain.

    Raises:
        ValueError: unknown name, with the nearest ones; or a domain that can't be imported, with its entry point.
    """
    known = _entry_points()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(sorted(known)) or 'none'}"
        raise ValueError(f"unknown domain {name!r}; {hint}")
    try:
        factory = known[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"domain {name!r} ({known[name].value}) can't be loaded: {error}") from error
    return cast(Domain, factory())


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
