"""Settings: defaults, file, variables, and what is refused."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from schemas.config import SECTIONS, Config, ConfigError, HomeConfig, PipelineConfig, load_config, variables
from schemas.config._load import build


def load(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> Config:
    path = tmp_path / "trajlake.toml"
    path.write_text(text)
    return load_config(path, environ or {})


def test_without_a_file_every_setting_has_its_default():
    assert load_config(None, {}) == Config()


def test_a_file_overrides_defaults_and_variables_override_the_file(tmp_path):
    config = load(
        tmp_path,
        "[home]\npartitions = 8\n[pipeline]\nnum_workers = 3\nverify_tries = 5\n",
        {"TRAJLAKE_LAKE": "s3://bucket/lake", "TRAJLAKE_PIPELINE_NUM_WORKERS": "7", "PATH": "/bin"},
    )
    assert config.home == HomeConfig(partitions=8, lake="s3://bucket/lake")
    assert config.pipeline == PipelineConfig(num_workers=7, verify_tries=5)


@pytest.mark.parametrize(
    ("text", "environ", "words"),
    [
        ("[pipelin]\n", {}, ["trajlake.toml", "section 'pipelin'", "did you mean 'pipeline'"]),
        ("[pipeline]\nmax_epoch_byte = 3\n", {}, ["trajlake.toml", "[pipeline]", "did you mean 'max_epoch_bytes'"]),
        ("[pipeline]\nzzz = 3\n", {}, ["unknown key 'zzz'", "known: max_epoch_records"]),
        ("[pipeline]\nmax_epoch_bytes = '3'\n", {}, ["[pipeline] max_epoch_bytes", "expected `int`, got `str`"]),
        ("[pipeline]\nmax_epoch_bytes = 0\n", {}, ["[pipeline] max_epoch_bytes", ">= 1"]),
        ("[home]\nlog = 'log.sqlite'\n", {}, ["[home] log", "://"]),
        ("pipeline = 3\n", {}, ["[pipeline] must be a table", "int"]),
        ("[pipeline\n", {}, ["trajlake.toml", "not valid TOML", "line 1"]),
        ("", {"TRAJLAKE_LAEK": "x"}, ["environment", "'TRAJLAKE_LAEK'", "did you mean 'TRAJLAKE_LAKE'"]),
        ("", {"TRAJLAKE_PIPELINE_NUM_WORKERS": "two"}, ["TRAJLAKE_PIPELINE_NUM_WORKERS='two'", "expected `int`"]),
        ("", {"TRAJLAKE_PIPELINE_NUM_WORKERS": "0"}, ["TRAJLAKE_PIPELINE_NUM_WORKERS='0'", ">= 1"]),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name_with_the_nearest_known_one(tmp_path, text, environ, words):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, environ)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml: there is no such file"):
        load_config(tmp_path / "nothing.toml", {})


def test_the_home_folder_and_test_variables_are_no_settings():
    environ = {"TRAJLAKE_HOME": "/elsewhere", "TRAJLAKE_TEST_ANYTHING": "1"}
    assert load_config(None, environ) == Config()


class _Inner(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    seconds: Annotated[float, Meta(gt=0)] = 1.0


class _Outer(Struct, kw_only=True, forbid_unknown_fields=True):
    limits: _Inner = _Inner()
    names: list[str] = []
    dry: bool = False


def test_nested_settings_have_variables_and_are_checked_too():
    environ = {"TRAJLAKE_ROLLOUT_LIMITS_SECONDS": "2.5", "TRAJLAKE_ROLLOUT_NAMES": '["a"]', "TRAJLAKE_ROLLOUT_DRY": "1"}
    assert build({"rollout": _Outer}, {}, environ, "x")["rollout"] == _Outer(
        limits=_Inner(seconds=2.5), names=["a"], dry=True
    )
    with pytest.raises(ConfigError, match=r"\[rollout.limits\]: unknown key 'second'; did you mean 'seconds'"):
        build({"rollout": _Outer}, {"rollout": {"limits": {"second": 1}}}, {}, "x")


def test_no_two_settings_share_a_variable():
    leaves = sum(1 for cls in SECTIONS.values() for _ in msgspec.structs.fields(cls))
    assert len(variables(SECTIONS)) >= leaves


@given(st.integers(min_value=-(2**63), max_value=2**63 - 1))
def test_a_number_is_accepted_or_refused_alike_from_file_and_variable(number):
    def outcome(document, environ):
        try:
            return build(SECTIONS, document, environ, "x")["pipeline"]
        except ConfigError:
            return None

    from_file = outcome({"pipeline": {"num_workers": number}}, {})
    assert from_file == outcome({}, {"TRAJLAKE_PIPELINE_NUM_WORKERS": str(number)})
    assert (from_file is not None) == (1 <= number <= 256)


@pytest.mark.parametrize("cls", SECTIONS.values(), ids=SECTIONS)
def test_every_setting_has_a_default_so_that_an_empty_file_is_a_home(cls):
    assert msgspec.convert({}, cls) == cls()
    assert all(get_args(field.type) or field.type for field in msgspec.structs.fields(cls))


def test_every_toml_file_of_the_repository_loads():
    root = Path(__file__).parents[2]
    skipped = {".venv", ".git", "build", "dist"}
    files = [path for path in root.rglob("*.toml") if not skipped & set(path.relative_to(root).parts)]
    for path in files:
        document = tomllib.loads(path.read_text())
        if path.name != "pyproject.toml":
            load_config(path, {})
        assert document
    assert files, os.fspath(root)
