"""The Harness protocol, and one agent per file."""

from sandlot.harness.base import Command, Endpoint, Harness
from sandlot.registry import Registry

HARNESSES = Registry(
    "sandlot.harnesses",
    {
        "pi": "sandlot.harness.pi:Pi",
        "claude-code": "sandlot.harness.claude_code:ClaudeCode",
        "codex": "sandlot.harness.codex:Codex",
        "opencode": "sandlot.harness.opencode:OpenCode",
        "qwen-code": "sandlot.harness.qwen_code:QwenCode",
        "gemini-cli": "sandlot.harness.gemini_cli:GeminiCli",
        "mini-swe-agent": "sandlot.harness.mini_swe_agent:MiniSweAgent",
    },
)

__all__ = ["HARNESSES", "Command", "Endpoint", "Harness"]
