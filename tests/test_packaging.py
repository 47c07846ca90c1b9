"""What is imported is what is here, and what is shipped is all of it."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_imported_from_here_and_from_no_other_distribution(name):
    # PyPI has distributions named `schemas`, `verify`, `learner`…; one of them in site-packages would win.
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).parent == ROOT / name
    assert set(packages_distributions().get(name, ["trajlake"])) == {"trajlake"}


def test_every_folder_with_code_is_shipped_checked_and_layered():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests"}
    tool = PROJECT["tool"]
    assert folders == set(PACKAGES)
    assert folders <= set(tool["mypy"]["packages"])
    assert folders == set(tool["importlinter"]["root_packages"])
    assert folders < set(tool["hatch"]["build"]["targets"]["sdist"]["only-include"])


def test_the_wheel_has_every_module_and_nothing_else(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    here = {name for name in tracked.stdout.split() if (ROOT / name).exists()}
    assert {name for name in here if name.endswith(".py")} <= names
    assert {name.partition("/")[0] for name in names} == set(PACKAGES)
    assert not [name for name in names if "__pycache__" in name]


def test_locked_versions_are_exact_and_carry_no_place():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.!+-]+", line) for line in lines), lines
    assert len({line.partition("==")[0] for line in lines}) == len(lines)


def test_every_dependency_is_locked():
    project = PROJECT["project"]
    wanted = {
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    }
    names = {re.split(r"[^A-Za-z0-9_-]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    locked = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert names - {"trajlake"} <= locked


def make(*arguments, **variables):
    return subprocess.run(
        ["make", "--no-print-directory", *arguments, *(f"{name}={value}" for name, value in variables.items())],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "MAKEFLAGS": ""},
    )


def test_setup_refuses_an_old_python_by_name(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = make("setup", PYTHON=old, VENV=tmp_path / "venv")
    assert result.returncode != 0
    assert "Python 3.9.2; trajlake needs Python 3.11 or newer" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_does_nothing_where_it_was_done(tmp_path):
    fingerprint = subprocess.run(
        ["sh", "-c", "cat pyproject.toml constraints.txt | cksum"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    (tmp_path / ".trajlake-setup").write_text(fingerprint)
    result = make("setup", PYTHON="/nowhere/python", VENV=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_check_covers_lint_format_types_and_layers():
    dry = make("--dry-run", "check").stdout
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports"):
        assert tool in dry


def test_help_lists_every_target():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    listed = set(re.findall(r"^  make ([a-z-]+)", make("help").stdout, re.MULTILINE))
    assert targets == listed


def test_ci_runs_the_same_targets_everywhere():
    local, hosted = (ROOT / ".ci/run").read_text(), (ROOT / ".github/workflows/ci.yml").read_text()
    for target in ("setup", "check", "demo", "test"):
        assert re.search(rf"\bmake {target}\b", local)
        assert re.search(rf"\bmake {target}\b", hosted)
