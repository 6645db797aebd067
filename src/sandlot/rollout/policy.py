"""From a configuration to something that samples: model, chat format, engine, probed before anything is trained."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from sandlot.cache import cache_dir
from sandlot.config import RunConfig
from sandlot.engine import ENGINES, Engine, SamplingParams
from sandlot.engine.client import plain_address
from sandlot.engine.embedded_model import prepare_embedded_model
from sandlot.engine.probe import probe, require_alike
from sandlot.engine.process import EngineProcess
from sandlot.engine.replicas import ReplicatedEngine
from sandlot.errors import ConfigError, ModelError
from sandlot.gateway.call import Policy
from sandlot.rollout.format import format_of
from sandlot.rollout.scripts import idle_scripts, solution_scripts
from sandlot.tasks import Task

Say = Callable[[str], None]
"""Told in words what long step is under way."""

_PROBE = "The quick brown fox jumps over the lazy dog, and then it goes on to say that"

EMBEDDED = ("embedded", "scripted", "scripted-idle")
"""Engines that Sandlot starts itself."""


@asynccontextmanager
async def policy_of(
    config: RunConfig, tasks: Sequence[Task], *, say: Say, log: Path | None = None
) -> AsyncIterator[Policy]:
    """The policy that `config` describes, its engine started if it is an embedded one.

    Raises `ModelError` or `EngineError` when the model has no usable chat template, or the engine is down, has no token
    endpoint, or gives logprobs of another distribution than the one it samples from.
    """
    async with with_engine(config, tasks, say=say, log=log) as running, _probed(running, say) as policy:
        yield policy


def expect_policy(config: RunConfig) -> None:
    """Refuse what can be seen to be wrong before anything is installed or started."""
    if config.engine not in EMBEDDED:
        _addresses(config.engine)
        if config.model is None:
            raise ConfigError(
                f"the checkpoint that {config.engine} serves is not named, and prompts are made with its tokenizer and "
                "chat template: give --model DIR"
            )
    if config.model is not None and not config.model.is_dir():
        raise ModelError(f"{config.model} is no checkpoint directory: give one with tokenizer.json and a chat template")


@asynccontextmanager
async def with_engine(
    config: RunConfig, tasks: Sequence[Task], *, say: Say, log: Path | None = None
) -> AsyncIterator[RunConfig]:
    """The same configuration with a checkpoint directory and the URL of an engine, which is started if embedded."""
    expect_policy(config)
    model_dir = config.model
    if model_dir is None:
        say("preparing the embedded model")
        model_dir = await asyncio.to_thread(prepare_embedded_model, cache_dir(), say)
    if config.engine not in EMBEDDED:
        yield config.model_copy(update={"model": model_dir})
        return
    say(f"starting the {config.engine} engine")
    async with _embedded(config, model_dir, tasks, log) as process:
        yield config.model_copy(update={"model": model_dir, "engine": process.url, "engine_kind": "vllm"})


@asynccontextmanager
async def _probed(config: RunConfig, say: Say) -> AsyncIterator[Policy]:
    model_dir = config.model
    assert model_dir is not None
    fmt = await asyncio.to_thread(format_of, model_dir, config.chat)
    async with AsyncExitStack() as stack:
        engine = engine_at(config.engine, config.engine_kind, config.served_model)
        stack.push_async_callback(engine.close)
        info = await engine.info()
        if info.vocab_size is not None and fmt.vocab_size > info.vocab_size:
            raise ModelError(
                f"the tokenizer of {model_dir} has {fmt.vocab_size} tokens, the engine's model {info.vocab_size}: "
                "give the checkpoint directory of the model that the engine serves"
            )
        sampling = SamplingParams(**config.sampling.model_dump())
        say("probing the engine's logprobs")
        mode = await _probe_replicas(engine, sampling, fmt.encode(_PROBE))
        context = min(info.max_context, config.limits.context or info.max_context)
        yield Policy(engine, fmt, info.model, sampling, context, mode)


async def _probe_replicas(engine: ReplicatedEngine, sampling: SamplingParams, text: Sequence[int]) -> str:
    """What all replicas' logprobs are. One that goes and comes back is probed again before it serves."""
    modes = {await probe(replica, sampling, prompt_ids=text) for replica in engine.replicas.values()}
    if len(modes) > 1:
        raise ModelError(
            f"the replicas give logprobs of different kinds ({', '.join(sorted(modes))}): start all with the same "
            "options"
        )
    (mode,) = modes

    async def examine(replica: Engine, other: Engine | None) -> None:
        found = await probe(replica, sampling, prompt_ids=text)
        if mode not in (found, "unknown"):
            raise ModelError(f"its logprobs are {found}, those of the others {mode}: start it with the same options")
        if other is not None and found != "unknown":
            await require_alike(replica, other, text)

    engine.examine = examine
    return mode


def engine_at(urls: str, kind: str, served_model: str | None = None) -> ReplicatedEngine:
    """The client of one engine, or of several replicas where `urls` has commas."""
    addresses = _addresses(urls)
    make = ENGINES.get(kind)
    engines: dict[str, Engine] = {plain_address(address): make(address, served_model) for address in addresses}
    return ReplicatedEngine(engines)


def _addresses(urls: str) -> list[str]:
    addresses = [address.strip() for address in urls.split(",") if address.strip()]
    if not addresses or not all("://" in address for address in addresses):
        raise ConfigError(
            f"engine {urls!r} is neither a URL (or several, with commas) nor one of {', '.join(EMBEDDED)}"
        )
    if len(set(map(plain_address, addresses))) < len(addresses):
        raise ConfigError(f"engine {urls!r} names an address twice")
    return addresses


@asynccontextmanager
async def _embedded(
    config: RunConfig, model_dir: Path, tasks: Sequence[Task], log: Path | None
) -> AsyncIterator[EngineProcess]:
    if config.engine == "embedded":
        async with EngineProcess(model_dir, log_file=log) as process:
            yield process
        return
    scripts = solution_scripts(tasks) if config.engine == "scripted" else idle_scripts(tasks)
    async with AsyncExitStack() as stack:
        with tempfile.TemporaryDirectory(prefix="sandlot-scripts-") as scratch:
            file = Path(scratch) / "scripts.json"
            file.write_text(json.dumps(scripts), "utf-8")
            process = EngineProcess(model_dir, kind="scripted", script=file, log_file=log)
            await stack.enter_async_context(process)  # it has read them when it serves
        yield process
