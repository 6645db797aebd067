"""One episode; many episodes; what they came to."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandlot.rollout.episode import Episode, EpisodeRunner
    from sandlot.rollout.outcome import EpisodeResult
    from sandlot.rollout.run import rollout

_HOMES = {
    "Episode": "sandlot.rollout.episode",
    "EpisodeResult": "sandlot.rollout.outcome",
    "EpisodeRunner": "sandlot.rollout.episode",
    "rollout": "sandlot.rollout.run",
}

__all__ = ["Episode", "EpisodeResult", "EpisodeRunner", "rollout"]


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'sandlot.rollout' has no attribute {name!r}")
