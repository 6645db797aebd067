"""Loader of Harbor task directories: a strict subset of `task.toml` 1.4.

What is not of the subset is refused by name, never ignored. `[metadata.sandlot]`, which Harbor leaves alone, may say
`image` (`host`, a directory, a reference) and `directory` (the work tree, beside task.toml) where no image is built.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandlot.errors import TaskError
from sandlot.tasks.checked import (
    check_workdir,
    checked_options,
    explain,
    files_below,
    inside,
    own,
    read_statement,
    read_toml,
)
from sandlot.tasks.harbor_files import TaskFiles
from sandlot.tasks.task import DOCKERFILE, HarborGrading, Repository, Task, TaskLimits

_FORBID = ConfigDict(extra="forbid")
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NETWORKS = ("public", "no-network")


class _Info(BaseModel):
    model_config = _FORBID
    name: str = ""
    version: str = ""
    description: str = ""
    authors: list[Any] = []
    keywords: list[str] = []


class _Environment(BaseModel):
    """`cpus`, `memory_mb` and the like are bounds that the run's own sandbox limits stand for."""

    model_config = _FORBID
    docker_image: str = ""
    build_timeout_sec: _Seconds = 600.0
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
    workdir: str = ""
    network_mode: str = "public"
    allow_internet: bool = True
    os: str = "linux"
    gpus: int = 0


class _Agent(BaseModel):
    model_config = _FORBID
    timeout_sec: _Seconds | None = None
    network_mode: str = "public"


class _Verifier(BaseModel):
    model_config = _FORBID
    timeout_sec: _Seconds = 600.0
    env: dict[str, str] = {}
    user: str | None = None
    environment_mode: str = "shared"
    network_mode: str = "public"


class _Solution(BaseModel):
    model_config = _FORBID
    env: dict[str, str] = {}


class _TaskFile(BaseModel):
    model_config = _FORBID
    schema_version: str = "1.4"
    version: str = ""
    source: str = ""
    task: _Info = _Info()
    metadata: dict[str, Any] = {}
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()


class _Place(BaseModel):
    """`[metadata.sandlot]`."""

    model_config = _FORBID
    image: str = ""
    directory: str = ""
    options: dict[str, Any] = {}


def is_harbor(path: Path) -> bool:
    """Whether a directory with a `task.toml` is a task of Harbor's."""
    return not (path / "statement.md").exists() and any((path / n).exists() for n in ("instruction.md", "steps"))


def harbor_task(path: Path) -> Task:
    """Load one Harbor task directory; its name is the task's id."""
    file = path / "task.toml"
    try:
        spec = _TaskFile.model_validate(read_toml(file))
        place = _Place.model_validate(spec.metadata.get("sandlot", {}))
    except ValidationError as error:
        raise TaskError(f"{file}: {explain(error)} (outside of the subset of Harbor's format)") from None
    if fault := _unsupported(path, spec):
        raise TaskError(f"{file}: {fault}")
    image, repository = _environment(path, spec, place)
    name = path.resolve().name
    workdir = spec.environment.workdir or _dockerfile_workdir(path) or "/app"
    try:
        check_workdir(workdir)
        options = checked_options(place.options)
    except ValueError as error:
        raise TaskError(f"{file}: environment.workdir or metadata.sandlot.options: {error}") from None
    grading = HarborGrading(
        files=_tests(path),
        env=_resolved(file, spec.verifier.env),
        user=spec.verifier.user or "root",
        timeout=spec.verifier.timeout_sec,
    )
    gold = path / "solution" / "gold.patch"
    limits = TaskLimits() if spec.agent.timeout_sec is None else TaskLimits(wall_clock=spec.agent.timeout_sec)
    return Task(
        id=name,
        statement=read_statement(path / "instruction.md"),
        grading=grading,
        image=image,
        repository=repository,
        workdir=workdir,
        limits=limits,
        gold_patch=own(gold, path).read_bytes() if gold.is_file() else None,
        options=options,
        metadata={
            "harbor": spec.task.name or name,
            "solution": str(path / "solution") if (path / "solution" / "solve.sh").is_file() else "",
            **{key: value for key, value in spec.metadata.items() if isinstance(value, str | int | float | bool)},
        },
    )


