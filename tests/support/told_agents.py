"""What a told policy says to each agent CLI so that it works: every CLI names its shell tool in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sandlot.harness import Harness
from support.policy import call_text

_SHELLS = {
    "claude-code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "gemini-cli": ("run_shell_command", "command"),
    "qwen-code": ("run_shell_command", "command"),
}


def shell_call(harness: Harness, command: str, *, before: str = "") -> str:
    """A call of the CLI's shell tool."""
    tool, argument = _SHELLS.get(harness.name, ("bash", "command"))
    return call_text(tool, {argument: command}, before=before)


def broken_call(harness: Harness, *, before: str = "") -> str:
    """A call of the CLI's shell tool whose arguments end in the middle."""
    tool, argument = _SHELLS.get(harness.name, ("bash", "command"))
    return call_text(tool, f'{{"{argument}": "echo', before=before)


def thinking(text: str, then: str) -> str:
    return f"<think>\n{text}\n</think>\n\n{then}"


def farewell(harness: Harness) -> str:
    """The last turn: mini-SWE-agent ends by a command, all others by saying nothing but text."""
    if harness.name == "mini-swe-agent":
        return shell_call(harness, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", before="All done.\n")
    return "  All done.\n\n"


def in_turn(said: Sequence[str]) -> Callable[[list[int], int], str]:
    """Say these one after another, and the last one for ever."""
    return lambda prompt, number: said[min(number, len(said) - 1)]
