"""Prepared repositories are kept within bounds, and never taken from under whoever works with them."""

import gc
from pathlib import Path

import pytest

from sandlot.tasks import Repository
from sandlot.workspace.repository import built
from support.repositories import prepared, repository, stream


def test_what_nobody_uses_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sandlot.workspace.repository.CACHE_LIMIT", 1)

    def source(name: str) -> Repository:
        origin = repository(tmp_path / name, {"a.py": f"{name}\n"})
        return Repository(fast_export=stream(origin, tmp_path / f"{name}.fi"), base="base")

    def kept() -> set[Path]:
        return {path for path in (tmp_path / "cache/sandlot/workspaces").iterdir() if path.is_dir()}

    first, second = source("first"), source("second")
    used = prepared(first)
    built(second)
    gc.collect()
    place = used.store.path.parent
    assert place in kept()
    assert list(used.store.blobs([used.entries[b"a.py"].blob])) == [b"first\n"]
    del used
    gc.collect()
    built(source("third"))
    assert place not in kept()
    assert built(first).tar.is_file(), "it is made anew"
