"""Qwen Code (`@qwen-code/qwen-code`): headless, on any wire."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from sandlot.errors import FailureKind
from sandlot.harness.base import Command, Endpoint, as_text, wires
from sandlot.harness.ending import classify, last_words
from sandlot.harness.layer import MOUNT_ROOT, Progress
from sandlot.harness.npm import NODE, Part, cpu, node_layer, npm_layer
from sandlot.sandbox import ExecResult, Layer, Sandbox

_SETTINGS = "/home/agent/.qwen/settings.json"
_NEVER_MS = 86_400_000
_NEVER_TOKENS = 1_000_000_000
_AUTH = {
    "chat": ("openai", "OPENAI", "/v1"),
    "anthropic": ("anthropic", "ANTHROPIC", ""),
    "responses": ("openai-responses", "OPENAI", "/v1"),
    "google": ("gemini", "GEMINI", ""),
}
_NOWHERE = "http://127.0.0.1:9"
"""Where nobody answers."""
_UNUSED = ("web-shell", "examples", "export-transcript-document.js", "export-transcript-document.css")


def _skip(path: PurePosixPath) -> bool:
    """What only a browser shows, and programs for other systems."""
    return path.parts[0] in _UNUSED or (
        path.parts[:2] == ("vendor", "ripgrep") and (not path.parts[2].endswith("-linux"))
    )


class QwenCode:
    """Qwen Code, headless. `protocol` chooses the wire; `compaction` lets it summarise a long history."""

    name = "qwen-code"
    prompt_tokens = 20_500

    def __init__(self, protocol: str = "chat", *, compaction: bool = False, progress: Progress | None = None) -> None:
        self.protocol = protocol
        self.protocols = wires("Qwen Code", protocol, _AUTH)
        self._compaction = compaction
        self._progress = progress

    def layers(self) -> tuple[Layer, ...]:
        # Its optional packages serve terminals, clipboards and microphones.
        rg = f"vendor/ripgrep/{cpu()}-linux/rg"
        part = Part("@qwen-code/qwen-code", skip=_skip, programs=(rg,))
        return (node_layer(self._progress), npm_layer("qwen-code", [part], entry="cli.js", progress=self._progress))

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        await sandbox.write_file(_SETTINGS, json.dumps(self.settings(endpoint), indent=1).encode(), mode=0o600)

    def settings(self, endpoint: Endpoint) -> dict[str, Any]:
        """`settings.json`: no requests beside the conversation, nothing cleared of it, no time limit on an engine."""
        generation = {
            "timeout": _NEVER_MS,
            "streamIdleTimeoutMs": _NEVER_MS,
            "maxRetries": 2,
            "contextWindowSize": endpoint.context_window if self._compaction else _NEVER_TOKENS,
            "samplingParams": {"max_tokens": endpoint.max_output_tokens},
        }
        keep = {"toolResultsThresholdMinutes": -1, "toolResultsTotalCharsThreshold": -1}
        auth, prefix, _ = _AUTH[self.protocol]
        # A history that is refused as too long it would summarise whatever its settings say, if a model did it.
        nobody = {"id": "nobody", "baseUrl": _NOWHERE, "envKey": f"{prefix}_API_KEY"}
        summaries = {"compactionModel": f"{auth}:nobody", "modelProviders": {auth: [nobody]}}
        return {
            **({} if self._compaction else summaries),
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "security": {"auth": {"selectedType": auth}},
            "model": {
                "name": endpoint.model,
                "generationConfig": generation,
                "skipNextSpeakerCheck": True,
                "skipLoopDetection": True,
            },
            "context": {"clearContextOnIdle": keep},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
            "tools": {"shell": {"enableInteractiveShell": False}},
            "ui": {"enableFollowupSuggestions": False},
        }

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        auth, prefix, path = _AUTH[self.protocol]
        # The launcher beside it would start a second node, for the sake of memory that can be freed by hand. With V8's
        # better WebAssembly compiler it would wait for that at its end: seconds of a core, for one parser.
        argv = [NODE, "--liftoff-only", f"{MOUNT_ROOT}/qwen-code/cli.js", "--yolo"]
        argv += ["--auth-type", auth, "--model", endpoint.model]
        url = "GOOGLE_GEMINI_BASE_URL" if prefix == "GEMINI" else f"{prefix}_BASE_URL"
        env = {
            f"{prefix}_API_KEY": endpoint.api_key,
            f"{prefix}_MODEL": endpoint.model,
            url: endpoint.base_url + path,
            "QWEN_CODE_NO_RELAUNCH": "true",
            "NODE_DISABLE_COMPILE_CACHE": "1",  # in a fresh home it is only written, for seconds
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_STREAM_IDLE_TIMEOUT_MS": str(_NEVER_MS),
            "QWEN_STREAM_MAX_LIFETIME_MS": str(_NEVER_MS),
            "QWEN_CODE_API_TIMEOUT_MS": str(_NEVER_MS),
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output_tokens),
            "QWEN_DISABLE_AUTO_TITLE": "1",
            "QWEN_CODE_DISABLE_CRON": "1",
            "NO_COLOR": "1",
        }
        return Command(tuple(argv), env, as_text(prompt).encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        return classify(result, last_words(result.stderr.decode("utf-8", "replace")))
