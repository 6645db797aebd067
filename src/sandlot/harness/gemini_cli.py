"""Gemini CLI (`@google/gemini-cli`): headless, on the Google wire."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from sandlot.errors import FailureKind
from sandlot.harness.base import Command, Endpoint, as_text
from sandlot.harness.ending import classify, last_words
from sandlot.harness.layer import MOUNT_ROOT, Progress
from sandlot.harness.npm import NODE, Part, node_layer, npm_layer
from sandlot.sandbox import ExecResult, Layer, Sandbox

_SETTINGS = "/home/agent/.gemini/settings.json"
_FLAGS = "/home/agent/.gemini/flags.json"
_POLICY = "/home/agent/.gemini/policies/sandlot.toml"
_AS_MODEL = "gemini-2.5-pro"
_WINDOW = 1_048_576
_NEVER_TOKENS = 1_000_000_000
# Its settings for these are read by nothing: tokens of tools' outputs that stay, and that must be saved at least.
_KEPT, _SAVED = 45758817, 45758818
_API_ERROR = "ApiError: "
# Tools that the vendor's models run: the policy would be asked for what they find, and could only make it up.
_RULES = """\
[[rule]]
toolName = ["google_web_search", "web_fetch"]
decision = "deny"
priority = 999
"""


def _skip(path: PurePosixPath) -> bool:
    """What only people and browsers read."""
    return path.name.endswith((".map", ".d.ts")) or path.parts[:2] in (("bundle", "docs"), ("bundle", "bundled"))


class GeminiCli:
    """Gemini CLI, headless.

    It knows its models by name, and asks another one first which to take: `as_model` is the one it takes the policy
    for. `compaction` lets it shorten a history: outputs of tools before the latest quarter of the window become notes.
    """

    name = "gemini-cli"
    protocols = ("google",)
    prompt_tokens = 12_000

    def __init__(
        self, *, as_model: str = _AS_MODEL, compaction: bool = False, progress: Progress | None = None
    ) -> None:
        self._as_model = as_model
        self._compaction = compaction
        self._progress = progress

    def layers(self) -> tuple[Layer, ...]:
        # Bundled whole; its optional packages serve terminals and keyrings.
        part = Part("@google/gemini-cli", skip=_skip)
        cli = npm_layer("gemini-cli", [part], entry="bundle/gemini.js", progress=self._progress)
        return (node_layer(self._progress), cli)

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        for path, content in ((_SETTINGS, self.settings(endpoint)), (_FLAGS, self.flags(endpoint))):
            await sandbox.write_file(path, json.dumps(content, indent=1).encode(), mode=0o600)
        await sandbox.write_file(_POLICY, _RULES.encode(), mode=0o600)

    def settings(self, endpoint: Endpoint) -> dict[str, Any]:
        """`settings.json`: no requests beside the conversation, nothing of it rewritten."""
        return {
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False, "maxAttempts": 3},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "model": {
                # A share of the window that it takes its model to have; more than the whole of it is never. It cuts
                # only before something that the user says, so with one prompt there is nothing to summarise.
                "compressionThreshold": endpoint.context_window / 2 / _WINDOW if self._compaction else 1e6,
                "disableLoopDetection": True,  # it asks a model whether there is a loop
                "skipNextSpeakerCheck": True,
            },
            "tools": {"shell": {"enableInteractiveShell": False}, "useRipgrep": False},
            "ide": {"enabled": False},
        }

    def flags(self, endpoint: Endpoint) -> dict[str, Any]:
        """What its vendor would tell it to try: when it replaces outputs of tools in the history by notes."""
        window = endpoint.context_window if self._compaction else _NEVER_TOKENS
        values = {_KEPT: window // 4, _SAVED: window // 8}
        return {"flags": [{"flagId": flag, "intValue": str(value)} for flag, value in values.items()]}

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        # V8's better WebAssembly compiler takes seconds of a core for one parser.
        argv = [NODE, "--liftoff-only", f"{MOUNT_ROOT}/gemini-cli/bundle/gemini.js", "--yolo", "--skip-trust"]
        argv += ["-m", self._as_model]
        env = {
            "GEMINI_API_KEY": endpoint.api_key,
            "GOOGLE_GEMINI_BASE_URL": endpoint.base_url,
            "GEMINI_CLI_NO_RELAUNCH": "true",
            "GEMINI_EXP": _FLAGS,
            "NO_BROWSER": "1",
            "NO_COLOR": "1",
        }
        return Command(tuple(argv), env, as_text(prompt).encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        said = result.stderr.decode("utf-8", "replace")
        return classify(result, last_words(_api_error(said) or said))


def _api_error(stderr: str) -> str:
    """The message of the last refused request: a stack trace and a report follow it."""
    for line in reversed(stderr.splitlines()):
        _, found, told = line.partition(_API_ERROR)
        if found:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                return str(json.loads(told)["error"]["message"])
    return ""
