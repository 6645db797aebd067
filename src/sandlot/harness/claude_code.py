"""Claude Code (`@anthropic-ai/claude-code`): the native binary in print mode, its history left append-only."""

from __future__ import annotations

from sandlot.errors import FailureKind
from sandlot.harness.base import Command, Endpoint, as_text
from sandlot.harness.ending import classify, events_backwards, last_words
from sandlot.harness.layer import MOUNT_ROOT, Progress
from sandlot.harness.npm import Part, cpu, npm_layer
from sandlot.sandbox import ExecResult, Layer, Sandbox

_CLI = f"{MOUNT_ROOT}/claude-code/claude"
_NEVER = "86400000"
"""Milliseconds: longer than any episode. How long to wait is the gateway's to decide."""
_HUGE_WINDOW = "1000000"
_BARE_BELOW = 64_000
"""Tokens of context below which the full prompt (about 20k tokens) leaves too little room to work."""
# A web search would ask the policy for results, which it could only make up; a fetch would ask the vendor first.
_WEB = ("--disallowedTools", "WebSearch", "--settings", '{"skipWebFetchPreflight": true}')

_ENV = {
    "IS_SANDBOX": "1",  # the root of a sandbox may skip permissions
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    # What would make the same history arrive in other words the next time.
    "DISABLE_PROMPT_CACHING": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "ENABLE_TOOL_SEARCH": "false",
    "CLAUDE_CODE_MAX_RETRIES": "2",
    "API_TIMEOUT_MS": _NEVER,
    "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": _NEVER,
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": _NEVER,
    "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": _NEVER,
}


class ClaudeCode:
    """Claude Code in print mode.

    `bare` is its small form (3 tools, about 1k tokens of prompt); None chooses it where the context is small.
    `compaction` lets it summarise a history that grows too long; without it such a session ends. `background` lets
    commands and sub-agents run beside it; without it each is waited for.
    """

    name = "claude-code"
    protocols = ("anthropic",)

    def __init__(
        self,
        *,
        bare: bool | None = None,
        compaction: bool = False,
        background: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._bare = bare
        self._compaction = compaction
        self._background = background
        self._progress = progress
        self.prompt_tokens = 19_500 if bare is False else 1_000

    def layers(self) -> tuple[Layer, ...]:
        part = Part(f"@anthropic-ai/claude-code-linux-{cpu()}")
        return (npm_layer("claude-code", [part], entry="claude", progress=self._progress),)

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        """Nothing: Claude Code is configured by its environment alone."""

    def is_bare(self, endpoint: Endpoint) -> bool:
        return endpoint.context_window < _BARE_BELOW if self._bare is None else self._bare

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        argv = [_CLI, "--print", "--dangerously-skip-permissions", "--model", endpoint.model]
        argv += ["--output-format", "stream-json", "--verbose", *_WEB]
        if self.is_bare(endpoint):
            argv.append("--bare")
        env = {
            **_ENV,
            "ANTHROPIC_BASE_URL": endpoint.base_url,
            "ANTHROPIC_API_KEY": endpoint.api_key,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": endpoint.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": endpoint.model,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output_tokens),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context_window),
        }
        if not self._background:
            env["CLAUDE_CODE_DISABLE_BACKGROUND_TASKS"] = "1"
        if not self._compaction:
            # A fifth short of the window it knows of, it would give up by itself: the gateway decides.
            env |= {"DISABLE_AUTO_COMPACT": "1", "CLAUDE_CODE_MAX_CONTEXT_TOKENS": _HUGE_WINDOW}
        # The prompt goes through stdin: as an argument its length is bounded, and a leading `-` means something.
        return Command(tuple(argv), env, as_text(prompt).encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        ends = (event for event in events_backwards(result.stdout, "result") if event.get("type") == "result")
        final = next(ends, {})
        said = str(final.get("result") or final.get("subtype") or "")
        return classify(result, last_words(said or result.stderr.decode("utf-8", "replace")))
