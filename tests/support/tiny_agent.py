"""A small coding agent for tests: one Python file that speaks chat completions and runs shell calls, as a harness."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sandlot.errors import FailureKind
from sandlot.harness import Command, Endpoint
from sandlot.sandbox import ExecResult, Layer, Sandbox

AGENT = r"""
import json, subprocess, sys, urllib.error, urllib.request

settings = json.loads(sys.argv[1])
tools = [{"type": "function", "function": {"name": "bash", "description": "Run a command", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}]
messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    headers = {"Authorization": "Bearer " + settings["key"], "Content-Type": "application/json"}
    request = urllib.request.Request(settings["url"] + "/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request) as reply:
            message = json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        print(error.read().decode(), file=sys.stderr)
        sys.exit(settings["exit_on_error"])
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
"""


@dataclass(frozen=True)
class TinyAgent:
    """`exit_on_error` is its exit status when the gateway refuses it."""

    name: str = "tiny"
    protocols: tuple[str, ...] = ("chat",)
    prompt_tokens: int = 100
    exit_on_error: int = 1

    def layers(self) -> tuple[Layer, ...]:
        return ()

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        await sandbox.write_file("/home/agent/tiny.py", AGENT.encode())

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        settings = {"url": endpoint.base_url, "key": endpoint.api_key, "exit_on_error": self.exit_on_error}
        return Command(("python3", "/home/agent/tiny.py", json.dumps(settings)), {}, prompt.encode())

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        if result.timed_out:
            return FailureKind.AGENT_TIMEOUT, "timed out"
        return (None, "") if result.ok else (FailureKind.AGENT_ERROR, f"exit {result.exit_code}")
