"""The launchers: sound shell, nothing killed by name, everything checked first, and commands that can be read."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from sandlot.errors import ConfigError, SandlotError
from sandlot.tasks import bundled_path
from sandlot.trainers.live import WithArguments, harness_of, read_rollout_file
from sandlot.trainers.prepare import prepare
from support.toy_model import make_toy_model

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
SCRIPTS = sorted(LAUNCH.rglob("*.sh"))
SIZES = [script for script in SCRIPTS if script.name[0].isdigit()]
VARIANTS = [(size, trainer) for size in SIZES for trainer in ("slime", "vime")]


def named(script: Path) -> str:
    return str(script.relative_to(LAUNCH))


def launch(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(
        ["bash", script, *arguments], capture_output=True, text=True, env=env, timeout=30, check=False
    )


def variant(value: object) -> str:
    return named(value) if isinstance(value, Path) else str(value)


def test_there_are_three_sizes() -> None:
    assert [named(size) for size in SIZES] == ["1gpu.sh", "1node.sh", "8nodes.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert not re.search(r"\b(pkill|killall|ssh|kill -9)\b|ray stop", text)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(
        ["shellcheck", "-x", "-P", "SCRIPTDIR", script], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(("script", "trainer"), VARIANTS, ids=variant)
def test_a_dry_run_prints_one_command_that_a_shell_reads(script: Path, trainer: str) -> None:
    shown = launch(script, trainer, "--dry-run", WANDB_API_KEY="secret-key", WANDB_PROJECT="p")
    assert shown.returncode == 0, shown.stderr
    words = shlex.split(shown.stdout)
    assert words[:3] == ["ray", "job", "submit"]
    for option, value in (
        ("--custom-generate-function-path", f"sandlot.trainers.{trainer}.generate"),
        ("--custom-reward-post-process-path", f"sandlot.trainers.{trainer}.reward_post_process"),
        ("--rollout-top-p", "1.0"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--colocate" in words
    engine = {"slime": "--sglang-mem-fraction-static", "vime": "--vllm-gpu-memory-utilization"}
    assert [name for name, option in engine.items() if option in words] == [trainer]
    assert "secret-key" not in shown.stdout + shown.stderr
    per_step = int(words[words.index("--rollout-batch-size") + 1]) * int(
        words[words.index("--n-samples-per-prompt") + 1]
    )
    assert words[words.index("--global-batch-size") + 1] == str(per_step)


def test_eight_nodes_are_what_they_say() -> None:
    words = shlex.split(launch(LAUNCH / "8nodes.sh", "slime", "--dry-run").stdout)
    for option, value in (
        ("--actor-num-nodes", "8"),
        ("--actor-num-gpus-per-node", "8"),
        ("--rollout-num-gpus", "64"),
        ("--rollout-max-context-len", "96000"),
        ("--max-tokens-per-gpu", "12000"),
    ):
        assert words[words.index(option) + 1] == value


@pytest.mark.parametrize(("script", "trainer"), VARIANTS, ids=variant)
def test_nothing_starts_before_everything_is_there(script: Path, trainer: str, tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    ray.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    failed = launch(script, trainer, PATH=path, RUN_DIR=str(tmp_path / "run"), HF_CHECKPOINT=str(tmp_path / "no"))
    assert failed.returncode == 1
    for name in ("TRAINER_DIR", "MEGATRON_DIR", "REF_CHECKPOINT", "PROMPT_DATA"):
        assert f"set {name}" in failed.stderr
    assert f"HF_CHECKPOINT is {tmp_path / 'no'}, which does not exist" in failed.stderr
    assert "nothing was started" in failed.stderr
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "run").exists()
    assert launch(script, trainer, "--nonsense").returncode == 2
    assert launch(script, "--dry-run").returncode == 2


@pytest.mark.parametrize("where", ["head", "10.0.0.1"])
def test_a_node_joins_in_the_foreground(where: str) -> None:
    shown = launch(LAUNCH / "ray-node.sh", where, "--dry-run")
    words = shlex.split(shown.stdout)
    assert words[:2] == ["ray", "start"]
    assert "--block" in words
    assert ("--head" in words) == (where == "head")
    assert launch(LAUNCH / "ray-node.sh").returncode == 1


# -- the rollout file and what is prepared from it --------------------------------------------------------------------


def test_the_rollout_file_is_complete() -> None:
    config, hook = read_rollout_file(LAUNCH / "rollout.toml")
    harness = harness_of(config, hook)
    assert isinstance(harness, WithArguments)
    assert (harness.name, vars(harness.inner)["_bare"], vars(harness.inner)["_compaction"]) == (
        "claude-code",
        False,
        True,
    )
    agents = json.loads(hook.harness_arguments[hook.harness_arguments.index("--agents") + 1])
    assert set(agents["investigator"]["tools"]) == {"Grep", "Glob", "Read"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


def test_files_for_the_trainer_are_prepared(model_dir: Path, tmp_path: Path) -> None:
    rows = bundled_path() / "rows.jsonl"
    hook = prepare(LAUNCH / "rollout.toml", tmp_path / "run", tasks=rows, model=model_dir)
    name, _, value = hook.read_text().partition(": ")
    assert name == "sandlot_config"
    config, settings = read_rollout_file(Path(json.loads(value)))
    assert (config.tasks, config.model) == (str(rows.resolve()), model_dir.resolve())
    assert settings.out == (tmp_path / "run" / "rollouts").resolve()


def test_what_cannot_work_is_refused_before(model_dir: Path, tmp_path: Path) -> None:
    rows = bundled_path() / "rows.jsonl"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SandlotError):
        prepare(LAUNCH / "rollout.toml", tmp_path / "run", tasks=rows, model=empty)
    wrong = tmp_path / "wrong.toml"
    for text, why in (
        ("[trainer]\nout = 'x'\nnonsense = 1\n", "nonsense"),
        ("harness = 'claude-code:more=1'\n[trainer]\nout = 'x'\n", "no option 'more'"),
        ("harness = 'clippy'\n[trainer]\nout = 'x'\n", "clippy"),
        ("sandbox = 'box'\n[trainer]\nout = 'x'\n", "box"),
    ):
        wrong.write_text(text)
        with pytest.raises(ConfigError, match=why):
            prepare(wrong, tmp_path / "run", tasks=rows, model=model_dir)
    assert not (tmp_path / "run").exists()
