"""A task: one problem, where it lives, and how a solution is graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Repository:
    """Where a task's repository comes from when it is not in the image.

    Exactly one is set: `fast_export` (a `git fast-export` stream with history) or `directory` (a plain tree that
    becomes a repository with one commit). `base` is the ref or commit the agent starts from.
    """

    fast_export: Path | None = None
    directory: Path | None = None
    base: str = "HEAD"


@dataclass(frozen=True)
class PytestGrading:
    """Hidden test files are put in, then named tests must pass: `fail_to_pass` and `pass_to_pass`.

    `files` maps a path relative to the workdir to its content. A test that is absent, skipped, in error or not
    collected has not passed.
    """

    files: Mapping[str, bytes]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    timeout: float = 300.0


@dataclass(frozen=True)
class CommandGrading:
    """`eval_cmd`: exit status 0 of a shell command in the workdir is reward 1, another status is 0.

    `files` are put in after the patch and before the command.
    """

    command: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    timeout: float = 600.0


@dataclass(frozen=True)
class ScriptGrading:
    """`f2p_script`: a pytest file whose every test must pass (the form of `remote_env_info.f2p_script`)."""

    script: str
    timeout: float = 600.0


@dataclass(frozen=True)
class SweProGrading:
    """SWE-bench Pro form: `before_repo_set_cmd`'s test checkout, a run script and a parser, and named tests.

    `run_script` prints a log, `parser_script` turns stdout and stderr into `{"tests": [{"name", "status"}]}`.
    """

    run_script: str
    parser_script: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    selected_test_files: tuple[str, ...] = ()
    before_repo_set_cmd: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    timeout: float = 1800.0


Grading = PytestGrading | CommandGrading | ScriptGrading | SweProGrading


@dataclass(frozen=True)
class TaskLimits:
    """What one attempt may use. `wall_clock` in seconds, `tokens` sampled in the whole session."""

    wall_clock: float = 1800.0
    turns: int = 100
    tokens: int = 200_000


@dataclass(frozen=True)
class Task:
    """One problem. `image` is what the sandbox boots (`host`, a directory, a reference); `setup` are shell commands
    run as root in the workdir before the agent starts, and again before grading. `protected` are path patterns that
    belong to the tests and are restored after the patch.
    """

    id: str
    statement: str
    grading: Grading
    image: str = "host"
    repository: Repository | None = None
    workdir: str = "/workspace"
    setup: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    limits: TaskLimits = TaskLimits()
    gold_patch: bytes | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
