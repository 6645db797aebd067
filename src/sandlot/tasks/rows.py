"""Loader of coding-agent JSONL rows: `{"prompt", "label", "metadata": {image, workdir, …, one grader}}`.

The grader is one of `swepro`, `eval_cmd` and `remote_env_info.f2p_script`. Beside the form's own keys a row may
name a repository next to the file (`metadata.repository = {"fast_export" | "directory", "base"}`) when its image
is `host`, and `metadata.gold_patch`, `metadata.files` (hidden files, path to text) and `metadata.limits`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sandlot.errors import TaskError
from sandlot.tasks.directory import check_workdir, inside
from sandlot.tasks.task import CommandGrading, Grading, Repository, ScriptGrading, SweProGrading, Task, TaskLimits

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


class _Row:
    """One row with typed access to its fields; every refusal names file, row and field."""

    def __init__(self, path: Path, number: int, row: Mapping[str, Any]) -> None:
        self.path = path
        self.where = f"{path}: row {number}"
        self.row = row
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise self.error("metadata", "must be an object")
        remote = metadata.get("remote_env_info") or {}
        if not isinstance(remote, Mapping):
            raise self.error("metadata.remote_env_info", "must be an object")
        self.metadata: Mapping[str, Any] = metadata
        self.remote: Mapping[str, Any] = remote

    def error(self, field: str, reason: str) -> TaskError:
        return TaskError(f"{self.where}: {field}: {reason}")

    def text(self, source: Mapping[str, Any], key: str, field: str) -> str:
        """The string at `key`, empty when absent or null."""
        value = source.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.error(field, f"must be a string, not {type(value).__name__}")
        return value

    def strings(self, source: Mapping[str, Any], field: str, *keys: str) -> tuple[str, ...]:
        """The list of strings at the first of `keys` that is there; lists written as JSON text are read too."""
        for key in keys:
            value = source.get(key)
            if value is None:
                continue
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError:
                    raise self.error(f"{field}.{key}", "is text, but no JSON list") from None
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.error(f"{field}.{key}", "must be a list of strings")
            return tuple(value)
        return ()

    def files(self, source: Mapping[str, Any], field: str) -> dict[str, bytes]:
        """Hidden files: path to text, or to `{"base64": …}` for bytes."""
        value = source.get("files") or {}
        if not isinstance(value, Mapping):
            raise self.error(field, "must map paths to text")
        files = {}
        for name, content in value.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name:
                raise self.error(field, f"{name!r} leads out of the workdir")
            if isinstance(content, str):
                files[name] = content.encode()
                continue
            try:
                files[name] = base64.b64decode(content["base64"], validate=True)
            except (TypeError, KeyError, ValueError, binascii.Error):
                raise self.error(f"{field}.{name}", 'must be text or {"base64": text}') from None
        return files

    def seconds(self, source: Mapping[str, Any], field: str, default: float) -> float:
        value = source.get("timeout", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(field, "must be a positive number of seconds")
        return float(value)


def load_jsonl(path: Path) -> list[Task]:
    """Load every row of a JSONL file; blank lines are skipped."""
    tasks = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise TaskError(f"{path}: row {number}: not readable as JSON: {error}") from None
            if not isinstance(row, dict):
                raise TaskError(f"{path}: row {number}: must be an object with prompt, label and metadata")
            tasks.append(_task(_Row(path, number, row)))
    return tasks


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
    try:
        check_workdir(workdir)
    except ValueError as error:
        raise row.error("metadata.workdir", str(error)) from None
    statement = row.text(metadata, "problem_statement", "metadata.problem_statement") or _prompt(row)
    if not statement.strip():
        raise row.error("metadata.problem_statement", "is missing, and prompt holds no text either")
    repository = _repository(row)
    if image == "host" and repository is None:
        raise row.error("metadata.repository", "the image 'host' holds no repository, so one must be named here")
    gold = row.text(metadata, "gold_patch", "metadata.gold_patch")
    return Task(
        id=_identity(row),
        statement=statement,
        grading=_grading(row),
        image=image,
        repository=repository,
        workdir=workdir,
        setup=_setup(row),
        protected=row.strings(metadata, "metadata", "protected"),
        limits=_limits(row),
        gold_patch=gold.encode() if gold else None,
        metadata=_rest(row),
    )


def _rest(row: _Row) -> dict[str, Any]:
    """What the row says besides; `base_commit` is where an image's repository is taken to."""
    rest = {key: value for key, value in row.metadata.items() if key not in _KNOWN}
    swepro = row.metadata.get("swepro")
    if isinstance(swepro, Mapping) and isinstance(swepro.get("base_commit"), str):
        rest.setdefault("base_commit", swepro["base_commit"])
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


def _limits(row: _Row) -> TaskLimits:
    value = row.metadata.get("limits") or {}
    if not isinstance(value, Mapping):
        raise row.error("metadata.limits", "must be an object")
    for key, number in value.items():
        if key not in ("wall_clock", "turns", "tokens"):
            raise row.error(f"metadata.limits.{key}", "is no limit; there are wall_clock, turns and tokens")
        whole = isinstance(number, int) or (key == "wall_clock" and isinstance(number, float))
        if isinstance(number, bool) or not whole or not 0 < number < float("inf"):
            raise row.error(f"metadata.limits.{key}", "must be a positive number")
    return TaskLimits(**value)


def _repository(row: _Row) -> Repository | None:
    value = row.metadata.get("repository")
    if value is None:
        return None
    field = "metadata.repository"
    if not isinstance(value, Mapping) or not value.keys() <= {"fast_export", "directory", "base"}:
        raise row.error(field, "must be an object with fast_export or directory, and base")
    sources = [key for key in ("fast_export", "directory") if value.get(key) is not None]
    if len(sources) != 1:
        raise row.error(field, "must name exactly one of fast_export and directory")
    name = row.text(value, sources[0], f"{field}.{sources[0]}")
    path = inside(row.path.parent, name, f"{field}.{sources[0]}", row.where)
    base = row.text(value, "base", f"{field}.base") or "HEAD"
    if sources[0] == "directory":
        return Repository(directory=path, base=base)
    return Repository(fast_export=path, base=base)


def _grading(row: _Row) -> Grading:
    """The row's grader, in the form's own order of precedence."""
    metadata = row.metadata
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
    fail_to_pass = row.strings(spec, field, "fail_to_pass", "FAIL_TO_PASS")
    if not fail_to_pass:
        raise row.error(f"{field}.fail_to_pass", "names no test, so no patch could be told from no patch")
    before = row.text(spec, "before_repo_set_cmd", f"{field}.before_repo_set_cmd").replace("\\n", "\n")
    return SweProGrading(
        run_script=_script(row, spec, field, "run_script"),
        parser_script=_script(row, spec, field, "parser_script"),
        fail_to_pass=fail_to_pass,
        pass_to_pass=row.strings(spec, field, "pass_to_pass", "PASS_TO_PASS"),
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
    path = Path(name) if Path(name).is_absolute() else row.path.parent / name
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise row.error(f"{field}.{key}_path", f"cannot be read: {error}") from None


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
