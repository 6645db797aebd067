"""The online hooks of slime and vime: an episode per `generate` call, fanned out; rewards compared by episode."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sandlot.engine import SamplingParams
from sandlot.errors import ConfigError, SandlotError, TaskError
from sandlot.train.advantage import Estimator, advantages
from sandlot.trainers.base import TrainerDataError, checked
from sandlot.trainers.slime_family import REPLAY_NEEDS, aborted_fields, fields_of, validate

if TYPE_CHECKING:
    from sandlot.trainers.live import Done, LiveRollouts

log = logging.getLogger(__name__)
T = TypeVar("T")

_ABORT_CHECK = 1.0
"""Seconds between looks at the trainer's abort flag, for which it offers no event."""


@dataclass(frozen=True)
class Flavor:
    """How one of the two trainers names things."""

    name: str
    router_ip: str
    router_port: str
    engine_kind: str
    rollout_module: str


_UNFIT = {
    "partial_rollout": "an aborted episode's sandbox is gone, so it is begun anew; leave the option out",
    "group_rm": "they bring the reward of their grading, which a reward model would overwrite; leave the option out",
    "use_rollout_routing_replay": "engines do not report routed experts here; leave the option out",
}
_SAMPLING = frozenset(
    ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids", "seed", "sampling_seed")
)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    # How text is made of ids, which is not what is trained.
    "skip_special_tokens": (True, False, None),
    "no_stop_trim": (True, False, None),
    "spaces_between_special_tokens": (True, False, None),
    "repetition_penalty": (None, 1, 1.0),
}


@dataclass
class _State:
    rollouts: LiveRollouts
    stack: AsyncExitStack


_states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[_State]] = weakref.WeakKeyDictionary()


async def generate(flavor: Flavor, args: Any, sample: Any, sampling_params: dict[str, Any], *, evaluation: bool) -> Any:
    """Run one episode for `sample`: a list of its rows for training, one `Sample` for evaluation.

    Raises `ConfigError` for what no episode can survive; everything else becomes one aborted placeholder.
    """
    check_arguments(flavor, args, sample, evaluation=evaluation)
    sampling = sampling_of(sampling_params, evaluation=evaluation)
    state = await _state(flavor, args)
    try:
        task = state.rollouts.task(_task_id(sample))
        done = await _unless(_aborted(flavor, args), state.rollouts.episode(task, sampling))
    except TaskError as error:
        return _give(args, sample, [], str(error), evaluation)
    if done is None:
        return _give(args, sample, [], "the trainer ended the rollout", evaluation)
    return _give(args, sample, _fields(done), _why(done), evaluation)


def check_arguments(flavor: Flavor, args: Any, sample: Any, *, evaluation: bool) -> None:
    """`ConfigError` for settings of the trainer under which rollouts that fan out would train wrongly, or crash it."""
    if not hasattr(sample, "rollout_id"):
        raise ConfigError(
            f"this {flavor.name} has no Sample.rollout_id, so siblings would count as rollouts; update it"
        )
    for name, why in _UNFIT.items():
        if getattr(args, name, False):
            raise ConfigError(f"--{name.replace('_', '-')} cannot be used with agents' episodes: {why}")
    compares = not evaluation and _estimator(args) != "none"
    if compares and not getattr(args, "custom_reward_post_process_path", None):
        raise ConfigError(
            "episodes that fan out would be compared over the whole batch: set --custom-reward-post-process-path "
            f"sandlot.trainers.{flavor.name}.reward_post_process"
        )


