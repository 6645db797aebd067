"""Small Harbor tasks, and registries and manifests of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from support.repositories import write


def task(root: Path, name: str, *, statement: str = "Do it.", **environment: Any) -> Path:
    """A task directory called `name`; the task is `org/<name>`."""
    spec = {
        "schema_version": "1.4",
        "task": {"name": f"org/{name}"},
        "environment": {"docker_image": "registry.example/one:1", **environment},
    }
    text = {"task.toml": tomli_w.dumps(spec), "instruction.md": f"{statement}\n", "tests/test.sh": "echo 1\n"}
    write(root / name, text)
    return root / name


def registry(root: Path, sets: Mapping[str, list[dict[str, Any]]]) -> Path:
    """A `registry.json` of data sets by `name` or `name@version`."""
    root.mkdir(parents=True, exist_ok=True)
    told = []
    for name, entries in sets.items():
        tasks = [{"name": Path(str(entry.get("path"))).name, **entry} for entry in entries]
        told.append(
            {"name": name.partition("@")[0], "version": name.partition("@")[2], "description": "", "tasks": tasks}
        )
    path = root / "registry.json"
    path.write_text(json.dumps(told))
    return path


def manifest(root: Path, digests: Mapping[str, str]) -> Path:
    """A `dataset.toml` of tasks with their digests."""
    tasks = [{"name": name, "digest": digest} for name, digest in digests.items()]
    path = root / "dataset.toml"
    path.write_text(tomli_w.dumps({"dataset": {"name": "org/set", "authors": [{"name": "A"}]}, "tasks": tasks}))
    return path
