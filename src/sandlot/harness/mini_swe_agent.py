"""mini-SWE-agent (`mini-swe-agent`): one tool, a short prompt, litellm underneath, nothing streamed."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from sandlot.errors import ConfigError, FailureKind
from sandlot.harness.base import Command, Endpoint, wires
from sandlot.harness.ending import classify, last_words
from sandlot.harness.layer import MOUNT_ROOT, Progress
from sandlot.harness.wheels import wheel_layer
from sandlot.sandbox import ExecResult, Layer, Sandbox
from sandlot.sandbox.host_python import host_python

_VERSION = "2.4.6"
_ROOT = f"{MOUNT_ROOT}/mini-swe-agent"
_HOME = "/home/agent/.config/mini-swe-agent"
_NEVER = "86400"
"""Seconds: longer than any episode."""
_WIRES = {
    "chat": ("openai", "OPENAI_API_KEY", "OPENAI_API_BASE", "/v1"),
    "anthropic": ("anthropic", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", ""),
    "google": ("gemini", "GEMINI_API_KEY", "GEMINI_API_BASE", "/v1beta"),
}
_START = '''\
"""Starts mini-SWE-agent from the wheels beside this file, with the task from stdin."""

import os
import sys

if sys.version_info[:2] != ({version}):
    sys.exit(
        "mini-SWE-agent is installed for Python {python}, and this image has another: "
        "choose mini-swe-agent:python=%d.%d" % sys.version_info[:2]
    )
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
sys.argv += ["--task", sys.stdin.read()]

from minisweagent.run.mini import app

try:
    app()
except Exception as error:  # in few words, instead of a traceback with all that was in sight
    sys.exit(f"{{type(error).__name__}}: {{error}}")
'''


class MiniSweAgent:
    """mini-SWE-agent, unattended. `protocol` chooses the wire.

    `python` is the version of the image's `python3`; None stands for this machine's, which the `host` image has.
    """

    name = "mini-swe-agent"
    prompt_tokens = 1_100

    def __init__(self, protocol: str = "chat", *, python: str | None = None, progress: Progress | None = None) -> None:
        self.protocol = protocol
        self.protocols = wires("mini-SWE-agent", protocol, _WIRES)
        self._python = python
        self._progress = progress

    def layers(self) -> tuple[Layer, ...]:
        python = self._python or _host_python()
        start = _START.format(python=python, version=python.replace(".", ", "))
        layer = wheel_layer(
            self.name,
            Path(__file__).with_name("mini_swe_agent.txt").read_text(),
            version=_VERSION,
            python=python,
            files={"start.py": start},
            drop=("litellm/proxy/_experimental",),
            progress=self._progress,
        )
        return (layer,)

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        """Nothing: it is configured by its arguments and its environment."""

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        provider, key, url, path = _WIRES[self.protocol]
        argv = ["python3", "-I", "-S", f"{_ROOT}/start.py", "--yolo", "--exit-immediately", "--cost-limit", "0"]
        argv += ["--model", f"{provider}/{endpoint.model}", "--output", f"{_HOME}/trajectory.json"]
        argv += ["--config", "mini.yaml"]
        for name, value in (("timeout", _NEVER), ("max_tokens", str(endpoint.max_output_tokens)), ("max_retries", "0")):
            argv += ["--config", f"model.model_kwargs.{name}={value}"]
        env = {
            key: endpoint.api_key,
            url: endpoint.base_url + path,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # it would ask a spent session again; the gateway retries
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch the prices
            "NO_COLOR": "1",
        }
        return Command(tuple(argv), env, prompt.encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        return classify(result, last_words(result.stderr.decode("utf-8", "replace")))


@cache
def _host_python() -> str:
    program = host_python()
    done = subprocess.run(
        [program, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"{program} does not run: repair it, or say mini-swe-agent:python=VERSION for your image's")
    return done.stdout.strip()
