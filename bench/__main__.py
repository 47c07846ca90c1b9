"""Runs benchmarks: `python -m bench NAME… [--json] [--quick] [--check] [--save]`.

A benchmark is a module of this folder with `run(quick: bool) -> list[dict]`; each dict is one metric: `metric`,
`value`, `unit`, and where they apply `against` (what it is compared to), `ratio` and `params`, and as bounds
`at_least`, `at_most` (of the value), `ratio_at_least`, `ratio_at_most`.

`--check` fails (exit 1) where a bound is broken, or a value is worse than the committed baseline by more than its
tolerance. `--save` writes `bench/baselines/NAME.json`. Figures of a busy machine mean little.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from pathlib import Path
from typing import Any

import bench

BASELINES = Path(__file__).parent / "baselines"
TOLERANCE = 0.5
"""Part of a baseline's value that a value may lose on another machine before `--check` calls it worse."""
FIELDS = ("metric", "value", "unit", "against", "ratio", "params")
HIGHER_IS_BETTER = ("/s",)
"""Units of rates; every other unit (seconds, bytes, ratios of cost) is better when lower."""

Metric = dict[str, Any]


def names() -> list[str]:
    """Benchmarks that exist."""
    return sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_"))


def broken_bounds(metric: Metric) -> list[str]:
    """Bounds that a metric states and does not keep."""
    broken = []
    for bound, of, sign in (
        ("at_least", "value", 1),
        ("at_most", "value", -1),
        ("ratio_at_least", "ratio", 1),
        ("ratio_at_most", "ratio", -1),
    ):
        limit, seen = metric.get(bound), metric.get(of)
        if limit is not None and (seen is None or (seen - limit) * sign < 0):
            broken.append(f"{metric['metric']}: {of} {seen} breaks {bound} {limit}")
    return broken


def worse_than(metric: Metric, baseline: Metric) -> str | None:
    """A sentence where a metric is worse than its baseline by more than the tolerance."""
    seen, known = metric["value"], baseline["value"]
    if seen is None or not known or metric.get("params") != baseline.get("params"):
        return None
    rate = metric["unit"].endswith(HIGHER_IS_BETTER)
    is_worse = seen < known * (1 - TOLERANCE) if rate else seen > known / (1 - TOLERANCE)
    return f"{metric['metric']}: {seen:g} {metric['unit']}, baseline {known:g}" if is_worse else None


def read_baseline(name: str) -> dict[str, Metric]:
    """Committed metrics of a benchmark, by name; empty where there are none."""
    path = BASELINES / f"{name}.json"
    return {metric["metric"]: metric for metric in json.loads(path.read_text())["metrics"]} if path.exists() else {}


def save_baseline(name: str, metrics: list[Metric]) -> None:
    """Write what was measured, and on what machine."""
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}
    BASELINES.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine, "metrics": [_shown(metric) for metric in metrics]}, indent=2)
    (BASELINES / f"{name}.json").write_text(text + "\n")


def _shown(metric: Metric) -> Metric:
    return {field: metric.get(field) for field in FIELDS}


def _print(metric: Metric, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_shown(metric)), flush=True)
        return
    value = "null" if metric["value"] is None else f"{metric['value']:,.6g}"
    ratio = f"  ({metric['ratio']:.3g}x {metric.get('against')})" if metric.get("ratio") is not None else ""
    print(f"{metric['metric']:<48} {value:>14} {metric['unit']}{ratio}", flush=True)


def _run_one(name: str, options: argparse.Namespace) -> list[str]:
    metrics = importlib.import_module(f"bench.{name}").run(quick=options.quick)
    for metric in metrics:
        _print(metric, options.json)
    if options.save:
        save_baseline(name, metrics)
    if not options.check:
        return []
    baseline = read_baseline(name)
    problems = [line for metric in metrics for line in broken_bounds(metric)]
    compared = [worse_than(metric, baseline[metric["metric"]]) for metric in metrics if metric["metric"] in baseline]
    return problems + [line for line in compared if line]


def main(argv: list[str] | None = None) -> int:
    """Run, print, compare; the exit code is 1 where `--check` found something."""
    known = names()
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of trajlake.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(known)}")
    parser.add_argument("--all", action="store_true", help="run every benchmark")
    parser.add_argument("--json", action="store_true", help="one JSON object per metric")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures little")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound or the baseline is not kept")
    parser.add_argument("--save", action="store_true", help="write bench/baselines/NAME.json")
    options = parser.parse_args(argv)
    chosen = known if options.all else options.names
    if not chosen:
        parser.error(f"name a benchmark: {', '.join(known)}; or --all")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(known)}")
    if options.save and options.quick:
        parser.error("--quick measures too little to be a baseline")
    problems = [line for name in chosen for line in _run_one(name, options)]
    for line in problems:
        print(f"worse: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
