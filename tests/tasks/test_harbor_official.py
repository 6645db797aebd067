"""Harbor's own registry client, packager and manifests on what we load; run by `test_harbor_registry.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("harbor", reason="Harbor is not installed here")

from harbor.cli.sync import sync_dataset
from harbor.models.dataset.manifest import DatasetManifest
from harbor.models.task.file_filter import TaskFileFilter
from harbor.publisher.packager import Packager
from harbor.registry.client.json import JsonRegistryClient

from sandlot.errors import TaskError
from sandlot.tasks import HarborGrading, load_all, load_tasks
from sandlot.tasks.harbor import harbor_task
from sandlot.tasks.harbor_files import TaskFiles
from support.harbor_sets import manifest, registry, task
from support.repositories import git, repository, write

DATA = Path(__file__).parents[1] / "data" / "harbor"
RULES = st.lists(
    st.sampled_from(["*.bin", "!keep.bin", "sub/", "/a.txt", "a.*", "# no", "", "sub/*.txt", "!sub/", "**/deep", "x*"]),
    max_size=4,
).map("\n".join)  # fmt: skip
NAMES = st.sampled_from(
    ["a.txt", "keep.bin", "x.bin", "sub/a.txt", "sub/x.bin", "sub/deep/a.txt", "x.pyc", "__pycache__/y.txt", "z~"]
)
TREE = st.dictionaries(NAMES, st.text(max_size=3), max_size=5)


def digest_of(place: Path) -> str:
    return f"sha256:{Packager.compute_content_hash(place)[0]}"


@pytest.mark.parametrize("place", sorted(file.parent for file in DATA.glob("*/task.toml")), ids=lambda path: path.name)
def test_digests_of_whole_tasks(place: Path) -> None:
    assert TaskFiles(place).digest == digest_of(place)


@given(TREE, TREE, TREE, RULES | st.none(), RULES | st.none(), RULES | st.none())
@settings(max_examples=50, deadline=None)
def test_digests_and_tests_under_any_rules(
    tests: dict[str, str], solution: dict[str, str], environment: dict[str, str],
    rules: str | None, inner: str | None, published: str | None,
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        place = task(Path(scratch), "a")
        for tree, files in (("tests", tests), ("solution", solution), ("environment", environment)):
            write(place, {f"{tree}/{name}": text for name, text in files.items()})
        told = {"tests/.harborignore": rules, "tests/sub/.harborignore": inner, ".gitignore": published}
        write(place, {name: text for name, text in told.items() if text is not None})
        write(place, {"tests/link.txt": Path("a.txt")} if "a.txt" in tests else {})
        assert TaskFiles(place).digest == digest_of(place)
        selected = TaskFileFilter(place).select(place / "tests").relative_paths
        wanted = {path.as_posix() for path in selected if (place / "tests" / path).is_file()}
        grading = harbor_task(place).grading
        assert isinstance(grading, HarborGrading)
        assert grading.files.keys() == {name for name in wanted if "__pycache__" not in name}


async def test_a_registry_has_the_same_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    task(tmp_path / "tasks", "near")
    task(tmp_path / "origin" / "sets", "far")
    origin = repository(tmp_path / "origin", {})
    head = git(origin, "rev-parse", "HEAD").strip()
    far = {"path": "sets/far", "git_url": origin.as_uri()}
    path = registry(
        tmp_path, {"one@1": [{"path": "tasks/near"}, {**far, "git_commit_id": head}], "two@1": [far], "two@2": []}
    )
    client = JsonRegistryClient(path=path)
    for wanted in ("one", "one@1", "two@1"):
        metadata = await client.get_dataset_metadata(wanted)
        got = await client._task_client.download_tasks(task_ids=metadata.task_ids, output_dir=tmp_path / "harbor")
        ours = load_tasks(f"{path}#{wanted}")
        assert [place.name for place in got.paths] == [loaded.id for loaded in ours]
        for place, loaded in zip(got.paths, ours, strict=True):
            assert harbor_task(place).grading == loaded.grading
            assert harbor_task(place).statement == loaded.statement


def test_a_manifest_is_in_step_for_both_or_for_neither(tmp_path: Path) -> None:
    place = task(tmp_path, "a")
    path = manifest(tmp_path, {"org/a": TaskFiles(place).digest})
    assert [ref.name for ref in DatasetManifest.from_toml_file(path).tasks] == ["org/a"]
    assert [change.source for change in sync_dataset(tmp_path)] == ["unchanged"]
    assert [loaded.id for loaded in load_tasks(path)] == ["a"]
    write(place, {"tests/more.py": "x = 1\n"})
    with pytest.raises(TaskError, match="harbor sync"):
        load_tasks(path)
    assert [change.source for change in sync_dataset(tmp_path)] == ["local"]
    assert load_all(path).refused == ()
