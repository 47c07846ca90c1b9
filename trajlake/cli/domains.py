"""`trajlake domains`."""

import typer

from trajlake.cli.options import FormatOption
from trajlake.cli.rows import put_rows


def domains(ctx: typer.Context, how: FormatOption = "table") -> None:
    """List the domains of tasks that are installed, ours and yours."""
    from typing import get_args

    from domains.registry import domain_names, load_domain
    from schemas.events import Split

    rows = []
    for name in domain_names():
        domain = load_domain(name)
        verifier = domain.verifier()
        counts = {split: len(domain.tasks(split)) for split in get_args(Split)}
        scorer = f"{verifier.id}@{verifier.version}" if verifier else "env:return"
        rows.append({"domain": name, **counts, "primary_scorer": scorer})
    put_rows(rows, ["domain", *get_args(Split), "primary_scorer"], how)
