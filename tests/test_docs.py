"""Pages that follow from code are up to date, and every command that a page shows works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.config import SECTIONS, variables
from schemas.tables import TABLES
from trajlake.docs import PAGES, field_docstrings

ROOT = Path(__file__).parents[1]
WRITTEN = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "cli.md")]
BLOCK = re.compile(r"^```(console|sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN_BY_CI = re.compile(r"make (setup|demo|test|check|bench|docs|lint-format)\b")
"""CI itself runs these; a test that ran `make test` would never end."""


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name):
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run: make docs"


def test_every_table_and_column_has_a_line():
    page = (ROOT / "docs/data-model.md").read_text()
    for table, schema in TABLES.items():
        section = page.partition(f"\n## {table}\n")[2].partition("\n## ")[0]
        for field in schema:
            assert re.search(rf"^\| `{field.name}` \| .+ \| .+ \|$", section, re.MULTILINE), (table, field.name)


def test_every_setting_and_variable_is_explained():
    page = (ROOT / "docs/configuration.md").read_text()
    for name in variables(SECTIONS):
        assert f"`{name}`" in page
    for cls in SECTIONS.values():
        assert set(field_docstrings(cls)) == set(cls.__struct_fields__), cls


def test_every_option_is_explained():
    page = (ROOT / "docs/cli.md").read_text()
    assert not re.findall(r"^\|[^|]+\|\s*\|$", page, re.MULTILINE)


def steps(path):
    """(language, text) of what a page lets its reader run, in order."""
    for language, text in BLOCK.findall(path.read_text()):
        if language == "python":
            yield "python", text
            continue
        for line in text.splitlines():
            if line.startswith("$ "):
                yield "sh", line.removeprefix("$ ")


def run(language, text, folder):
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRAJLAKE_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    argv = [sys.executable, "-c", text] if language == "python" else ["bash", "-o", "pipefail", "-c", text]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_every_command_that_a_page_shows_works_in_the_order_shown(path, tmp_path):
    shutil.copytree(ROOT / "tests/data/tau-bench", tmp_path / "tests/data/tau-bench")
    for language, text in steps(path):
        if language == "sh" and RUN_BY_CI.match(text):
            continue
        done = run(language, text, tmp_path)
        assert done.returncode == 0, f"{path.name}: {text}\n{done.stdout}{done.stderr}"


def test_pages_have_commands_to_run_and_links_that_lead_somewhere():
    assert sum(1 for path in WRITTEN for _ in steps(path)) > 15
    for path in [*WRITTEN, ROOT / "docs/cli.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
