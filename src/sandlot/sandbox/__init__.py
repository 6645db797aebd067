"""The Sandbox protocol, and one backend per file."""

from collections.abc import Mapping
from typing import Any

from sandlot.errors import ConfigError
from sandlot.registry import Registry
from sandlot.sandbox.base import (
    AGENT_USER,
    Check,
    ExecResult,
    Layer,
    Limits,
    Lists,
    Process,
    Running,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    Snapshot,
    Terminals,
)

SANDBOXES = Registry(
    "sandlot.sandboxes",
    {
        "local": "sandlot.sandbox.local:LocalBackend",
        "docker": "sandlot.sandbox.docker:DockerBackend",
        "e2b": "sandlot.sandbox.e2b:E2BBackend",
        "modal": "sandlot.sandbox.modal:ModalBackend",
        "daytona": "sandlot.sandbox.daytona:DaytonaBackend",
        "harbor": "sandlot.sandbox.harbor:HarborBackend",
        "kubernetes": "sandlot.sandbox.kubernetes:KubernetesBackend",
    },
)


def make_backend(name: str, options: Mapping[str, Any] | None = None) -> SandboxBackend:
    """A backend by its name, made with options of its own."""
    kind = SANDBOXES.get(name)
    try:
        made: SandboxBackend = kind(**(options or {}))
    except TypeError as error:
        raise ConfigError(f"the sandbox backend {name} cannot be made with these options: {error}") from None
    return made


__all__ = [
    "AGENT_USER",
    "SANDBOXES",
    "Check",
    "ExecResult",
    "Layer",
    "Limits",
    "Lists",
    "Process",
    "Running",
    "Sandbox",
    "SandboxBackend",
    "SandboxSpec",
    "Snapshot",
    "Terminals",
    "make_backend",
]
