"""Policies by name, for commands that run actors.

torch        the tiny transformer; follows what the run's learner publishes
reference    plays a domain's own solutions
empty        answers nothing
"""

from typing import TYPE_CHECKING

from schemas.config import Config
from schemas.events import Split

if TYPE_CHECKING:
    from domains.port import Domain
    from models.tokenizer import Vocabulary
    from rollout.port import Policy

POLICIES = ("torch", "reference", "empty")


def make_policy(name: str, domain: "Domain", config: Config) -> "tuple[Policy, str | None]":
    """A policy, and the id under which newer versions of it are looked for (None: it has no versions).

    Raises:
        ValueError: for an unknown name, or a domain that this policy can't play.
    """
    if name == "torch":
        return _tiny(domain, config), config.learner.policy_id
    from domains.port import HasReferences  # noqa: PLC0415 - after the name is known
    from rollout.scripted import EmptyPolicy, ReferencePolicy  # noqa: PLC0415 - as above

    if name == "reference":
        if not isinstance(domain, HasReferences):
            raise ValueError(f"domain {domain.name} has no reference solutions")
        return ReferencePolicy(domain), None
    if name == "empty":
        return EmptyPolicy(), None
    raise ValueError(f"unknown policy {name!r}; there is {', '.join(POLICIES)}")


def _tiny(domain: "Domain", config: Config) -> "Policy":
    """The model that a learner with the same settings publishes as version 0: same seed, same weights."""
    from learner.trainer import model_config  # noqa: PLC0415 - torch
    from models.transformer import new_transformer  # noqa: PLC0415 - torch
    from rollout.torch_policy import TorchPolicy  # noqa: PLC0415 - torch

    vocabulary = vocabulary_of(domain)
    return TorchPolicy(
        new_transformer(model_config(config.learner, vocabulary), config.learner.seed),
        vocabulary,
        policy_id=config.learner.policy_id,
        temperature=config.rollout.temperature,
        batch_wait_ms=config.rollout.batch_wait_ms,
    )


def vocabulary_of(domain: "Domain") -> "Vocabulary":
    """The closed vocabulary that the tiny model reads and answers in.

    Raises:
        ValueError: the domain has none.
    """
    vocabulary: Vocabulary | None = getattr(domain, "vocabulary", None)
    if vocabulary is None:
        raise ValueError(
            f"domain {domain.name} has no closed vocabulary for the tiny model; use --policy reference or empty"
        )
    return vocabulary


def default_split(domain: "Domain") -> Split:
    """`train` where the domain has such tasks, else the first split that has any.

    Raises:
        ValueError: the domain has no tasks.
    """
    splits: tuple[Split, ...] = ("train", "eval", "probe")
    for split in splits:
        if domain.tasks(split):
            return split
    raise ValueError(f"domain {domain.name} has no tasks")
