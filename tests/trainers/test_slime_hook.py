"""`generate` of slime and vime end to end: real gateway, engine process, sandbox, agent, grading; only the trainer is
a stand-in."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sandlot.engine import VersionSpan
from sandlot.engine.process import EngineProcess
from sandlot.errors import ConfigError, EngineError, SandboxError, SandlotError
from sandlot.harness import HARNESSES
from sandlot.rollout import episode
from sandlot.rollout.dialogue import dialogue
from sandlot.rollout.scripts import idle_scripts, solution_scripts
from sandlot.tasks import load_tasks
from sandlot.trainers import slime, slime_hook, vime
from sandlot.trainers.live import read_rollout_file
from sandlot.trainers.slime_hook import reward_post_process
from sandlot.trajectory.journal import read_journal
from support.slime_sample import StandIn, arguments, needs_reward_model, sampling_params, train_data
from support.toy_model import make_toy_model

TASK = "page-count"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`page-count` is solved; of every other task the agent only looks at the files."""
    tasks = load_tasks("bundled")
    solved = solution_scripts([t for t in tasks if t.id == TASK])
    idle = idle_scripts([t for t in tasks if t.id != TASK])
    file = tmp_path_factory.mktemp("script") / "scripts.json"
    file.write_text(json.dumps({"scripts": solved["scripts"] + idle["scripts"], "fallback": solved["fallback"]}))
    return file


@pytest.fixture
async def args(
    model_dir: Path, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SimpleNamespace]:
    """Arguments of a trainer whose router is a scripted engine, and whose agent is the tests' tiny one."""
    monkeypatch.setitem(HARNESSES._builtin, "tiny", "support.tiny_agent:TinyAgent")
    file = tmp_path / "rollout.toml"
    file.write_text(
        f'tasks = "bundled"\nharness = ["tiny"]\nretries = 0\nconcurrency = 8\n[trainer]\nout = "{tmp_path / "out"}"\n'
        'engine_kind = "vllm"\n'
    )
    async with EngineProcess(model_dir, kind="scripted", script=script) as engine:
        host, port = engine.url.removeprefix("http://").split(":")
        made = arguments(sandlot_config=str(file), hf_checkpoint=str(model_dir))
        for prefix in ("sglang", "vllm"):
            setattr(made, f"{prefix}_router_ip", host)
            setattr(made, f"{prefix}_router_port", int(port))
        yield made
        await slime_hook.close()


def sample_of(task: str = TASK, index: int = 0, **fields: Any) -> StandIn:
    return StandIn(group_index=0, index=index, prompt="p", metadata={"instance_id": task}, **fields)


def use_agent(args: SimpleNamespace, agent: str) -> None:
    file = Path(args.sandlot_config)
    file.write_text(file.read_text().replace('"tiny"', f'"{agent}"'))


@pytest.fixture
def loaded_rollout_module() -> Iterator[SimpleNamespace]:
    """The trainer's rollout module with its abort flag, as it would be loaded in the trainer's process."""
    flag = SimpleNamespace(aborted=False)
    module = ModuleType(vime.FLAVOR.rollout_module)
    module.GenerateState = lambda args: flag  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield flag
    del sys.modules[module.__name__]


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, bytes], Any]:
    return {}


