"""One episode; many episodes; what they came to. The package can be called like its function `rollout`."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from sandlot.config import RunConfig
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


class _Room(ModuleType):
    """Importing a part of this package binds `sandlot.rollout` to it; whoever calls that means the function."""

    def __call__(self, config: RunConfig, out: str | Path, **shown: Any) -> Coroutine[Any, Any, list[EpisodeResult]]:
        """See `sandlot.rollout.run.rollout`."""
        from sandlot.rollout.run import rollout

        return rollout(config, out, **shown)


sys.modules[__name__].__class__ = _Room


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        return getattr(import_module(home), name)
    raise AttributeError(f"module 'sandlot.rollout' has no attribute {name!r}")
