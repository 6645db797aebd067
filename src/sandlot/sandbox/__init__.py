"""The Sandbox protocol, and one backend per file."""

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
]