@pytest.fixture
def graded_once(verdicts: dict[tuple[str, bytes], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal patches are graded once in this file: grading is most of an episode's time, and shown elsewhere."""
    grade, running = episode.grade, {}

    async def once(task: Any, patch: Any, *rest: Any, **named: Any) -> Any:
        key = (task.id, patch.diff)
        if key not in verdicts:
            if key not in running:
                running[key] = asyncio.create_task(grade(task, patch, *rest, **named))
            verdicts[key] = await asyncio.shield(running[key])
        return verdicts[key]

    monkeypatch.setattr(episode, "grade", once)


@pytest.mark.slow
async def test_a_group_from_generate_to_training_data(args: SimpleNamespace) -> None:
    samples = [sample_of(index=0), sample_of("ini-quotes", 1), sample_of("no-such-task", 2), sample_of(index=3)]
    group = await asyncio.gather(*(slime.generate(args, s, sampling_params()) for s in samples))
    assert all(isinstance(rollout, list) for rollout in group)
    assert [rollout[0].reward for rollout in group] == [1.0, 0.0, 0.0, 1.0]
    assert [rollout[0].status.value for rollout in group] == ["completed", "completed", "aborted", "completed"]
    assert [{s.rollout_id for s in rollout} for rollout in group] == [{0}, {1}, {2}, {3}]
    assert "no task 'no-such-task'" in group[2][0].metadata["sandlot"]["why"]
    assert not any(needs_reward_model(rollout) for rollout in group)
    data = train_data(args, [list(group)], reward_post_process)
    by_rollout = dict(zip(data["rollout_ids"], data["rewards"], strict=True))
    assert by_rollout == pytest.approx({0: 0.57735, 1: -1.1547, 2: 0.0, 3: 0.57735}, rel=1e-3)
    solved = group[0][0]
    assert solved.metadata["instance_id"] == TASK
    assert solved.metadata["sandlot"]["task"] == TASK
    assert sum(solved.loss_mask) == sum(1 for lp in solved.rollout_log_probs if lp != 0)
    trained = {r: sum(m) for r, m in zip(data["rollout_ids"], data["loss_masks"], strict=True)}
    assert trained[2] == 0
    assert min(trained[0], trained[1], trained[3]) > 0
    assert solved.tokens is not group[3][0].tokens


@pytest.mark.slow
async def test_evaluation_gives_one_sample_and_its_own_sampling(args: SimpleNamespace, graded_once: None) -> None:
    made = await vime.generate(args, sample_of(), sampling_params(temperature=0.6, top_p=0.9), evaluation=True)
    assert isinstance(made, StandIn)
    assert (made.reward, made.status) == (1.0, StandIn.Status.COMPLETED)
    lost = await vime.generate(args, sample_of("gone"), sampling_params(), evaluation=True)
    assert isinstance(lost, StandIn)
    assert (lost.reward, lost.status, lost.remove_sample) == (0.0, StandIn.Status.ABORTED, True)


@pytest.mark.slow
async def test_an_abort_ends_an_episode_wherever_it_is(
    args: SimpleNamespace, graded_once: None, loaded_rollout_module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways trainers end a rollout, their flag and a cancellation, in every phase; what hangs is cancelled too."""
    monkeypatch.setattr(slime_hook, "_ABORT_CHECK", 0.05)
    await vime.generate(args, sample_of("ini-quotes"), sampling_params())  # everything is installed and open
    rollouts = (await slime_hook._states[asyncio.get_running_loop()]).rollouts
    loaded_rollout_module.aborted = True
    (unbegun,) = await vime.generate(args, sample_of(), sampling_params())
    assert (unbegun.status, unbegun.remove_sample) == (StandIn.Status.ABORTED, True)

    for owner, phase in ((rollouts.backend, "create"), (rollouts.policy.engine, "generate"), (episode, "grade")):
        for flag in (True, False):
            loaded_rollout_module.aborted = False
            reached, cancelled = asyncio.Event(), asyncio.Event()

            async def hang(*_: Any, reached: Any = reached, cancelled: Any = cancelled, **__: Any) -> Any:
                reached.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

            with monkeypatch.context() as patched:
                patched.setattr(owner, phase, hang)
                running = asyncio.create_task(vime.generate(args, sample_of(), sampling_params()))
                await asyncio.wait_for(reached.wait(), 60)
                if flag:
                    loaded_rollout_module.aborted = True
                    (ended,) = await asyncio.wait_for(running, 60)
                    assert (ended.status, ended.loss_mask) == (StandIn.Status.ABORTED, [0])
                    assert ended.metadata["sandlot"]["why"] == "the trainer ended the rollout"
                else:
                    running.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await asyncio.wait_for(running, 60)
                await asyncio.wait_for(cancelled.wait(), 60)
            assert not any(gateway.sessions for gateway in rollouts._gateways.values())
    loaded_rollout_module.aborted = False
    (after,) = await vime.generate(args, sample_of(), sampling_params())
    assert after.reward == 1.0


@pytest.mark.slow
async def test_a_call_that_a_weight_update_aborts_is_sampled_again(
    args: SimpleNamespace, graded_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends what is in flight when weights are pushed: the turn is asked for again, the episode goes on."""
    await vime.generate(args, sample_of("ini-quotes"), sampling_params())
    rollouts = (await slime_hook._states[asyncio.get_running_loop()]).rollouts
    engine, asked = rollouts.policy.engine, []
    generate = engine.generate
    for gateway in rollouts._gateways.values():
        object.__setattr__(gateway.limits, "engine_retry_delays", (0.0,))

    async def updated(prompt_ids: Any, sampling: Any, **names: Any) -> Any:
        asked.append(list(prompt_ids))
        if len(asked) == 2:
            raise EngineError("the engine aborted the call: weights are being updated")
        made = await generate(prompt_ids, sampling, **names)
        version = "0" if len(asked) == 1 else "1"
        return replace(made, versions=(VersionSpan(version, 0, len(made.output_ids)),))

    monkeypatch.setattr(engine, "generate", updated)
    (row,) = await vime.generate(args, sample_of(), sampling_params())
    assert (row.reward, row.status) == (1.0, StandIn.Status.COMPLETED)
    assert asked[1] == asked[2]  # the same prompt, token by token
    assert row.weight_versions == ["0", *["1"] * (len(asked) - 2)]
    assert len(row.weight_versions) == len(asked) - 1  # what was aborted is no turn


@pytest.mark.slow
async def test_an_engine_that_goes_away_aborts_and_never_trains(args: SimpleNamespace, graded_once: None) -> None:
    (good,) = await vime.generate(args, sample_of(), sampling_params())
    assert good.reward == 1.0
    state = await slime_hook._states[asyncio.get_running_loop()]
    policy = state.rollouts.policy
    (client,) = policy.engine.replicas.values()  # type: ignore[attr-defined]
    client.base_url = "http://127.0.0.1:9"
    for gateway in state.rollouts._gateways.values():
        object.__setattr__(gateway.limits, "engine_retry_delays", ())
    (lost,) = await vime.generate(args, sample_of(), sampling_params())
    assert (lost.status, lost.remove_sample, lost.loss_mask) == (StandIn.Status.ABORTED, True, [0])
    assert "infra_error" in lost.metadata["sandlot"]["why"]


@pytest.mark.slow
async def test_a_sandbox_that_cannot_be_made_aborts_one_rollout_only(
    args: SimpleNamespace, graded_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """d02: sandbox creation of one of the group raises, and another one is cancelled from inside (h02)."""
    await vime.generate(args, sample_of(), sampling_params())
    backend = (await slime_hook._states[asyncio.get_running_loop()]).rollouts.backend
    create, made = backend.create, iter([SandboxError("no space left"), asyncio.CancelledError()])

    async def unreliable(spec: Any) -> Any:
        if spec.labels.get("episode", "").startswith("ini-quotes"):
            raise next(made)
        return await create(spec)

    monkeypatch.setattr(backend, "create", unreliable)
    tasks = [TASK, "ini-quotes", "ini-quotes", TASK]
    group = await asyncio.gather(
        *(vime.generate(args, sample_of(name, k), sampling_params()) for k, name in enumerate(tasks))
    )
    assert [r[0].status.value for r in group] == ["completed", "aborted", "aborted", "completed"]
    why = {group[k][0].metadata["sandlot"]["why"] for k in (1, 2)}
    assert why == {"infra_error: no space left", "infra_error: a call inside the episode was cancelled"}
    data = train_data(args, [list(group)], reward_post_process)
    assert data["rewards"] == [0.0] * len(data["rewards"])
    assert {r for r, m in zip(data["rollout_ids"], data["loss_masks"], strict=True) if sum(m)} == {0, 3}


@pytest.mark.slow
async def test_rewards_are_where_the_trainer_looks(args: SimpleNamespace, graded_once: None) -> None:
    args.reward_key, args.eval_reward_key = "score", "solved"
    for name, reward in ((TASK, 1.0), ("gone", 0.0)):
        (row,) = await vime.generate(args, sample_of(name), sampling_params())
        assert row.reward == {"score": reward}
        assert reward_post_process(args, [row]) == ([reward], [0.0])
        made = await vime.generate(args, sample_of(name), sampling_params(), evaluation=True)
        assert made.reward == {"solved": reward}


@pytest.mark.slow
async def test_a_whole_batch_at_once(args: SimpleNamespace, graded_once: None) -> None:
    """64 real episodes."""
    count, names = 64, [TASK, "ini-quotes"]
    rollouts = await asyncio.gather(
        *(vime.generate(args, sample_of(names[k % 2], k), sampling_params()) for k in range(count))
    )
    assert [r[0].reward for r in rollouts] == [1.0, 0.0] * (count // 2)
    assert len({r[0].metadata["sandlot"]["episode_id"] for r in rollouts}) == count
    assert {r[0].rollout_id for r in rollouts} == set(range(count))


@pytest.mark.slow
@pytest.mark.npm
@pytest.mark.parametrize("agent", [name for name in ("claude-code", "codex", "pi") if name in HARNESSES.names()])
async def test_real_agents_give_rows_that_train(args: SimpleNamespace, agent: str) -> None:
    use_agent(args, agent)
    rows = await vime.generate(args, sample_of(), sampling_params(max_new_tokens=None))
    assert {s.status.value for s in rows} <= {"completed", "truncated"}
    assert {s.reward for s in rows} == {1.0}
    data = train_data(args, [[rows]], reward_post_process)
    assert all(sum(mask) > 0 for mask in data["loss_masks"])
    assert data["rewards"] == [0.0] * len(rows)
    rollouts = (await slime_hook._states[asyncio.get_running_loop()]).rollouts
    turns = read_journal(rollouts.run.journal_path(rows[0].metadata["sandlot"]["episode_id"])).turns
    exchanges = list(dialogue(turns, rollouts.policy.format))
    assert all(exchange.heard for exchange in exchanges)  # what the real agent sent is read back from the ids
    results = [m.text for exchange in exchanges for m in exchange.heard or () if m.role == "tool"]
    assert len(results) == sum(len(exchange.calls) for exchange in exchanges)
    assert any("passed" in text for text in results)


# -- what stops everything is said at once ----------------------------------------------------------------------------


async def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    args = arguments(hf_checkpoint="x")
    with pytest.raises(ConfigError, match="--custom-config-path"):
        await slime.generate(args, sample_of(), sampling_params())
    with pytest.raises(ConfigError, match="cannot be read"):
        await slime.generate(
            arguments(hf_checkpoint="x", sandlot_config=str(tmp_path / "no.toml")), sample_of(), sampling_params()
        )
    file = tmp_path / "rollout.toml"
    file.write_text(f'[trainer]\nout = "{tmp_path}"\n')
    with pytest.raises(ConfigError, match="has not started its router"):
        await slime.generate(arguments(hf_checkpoint="x", sandlot_config=str(file)), sample_of(), sampling_params())


async def test_an_old_trainer_without_rollout_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no Sample\.rollout_id"):
        await slime.generate(arguments(), SimpleNamespace(), sampling_params())


async def test_rewards_that_would_be_compared_over_the_batch_are_refused(tmp_path: Path) -> None:
    unset = {"custom_reward_post_process_path": None, "hf_checkpoint": "x"}
    with pytest.raises(ConfigError, match=r"path sandlot\.trainers\.vime\.reward_post_process"):
        await vime.generate(arguments(**unset), sample_of(), sampling_params())
    for fine in ({"rewards_normalization": False}, {"advantage_estimator": "ppo"}):
        with pytest.raises(ConfigError, match="custom-config-path"):  # the next thing that is missing
            await vime.generate(arguments(**unset, **fine), sample_of(), sampling_params())
    with pytest.raises(ConfigError, match="custom-config-path"):
        await vime.generate(arguments(**unset), sample_of(), sampling_params(), evaluation=True)


@pytest.mark.parametrize("option", ["partial_rollout", "group_rm", "use_rollout_routing_replay"])
async def test_settings_that_break_on_fan_out_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} cannot be used"):
        await vime.generate(arguments(**{option: True}), sample_of(), sampling_params())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("harness = ['pi']\n", "trainer.out"),
        ("[trainer]\nout = 'x'\nmore = 1\n", "trainer.more"),
        ("nonsense = 1\n[trainer]\nout = 'x'\n", "nonsense"),
        ("[trainer\n", "no valid TOML"),
    ],
)
def test_a_wrong_rollout_file_is_named(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "rollout.toml"
    file.write_text(text)
    with pytest.raises(SandlotError, match=why):
        read_rollout_file(file)


async def test_nothing_is_left_running_when_the_trainer_aborts() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return 1

    assert await slime_hook._unless(begun.is_set, work()) is None
    assert ended.is_set()

    async def quick() -> int:
        begun.set()
        return 7

    begun.clear()
    assert await slime_hook._unless(begun.is_set, quick()) == 7  # it was over before anybody looked
    begun.clear()
    assert await slime_hook._unless(lambda: True, quick()) is None
    assert not begun.is_set()
