"""Pi (`@earendil-works/pi-coding-agent`): small prompt, four tools, speaks every wire."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from sandlot.errors import FailureKind
from sandlot.harness.base import Command, Endpoint, wires
from sandlot.harness.ending import classify, last_words
from sandlot.harness.layer import MOUNT_ROOT, Progress
from sandlot.harness.npm import NODE, Part, node_layer, npm_layer
from sandlot.sandbox import ExecResult, Layer, Sandbox

_CLI = f"{MOUNT_ROOT}/pi/dist/bundle/cli.js"
_CONFIG = "/home/agent/.pi/agent"
_PROVIDER = "sandlot"
_APIS = {
    "chat": ("openai-completions", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "responses": ("openai-responses", "/v1"),
    "google": ("google-generative-ai", "/v1beta"),
}


def _skip(path: PurePosixPath) -> bool:
    """What only editors and debuggers read. The bundle needs none of Pi's dependencies but the image codec."""
    return path.name.endswith((".map", ".d.ts"))


class Pi:
    """Pi in print mode. `protocol` chooses the wire; `compaction` lets Pi summarise a history that grows too long."""

    name = "pi"
    prompt_tokens = 1400

    def __init__(self, protocol: str = "chat", *, compaction: bool = False, progress: Progress | None = None) -> None:
        self.protocol = protocol
        self.protocols = wires("Pi", protocol, _APIS)
        self._compaction = compaction
        self._progress = progress

    def layers(self) -> tuple[Layer, ...]:
        parts = [
            Part("@earendil-works/pi-coding-agent", skip=_skip),
            Part("@silvia-odwyer/photon-node", "node_modules/@silvia-odwyer/photon-node"),
        ]
        cli = npm_layer("pi", parts, entry="dist/bundle/cli.js", progress=self._progress)
        return (node_layer(self._progress), cli)

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        for name, content in (("models.json", self.models(endpoint)), ("settings.json", self.settings(endpoint))):
            await sandbox.write_file(f"{_CONFIG}/{name}", json.dumps(content, indent=1).encode(), mode=0o600)

    def models(self, endpoint: Endpoint) -> dict[str, Any]:
        """`models.json`: one provider with one model."""
        api, path = _APIS[self.protocol]
        # An empty thinking signature would make Pi replay the thinking as ordinary text.
        compat = {"allowEmptySignature": True} if self.protocol == "anthropic" else {}
        model = {
            "id": endpoint.model,
            "reasoning": True,
            "contextWindow": endpoint.context_window,
            "maxTokens": endpoint.max_output_tokens,
            "compat": compat,
        }
        # Pi expands `$NAME` and runs `!command` in keys; a doubled sign stands for itself.
        key = endpoint.api_key.replace("$", "$$")
        key = f"${key}" if key.startswith("!") else key
        provider = {"baseUrl": endpoint.base_url + path, "api": api, "apiKey": key, "models": [model]}
        return {"providers": {_PROVIDER: provider}}

    def settings(self, endpoint: Endpoint) -> dict[str, Any]:
        """`settings.json`: no time limit on a slow engine, no requests beside the conversation."""
        reserve = min(endpoint.context_window // 2, endpoint.max_output_tokens + 1024)
        keep = max(1024, endpoint.context_window // 4)
        return {
            "httpIdleTimeoutMs": 0,
            "cacheWarming": "off",
            "enableInstallTelemetry": False,
            "enableAnalytics": False,
            "quietStartup": True,
            "compaction": {"enabled": self._compaction, "reserveTokens": reserve, "keepRecentTokens": keep},
            "retry": {"enabled": True, "maxRetries": 3, "baseDelayMs": 2000, "provider": {"maxRetries": 0}},
        }

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        # The prompt goes through stdin: as an argument a leading `-` or `@` means something, and its length is bounded.
        argv = (
            NODE,
            _CLI,
            "--print",
            "--no-session",
            "--no-approve",
            "--provider",
            _PROVIDER,
            "--model",
            endpoint.model,
        )
        env = {
            "PI_CODING_AGENT_DIR": _CONFIG,
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
            "PI_SKIP_VERSION_CHECK": "1",
            "NO_COLOR": "1",
        }
        return Command(argv, env, prompt.encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        return classify(result, last_words(result.stderr.decode("utf-8", "replace")))
