"""The type of the fixture that makes episode runners."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sandlot.rollout.episode import EpisodeRunner

MakeRunner = Callable[..., Awaitable[EpisodeRunner]]
