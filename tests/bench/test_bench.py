"""The runner of benchmarks: what it finds, and when `--check` fails."""

import importlib
import json
from pathlib import Path

import pytest

from bench import __main__ as runner

RATE = {"metric": "speed", "value": 100.0, "unit": "events/s", "params": {"n": 1}}
COST = {"metric": "cost", "value": 2.0, "unit": "s", "params": {"n": 1}}


def test_every_benchmark_has_a_run_function_and_is_found_by_name():
    for name in runner.names():
        assert "def run(" in (Path(runner.__file__).parent / f"{name}.py").read_text(), name


def test_bounds_hold_to_either_side():
    assert runner.broken_bounds({**RATE, "at_least": 100}) == []
    assert runner.broken_bounds({**RATE, "at_least": 101}) == ["speed: value 100.0 breaks at_least 101"]
    assert runner.broken_bounds({**COST, "at_most": 2}) == []
    assert runner.broken_bounds({**COST, "at_most": 1.9}) == ["cost: value 2.0 breaks at_most 1.9"]


def test_a_bound_on_what_could_not_be_measured_is_broken():
    assert runner.broken_bounds({**RATE, "ratio_at_least": 0.6, "ratio": None}) != []


@pytest.mark.parametrize(
    ("metric", "value", "is_worse"),
    [(RATE, 51.0, False), (RATE, 49.0, True), (RATE, 900.0, False), (COST, 3.9, False), (COST, 4.1, True)],
)
def test_a_baseline_is_kept_within_the_tolerance_in_the_direction_that_is_worse(metric, value, is_worse):
    assert (runner.worse_than({**metric, "value": value}, metric) is not None) == is_worse


def test_figures_of_other_sizes_are_not_compared():
    assert runner.worse_than({**RATE, "value": 1.0, "params": {"n": 2}}, RATE) is None


def test_a_saved_baseline_reads_back_with_the_documented_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "BASELINES", tmp_path)
    runner.save_baseline("speed", [{**RATE, "against": "raw", "ratio": 0.7, "at_least": 1}])
    assert runner.read_baseline("speed") == {"speed": {**RATE, "against": "raw", "ratio": 0.7}}
    assert json.loads((tmp_path / "speed.json").read_text())["machine"]["cpus"] >= 1


def test_an_unknown_name_is_wrong_use_and_names_the_known(capsys):
    with pytest.raises(SystemExit) as caught:
        runner.main(["nothing"])
    assert caught.value.code == 2
    assert "unknown benchmark 'nothing'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", runner.names())
def test_every_benchmark_runs_when_quick(name):
    metrics = importlib.import_module(f"bench.{name}").run(True)
    assert metrics
    for metric in metrics:
        assert {"metric", "value", "unit", "params"} <= metric.keys()
        assert metric["value"] is None or metric["value"] >= 0
