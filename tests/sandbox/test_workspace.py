"""Snapshots of arbitrary trees: what goes in comes out."""

import hashlib
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox import _archive, _workspace
from sandbox.port import SandboxError
from schemas.records import Workspace

names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and len(name.encode()) <= 80
)
trees = st.dictionaries(st.lists(names, min_size=1, max_size=4).map("/".join), st.binary(max_size=2000), max_size=12)


def without_conflicts(tree):
    """A path can't be both file and folder; the later one wins, as in a real tree."""
    return {path: data for path, data in tree.items() if not any(other.startswith(path + "/") for other in tree)}


@settings(max_examples=60, deadline=None)
@given(trees.map(without_conflicts))
def test_a_tree_survives_pack_and_unpack(tmp_path_factory, tree):
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    _workspace.write_files(first, tree)
    snapshot = _archive.pack(first, 10_000_000)
    _archive.unpack(second, snapshot)
    files = {path: state for path, state in _workspace.states(second, 10_000_000).items() if state.kind == "file"}
    assert {path: state.sha256 for path, state in files.items()} == {
        path: hashlib.sha256(data).hexdigest() for path, data in tree.items()
    }
    assert _archive.pack(second, 10_000_000) == snapshot
    assert _workspace.measure(first, 10_000_000) <= len(snapshot.data)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000), st.data())
def test_damaged_archives_are_refused_or_stay_inside(tmp_path_factory, garbage, data):
    base = tmp_path_factory.mktemp("damaged")
    root = base / "workspace"
    root.mkdir()
    _workspace.write_files(root, {"a/b": b"x" * 700, "c": b"y"})
    content = bytearray(_archive.pack(root, 100_000).data)
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=8)):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    content[: len(garbage) // 20] = garbage[: len(garbage) // 20]
    damaged = bytes(content)
    with suppress(SandboxError):
        _archive.unpack(root, Workspace(sha256=hashlib.sha256(damaged).hexdigest(), data=damaged))
    assert [path.name for path in base.iterdir()] == ["workspace"]
