"""Codex (`@openai/codex`): the native binary in exec mode, on the Responses wire."""

from __future__ import annotations

import json
import platform
from typing import Any

from sandlot.errors import FailureKind
from sandlot.harness.base import Command, Endpoint
from sandlot.harness.ending import classify, events_backwards, last_words
from sandlot.harness.layer import MOUNT_ROOT, Progress, with_path
from sandlot.harness.npm import Part, cpu, npm_layer
from sandlot.sandbox import ExecResult, Layer, Sandbox

_HOME = "/home/agent/.codex"
_PROVIDER = "sandlot"
_KEY = "SANDLOT_API_KEY"
_NEVER_MS = 86_400_000
_NEVER_TOKENS = 1_000_000_000
# What would ask other servers, or go on asking a server that is gone.
_DISABLED = ("plugins", "apps", "unbounded_connection_retries")


class Codex:
    """Codex in exec mode.

    It writes its prompt and chooses its tools by the model's name: `as_model`, such as `gpt-5.5`, makes it take the
    policy for that model; None tells it the policy's own name. `compaction` lets it summarise a long history.
    """

    name = "codex"
    protocols = ("responses",)
    prompt_tokens = 10_500

    def __init__(
        self, *, as_model: str | None = None, compaction: bool = False, progress: Progress | None = None
    ) -> None:
        self._as_model = as_model
        self._compaction = compaction
        self._progress = progress

    def layers(self) -> tuple[Layer, ...]:
        part = Part(f"@openai/codex-linux-{cpu()}", skip=lambda path: "voice" in path.parts)
        return (npm_layer("codex", [part], entry=f"{_vendor()}/bin/codex", progress=self._progress),)

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        await sandbox.write_file(f"{_HOME}/config.toml", self.config(endpoint).encode(), mode=0o600)

    def config(self, endpoint: Endpoint) -> str:
        """`config.toml`: one provider, nobody told of anything, no time limit on a slow engine."""
        window = endpoint.context_window
        compact_at = window - endpoint.max_output_tokens - 1024 if self._compaction else _NEVER_TOKENS
        top = {
            "model": self._as_model or endpoint.model,
            "model_provider": _PROVIDER,
            "model_context_window": window if self._compaction else _NEVER_TOKENS,
            "model_auto_compact_token_limit": max(window // 2, compact_at),
            # Counted so, the limit is what is written there; else never more than nine tenths of what it takes to be
            # the model's window. It compacts at 19 of 20 parts of that in any case.
            "model_auto_compact_token_limit_scope": "total" if self._compaction else "body_after_prefix",
            "check_for_update_on_startup": False,
        }
        provider = {
            "name": _PROVIDER,
            "base_url": f"{endpoint.base_url}/v1",
            "env_key": _KEY,
            "wire_api": "responses",
            "request_max_retries": 2,
            "stream_max_retries": 2,
            "stream_idle_timeout_ms": _NEVER_MS,
        }
        tables: dict[str, dict[str, Any]] = {
            "": top,
            "analytics": {"enabled": False},
            f"model_providers.{_PROVIDER}": provider,
        }
        # A JSON scalar is a TOML scalar.
        return "\n".join(
            (f"[{table}]\n" if table else "") + "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows.items())
            for table, rows in tables.items()
        )

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        argv = [f"{MOUNT_ROOT}/codex/{_vendor()}/bin/codex", "exec", "--json", "--skip-git-repo-check"]
        argv.append("--dangerously-bypass-approvals-and-sandbox")
        for feature in _DISABLED:
            argv += ["--disable", feature]
        # Its own home, for codex looks at $HOME; the prompt is read from stdin.
        env = {"CODEX_HOME": _HOME, _KEY: endpoint.api_key, "NO_COLOR": "1"}
        return Command(with_path(f"codex/{_vendor()}/codex-path", [*argv, "-"]), env, prompt.encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        return classify(result, last_words(_error(result.stdout) or result.stderr.decode("utf-8", "replace")))


def _vendor() -> str:
    return f"vendor/{platform.machine()}-unknown-linux-musl"


def _error(stdout: bytes) -> str:
    """The message of the last error event in the JSON lines."""
    for event in events_backwards(stdout, "error"):
        if event.get("type") == "turn.failed" and isinstance(error := event.get("error"), dict):
            return str(error.get("message") or "")
        if event.get("type") == "error":
            return str(event.get("message") or "")
    return ""
