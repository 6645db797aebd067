"""Before a launcher starts anything: check what it is about to use, and write the files its trainer reads."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path

import tomli_w

from sandlot.errors import ConfigError, SandlotError
from sandlot.trajectory.store import write_bytes


def prepare(rollout_file: Path, run_dir: Path, *, tasks: Path, model: Path) -> Path:
    """Write `rollout.toml` and `hook.yaml` into `run_dir`; returns the latter.

    The rollout file is taken over with tasks, model and output set. Refused are settings or tasks that do not load,
    rows of the trainer that name none of them, a harness, sandbox or option of it that there is not, a model without a
    chat format.
    """
    from sandlot.rollout.format import format_of
    from sandlot.sandbox import make_backend
    from sandlot.tasks import load_tasks
    from sandlot.trainers.live import harness_of, read_rollout_file

    config, hook = read_rollout_file(rollout_file)
    harness_of(config, hook)
    make_backend(config.sandbox, config.sandbox_options)  # also says which package it lacks
    values = tomllib.loads(rollout_file.read_text("utf-8"))
    values |= {"tasks": str(tasks.resolve()), "model": str(model.resolve())}
    values["trainer"]["out"] = str((run_dir / "rollouts").resolve())
    known = {task.id for task in load_tasks(tasks)}
    for number, line in enumerate(tasks.read_text("utf-8").splitlines(), 1):
        if line.strip() and (name := _task_id(json.loads(line))) not in known:
            raise ConfigError(f"{tasks}: row {number} names the task {name!r}, which no loader finds in the file")
    format_of(model, config.chat)
    run_dir.mkdir(parents=True, exist_ok=True)
    written = run_dir / "rollout.toml"
    write_bytes(written, tomli_w.dumps(values).encode())
    read_rollout_file(written)
    hook_file = run_dir / "hook.yaml"
    write_bytes(hook_file, f"sandlot_config: {json.dumps(str(written.resolve()))}\n".encode())
    return hook_file


def _task_id(row: dict[str, object]) -> object:
    metadata = row.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    remote = metadata.get("remote_env_info") or {}
    return metadata.get("instance_id") or remote.get("instance_id") or row.get("label")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sandlot.trainers.prepare", description=__doc__)
    parser.add_argument("rollout_file", type=Path, help="settings of the rollouts (TOML)")
    parser.add_argument("run_dir", type=Path, help="where the files are written")
    parser.add_argument("--tasks", type=Path, required=True, help="the trainer's prompt data (JSONL)")
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint directory of the model")
    given = parser.parse_args()
    try:
        print(prepare(given.rollout_file, given.run_dir, tasks=given.tasks, model=given.model))
    except (SandlotError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
