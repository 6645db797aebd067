"""Reinforcement learning of coding agents where they really work. See docs/python.md.

The names below are loaded when they are first used, so that `import sandlot` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandlot.config import RunConfig, load_config
    from sandlot.gateway import Gateway, Session
    from sandlot.rollout.episode import Episode
    from sandlot.rollout.outcome import EpisodeResult
    from sandlot.rollout.run import rollout
    from sandlot.tasks import Task, load_tasks
    from sandlot.trajectory.audit import audit
    from sandlot.trajectory.rundir import RunDir
    from sandlot.trajectory.sample import Sample

_HOMES = {
    "Episode": "sandlot.rollout.episode",
    "EpisodeResult": "sandlot.rollout.outcome",
    "Gateway": "sandlot.gateway",
    "RunConfig": "sandlot.config",
    "RunDir": "sandlot.trajectory.rundir",
    "Sample": "sandlot.trajectory.sample",
    "Session": "sandlot.gateway",
    "Task": "sandlot.tasks",
    "audit": "sandlot.trajectory.audit",
    "load_config": "sandlot.config",
    "load_tasks": "sandlot.tasks",
}

__all__ = [
    "Episode",
    "EpisodeResult",
    "Gateway",
    "RunConfig",
    "RunDir",
    "Sample",
    "Session",
    "Task",
    "audit",
    "load_config",
    "load_tasks",
    "rollout",
]


def __getattr__(name: str) -> Any:
    if name == "rollout":  # the package, which can be called like its function
        return import_module("sandlot.rollout")
    if home := _HOMES.get(name):
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'sandlot' has no attribute {name!r}")
