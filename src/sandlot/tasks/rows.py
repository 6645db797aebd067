"""Loader of coding-agent JSONL rows: `{"prompt", "label", "metadata": {image, workdir, …, one grader}}`.

The grader is one of `swepro`, `eval_cmd` and `remote_env_info.f2p_script`. Beside the form's own keys a row may
name a repository next to the file (`metadata.repository = {"fast_export" | "directory", "base"}`) when its image
is `host`, and `metadata.gold_patch`, `metadata.files` (hidden files, path to text), `metadata.limits` and
`metadata.options`; rows that `sandlot tasks convert` wrote have `metadata.grading`, which holds any form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandlot.tasks.checked import inside
from sandlot.tasks.convert import read_grading, read_mutation
from sandlot.tasks.row import Row
from sandlot.tasks.task import DOCKERFILE, CommandGrading, Grading, HarborGrading, ScriptGrading, SweProGrading, Task

_LABEL_LIMIT = 256
"""Labels from this length on are a grader's payload, not a name."""
_KNOWN = frozenset(
    (
        "instance_id",
        "image",
        "workdir",
        "problem_statement",
        "swepro",
        "eval_cmd",
        "remote_env_info",
        "pre_commands",
        "repository",
        "gold_patch",
        "files",
        "limits",
        "options",
        "grading",
        "mutation",
        "hidden",
        "python",
        "protected",
        "timeout",
    )
)
_SWEPRO_KEYS = frozenset(
    (
        "run_script",
        "run_script_path",
        "parser_script",
        "parser_script_path",
        "fail_to_pass",
        "pass_to_pass",
        "FAIL_TO_PASS",
        "PASS_TO_PASS",
        "selected_test_files",
        "selected_test_files_to_run",
        "before_repo_set_cmd",
        "base_commit",
        "files",
        "timeout",
    )
)


class _Row(Row):
    """A row with its two objects."""

    def __init__(self, path: Path, number: int, row: Mapping[str, Any]) -> None:
        super().__init__(path, number, row)
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise self.error("metadata", "must be an object")
        remote = metadata.get("remote_env_info") or {}
        if not isinstance(remote, Mapping):
            raise self.error("metadata.remote_env_info", "must be an object")
        self.metadata: Mapping[str, Any] = metadata
        self.remote: Mapping[str, Any] = remote


def agent_task(path: Path, number: int, row: Mapping[str, Any]) -> Task:
    """The task of one coding-agent row."""
    return _task(_Row(path, number, row))


def _task(row: _Row) -> Task:
    metadata, remote = row.metadata, row.remote
    image = row.text(metadata, "image", "metadata.image") or row.text(remote, "image_url", "remote_env_info.image_url")
    workdir = row.text(metadata, "workdir", "metadata.workdir") or row.text(
        remote, "workdir", "metadata.remote_env_info.workdir"
    )
    if not image:
        raise row.error("metadata.image", "is missing, and so is remote_env_info.image_url")
    if not workdir:
        raise row.error("metadata.workdir", "is missing, and so is remote_env_info.workdir")
    row.workdir(workdir, "metadata.workdir")
    statement = row.text(metadata, "problem_statement", "metadata.problem_statement") or _prompt(row)
    if not statement.strip():
        raise row.error("metadata.problem_statement", "is missing, and prompt holds no text either")
    repository = row.repository(metadata, "metadata.repository")
    if image == "host" and repository is None:
        raise row.error("metadata.repository", "the image 'host' holds no repository, so one must be named here")
    gold, grading = metadata.get("gold_patch"), _grading(row)
    mutation = row.object(metadata, "mutation", "metadata.mutation")
    return Task(
        id=_identity(row),
        statement=statement,
        grading=grading,
        image=_image(row, image),
        repository=repository,
        workdir=workdir,
        setup=_setup(row),
        protected=row.strings(metadata, "metadata", "protected"),
        limits=row.limits(metadata, "metadata.limits"),
        options=row.options(metadata, "metadata.options"),
        gold_patch=row.content(gold, "metadata.gold_patch") if gold else None,
        mutation=read_mutation(row, mutation, "metadata.mutation") if mutation else None,
        hidden=row.strings(metadata, "metadata", "hidden"),
        python=row.text(metadata, "python", "metadata.python"),
        metadata=_rest(row, grading),
    )


def _image(row: _Row, image: str) -> str:
    directory = image.removeprefix(DOCKERFILE)
    if directory == image or Path(directory).is_absolute():
        return image
    return f"{DOCKERFILE}{inside(row.path.parent, directory, 'metadata.image', row.where).resolve()}"


def _rest(row: _Row, grading: Grading) -> dict[str, Any]:
    """What the row says besides; `base_commit` is where an image's repository is taken to."""
    rest = {key: value for key, value in row.metadata.items() if key not in _KNOWN}
    swepro = row.metadata.get("swepro")
    if isinstance(swepro, Mapping) and isinstance(swepro.get("base_commit"), str):
        rest.setdefault("base_commit", swepro["base_commit"])
    if isinstance(grading, HarborGrading) and (solution := row.text(rest, "solution", "metadata.solution")):
        rest["solution"] = str(inside(row.path.parent, solution, "metadata.solution", row.where).resolve())
    return rest


