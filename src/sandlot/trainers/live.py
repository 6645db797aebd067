"""Episodes on demand inside a trainer's process: one policy, one sandbox backend, one run directory, many episodes."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import time
import tomllib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sandlot.config import RunConfig, load_config
from sandlot.engine import SamplingParams
from sandlot.errors import ConfigError, FailureKind, SandlotError, TaskError
from sandlot.gateway import Gateway, GatewayLimits
from sandlot.gateway.call import Policy
from sandlot.harness import Command, Endpoint, Harness
from sandlot.harness.chosen import chosen
from sandlot.rollout.episode import Episode, EpisodeRunner
from sandlot.rollout.outcome import EpisodeResult
from sandlot.rollout.policy import policy_of
from sandlot.rollout.progress import Silent
from sandlot.rollout.run import concurrency_of, expect_room
from sandlot.sandbox import ExecResult, Layer, Sandbox, SandboxBackend, make_backend
from sandlot.tasks import Task, load_tasks
from sandlot.train.episodes import abandoned
from sandlot.trajectory.rundir import RunDir
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.store import read_samples

_WINDOW = 32
"""Episodes over which the share of infrastructure failures is looked at."""


class HookConfig(BaseModel):
    """The `[trainer]` table of a rollout file: what is not a setting of a run.

    `out` is where run directories are made; `engine_kind` the engine's protocol if not the trainer's usual one;
    `harness_arguments` go to the agent's command line, at its end; `abandoned` says whether answers are trained that
    the agent asked for again and did not go on from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    out: Path
    engine_kind: str | None = None
    harness_arguments: list[str] = []
    abandoned: Literal["drop", "train"] = "drop"


def read_rollout_file(path: Path) -> tuple[RunConfig, HookConfig]:
    """The run settings and the `[trainer]` table of a TOML file. `ConfigError` names what is wrong."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"the rollout file {path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from error
    try:
        hook = HookConfig(**values.pop("trainer", {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: trainer.{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error
    return load_config(None, values), hook


class WithArguments:
    """A harness whose agent gets more arguments at the end of its command line."""

    def __init__(self, inner: Harness, arguments: tuple[str, ...]) -> None:
        self.inner = inner
        self.arguments = arguments
        self.name = inner.name
        self.protocols = inner.protocols
        self.prompt_tokens = inner.prompt_tokens

    def layers(self) -> tuple[Layer, ...]:
        return self.inner.layers()

    async def configure(self, sandbox: Sandbox, endpoint: Endpoint) -> None:
        await self.inner.configure(sandbox, endpoint)

    def command(self, prompt: str, endpoint: Endpoint) -> Command:
        command = self.inner.command(prompt, endpoint)
        return replace(command, argv=(*command.argv, *self.arguments))

    def failure(self, result: ExecResult) -> tuple[FailureKind | None, str]:
        return self.inner.failure(result)


def harness_of(config: RunConfig, hook: HookConfig) -> Harness:
    """The one harness of a trainer's rollouts, with its options. `ConfigError` names what does not fit."""
    if len(config.harness) != 1:
        raise ConfigError(f"a trainer takes one harness, not {', '.join(config.harness)}")
    harness = chosen(config.harness[0], _silent)
    return WithArguments(harness, tuple(hook.harness_arguments)) if hook.harness_arguments else harness


@dataclass(frozen=True)
class Done:
    """A finished episode: its result and its audited samples (none when it says nothing about the policy)."""

    result: EpisodeResult
    samples: tuple[Sample, ...]


