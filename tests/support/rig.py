"""A served gateway over an engine that is told what to say, with one session open and an HTTP client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sandlot.gateway import Gateway, Opened
from sandlot.trajectory.turn import Turn
from support.policy import ToldEngine


@dataclass
class Kept:
    """A recorder in memory that can be told to fail."""

    turns: list[Turn] = field(default_factory=list)
    delivered_ids: list[str] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    seals: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0
    on_turn: Callable[[Turn], None] | None = None

    def turn(self, turn: Turn) -> None:
        if self.on_turn is not None:
            self.on_turn(turn)
        self.turns.append(turn)

    def delivered(self, turn_id: str) -> None:
        self.delivered_ids.append(turn_id)

    def event(self, kind: str, detail: Mapping[str, Any]) -> None:
        self.events.append((kind, dict(detail)))

    def sealed(self, detail: Mapping[str, Any]) -> None:
        self.seals.append(dict(detail))

    def close(self) -> None:
        self.closed += 1


@dataclass
class Rig:
    """A served gateway with one session open, and an HTTP client."""

    gateway: Gateway
    engine: ToldEngine
    opened: Opened
    url: str
    kept: Kept
    http: aiohttp.ClientSession

    @property
    def session(self) -> Any:
        return self.opened.session

    async def messages(self, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        """POST /v1/messages without streaming."""
        sent = {"x-api-key": self.opened.api_key, **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with self.http.post(f"{self.url}/v1/messages", json=body, headers=sent) as reply:
            return reply.status, await reply.json()


MakeRig = Callable[..., Awaitable[Rig]]


def ask(*texts: str, tools: bool = True, **more: Any) -> dict[str, Any]:
    """An Anthropic request: user and assistant texts in turn, starting with the user."""
    roles = ("user", "assistant")
    body: dict[str, Any] = {
        "model": "toy",
        "max_tokens": 1000,
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)],
        **more,
    }
    if tools:
        body["tools"] = [BASH]
    return body


BASH = {
    "name": "Bash",
    "description": "Run a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