def _unsupported(path: Path, spec: _TaskFile) -> str:
    """What of a task cannot be done here, or nothing."""
    environment, verifier = spec.environment, spec.verifier
    if not (version := re.fullmatch(r"(\d{1,9})\.(\d{1,9})", spec.schema_version)):
        return f"schema_version: {spec.schema_version!r} is no version"
    if (int(version[1]), int(version[2])) > (1, 4):
        return f"schema_version: {spec.schema_version!r} is newer than 1.4"
    if (path / "trajectory.json").exists():
        return "trajectory.json: tasks that go on from a recorded trajectory are not supported"
    if (path / "steps").exists():
        return "steps: tasks of several steps are not supported"
    if any((path / "environment" / f"docker-compose.{end}").exists() for end in ("yaml", "yml")):
        return "environment: docker-compose files are not supported; one image is"
    if (path / "tests" / "Dockerfile").exists():
        return "tests/Dockerfile: images of the verifier's own are not supported; it runs in the task's image"
    if not (path / "tests" / "test.sh").is_file():
        return "tests/test.sh is missing"
    if environment.os.lower() != "linux" or environment.gpus:
        return "environment: only Linux without GPUs is supported"
    for name, mode in (
        ("environment", environment.network_mode),
        ("agent", spec.agent.network_mode),
        ("verifier", verifier.network_mode),
    ):
        if mode not in _NETWORKS:
            return f"{name}.network_mode: {mode!r} is not supported; nothing has a network here"
    if verifier.environment_mode not in ("shared", "separate"):
        return f"verifier.environment_mode: {verifier.environment_mode!r} is neither shared nor separate"
    if verifier.user not in (None, "", "root", "0", "agent"):
        return f"verifier.user: {verifier.user!r} is not supported; there are root and agent"
    return ""


def _environment(path: Path, spec: _TaskFile, place: _Place) -> tuple[str, Repository | None]:
    file = path / "task.toml"
    repository = None
    if place.directory:
        directory = inside(path, place.directory, "metadata.sandlot.directory", str(file))
        if not directory.is_dir():
            raise TaskError(f"{file}: metadata.sandlot.directory: {place.directory!r} is no directory")
        repository = Repository(directory=directory)
    if image := place.image or spec.environment.docker_image:
        if image == "host" and repository is None:
            raise TaskError(f"{file}: metadata.sandlot.directory: the image 'host' holds no work tree, so name one")
        return image, repository
    if (path / "environment" / "Dockerfile").is_file():
        return f"{DOCKERFILE}{(path / 'environment').resolve()}", repository
    raise TaskError(f"{file}: environment.docker_image: is missing, and there is no environment/Dockerfile either")


def _dockerfile_workdir(path: Path) -> str:
    """The last absolute WORKDIR of the Dockerfile, if one is there."""
    file = path / "environment" / "Dockerfile"
    if not file.is_file():
        return ""
    found = re.findall(r"^[ \t]*WORKDIR[ \t]+[\"']?(/[^\s\"']+)", file.read_text("utf-8", "replace"), re.M | re.I)
    return str(found[-1]).rstrip("/") if found else ""


def _tests(path: Path) -> dict[str, bytes]:
    """The files below `tests`, but for what `.harborignore` files and caches leave out."""
    root, task = path / "tests", TaskFiles(path)
    return {
        file.relative_to(root).as_posix(): data
        for file, data in files_below(root).items()
        if not task.ignored(path.resolve() / file.relative_to(path))
    }


_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")


def _resolved(file: Path, env: Mapping[str, str]) -> dict[str, str]:
    """`${NAME}` and `${NAME:-default}` filled in from our own environment."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match["name"], match["default"])
        if found is None:
            raise TaskError(f"{file}: verifier.env: the variable {match['name']} is not set, and has no default")
        return found

    return {name: _VARIABLE.sub(value, text) for name, text in env.items()}
