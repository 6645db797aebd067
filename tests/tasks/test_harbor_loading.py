"""Harbor task directories: the subset that loads, and how the rest is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandlot.errors import TaskError
from sandlot.tasks import GradingOptions, HarborGrading, bundled_path, load_all, load_tasks
from support.repositories import write

TOML = """\
schema_version = "1.4"
[task]
name = "org/one"
authors = [{name = "A", email = "a@example.com"}]
keywords = ["x"]
[metadata]
difficulty = "easy"
[environment]
docker_image = "registry.example/one:1"
build_timeout_sec = 60
cpus = 1
memory_mb = 2048
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 30
[verifier.env]
MODE = "${SANDLOT_TEST_UNSET:-plain}"
"""


def harbor(root: Path, name: str = "one", toml: str = TOML, **files: str) -> Path:
    path = root / name
    write(path, {"task.toml": toml, "instruction.md": "Do it.\n", "tests/test.sh": "echo 1\n", **files})
    return path


def test_a_harbor_task_loads(tmp_path: Path) -> None:
    path = harbor(tmp_path, **{"tests/test_x.py": "x", "tests/big.bin": "b", "tests/.harborignore": "*.bin\n# no\n"})
    write(path, {"solution/solve.sh": "true\n"})
    (task,) = load_tasks(path)
    assert (task.id, task.statement, task.image, task.workdir) == ("one", "Do it.\n", "registry.example/one:1", "/app")
    assert task.grading == HarborGrading({"test.sh": b"echo 1\n", "test_x.py": b"x"}, {"MODE": "plain"}, timeout=30)
    assert task.limits.wall_clock == 120
    assert task.metadata["difficulty"] == "easy"
    assert task.metadata["solution"] == str(path / "solution")


def test_a_dockerfile_is_an_image_to_build_and_names_the_workdir(tmp_path: Path) -> None:
    toml = TOML.replace('docker_image = "registry.example/one:1"\n', "")
    path = harbor(tmp_path, toml=toml, **{"environment/Dockerfile": "FROM x\nWORKDIR /srv\nWORKDIR /srv/app/\n"})
    (task,) = load_tasks(path)
    assert task.image == f"dockerfile:{path / 'environment'}"
    assert task.workdir == "/srv/app"


def test_a_work_tree_beside_the_file_needs_no_image(tmp_path: Path) -> None:
    more = '[metadata.sandlot]\nimage = "host"\ndirectory = "environment/app"\noptions = {weights = {a = 1}}\n'
    path = harbor(tmp_path, toml=TOML.replace("[environment]", f"{more}[environment]"), **{"environment/app/a.py": ""})
    (task,) = load_tasks(path)
    assert task.image == "host"
    assert task.repository is not None
    assert task.repository.directory == path / "environment" / "app"
    assert task.options == GradingOptions(weights={"a": 1})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('"1.4"', '"1.5"'), "newer than 1.4"),
        (('"1.4"', '"latest"'), "'latest' is no version"),
        (("cpus = 1", "tpu = {}"), "environment.tpu"),
        (("cpus = 1", "skills_dir = 'x'"), "environment.skills_dir"),
        (("[verifier]\n", "user = 'bob'\n[verifier]\n"), "agent.user"),
        (("[task]", "artifacts = ['/x']\n[task]"), "artifacts"),
        (("[task]", "[taks]"), "taks: Extra inputs"),
        (("cpus = 1", "gpus = 1"), "without GPUs"),
        (("cpus = 1", 'os = "windows"'), "only Linux"),
        (("cpus = 1", "healthcheck = {command = 'x'}"), "environment.healthcheck"),
        (("cpus = 1", "mcp_servers = []"), "environment.mcp_servers"),
        (("cpus = 1", "network_mode = 'allowlist'"), "environment.network_mode: 'allowlist'"),
        (("cpus = 1", "workdir = 'app'"), "absolute path"),
        (("cpus = 1", "env = {A = 'b'}"), "environment.env"),
        (("timeout_sec = 30", "timeout_sec = 0"), "verifier.timeout_sec"),
        (("timeout_sec = 30", "user = 'bob'"), "verifier.user"),
        (("timeout_sec = 30", "collect = []"), "verifier.collect"),
        ((":-plain}", "}"), "SANDLOT_TEST_UNSET is not set"),
        (('docker_image = "registry.example/one:1"', ""), "docker_image: is missing"),
        (("[metadata]", "[metadata.sandlot]\nimage = 'host'\n[metadata]"), "holds no work tree"),
        (("[metadata]", "[[steps]]\nname = 'a'\n[metadata]"), "steps: Extra inputs"),
        (("[task]", "[task"), "not readable as TOML"),
    ],
)
def test_what_is_not_of_the_subset_is_refused_by_name(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    assert change[0] in TOML
    path = harbor(tmp_path, toml=TOML.replace(*change))
    with pytest.raises(TaskError) as refused:
        load_tasks(path)
    assert str(refused.value).startswith(str(path / "task.toml"))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"instruction.md": " "}, "instruction is empty"),
        ({"tests/Dockerfile": "FROM x"}, "tests/Dockerfile"),
        ({"trajectory.json": "{}"}, "trajectory.json"),
        ({"environment/docker-compose.yaml": "x"}, "docker-compose"),
        ({"steps/a/instruction.md": "x"}, "several steps"),
        ({"tests/test.sh": None}, "tests/test.sh is missing"),
    ],
)
def test_files_that_are_not_supported(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    path = harbor(tmp_path)
    write(path, files)
    with pytest.raises(TaskError, match=reason):
        load_tasks(path)


def test_links_among_the_tests_are_files_or_refused(tmp_path: Path) -> None:
    path = harbor(tmp_path, **{"tests/data/a.txt": "a"})
    write(path, {"tests/b.txt": Path("data/a.txt")})
    (task,) = load_tasks(path)
    assert isinstance(task.grading, HarborGrading)
    assert task.grading.files["b.txt"] == b"a"
    for target in ("/etc/passwd", "../instruction.md", "nothing", "data", "c.txt"):
        write(path, {"tests/c.txt": Path(target)})
        with pytest.raises(TaskError, match=r"tests/c.txt"):
            load_tasks(path)


@pytest.mark.parametrize("content", [b"a = \xff", b"a = " + b"[" * 5000, b"\0"])
def test_a_task_file_of_junk_is_refused(tmp_path: Path, content: bytes) -> None:
    path = harbor(tmp_path)
    (path / "task.toml").write_bytes(content)
    with pytest.raises(TaskError, match="not readable as TOML"):
        load_tasks(path)


def test_harbor_tasks_and_ours_may_lie_side_by_side(tmp_path: Path) -> None:
    harbor(tmp_path, "b")
    write(tmp_path / "a", {"task.toml": "schema = 1\n", "statement.md": "x"})
    loaded = load_all(tmp_path)
    assert [task.id for task in loaded.tasks] == ["b"]
    assert "difficulty" in str(loaded.refused[0])


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "statement.md", "solution/gold.patch", "gold.patch"])
def test_no_file_of_a_task_is_read_elsewhere(tmp_path: Path, name: str) -> None:
    """A task that somebody else wrote must not have a file of this machine told to an agent."""
    secret = tmp_path / "secret"
    secret.write_text(TOML)
    path = tmp_path / "one"
    if name in ("statement.md", "gold.patch"):
        shutil.copytree(bundled_path() / "page-count", path)
    else:
        harbor(tmp_path)
    write(path, {name: secret})
    with pytest.raises(TaskError, match=f"{name}: is a link that leads out"):
        load_tasks(path)
