"""The Sandbox protocol, and one backend per file."""

from collections.abc import Mapping
from typing import Any, cast

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
from sandlot.sandbox.options import checked

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
    """A backend by its name, made with options of its own; `ConfigError` names those that it has."""
    kind = SANDBOXES.get(name)
    if not options:
        return cast("SandboxBackend", kind())
    try:
        return cast("SandboxBackend", kind(**checked(name, kind, options)))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"the sandbox backend {name} cannot be made with these options: {error}") from None


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
