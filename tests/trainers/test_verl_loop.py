"""verl's agent loop with everything real but verl's servers: gateway, sandbox, agent, grading."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandlot.chat.format import load_chat_format
from sandlot.engine import SamplingParams
from sandlot.errors import ConfigError, ContextOverflowError, EngineError, EngineEvidenceError, TaskError
from sandlot.harness import HARNESSES
from sandlot.rollout.scripts import solution_scripts
from sandlot.tasks import load_tasks
from sandlot.trainers import TrainerDataError, verl_loop
from sandlot.trainers.verl import validate
from sandlot.trainers.verl_loop import SandlotAgentLoop, VerlEngine
from support.policy import ToldEngine, call_text
from support.toy_model import make_toy_model

TASK = "page-count"


class Config(dict[str, Any]):
    """Attribute access as of OmegaConf."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Servers:
    """verl's `LLMServerClient` over an engine that is told what to say."""

    def __init__(self, told: ToldEngine, *, step: int | None = 7, stop_reason: str = "completed") -> None:
        self.told = told
        self.step = step
        self.stop_reason = stop_reason
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append((request_id, sampling_params))
        sampling = SamplingParams(
            max_tokens=sampling_params["max_tokens"], stop_token_ids=tuple(sampling_params["stop_token_ids"])
        )
        made = await self.told.generate(prompt_ids, sampling, request_id=request_id, session_id=request_id)
        return SimpleNamespace(
            token_ids=list(made.output_ids),
            log_probs=list(made.logprobs),
            stop_reason=self.stop_reason,
            extra_fields={"global_steps": self.step},
        )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


def solving(prompt: list[int], number: int) -> str:
    (task,) = (t for t in load_tasks("bundled") if t.id == TASK)
    step = solution_scripts([task])["scripts"][0]["steps"][1]
    return call_text("bash", step["calls"][0]["arguments"]) if number == 0 else "Done."


@pytest.fixture
async def make_loop(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setitem(HARNESSES._builtin, "tiny", "support.tiny_agent:TinyAgent")
    if importlib.util.find_spec("verl") is None:
        monkeypatch.setattr(verl_loop, "_output_type", lambda: SimpleNamespace)
    file = tmp_path / "rollout.toml"
    file.write_text(f'harness = ["tiny"]\nretries = 0\n[trainer]\nout = "{tmp_path / "out"}"\n')

    def make(servers: Servers, **rollout: Any) -> SandlotAgentLoop:
        settings = Config(prompt_length=4000, response_length=60_000, **rollout)
        config = Config(actor_rollout_ref=Config(model=Config(path=str(model_dir)), rollout=settings))
        wrapped = SimpleNamespace(config=config)
        return SandlotAgentLoop(wrapped, servers, rollout_file=str(file), tokenizer=None, processor=None)

    yield make
    await verl_loop.close()


@pytest.mark.slow
async def test_an_episode_becomes_outputs_with_the_reward_on_the_last(make_loop: Any, model_dir: Path) -> None:
    servers = Servers(ToldEngine(load_chat_format(model_dir), solving))
    outputs = await make_loop(servers).run({"temperature": 0.8}, extra_info={"instance_id": TASK})
    assert [o.reward_score for o in outputs] == [None] * (len(outputs) - 1) + [1.0]
    validate([{name: getattr(o, name) for name in _FIELDS} for o in outputs])
    sampled = [i for ids in servers.told.sampled for i in ids]
    trained = [i for o in outputs for i, m in zip(o.response_ids, o.response_mask, strict=True) if m]
    assert trained == sampled
    assert outputs[-1].extra_fields["max_global_steps"] == 7
    assert outputs[-1].extra_fields["temperature"] == 0.8
    assert len({request for request, _ in servers.asked}) == 1  # one session stays on one server
    assert all(params["logprobs"] is True for _, params in servers.asked)


_FIELDS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "extra_fields")


@pytest.mark.slow
async def test_an_aborted_episode_has_no_outputs(make_loop: Any, model_dir: Path) -> None:
    servers = Servers(
        ToldEngine(load_chat_format(model_dir), lambda prompt, number: EngineError("gone", retryable=False))
    )
    assert await make_loop(servers).run({}, extra_info={"instance_id": TASK}) == []
    with pytest.raises(TaskError, match="no task 'none'"):
        await make_loop(servers).run({}, instance_id="none")
    with pytest.raises(TrainerDataError, match="names no task"):
        await make_loop(servers).run({})


async def test_raw_logprobs_are_refused_where_they_differ(make_loop: Any, model_dir: Path) -> None:
    servers = Servers(ToldEngine(load_chat_format(model_dir), solving))
    loop = make_loop(servers, logprobs_mode="raw_logprobs")
    assert loop._sampling({"temperature": 1.0, "top_p": 1.0, "top_k": -1}).temperature == 1.0
    with pytest.raises(ConfigError, match="processed_logprobs"):
        loop._sampling({"temperature": 0.7})


async def test_the_engine_demands_proof(model_dir: Path) -> None:
    told = ToldEngine(load_chat_format(model_dir), lambda prompt, number: [5, 6, 7])
    sampling = SamplingParams(stop_token_ids=(7,))

    async def ask(servers: Any, sampling: SamplingParams = sampling, prompt: int = 3) -> Any:
        return await VerlEngine(servers, "m", 100).generate([1] * prompt, sampling, request_id="r", session_id="s")

    made = await ask(Servers(told))
    assert (made.output_ids, made.finish_reason, made.versions[0].version) == ((5, 6, 7), "stop", "7")
    assert (await ask(Servers(told), SamplingParams(max_tokens=2, stop_token_ids=(7,)))).finish_reason == "length"
    assert (await ask(Servers(told, step=None))).versions == ()

    class Updated(Servers):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            made = await super().generate(*args, **kwargs)
            made.extra_fields |= {"min_global_steps": 5, "max_global_steps": 7}
            return made

    assert [v.version for v in (await ask(Updated(told))).versions] == ["5"]  # staleness is never understated
    with pytest.raises(EngineError, match="aborted"):
        await ask(Servers(told, stop_reason="aborted"))
    with pytest.raises(ContextOverflowError):
        await ask(Servers(told), prompt=100)

    class NoLogprobs(Servers):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            made = await super().generate(*args, **kwargs)
            made.log_probs = None
            return made

    with pytest.raises(EngineEvidenceError, match="0 logprobs"):
        await ask(NoLogprobs(told))
