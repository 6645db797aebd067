"""Many episodes at once, each on its own: none waits for another, and one that breaks touches no other."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path

from sandlot.config import RunConfig
from sandlot.errors import ConfigError, FailureKind, SandlotError
from sandlot.gateway import Gateway, GatewayLimits
from sandlot.grading.runtime import runtime_layers
from sandlot.harness import Harness
from sandlot.harness.chosen import chosen
from sandlot.rollout.continued import expect_same_model, open_run
from sandlot.rollout.episode import Episode, EpisodeRunner
from sandlot.rollout.outcome import EpisodeResult
from sandlot.rollout.policy import Say, expect_policy, policy_of
from sandlot.rollout.progress import Progress, Silent
from sandlot.sandbox import Layer, make_backend
from sandlot.tasks import Task, load_tasks
from sandlot.trajectory.rundir import EpisodeState

MAY_DIFFER = ("concurrency", "retries", "max_infra_share")
"""Settings that may change when a run is continued: no result depends on them."""
_NOT_THE_POLICYS = (FailureKind.INFRA_ERROR, FailureKind.ABORTED)
"""Failures that say nothing about the policy: a run that is continued tries these episodes again."""
_ENOUGH_TO_JUDGE = 8
"""Finished episodes before a share of infrastructure failures means anything."""
_ROOM = 512
"""Tokens of context an agent needs beyond its own first prompt."""


def planned(config: RunConfig) -> tuple[list[Task], list[Episode]]:
    """The tasks of a run and its episodes; first attempts come first. `ConfigError` when a name fits no task."""
    tasks = load_tasks(config.tasks)
    if unknown := set(config.only) - {task.id for task in tasks}:
        raise ConfigError(f"there is no task called {sorted(unknown)[0]!r} in {config.tasks}")
    tasks = [task for task in tasks if not config.only or task.id in config.only]
    specs = [
        Episode(task, harness, attempt)
        for attempt in range(config.attempts)
        for harness in config.harness
        for task in tasks
    ]
    return tasks, specs


def concurrency_of(config: RunConfig) -> int:
    """Episodes at once: what was asked for, else as many as the cores carry. Agents mostly wait for the engine."""
    return config.concurrency or max(2, 4 * len(os.sched_getaffinity(0)))


async def rollout(
    config: RunConfig, out: str | Path, *, progress: Progress | None = None, say: Say = lambda text: None
) -> list[EpisodeResult]:
    """Run all episodes of `config` into the run directory `out`, or those that are still missing there.

    Returns the results of all finished episodes, also of earlier starts. Raises what makes the whole run
    impossible; an episode's own failure is in its result. `progress` is told of episodes, `say` what is prepared.
    """
    progress = progress or Silent()
    tasks, specs = await asyncio.to_thread(planned, config)
    facts = {"sandlot": version("sandlot"), "python": platform.python_version(), "kernel": platform.release()}
    harnesses = {name: chosen(name, say) for name in config.harness}
    expect_policy(config)
    with open_run(Path(out), config, facts=facts, may_differ=MAY_DIFFER) as run:
        await asyncio.to_thread(run.recover)
        if lost := [row["episode_id"] for row in run.results() if row["failure"] in _NOT_THE_POLICYS]:
            run.begin_again(lost)
        missing = [spec for spec in specs if run.state(spec.id) is not EpisodeState.FINISHED]
        progress.begin(len(specs), len(specs) - len(missing))
        if missing:
            async with AsyncExitStack() as stack:
                backend = make_backend(config.sandbox, config.sandbox_options)
                stack.push_async_callback(backend.close)
                layers = await _install(harnesses, {spec.task.image for spec in missing}, say)
                log = run.path / "logs" / "engine.log"
                policy = await stack.enter_async_context(policy_of(config, tasks, say=say, log=log))
                expect_same_model(run, policy.model, policy.max_context)
                for harness in harnesses.values():
                    expect_room(harness, policy.max_context)
                await backend.sweep()
                gateway = await stack.enter_async_context(Gateway(policy, limits=GatewayLimits()))
                say("running")
                runner = EpisodeRunner(config, gateway, backend, run, harnesses, layers, progress)
                await _run_all(runner, missing)
        return [EpisodeResult.from_row(row) for row in run.results()]


async def _run_all(runner: EpisodeRunner, specs: Sequence[Episode]) -> None:
    slots = asyncio.Semaphore(concurrency_of(runner.config))
    lost: list[EpisodeResult] = []
    finished = 0

    async def one(spec: Episode) -> None:
        nonlocal finished
        async with slots:
            result = await runner(spec)
        finished += 1
        if result.failure is FailureKind.INFRA_ERROR:
            lost.append(result)
        if finished >= _ENOUGH_TO_JUDGE and len(lost) > runner.config.max_infra_share * finished:
            raise SandlotError(
                f"{len(lost)} of {finished} episodes were lost to infrastructure, so the run stops; "
                f"the last said: {lost[-1].detail}"
            )

    try:
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(one(spec))
    except* (SandlotError, OSError) as several:  # the latter of the run directory: a full disk ends the run
        raise several.exceptions[0] from None


async def _install(harnesses: Mapping[str, Harness], images: set[str], say: Say) -> dict[str, tuple[Layer, ...]]:
    """The harnesses' layers by name, installed now rather than in the first episode."""
    layers: dict[str, tuple[Layer, ...]] = {}
    for name, harness in harnesses.items():
        say(f"installing {name}")
        layers[name] = await asyncio.to_thread(harness.layers)
    for image in images:
        await asyncio.to_thread(runtime_layers, image)
    return layers


def expect_room(harness: Harness, max_context: int) -> None:
    if harness.prompt_tokens + _ROOM > max_context:
        raise ConfigError(
            f"{harness.name} needs about {harness.prompt_tokens} tokens for its own prompt and the model's context is "
            f"{max_context}: use a model with a longer context, or a smaller harness"
        )
