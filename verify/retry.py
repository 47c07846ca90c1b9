"""Verdicts until one is decided: infrastructure errors are tried again, a few times."""

import time

from schemas.records import Task, Trajectory, Verdict
from verify.port import Runtime, Verifier
from verify.runtime import INFRASTRUCTURE_ERRORS


def verify_with_retries(
    verifier: Verifier,
    task: Task,
    trajectory: Trajectory,
    runtime: Runtime,
    tries: int = 3,
    pause_seconds: float = 0.0,
) -> list[Verdict]:
    """All verdicts, one per try; the last is final.

    If the last is `infra_error` too, the verification is abandoned: `verification_abandoned`, no reward. The pause
    doubles after each try.
    """
    assert tries > 0
    verdicts: list[Verdict] = []
    for number in range(tries):
        if number and pause_seconds:
            time.sleep(pause_seconds * 2 ** (number - 1))
        verdicts.append(_verify(verifier, task, trajectory, runtime))
        if verdicts[-1].outcome != "infra_error":
            break
    return verdicts


def _verify(verifier: Verifier, task: Task, trajectory: Trajectory, runtime: Runtime) -> Verdict:
    try:
        return verifier.verify(task, trajectory, runtime)
    except INFRASTRUCTURE_ERRORS as error:
        return Verdict(outcome="infra_error", score=None, reason=f"{type(error).__name__}: {error}")
