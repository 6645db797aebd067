"""The Harness protocol, and one agent per file."""

from sandlot.harness.base import Command, Endpoint, Harness
from sandlot.registry import Registry

HARNESSES = Registry(
    "sandlot.harnesses",
    {"pi": "sandlot.harness.pi:Pi", "claude-code": "sandlot.harness.claude_code:ClaudeCode"},
)

__all__ = ["HARNESSES", "Command", "Endpoint", "Harness"]
