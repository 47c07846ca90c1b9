"""The reward curve of a run as a PNG."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from msgspec import Struct


class Curve(Struct, frozen=True, kw_only=True):
    """One line of the picture."""

    label: str
    points: Sequence[tuple[float, float]]
    """(policy version, mean reward)."""


def plot_rewards(path: Path, curves: Sequence[Curve], *, title: str, goal: float | None = None) -> Path:
    """Draw curves of mean reward over policy versions; the goal as a dashed line.

    Raises:
        OSError: the file can't be written.
    """
    figure = Figure(figsize=(7, 4), dpi=120)
    axes = figure.subplots()
    for curve in curves:
        axes.plot([x for x, _ in curve.points], [y for _, y in curve.points], marker="o", ms=3, label=curve.label)
    if goal is not None:
        axes.axhline(goal, linestyle="--", linewidth=1, color="grey", label=f"goal {goal:g}")
    axes.set(title=title, xlabel="policy version", ylabel="mean reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", format="png")  # drawn by Agg: no display is needed
    return path