@dataclass
class LiveRollouts:
    """Runs episodes when asked, as many at once as the configuration says. Lives on one event loop.

    Sampling may differ from episode to episode (training and evaluation): there is a gateway for each kind.
    """

    config: RunConfig
    policy: Policy
    backend: SandboxBackend
    run: RunDir
    harness: Harness
    layers: tuple[Layer, ...]
    tasks: Mapping[str, Task]
    stack: AsyncExitStack
    abandoned: Literal["drop", "train"] = "drop"
    weight_version: str | None = None
    _slots: asyncio.Semaphore = field(init=False)
    _gateways: dict[SamplingParams, Gateway] = field(default_factory=dict)
    _attempts: dict[str, int] = field(default_factory=dict)
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(concurrency_of(self.config))

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: RunConfig, hook: HookConfig, *, policy: Policy | None = None
    ) -> AsyncIterator[LiveRollouts]:
        """Load tasks, install the agent, reach and probe the engine. Raises what makes every episode impossible."""
        harness = harness_of(config, hook)
        tasks = await asyncio.to_thread(load_tasks, config.tasks)
        layers = await asyncio.to_thread(harness.layers)
        async with AsyncExitStack() as stack:
            run = stack.enter_context(_run_directory(hook.out, config))
            if policy is None:
                log = run.path / "logs" / "engine.log"
                policy = await stack.enter_async_context(policy_of(config, tasks, say=_silent, log=log))
            expect_room(harness, policy.max_context)
            backend = make_backend(config.sandbox, config.sandbox_options)
            stack.push_async_callback(backend.close)
            await backend.sweep()
            by_id = {task.id: task for task in tasks}
            yield cls(config, policy, backend, run, harness, layers, by_id, stack, hook.abandoned)

    @property
    def sampling(self) -> SamplingParams:
        """What episodes are sampled with unless they ask for something else."""
        return self.policy.sampling

    def task(self, task_id: str) -> Task:
        """The task a trainer's row names; `TaskError` when there is none."""
        if task_id not in self.tasks:
            raise TaskError(f"{self.config.tasks} has no task {task_id!r}, which the trainer's data names")
        return self.tasks[task_id]

    async def episode(self, task: Task, sampling: SamplingParams | None = None) -> Done:
        """Run one attempt. What breaks is in the result; a cancellation from outside ends it at once.

        Raises `SandlotError` when so many of the last episodes were lost to infrastructure that going on is useless.
        """
        async with self._slots:
            name = self.config.harness[0]
            group = Episode(task, name, 0).group_id
            attempt = self._attempts[group] = self._attempts.get(group, -1) + 1
            gateway = await self._gateway(sampling or self.policy.sampling)
            runner = EpisodeRunner(
                self.config, gateway, self.backend, self.run, {name: self.harness}, {name: self.layers}, Silent()
            )
            result = await runner(Episode(task, name, attempt))
        self._judge(result)
        samples: tuple[Sample, ...] = ()
        if result.samples and result.reward is not None:
            path = self.run.samples_path(result.episode_id)
            rows = await asyncio.to_thread(lambda: list(read_samples(path)))
            samples = tuple(row for row in rows if self.abandoned == "train" or not abandoned(row))
        return Done(result, samples)

    async def announce(self, weight_version: str) -> None:
        """Turns from now on carry `weight_version`, where the engine does not name one itself."""
        self.weight_version = weight_version
        for gateway in self._gateways.values():
            gateway.resume(weight_version)

    async def _gateway(self, sampling: SamplingParams) -> Gateway:
        if sampling not in self._gateways:
            gateway = Gateway(replace(self.policy, sampling=sampling), limits=GatewayLimits())
            self._gateways[sampling] = gateway  # before any await: two episodes must not make two
            if self.weight_version is not None:
                gateway.resume(self.weight_version)
            await self.stack.enter_async_context(gateway)
        return self._gateways[sampling]

    def _judge(self, result: EpisodeResult) -> None:
        self._recent.append(result.failure is FailureKind.INFRA_ERROR)
        lost = sum(self._recent)
        if len(self._recent) == _WINDOW and lost > self.config.max_infra_share * _WINDOW:
            raise SandlotError(
                f"{lost} of the last {_WINDOW} episodes were lost to infrastructure, so training stops; "
                f"the last said: {result.detail}"
            )


def _silent(text: str) -> None: ...


def _run_directory(out: Path, config: RunConfig) -> RunDir:
    """A directory of this process's own: trainers have several, and a restarted one asks for other episodes."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"
    facts = {"sandlot": version("sandlot"), "python": platform.python_version()}
    out.mkdir(parents=True, exist_ok=True)
    number = 0
    while (path := out / (f"{name}-{number}" if number else name)).exists():
        number += 1
    return RunDir.create_or_continue(path, config.model_dump(mode="json"), facts=facts)