def _identity(row: _Row) -> str:
    label = row.row.get("label")
    short = label if isinstance(label, str) and len(label) < _LABEL_LIMIT else ""
    name = (
        row.text(row.metadata, "instance_id", "metadata.instance_id")
        or row.text(row.remote, "instance_id", "metadata.remote_env_info.instance_id")
        or short
    )
    if not name:
        raise row.error("label", "no label and no metadata.instance_id names this task")
    return name


def _prompt(row: _Row) -> str:
    """The text of `prompt`: a string, or the first user message of a list."""
    prompt = row.row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    for message in prompt if isinstance(prompt, list) else []:
        if not isinstance(message, Mapping) or message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, list):
            parts = (part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text")
            return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def _setup(row: _Row) -> tuple[str, ...]:
    """`pre_commands`: a list, or one text whose line breaks may be written as backslash-n."""
    value = row.metadata.get("pre_commands") or row.remote.get("pre_commands")
    if isinstance(value, str):
        return (value.replace("\\n", "\n"),)
    return tuple(c for c in row.strings({"pre_commands": value}, "metadata", "pre_commands") if c.strip())


def _grading(row: _Row) -> Grading:
    """The row's grader, in the form's own order of precedence."""
    metadata = row.metadata
    if spec := row.object(metadata, "grading", "metadata.grading"):
        return read_grading(row, spec, "metadata.grading")
    if metadata.get("swepro"):
        return _swepro(row, metadata["swepro"])
    if command := row.text(metadata, "eval_cmd", "metadata.eval_cmd"):
        timeout = row.seconds(metadata, "metadata.timeout", CommandGrading.timeout)
        return CommandGrading(command=command, files=row.files(metadata, "metadata.files"), timeout=timeout)
    if script := row.text(row.remote, "f2p_script", "metadata.remote_env_info.f2p_script"):
        return ScriptGrading(script=script, timeout=row.seconds(metadata, "metadata.timeout", ScriptGrading.timeout))
    raise row.error("metadata", "has no grader: one of swepro, eval_cmd and remote_env_info.f2p_script is needed")


def _swepro(row: _Row, spec: Any) -> SweProGrading:
    field = "metadata.swepro"
    if not isinstance(spec, Mapping):
        raise row.error(field, "must be an object")
    if unknown := sorted(set(spec) - _SWEPRO_KEYS):
        raise row.error(f"{field}.{unknown[0]}", "is not a key of this form")
    fail_to_pass = row.tests(spec, field, "fail_to_pass", "FAIL_TO_PASS")
    if not fail_to_pass:
        raise row.error(f"{field}.fail_to_pass", "names no test, so no patch could be told from no patch")
    before = row.text(spec, "before_repo_set_cmd", f"{field}.before_repo_set_cmd").replace("\\n", "\n")
    return SweProGrading(
        run_script=_script(row, spec, field, "run_script"),
        parser_script=_script(row, spec, field, "parser_script"),
        fail_to_pass=fail_to_pass,
        pass_to_pass=row.tests(spec, field, "pass_to_pass", "PASS_TO_PASS"),
        selected_test_files=row.strings(spec, field, "selected_test_files", "selected_test_files_to_run"),
        before_repo_set_cmd=before,
        files=row.files(spec, f"{field}.files"),
        timeout=row.seconds(spec, f"{field}.timeout", SweProGrading.timeout),
    )


def _script(row: _Row, spec: Mapping[str, Any], field: str, key: str) -> str:
    """A script given as text, or as the path of a file (relative ones beside the JSONL file)."""
    if text := row.text(spec, key, f"{field}.{key}"):
        return text
    name = row.text(spec, f"{key}_path", f"{field}.{key}_path")
    if not name:
        raise row.error(f"{field}.{key}", f"is missing, and so is {key}_path")
    return row.beside(name, f"{field}.{key}")


_CHECKOUT = re.compile(r"^\s*git\s+checkout\s+(?P<rev>[0-9A-Za-z][\w./^~-]*)\s+(?:--\s+)?(?P<paths>\S.*)$")


def test_checkouts(before_repo_set_cmd: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The lines of `before_repo_set_cmd` that bring tests in: (revision, paths) of each `git checkout REV -- PATHS`.

    They belong to the grader alone; the other lines only get to the base commit, which preparing does by itself.
    """
    found = []
    for line in before_repo_set_cmd.splitlines():
        if match := _CHECKOUT.match(line):
            paths = tuple(path for path in match["paths"].split() if not path.startswith("-"))
            if paths:
                found.append((match["rev"], paths))
    return tuple(found)


test_checkouts.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it by its name
