"""Loads typed settings: defaults, then `trajlake.toml`, then `TRAJLAKE_*` variables. What it can't place, it refuses.

A variable is named after its section and key: `TRAJLAKE_PIPELINE_MAX_EPOCH_BYTES` is `max_epoch_bytes` in `[pipeline]`.
Keys of `[home]` go without a section: `TRAJLAKE_LOG`. Lists and maps are given as JSON.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

T = TypeVar("T", bound=Struct)

PREFIX = "TRAJLAKE_"
NOT_SETTINGS = frozenset({"TRAJLAKE_HOME", "TRAJLAKE_BWRAP", "TRAJLAKE_SANDBOX_DIR", "TRAJLAKE_FAILPOINT"})
"""Variables with our prefix that no section holds."""
RESERVED_PREFIX = "TRAJLAKE_TEST_"
"""Variables of test suites; never settings."""


class ConfigError(ValueError):
    """A setting that can't be used; the message names where it stands, what is wrong and what is known."""


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: if it can't be read or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def build(
    sections: Mapping[str, type[Struct]], document: Mapping[str, Any], environ: Mapping[str, str], where: str
) -> dict[str, Struct]:
    """Typed settings of every section, from a parsed document and variables.

    Args:
        sections: Section name → class.
        document: Parsed TOML.
        environ: Variables; those without our prefix are ignored.
        where: Name of the document for messages.

    Raises:
        ConfigError: for unknown names, wrong types and values out of range.
    """
    _refuse_unknown(document, sections, where, "section")
    merged: dict[str, dict[str, Any]] = {}
    for name, cls in sections.items():
        table = document.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: [{name}] must be a table of settings, not {type(table).__name__}")
        _refuse_unknown_keys(table, cls, where, name)
        _convert(table, cls, f"{where}: [{name}]")
        merged[name] = dict(table)
    _apply_environment(merged, sections, environ)
    return {name: _convert(merged[name], cls, f"{where} and variables: [{name}]") for name, cls in sections.items()}


def variable_of(section: str, path: Iterable[str]) -> str:
    """Name of the variable that overrides a setting."""
    parts = [*([] if section == "home" else [section]), *path]
    return PREFIX + "_".join(parts).upper()


def variables(sections: Mapping[str, type[Struct]]) -> dict[str, tuple[str, tuple[str, ...], Any]]:
    """Every variable → (section, path of keys, type)."""
    found = {}
    for section, cls in sections.items():
        for path, kind in _leaves(cls):
            found[variable_of(section, path)] = (section, path, kind)
    return found


def _leaves(cls: type[Struct], above: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    for field in msgspec.structs.fields(cls):
        path = (*above, field.encode_name)
        nested = _struct_in(field.type)
        if nested is None:
            yield path, field.type
        else:
            yield from _leaves(nested, path)


def _struct_in(kind: Any) -> type[Struct] | None:
    """The struct class that a field's type is, also as `Struct | None`; None for plain values."""
    if get_origin(kind) is Annotated:
        return _struct_in(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        inner = [arg for arg in get_args(kind) if arg is not type(None)]
        return _struct_in(inner[0]) if len(inner) == 1 else None
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _refuse_unknown(names: Iterable[str], known: Iterable[str], where: str, what: str) -> None:
    known = list(known)
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"{where}: unknown {what} {name!r}; {hint}")


def _refuse_unknown_keys(table: Mapping[str, Any], cls: type[Struct], where: str, section: str) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    _refuse_unknown(table, fields, f"{where}: [{section}]", "key")
    for key, value in table.items():
        nested = _struct_in(fields[key].type)
        if nested is not None and isinstance(value, dict):
            _refuse_unknown_keys(value, nested, where, f"{section}.{key}")


def _apply_environment(
    merged: dict[str, dict[str, Any]], sections: Mapping[str, type[Struct]], environ: Mapping[str, str]
) -> None:
    known = variables(sections)
    ours = {
        name: text
        for name, text in environ.items()
        if name.startswith(PREFIX) and name not in NOT_SETTINGS and not name.startswith(RESERVED_PREFIX)
    }
    _refuse_unknown(ours, known, "environment", "variable")
    for name, text in ours.items():
        section, path, kind = known[name]
        target = merged[section]
        for key in path[:-1]:
            target[key] = dict(target.get(key, {}))
            target = target[key]
        target[path[-1]] = _parse_variable(name, text, kind)


def _parse_variable(name: str, text: str, kind: Any) -> Any:
    """A variable's text as the type of its setting, in the form that TOML would have given."""
    try:
        value = msgspec.json.decode(text) if text[:1] in ("[", "{") else text
        return msgspec.to_builtins(msgspec.convert(value, kind, strict=False))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"environment variable {name}={text[:80]!r}: {_sentence(error)}") from error


def _convert(table: Mapping[str, Any], cls: type[T], where: str) -> T:
    try:
        return msgspec.convert(dict(table), cls)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{where} {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    """The message of msgspec, with its JSON path turned into the key's name first."""
    message, _, path = str(error).partition(" - at `$")
    key = path.strip("`.")
    message = message[:1].lower() + message[1:]
    return f"{key}: {message}" if key else message
