"""verl's agent loop: an episode per call, sampled by verl's own servers; named in `agent_loop_config_path`.

- name: sandlot
  _target_: sandlot.trainers.verl_loop.SandlotAgentLoop
  rollout_file: rollout.toml
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from sandlot.engine import EngineInfo, Generation, SamplingParams, VersionSpan, checked
from sandlot.errors import ConfigError, ContextOverflowError, EngineError, MissingDependencyError
from sandlot.gateway.call import Policy
from sandlot.trainers.base import TrainerDataError
from sandlot.trainers.base import checked as checked_samples
from sandlot.trainers.live import LiveRollouts, read_rollout_file
from sandlot.trainers.verl import session_outputs, validate

log = logging.getLogger(__name__)

_open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[tuple[LiveRollouts, AsyncExitStack]]] = (
    weakref.WeakKeyDictionary()
)


class VerlEngine:
    """An engine over verl's `LLMServerClient`: ids in, ids out, one session on one server."""

    def __init__(self, client: Any, model: str, max_context: int) -> None:
        self._client = client
        self._info = EngineInfo("verl", model, max_context, "processed")

    async def info(self) -> EngineInfo:
        return self._info

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, session_id: str
    ) -> Generation:
        room = self._info.max_context - len(prompt_ids)
        if room < 1:
            raise ContextOverflowError(len(prompt_ids), self._info.max_context)
        limit = min(room, sampling.max_tokens or room)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": limit,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": True,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        try:
            output = await self._client.generate(session_id, prompt_ids=list(prompt_ids), sampling_params=params)
        except EngineError:
            raise
        except Exception as error:  # whatever Ray and the server raise
            raise EngineError(f"verl's server failed: {type(error).__name__}: {error}") from error
        ids = tuple(int(i) for i in output.token_ids)
        if output.stop_reason in ("aborted", "abort"):
            raise EngineError("verl's server aborted the call; it may be repeated")
        # verl does not tell a full answer from one that was cut: the stop token and the limit do.
        cut = len(ids) >= limit and (not ids or ids[-1] not in sampling.stop_token_ids)
        # A call that went on after a weight update names the first and the last step, not where it changed.
        told = output.extra_fields
        step = told.get("global_steps") if told.get("min_global_steps") is None else told["min_global_steps"]
        versions = () if step is None else (VersionSpan(str(int(step)), 0, len(ids)),)
        made = Generation(ids, tuple(output.log_probs or ()), "length" if cut else "stop", versions=versions)
        return checked(made, logprob_ids=ids)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise EngineError("verl's servers do not score tokens", retryable=False)

    async def close(self) -> None: ...


class SandlotAgentLoop:
    """An agent loop as verl's worker makes it, one per session. `rollout_file` is a Sandlot configuration with a
    `[trainer]` table; the rows of the data set name their task by `extra_info.instance_id` or `instance_id`."""

    def __init__(self, trainer_config: Any, server_manager: Any, *, rollout_file: str, **kwargs: Any) -> None:
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.rollout_file = Path(rollout_file)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[Any]:
        """The outputs of one episode, the reward on the last. An episode that says nothing has none: verl goes on
        with the rest of its group."""
        output_type = _output_type()
        rollouts = await self._rollouts()
        sampling = self._sampling(sampling_params)
        done = await rollouts.episode(rollouts.task(_task_id(kwargs)), sampling)
        if not done.samples:
            log.warning("episode %s gave nothing: %s", done.result.episode_id, done.result.detail)
            return []
        rows = checked_samples(done.samples, credit=False, per_turn=False)
        outputs = session_outputs(rows, temperature=sampling.temperature)
        validate(outputs)
        return [output_type(**output) for output in outputs]

    def _sampling(self, params: Mapping[str, Any]) -> SamplingParams:
        sampling = SamplingParams(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=int(params.get("top_k", -1)),
            max_tokens=params.get("max_tokens"),
        )
        mode = self.config.actor_rollout_ref.rollout.get("logprobs_mode", "processed_logprobs")
        plain = (sampling.temperature, sampling.top_p) == (1.0, 1.0) and sampling.top_k in (-1, 0)
        if mode != "processed_logprobs" and not plain:
            raise ConfigError(
                f"rollout.logprobs_mode is {mode}, which makes ratios wrong at this sampling: set processed_logprobs"
            )
        return sampling

    async def _rollouts(self) -> LiveRollouts:
        loop = asyncio.get_running_loop()
        task = _open.get(loop)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = _open[loop] = asyncio.create_task(self._start())
        return (await asyncio.shield(task))[0]

    async def _start(self) -> tuple[LiveRollouts, AsyncExitStack]:
        from sandlot.rollout.format import format_of

        config, hook = read_rollout_file(self.rollout_file)
        model = self.config.actor_rollout_ref.model.path
        rollout = self.config.actor_rollout_ref.rollout
        context = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        context = min(int(context), config.limits.context or int(context))
        directory = config.model or Path(model)
        config = config.model_copy(update={"model": directory, "engine": "verl"})
        fmt = await asyncio.to_thread(format_of, directory, config.chat)
        engine = VerlEngine(self.server_manager, str(model), context)
        policy = Policy(engine, fmt, str(model), SamplingParams(), context, "processed")
        stack = AsyncExitStack()
        return await stack.enter_async_context(LiveRollouts.open(config, hook, policy=policy)), stack


async def close() -> None:
    """Close what the episodes of this event loop shared; for tests and scripts."""
    if task := _open.pop(asyncio.get_running_loop(), None):
        await (await task)[1].aclose()


def _task_id(fields: Mapping[str, Any]) -> str:
    extra = fields.get("extra_info") or {}
    name = extra.get("instance_id") or fields.get("instance_id")
    if not isinstance(name, str) or not name:
        raise TrainerDataError("a row of the data set names no task: set extra_info.instance_id")
    return name


def _output_type() -> Any:
    try:
        from verl.experimental.agent_loop.agent_loop import (  # type: ignore[import-not-found, unused-ignore]
            AgentLoopOutput,
        )
    except ImportError:
        raise MissingDependencyError("verl", "verl") from None
    return AgentLoopOutput
