"""The scripted policy as a backend of the server: it gets token ids and gives token ids, like any model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sandlot.engine.backend import BackendInfo, Completion, Request
from sandlot.engine.base import VersionSpan
from sandlot.engine.scripted.policy import Markup, ScriptedPolicy, logprob
from sandlot.engine.scripted.script import read_scripts
from sandlot.errors import ModelError


class ScriptedBackend:
    """Serves a script file in the token ids of a model directory, of which it needs tokenizer and template only.

    `delay_s` is waited before each answer, so that tests can act while a request is in work.
    """

    def __init__(self, policy: ScriptedPolicy, info: BackendInfo, delay_s: float = 0.0) -> None:
        self.info = info
        self.weight_version = "0"
        self._policy = policy
        self._delay_s = delay_s
        self._ends: dict[asyncio.Event, str] = {}

    @classmethod
    def load(
        cls, model_dir: Path, script_file: Path, *, max_context: int | None = None, delay_s: float = 0.0
    ) -> ScriptedBackend:
        tokenizer_file = model_dir / "tokenizer.json"
        if not tokenizer_file.exists():
            raise ModelError(f"{model_dir} holds no tokenizer.json: give a Hugging Face model directory")
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        config = _read(model_dir / "tokenizer_config.json")
        limit = _read(model_dir / "config.json").get("max_position_embeddings") or config.get("model_max_length", 8192)
        policy = ScriptedPolicy(tokenizer, read_scripts(script_file), _markup(model_dir, tokenizer, config))
        info = BackendInfo(
            engine="scripted",
            model="scripted",
            version=version("sandlot"),
            max_context=min(int(limit), max_context or int(limit)),
            vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        )
        return cls(policy, info, delay_s)

    async def generate(self, request: Request) -> Completion:
        ended = asyncio.Event()
        self._ends[ended] = request.request_id
        try:
            ids = await asyncio.to_thread(self._policy.reply, request.token_ids)
            await self._wait(ended)
        finally:
            del self._ends[ended]
        ids, reason, stop = _cut(ids, request)
        if ended.is_set():
            ids, reason, stop = [], "abort", None
        before = (request.token_ids[-1], *ids)
        values = [logprob(b, i, request.sampling.temperature) for b, i in zip(before, ids, strict=False)]
        if request.sampling.top_k == 1:
            values = [0.0] * len(ids)  # there was nothing else to choose
        scored = [None, *(logprob(b, i) for b, i in zip(request.token_ids, request.token_ids[1:], strict=False))]
        return Completion(
            output_ids=ids,
            logprobs=values,
            ranks=[None] * len(ids),
            finish_reason=reason,
            stop_reason=stop,
            versions=[VersionSpan(self.weight_version, 0, len(ids))] if ids else [],
            prompt_logprobs=scored if request.score_prompt else None,
        )

    async def _wait(self, ended: asyncio.Event) -> None:
        if self._delay_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self._delay_s)

    def abort(self, request_id: str) -> None:
        for event, running in self._ends.items():
            if running == request_id:
                event.set()

    def running(self) -> int:
        return len(self._ends)

    async def close(self) -> None:
        for event in self._ends:
            event.set()


def _cut(ids: list[int], request: Request) -> tuple[list[int], str, int | None]:
    """End a turn where the request says so: at one of its stop tokens, or at its `max_tokens`."""
    sampling = request.sampling
    for at, i in enumerate(ids[:-1]):
        if i in sampling.stop_token_ids:
            return ids[: at + 1], "stop", i
        if at + 1 == sampling.max_tokens:
            return ids[: at + 1], "length", None
    return ids, "stop", None


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ModelError(f"{path} is not valid JSON ({e})") from e
    return value if isinstance(value, dict) else {}


def _markup(model_dir: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Markup:
    """The assistant header, as the difference that the generation prompt makes, and the token that ends a turn."""
    eos = config.get("eos_token")
    stop = tokenizer.token_to_id(eos["content"] if isinstance(eos, dict) else str(eos))
    if stop is None:
        raise ModelError(f"{model_dir / 'tokenizer_config.json'} names no eos_token of the vocabulary")
    file = model_dir / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if not isinstance(template, str):
        raise ModelError(f"{model_dir} has no chat template: add chat_template.jinja")
    render = _renderer(template, config, model_dir)
    bare, full = render(False), render(True)
    # A thinking block that the generation prompt opens is no part of the header; turns in the history may lack it.
    header = full.removeprefix(bare).split("<think>")[0].rstrip() if full.startswith(bare) else ""
    ids = tokenizer.encode(header, add_special_tokens=False).ids
    if not ids:
        raise ModelError(f"{model_dir}: the chat template writes no assistant header for the generation prompt")
    return Markup(header_ids=tuple(ids), stop_id=stop)


def _renderer(template: str, config: dict[str, Any], model_dir: Path) -> Callable[[bool], str]:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    names = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    messages = [{"role": "user", "content": "x"}]

    def render(generation_prompt: bool) -> str:
        try:
            return environment.from_string(template).render(
                messages=messages, tools=None, add_generation_prompt=generation_prompt, **names
            )
        except jinja2.TemplateError as e:
            raise ModelError(f"{model_dir}: the chat template cannot be rendered ({e})") from e

    return render
