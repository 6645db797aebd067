"""Loader of plain task directories: `<id>/{task.toml,statement.md,gold.patch,tests/,repo.fi or repo/}`.

`grading.files` names the directory of the hidden tests, `tests` say. It is put into the workdir under the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

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
    task_directories,
)
from sandlot.tasks.task import CommandGrading, Grading, PytestGrading, Repository, Task, TaskLimits

_FORBID = ConfigDict(extra="forbid", strict=True)
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
_Count = Annotated[int, Field(gt=0)]
_Names = Annotated[list[str], Field(min_length=1)]


class _Repository(BaseModel):
    model_config = _FORBID
    fast_export: str | None = None
    directory: str | None = None
    base: str = "HEAD"

    @model_validator(mode="after")
    def _one_source(self) -> _Repository:
        if (self.fast_export is None) == (self.directory is None):
            raise ValueError("give exactly one of fast_export and directory")
        return self


class _Pytest(BaseModel):
    model_config = _FORBID
    form: Literal["pytest"]
    files: str
    fail_to_pass: _Names
    pass_to_pass: list[str] = []
    timeout: _Seconds = 300.0


class _Command(BaseModel):
    model_config = _FORBID
    form: Literal["command"]
    command: Annotated[str, Field(min_length=1)]
    files: str | None = None
    timeout: _Seconds = 600.0


class _Limits(BaseModel):
    model_config = _FORBID
    wall_clock: _Seconds = TaskLimits.wall_clock
    turns: _Count = TaskLimits.turns
    tokens: _Count = TaskLimits.tokens


class _TaskFile(BaseModel):
    model_config = _FORBID
    schema_: Annotated[Literal[1], Field(alias="schema")]
    difficulty: Literal["trivial", "easy", "medium", "hard"]
    description: str
    image: str = "host"
    workdir: str = ""
    setup: list[str] = []
    protected: list[str] = []
    repository: _Repository | None = None
    grading: Annotated[_Pytest | _Command, Field(discriminator="form")]
    limits: _Limits = _Limits()
    options: dict[str, Any] = {}

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value:
            check_workdir(value)
        return value


def load_directory(path: Path) -> Iterator[Task | TaskError]:
    """The task in `path`, or the tasks in its directories that hold a `task.toml`, by name; Harbor's too."""
    from sandlot.tasks.harbor import harbor_task, is_harbor

    for place in task_directories(path):
        try:
            yield harbor_task(place) if is_harbor(place) else load_task(place)
        except TaskError as error:
            yield error


def load_task(path: Path) -> Task:
    """Load one task directory; the directory's name is the task's id."""
    file = path / "task.toml"
    try:
        spec = _TaskFile.model_validate(read_toml(file))
    except ValidationError as error:
        raise TaskError(f"{file}: {explain(error)}") from None
    if spec.image == "host" and spec.repository is None:
        raise TaskError(f"{file}: repository: the image 'host' holds no repository, so one must be given here")
    try:
        options = checked_options(spec.options)
    except ValueError as error:
        raise TaskError(f"{file}: options: {error}") from None
    return Task(
        id=path.resolve().name,
        statement=read_statement(path / "statement.md"),
        grading=_grading(path, spec.grading),
        image=spec.image,
        repository=_repository(file, spec.repository),
        workdir=spec.workdir or f"/workspace/{path.resolve().name}",
        setup=tuple(spec.setup),
        protected=tuple(spec.protected),
        limits=TaskLimits(**spec.limits.model_dump()),
        options=options,
        gold_patch=own(path / "gold.patch", path).read_bytes() if (path / "gold.patch").is_file() else None,
        metadata={"difficulty": spec.difficulty, "description": spec.description},
    )


def _grading(path: Path, spec: _Pytest | _Command) -> Grading:
    where = str(path / "task.toml")
    files: dict[str, bytes] = {}
    if spec.files is not None:
        directory = inside(path, spec.files, "grading.files", where)
        files = {file.relative_to(path).as_posix(): data for file, data in files_below(directory).items()}
        if not files:
            raise TaskError(f"{where}: grading.files: {spec.files!r} holds no file")
    if isinstance(spec, _Pytest):
        for name in spec.fail_to_pass:
            if name.partition("::")[0] not in files:
                raise TaskError(f"{where}: grading.fail_to_pass: {name!r} is in no file of {spec.files!r}")
    if isinstance(spec, _Command):
        return CommandGrading(command=spec.command, files=files, timeout=spec.timeout)
    return PytestGrading(
        files=files,
        fail_to_pass=tuple(spec.fail_to_pass),
        pass_to_pass=tuple(spec.pass_to_pass),
        timeout=spec.timeout,
    )


def _repository(file: Path, spec: _Repository | None) -> Repository | None:
    if spec is None:
        return None
    fields: dict[str, Any] = {"base": spec.base}
    for name in ("fast_export", "directory"):
        if (value := getattr(spec, name)) is not None:
            path = inside(file.parent, value, f"repository.{name}", str(file))
            if path.is_dir() != (name == "directory"):
                raise TaskError(f"{file}: repository.{name}: {value!r} is of the wrong kind")
            fields[name] = path
    return Repository(**fields)
