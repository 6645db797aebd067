"""A run that is gone on with: the same settings and the same model, wherever its engine is by now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandlot.config import RunConfig
from sandlot.errors import ConfigError, JournalError
from sandlot.rollout.policy import EMBEDDED
from sandlot.trajectory.journal import read_header
from sandlot.trajectory.rundir import RunDir
from sandlot.trajectory.runfile import read_run_file


def open_run(
    out: Path, config: RunConfig, *, facts: Mapping[str, Any] | None = None, may_differ: Collection[str] = ()
) -> RunDir:
    """Make the run at `out`, or go on with it: an engine that is reached by addresses may be at others."""
    stored = read_run_file(out)[0].get("engine", "") if (out / "run.toml").exists() else ""
    moved = ("engine",) if stored not in ("", *EMBEDDED) and config.engine not in EMBEDDED else ()
    return RunDir.create_or_continue(out, config.model_dump(mode="json"), facts=facts, may_differ=(*may_differ, *moved))


def expect_same_model(run: RunDir, model: str, max_context: int | None = None) -> None:
    """Raise `ConfigError` if what the engine serves is not what the run's finished episodes were sampled from."""
    before = next(_sessions(run), {})
    for name, now in (("model", model), ("max_context", max_context)):
        if now is not None and before.get(name) not in (None, now):
            raise ConfigError(
                f"the episodes of {run.path} were sampled with {name} {before[name]!r} and the engine has {now!r}: "
                "serve the same model in the same way, or use another directory"
            )


def _sessions(run: RunDir) -> Iterator[dict[str, Any]]:
    """What the journals of the finished episodes say of their sessions, as far as they can be read."""
    for episode_id in run.finished():
        with suppress(OSError, JournalError):
            if (header := read_header(run.journal_path(episode_id))) is not None:
                yield header.session
