"""Harbor's own code against our environment and our bridge to it; run by `test_harbor.py` where Harbor is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("harbor", reason="Harbor is not installed here")

from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from sandlot.errors import SandboxUnavailableError
from sandlot.sandbox import Limits, SandboxSpec
from sandlot.sandbox.harbor import HarborBackend
from sandlot.sandbox.harbor.environment import LocalEnvironment
from support.backends import LOCAL_ENVIRONMENT

Make = Callable[..., Any]
OFFLINE = {"network_mode": "no-network"}


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Any] = []

    def environment(config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        config = {"docker_image": "some-image", "workdir": "/app", **OFFLINE, **(config or {})}
        (tmp_path / "environment").mkdir(exist_ok=True)
        paths = TrialPaths(trial_dir=tmp_path / "trial")
        paths.mkdir()
        network = NetworkPolicy(network_mode=config["network_mode"])
        settings = {"image": "host", **kwargs}
        place = tmp_path / "environment"
        one = LocalEnvironment(
            place, "t", "t__env", paths, EnvironmentConfig(**config), network_policy=network, **settings
        )
        made.append(one)
        return one

    yield environment
    for one in made:
        await one.stop(delete=True)


def _task(place: Path) -> Path:
    files = {
        "task.toml": 'schema_version = "1.4"\n[environment]\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
        'docker_image = "some-image"\n',
        "instruction.md": "Write hello into /app/hello.txt.\n",
        "environment/given.txt": "given\n",
        "solution/solve.sh": "#!/bin/bash\ncp /app/given.txt /app/hello.txt; echo hello >>/app/hello.txt\n",
        "tests/test.sh": "#!/bin/bash\n"
        "grep -q hello /app/hello.txt && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_a_whole_trial(tmp_path: Path, agent: str, reward: float) -> None:
    task, jobs = _task(tmp_path / "hello"), tmp_path / "jobs"
    command = [Path(sys.executable).parent / "harbor", "run", "-p", task, "-a", agent, "-o", jobs]
    done = subprocess.run(
        [*command, "-e", LOCAL_ENVIRONMENT, "--ek", "image=host"],
        cwd=tmp_path,
        env={**os.environ, "HARBOR_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = jobs.glob("*/*/result.json")
    told = json.loads(result.read_text())
    assert told["exception_info"] is None
    assert told["verifier_result"]["rewards"] == {"reward": reward}


async def test_commands_and_their_users(make: Make) -> None:
    one = make({"env": {"OF_THE_TASK": "1"}})
    await one.start(force_build=False)
    result = await one.exec("whoami; pwd; echo $OF_THE_TASK $GIVEN; echo bad >&2; exit 3", env={"GIVEN": "x y"})
    assert (result.return_code, result.stdout, result.stderr) == (3, "root\n/app\n1 x y\n", "bad\n")
    with one.with_default_user("agent"):
        assert (await one.exec("whoami", cwd="/")).stdout == "agent\n"
    with pytest.raises(ValueError, match="no user 'www'"):
        await one.exec("true", user="www")
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        await one.exec("sleep 60", timeout_sec=1)
    heard: list[tuple[str, str]] = []

    async def hear(text: str, stream: str) -> None:
        heard.append((text, stream))

    with one.scoped_output_callback(hear):
        await one.exec("echo told")
    assert heard == [("told\n", "stdout")]
    await one.stop(delete=True)
    await one.stop(delete=True)


async def test_files_go_in_and_come_out(make: Make, tmp_path: Path) -> None:
    one = make()
    await one.start(force_build=False)
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "below" / "run.sh").chmod(0o755)
    await one.upload_dir(tree, "/opt/tree")
    assert (await one.exec("/opt/tree/below/run.sh")).stdout == "ran\n"
    await one.upload_file(tree / "below" / "run.sh", "/opt/new/place.sh")
    assert (await one.exec("/opt/new/place.sh")).stdout == "ran\n"
    await one.exec("cd /opt/tree; mkfifo fifo; ln -s below/run.sh link; echo 1 > -odd")
    await one.download_dir("/opt/tree", tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert found == {"below", "below/run.sh", "link", "-odd"}
    await one.download_file("/opt/tree/-odd", tmp_path / "deep" / "odd")
    assert (tmp_path / "deep" / "odd").read_text() == "1\n"
    assert await one.is_dir("/opt/tree")
    assert await one.is_file("/opt/new/place.sh")


async def test_a_model_server_of_this_side_is_reached_and_nothing_else(make: Make) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"model says " + await reader.readline())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        one = make(model_address=f"127.0.0.1:{port}", model_port=8500)
        await one.start(force_build=False)
        ask = "exec 3<>/dev/tcp/127.0.0.1/{} && echo hello >&3 && cat <&3"
        assert (await one.exec(ask.format(8500))).stdout == "model says hello\n"
        assert (await one.exec(ask.format(port))).return_code != 0


def test_what_it_cannot_be_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="offline=true"):
        make({"network_mode": "public"})
    make({"network_mode": "public"}, offline=True)
    with pytest.raises(ValueError, match="Dockerfile"):
        make({"docker_image": None}, image="")
    with pytest.raises(ValueError, match="Unknown option 'imag'"):
        make(imag="host")


async def test_a_spec_reaches_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    start = LocalEnvironment.start

    async def noted(self: Any, force_build: bool) -> None:
        asked.append(self)
        await start(self, force_build)

    monkeypatch.setattr(LocalEnvironment, "start", noted)
    backend = HarborBackend(LOCAL_ENVIRONMENT, kwargs={"image": "host"})
    limits = Limits(memory=1 << 30, disk=2 << 30, cpu=1.0)
    spec = SandboxSpec(image="docker://some-image", env={"GIVEN": "1"}, limits=limits)
    async with await backend.create(spec) as sandbox:
        assert (await sandbox.exec("whoami; echo $GIVEN; pwd")).stdout == b"agent\n1\n/workspace\n"
        (one,) = asked
        config = one.task_env_config
        assert (config.docker_image, config.memory_mb, config.storage_mb, config.cpus) == ("some-image", 1024, 2048, 1)
        assert one.network_policy.network_mode == "no-network"
        scratch = one.trial_paths.trial_dir.parent
        assert scratch.exists()
    assert not scratch.exists()
    assert [check.ok for check in await backend.doctor()] == [True]
    await backend.close()


async def test_what_harbor_refuses_is_refused_at_create() -> None:
    local = HarborBackend(LOCAL_ENVIRONMENT)
    for backend, spec, said in (
        (HarborBackend("no-such"), SandboxSpec(image="x"), "no-such refuses"),
        (HarborBackend("no.such:Class"), SandboxSpec(image="x"), "refuses"),
        (HarborBackend(LOCAL_ENVIRONMENT, kwargs={"imag": 1}), SandboxSpec(image="x"), "Unknown option"),
        (local, SandboxSpec(image="dockerfile:/var/empty"), "build no Dockerfile"),
        (local, SandboxSpec(image="x", network="gateway"), "advertise_url"),
        (
            HarborBackend(LOCAL_ENVIRONMENT, advertise_url="tcp://127.0.0.1:1", bind="127.0.0.1:0"),
            SandboxSpec(image="x", network="gateway"),
            "allowlist",
        ),
    ):
        with pytest.raises(SandboxUnavailableError, match=said):
            await backend.create(spec)
        await backend.close()
