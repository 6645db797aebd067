"""opencode (`opencode-ai`): the native binary in run mode, on any wire."""

from __future__ import annotations

import json
from typing import Any

from sandlot.errors import FailureKind
from sandlot.harness.base import Command, Endpoint, wires
from sandlot.harness.ending import classify, last_words
from sandlot.harness.layer import MOUNT_ROOT, Progress, with_path
from sandlot.harness.npm import Part, cpu, npm_layer
from sandlot.sandbox import ExecResult, Layer, Sandbox

_CONFIG = "/home/agent/.config/opencode"
_PROVIDER = "sandlot"
_NEVER_TOKENS = 1_000_000_000
_ADAPTERS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "responses": ("@ai-sdk/openai", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}


class OpenCode:
    """opencode in run mode. `protocol` chooses the wire; `compaction` lets it summarise a long history."""

    name = "opencode"
    prompt_tokens = 8_000

    def __init__(self, protocol: str = "chat", *, compaction: bool = False, progress: Progress | None = None) -> None:
        self.protocol = protocol
        self.protocols = wires("opencode", protocol, _ADAPTERS)
        self._compaction = compaction
        self._progress = progress

    def layers(self) -> tuple[Layer, ...]:
        cli = Part(f"opencode-linux-{cpu()}" + ("-baseline" if cpu() == "x64" else ""))
        # Its search tools would fetch ripgrep from elsewhere.
        rg = Part(f"@vscode/ripgrep-linux-{cpu()}", "tools", programs=("bin/rg",))
        return (npm_layer("opencode", [cli, rg], entry="bin/opencode", progress=self._progress),)

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        files = {
            "opencode.json": self.config(endpoint),
            # It would install this package for plugins to build on; what is in the lock file is taken as installed.
            "package-lock.json": {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}},
            "node_modules/.package-lock.json": {},
        }
        for name, content in files.items():
            await sandbox.write_file(f"{_CONFIG}/{name}", json.dumps(content, indent=1).encode(), mode=0o600)

    def config(self, endpoint: Endpoint) -> dict[str, Any]:
        """`opencode.json`: one provider with one model, for every purpose."""
        adapter, path = _ADAPTERS[self.protocol]
        model = f"{_PROVIDER}/{endpoint.model}"
        window = endpoint.context_window if self._compaction else _NEVER_TOKENS
        known = {
            "name": endpoint.model,
            "tool_call": True,
            "reasoning": True,
            "limit": {"context": window, "output": endpoint.max_output_tokens},
        }
        # No limit on the time of a request, nor on that between two pieces of an answer.
        options = {"baseURL": endpoint.base_url + path, "apiKey": endpoint.api_key, "timeout": False}
        provider = {"npm": adapter, "name": _PROVIDER, "options": options, "models": {endpoint.model: known}}
        return {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "model": model,
            "small_model": model,
            "enabled_providers": [_PROVIDER],
            "provider": {_PROVIDER: provider},
            "compaction": {"auto": self._compaction, "prune": False},
            "snapshot": False,
        }

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        # Without a title it asks the model for one first. As an argument the prompt would come in quotes.
        argv = (f"{MOUNT_ROOT}/opencode/bin/opencode", "run", "--auto", "--title", "task")
        env = {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_DISABLE_PRUNE": "1",  # it would empty old tool results in the history
            "OPENCODE_DISABLE_CLAUDE_CODE": "1",
            "OPENCODE_EXPERIMENTAL_DISABLE_FILEWATCHER": "1",
            "NO_COLOR": "1",
        }
        if not self._compaction:
            env["OPENCODE_DISABLE_AUTOCOMPACT"] = "1"
        return Command(with_path("opencode/tools/bin", argv), env, prompt.encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        # The whole conversation goes there; an error ends it.
        return classify(result, last_words(result.stderr.decode("utf-8", "replace").rpartition("Error: ")[2]))