def sampling_of(params: dict[str, Any], *, evaluation: bool) -> SamplingParams:
    """The trainer's sampling parameters; `max_new_tokens` bounds one turn. Refuses what cannot be trained, and what
    would be left out without a word."""
    for name, value in params.items():
        if name not in _SAMPLING and value not in _NEUTRAL.get(name, (None, False, 0, 0.0)):
            raise ConfigError(f"{name}={value!r} is no sampling parameter of an agent's calls; leave it out")
    temperature, top_p = float(params.get("temperature", 1.0)), float(params.get("top_p") or 1.0)
    if params.get("stop"):
        raise ConfigError("stop strings cut inside tokens; use --rollout-stop-token-ids instead of --rollout-stop")
    if not evaluation and top_p != 1.0:
        raise ConfigError(REPLAY_NEEDS)
    if not evaluation and temperature <= 0:
        raise ConfigError("at temperature 0 logprobs have no meaning; train with a temperature above 0")
    seed = params.get("seed", params.get("sampling_seed"))
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=int(params.get("top_k") or -1),
        max_tokens=params.get("max_new_tokens"),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        seed=int(seed) if seed is not None else None,
    )


def reward_post_process(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: raw rewards and advantages, row by row, compared by episode.

    Groups are `group_index`, episodes `rollout_id`. Aborted and removed rollouts are outside the baseline and get 0; a
    single survivor gets 0. Raises `TrainerDataError` when siblings have different rewards.
    """
    raw = [float(s.get_reward_value(args)) for s in samples]
    episodes: dict[tuple[Any, Any], float] = {}
    for s, reward in zip(samples, raw, strict=True):
        if s.rollout_id is None:
            raise TrainerDataError("a sample has no rollout_id, so its siblings cannot be told from other rollouts")
        if not math.isfinite(reward):
            raise TrainerDataError(f"rollout {s.rollout_id} has the reward {reward!r}")
        if _counts(s) and episodes.setdefault((s.group_index, s.rollout_id), reward) != reward:
            raise TrainerDataError(f"siblings of rollout {s.rollout_id} have different rewards")
    groups: dict[Any, list[Any]] = {}
    for group, rollout in episodes:
        groups.setdefault(group, []).append(rollout)
    values = advantages({str(g): [episodes[g, r] for r in members] for g, members in groups.items()}, _estimator(args))
    found = {(g, r): value for g, members in groups.items() for r, value in zip(members, values[str(g)], strict=True)}
    return raw, [found[s.group_index, s.rollout_id] if _counts(s) else 0.0 for s in samples]


def keep_group(args: Any, samples: Any, **kwargs: Any) -> bool:
    """`--dynamic-sampling-filter-path`: whether two graded episodes of a group differ in reward (DAPO)."""
    rewards = {s.rollout_id: float(s.get_reward_value(args)) for s in _flat(samples) if _counts(s)}
    return len(set(rewards.values())) > 1


def _estimator(args: Any) -> Estimator:
    name = args.advantage_estimator
    if name not in ("grpo", "gspo", "reinforce_plus_plus_baseline") or not args.rewards_normalization:
        return "none"
    return "grpo" if name != "reinforce_plus_plus_baseline" and args.grpo_std_normalization else "grpo_nostd"


def _counts(sample: Any) -> bool:
    return not sample.remove_sample and sample.status not in (type(sample).Status.ABORTED, type(sample).Status.FAILED)


def _flat(samples: Any) -> Iterable[Any]:
    for item in samples:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item


def _task_id(sample: Any) -> str:
    """The task a row of the trainer's data names: as the loaders of `sandlot.tasks` call it."""
    metadata = sample.metadata or {}
    remote = metadata.get("remote_env_info") or {}
    name = metadata.get("instance_id") or remote.get("instance_id") or sample.label
    if not isinstance(name, str) or not name:
        raise TaskError("a row of the trainer's data names no task: set metadata.instance_id or label to its id")
    return name


def _fields(done: Done) -> list[dict[str, Any]]:
    if not done.samples:
        return []
    rows = checked(done.samples, credit=False, per_turn=False)
    return [fields_of(s) for s in rows]


def _why(done: Done) -> str:
    result = done.result
    return f"{result.failure or 'no trained token'}: {result.detail}".rstrip(": ")


def _give(args: Any, sample: Any, rows: list[dict[str, Any]], why: str, evaluation: bool) -> Any:
    """Copies of the trainer's sample with the fields of each row; an evaluation counts an episode once."""
    if not rows:
        log.warning("rollout %s of group %s gave nothing: %s", sample.index, sample.group_index, why)
    rollout_id = sample.rollout_id if sample.rollout_id is not None else sample.index
    validate([{**row, "rollout_id": rollout_id, "group_index": sample.group_index} for row in rows])
    key = (getattr(args, "eval_reward_key", None) if evaluation else None) or getattr(args, "reward_key", None)
    given = []
    for row in rows or [aborted_fields(why)]:
        reward = {key: row["reward"]} if key else row["reward"]
        given.append(_with_fields(sample, {**row, "rollout_id": rollout_id, "reward": reward}))
    if not evaluation:
        return given
    return next((s for s in given if s.metadata["sandlot"].get("branch") == "main"), given[0])


def _with_fields(sample: Any, fields: dict[str, Any]) -> Any:
    made = copy.copy(sample)
    for name, value in fields.items():
        if name == "status":
            value = type(sample).Status(value)
        elif name == "metadata":
            value = {**(sample.metadata or {}), "sandlot": value}
        setattr(made, name, value)
    return made


async def _state(flavor: Flavor, args: Any) -> _State:
    """What all episodes of this process share, made once per event loop; a failed start is tried again."""
    loop = asyncio.get_running_loop()
    task = _states.get(loop)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = _states[loop] = asyncio.create_task(_open(flavor, args))
    return await asyncio.shield(task)


async def _open(flavor: Flavor, args: Any) -> _State:
    from sandlot.trainers.live import LiveRollouts, read_rollout_file

    file = getattr(args, "sandlot_config", None)
    if not file:
        raise ConfigError(
            "the trainer's arguments do not say sandlot_config: put `sandlot_config: FILE.toml` into the file that "
            "--custom-config-path names"
        )
    config, hook = read_rollout_file(Path(file))
    ip, port = getattr(args, flavor.router_ip, None), getattr(args, flavor.router_port, None)
    if not ip or not port:
        raise ConfigError(f"{flavor.name} has not started its router yet: {flavor.router_ip} is {ip!r}")
    limit = getattr(args, "rollout_max_context_len", None)
    limits = config.limits.model_copy(
        update={
            "context": min(x for x in (limit, config.limits.context) if x) if limit or config.limits.context else None
        }
    )
    changes = {
        "engine": f"http://{ip}:{port}",
        "engine_kind": hook.engine_kind or flavor.engine_kind,
        "model": config.model or Path(args.hf_checkpoint),
        "limits": limits,
        "sampling": config.sampling.model_copy(update={"temperature": float(args.rollout_temperature)}),
    }
    stack = AsyncExitStack()
    rollouts = await stack.enter_async_context(LiveRollouts.open(config.model_copy(update=changes), hook))
    return _State(rollouts, stack)


async def close() -> None:
    """Close what this event loop's episodes shared; trainers do not call it, tests and scripts can."""
    if task := _states.pop(asyncio.get_running_loop(), None):
        try:
            await (await task).stack.aclose()
        except SandlotError:
            pass


def _aborted(flavor: Flavor, args: Any) -> Callable[[], bool]:
    """Whether the trainer has enough and is ending its rollout; its state is looked at where it is loaded."""
    module = sys.modules.get(flavor.rollout_module)
    kind = getattr(module, "GenerateState", None)
    return (lambda: bool(kind(args).aborted)) if kind is not None else (lambda: False)


async def _unless(aborted: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the trainer aborts first. Nothing of it is left running either way."""
    if aborted():  # nothing is begun for a rollout that is over
        work.close()
        return None
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_ABORT_CHECK)
            if not task.done() and aborted():
                return None
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
