"""The contract of a harness: how one agent CLI is installed, configured and run unattended in a sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sandlot.errors import ConfigError, FailureKind
from sandlot.sandbox import ExecResult, Layer, Sandbox


@dataclass(frozen=True)
class Endpoint:
    """Where the agent finds its model: as seen from inside the sandbox.

    `base_url` has no trailing slash and no `/v1`; `context_window` and `max_output_tokens` in tokens.
    """

    base_url: str
    api_key: str
    model: str
    context_window: int
    max_output_tokens: int


@dataclass(frozen=True)
class Command:
    """What to run: `argv` in `cwd` (None: the task's workdir) with `env` on top of the sandbox's, `stdin` given."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    cwd: str | None = None


class Harness(Protocol):
    """One agent CLI. Data plus little code; no state."""

    name: str
    protocols: tuple[str, ...]
    """Wires it can speak, the preferred one first: `anthropic`, `chat`, `responses`, `google`."""
    prompt_tokens: int
    """About how many tokens its own first prompt takes: what a context window must exceed."""

    def layers(self) -> tuple[Layer, ...]:
        """Install what is needed in pinned versions (once per machine, under a lock) and name the shared layers.

        Blocking: run it in a thread. Raises `ConfigError` when it cannot be installed, with the cure.
        """
        ...

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        """Write the CLI's configuration files into the agent user's home."""
        ...

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        """The unattended run of one prompt."""
        ...

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        """What the end of the CLI means: a failure kind and a detail, or None for an ordinary end."""
        ...


def wires(agent: str, protocol: str, spoken: Iterable[str]) -> tuple[str, ...]:
    """The wires that an agent speaks, the chosen one first; `ConfigError` for one that it does not speak."""
    known = list(spoken)
    if protocol not in known:
        raise ConfigError(f"{agent} does not speak {protocol!r}; it speaks {', '.join(known)}")
    return (protocol, *(other for other in known if other != protocol))


def as_text(prompt: str) -> str:
    """A prompt that begins with `/` as text: some CLIs would call a command of theirs instead of the model."""
    return f"\n{prompt}" if prompt.startswith("/") else prompt
