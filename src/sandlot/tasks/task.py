"""A task: one problem, where it lives, and how a solution is graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

DOCKERFILE = "dockerfile:"
"""An image that is built: this, and the directory of its Dockerfile."""


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
class Mutation:
    """A change that makes the bug: `patch` is applied to the base commit and the files `removed` go, before anyone sees
    the repository. It then has one commit, since its past is the solution.
    """

    patch: bytes
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PytestGrading:
    """Hidden test files are put in, then named tests must pass: `fail_to_pass` and `pass_to_pass`.

    `files` maps a path relative to the workdir to its content; `base_files` are taken as the base commit has them,
    before the task's mutation. A test that is absent, skipped, in error or not collected has not passed.
    """

    files: Mapping[str, bytes]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    timeout: float = 300.0
    base_files: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class SwebenchGrading:
    """SWE-bench form: the files that `test_patch` changes are put in as it leaves them, then named tests must pass.

    With `command` (the shell lines that run the tests) and `log_parser` (a parser of the `swebench` package) the log is
    read by that parser; without them pytest runs the tests and the names must be pytest's.
    """

    test_patch: bytes
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    command: str = ""
    log_parser: str = ""
    timeout: float = 1800.0


@dataclass(frozen=True)
class R2EGrading:
    """R2E-Gym form: `expected` maps a test's name without its file (`TestX.test_y`) to its status with the real fix.

    Those expected to pass must pass. `files` are the hidden tests; where it is empty they are the image's own, in
    the directory `image_tests`, and are put into the workdir's `r2e_tests`.
    """

    expected: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)
    image_tests: str = ""
    timeout: float = 600.0


@dataclass(frozen=True)
class HarborGrading:
    """Harbor form: `files` go to `/tests`, `test.sh` runs there, and the reward is what it wrote to
    `/logs/verifier/reward.json` or `reward.txt`. Its exit status says nothing.
    """

    files: Mapping[str, bytes]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = "root"
    timeout: float = 600.0


Grading = PytestGrading | CommandGrading | ScriptGrading | SweProGrading | SwebenchGrading | R2EGrading | HarborGrading


@dataclass(frozen=True)
class GradingOptions:
    """How results become one number.

    `credit`: `all` gives 1 only when every required test passed; `fraction` gives the share of `fail_to_pass` that
    passed, and 0 when a test of `pass_to_pass` did not. `reruns`: how often an unsolved verdict is graded again; what
    most of the runs say counts. `weights`: of a verifier's several rewards by name; their weighted mean counts.
    `timeout`: seconds that the tests may take, in the place of the task's own. `countercheck`: whether what earns
    something is graded once more with the tests' assertions inverted, where it must earn nothing.
    """

    credit: Literal["all", "fraction"] = "all"
    reruns: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)
    timeout: float | None = None
    countercheck: bool = True


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
    belong to the tests and are restored after the patch. `hidden` are absolute paths of the image that belong to the
    tests and are gone before the agent starts. `python` is the image's interpreter that runs its tests (empty: the
    `python` on its PATH).
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
    mutation: Mutation | None = None
    hidden: tuple[str, ...] = ()
    python: str = ""
    options: GradingOptions = GradingOptions()
    metadata: Mapping[str, Any] = field(default_factory=dict)
