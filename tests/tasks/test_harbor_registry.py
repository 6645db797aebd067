"""Sets of Harbor tasks: registries with local and git paths, and `dataset.toml`; Harbor's own code says the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import TaskError
from sandlot.tasks import load_all, load_tasks
from sandlot.tasks.harbor_files import TaskFiles
from support.harbor_sets import manifest, registry, task
from support.repositories import git, repository, write

OFFICIAL = os.environ.get("SANDLOT_TEST_HARBOR_PYTHON", "")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ids(source: str | Path) -> list[str]:
    return [task.id for task in load_tasks(source)]


def reasons(source: str | Path) -> list[str]:
    return [str(error) for error in load_all(source).refused]


def test_tasks_beside_a_registry(tmp_path: Path) -> None:
    task(tmp_path / "tasks", "a")
    task(tmp_path / "tasks", "b", gpus=2)
    entries = [{"path": "tasks/a"}, {"path": "tasks/b"}, {"path": "../d"}, {"name": "e"}, {"path": "a", "git_url": 3}]
    path = registry(tmp_path, {"set": entries})
    assert [task.id for task in load_all(path).tasks] == ["a"]
    found = reasons(path)
    assert "without GPUs" in found[0]
    assert "row 3: path: '../d' leads out" in found[1]
    assert "row 4: path: is missing" in found[2]
    assert "row 5: git_url, git_commit_id: must be text" in found[3]
    path.write_text('{"tasks": []}')
    with pytest.raises(TaskError, match="must be a list of data sets"):
        load_tasks(path)


def test_one_data_set_of_a_registry_in_one_version(tmp_path: Path) -> None:
    for name in "abc":
        task(tmp_path, name)
    path = registry(tmp_path, {"one@1": [{"path": "a"}], "one@2": [{"path": "b"}], "two@1": [{"path": "c"}]})
    assert ids(f"{path}#two") == ids(f"harbor:{path}#two@1") == ["c"]
    assert ids(f"{path}#one@2") == ["b"]
    with pytest.raises(TaskError, match=r"several versions of 'one' \(1, 2\): name one"):
        load_tasks(path)
    with pytest.raises(TaskError, match="no data set 'three'; there are one@1, one@2, two@1"):
        load_tasks(f"{path}#three")


def test_tasks_in_a_git_repository(tmp_path: Path) -> None:
    task(tmp_path / "origin" / "sets" / "x", "a", statement="The first.")
    task(tmp_path / "origin" / "sets", "x*")
    origin = repository(tmp_path / "origin", {}, {"sets/x/a/instruction.md": "The second.\n"}, branch="main")
    first, second = git(origin, "rev-parse", "HEAD~1", "HEAD").split()
    for number, (commit, statement) in enumerate([(first, "The first.\n"), (second, "The second.\n"), ("", "")]):
        entry = {"path": "sets/x/a", "git_url": origin.as_uri(), "git_commit_id": commit or None}
        path = registry(tmp_path / f"r{number}", {"set": [entry]})
        (loaded,) = load_tasks(path)
        assert (loaded.id, loaded.statement) == ("a", statement or "The second.\n")
    entries = [{"path": name, "git_url": "../origin", "git_commit_id": second} for name in ("sets/x*", "sets/x/a")]
    assert ids(registry(tmp_path / "relative", {"set": entries})) == ["x*", "a"]
    origin.rename(tmp_path / "gone")
    assert ids(tmp_path / "relative" / "registry.json") == ["x*", "a"], "what was got once needs nobody"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"git_url": "../none"}, "git_url: {top}/none cannot be had"),
        ({"git_url": "ext::sh -c 'touch {top}/ran' x@y:"}, "cannot be had"),
        ({"git_url": "--upload-pack=touch {top}/ran"}, "cannot be had"),
        ({"git_commit_id": "v1"}, "git_commit_id: 'v1' is no full commit id"),
        ({"git_commit_id": "0" * 40}, "cannot be had"),
        ({"path": "../a"}, "path: '../a' leads out"),
        ({"path": "/etc"}, "path: '/etc' leads out"),
        ({"path": "none"}, "cannot be had"),
        ({"path": "a/task.toml"}, "is no directory"),
        ({"path": "link"}, "is no directory"),
        ({"path": "stored"}, "big.bin of {top}/origin lies in Git LFS"),
    ],
)
def test_what_git_cannot_give_is_refused(tmp_path: Path, entry: dict[str, Any], reason: str) -> None:
    task(tmp_path / "origin", "a")
    task(tmp_path / "origin", "stored")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    repository(tmp_path / "origin", {"stored/tests/big.bin": pointer, "link": Path("a")})
    told = json.loads(json.dumps({"path": "a", "git_url": "../origin", **entry}).replace("{top}", str(tmp_path)))
    (found,) = reasons(registry(tmp_path / "here", {"set": [told]}))
    assert reason.replace("{top}", str(tmp_path)) in found
    assert "row 1: " in found
    assert not (tmp_path / "ran").exists()


def test_a_manifest_pins_the_tasks_beside_it(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(task(tmp_path, name), {"environment/Dockerfile": "FROM x\n", "solution/solve.sh": "true\n"})
    digests = {f"org/{name}": TaskFiles(tmp_path / name).digest for name in ("b", "a")}
    path = manifest(tmp_path, digests)
    assert ids(path) == ["b", "a"]
    assert ids(tmp_path) == ["a", "b", "c"]
    write(tmp_path / "a", {"solution/solve.sh": "false\n", "notes.txt": "not published"})
    manifest(tmp_path, {**digests, "org/far": "sha256:" + "0" * 64})
    assert [task.id for task in load_all(path).tasks] == ["b"]
    changed, far = reasons(path)
    assert "row 2: digest:" in changed
    assert "run `harbor sync`" in changed
    assert f"get it with `harbor download org/far@sha256:{'0' * 64}`" in far
    named = manifest(tmp_path, {"org/b": digests["org/b"]}).read_text() + "\n[[files]]\npath = 'metric.py'\n"
    path.write_text(named)
    assert ids(path) == ["b"]
    path.write_text(f"{named}digest = 'sha256:0'\n")
    with pytest.raises(TaskError, match=r"files.0.digest"):
        load_tasks(path)
    path.write_text("[dataset]\nname = 'x'\n")
    with pytest.raises(TaskError, match=r"dataset.name: String should match"):
        load_tasks(path)


@pytest.mark.slow
@pytest.mark.skipif(not OFFICIAL, reason="SANDLOT_TEST_HARBOR_PYTHON names no interpreter with Harbor")
def test_harbors_own_code_says_the_same() -> None:
    tests = Path(__file__).with_name("test_harbor_official.py")
    argv = [OFFICIAL, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    env = {**os.environ, "HARBOR_TELEMETRY": "0"}
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False, env=env)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "skipped" not in ran.stdout
