"""The adapters of clouds: what they ask for, what they refuse, what they never repeat."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandlot.config import load_config
from sandlot.errors import ConfigError, MissingDependencyError, SandboxError, SandboxLostError, SandboxUnavailableError
from sandlot.sandbox import SANDBOXES, Layer, Limits, SandboxSpec, make_backend
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.remote import owner, spool
from sandlot.sandbox.remote.tunnel import Tunnel
from support.backends import CLOUDS, DAYTONA, MODAL, cloud_backend, free_port, serve
from support.clouds import Cloud

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the doubles' sandboxes need a root of their own, as clouds' have"),
]

Making = Callable[..., Any]
SPEC = SandboxSpec(image="some-image", env={"GIVEN": "1"}, labels={"run": "r1"}, limits=Limits(wall_clock=7200))
BROKE = "the connection broke|Server disconnected|Failed to communicate"
"""In the words of each SDK."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local() -> AsyncIterator[LocalBackend]:
    made = LocalBackend()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def cloud(local: LocalBackend, request: pytest.FixtureRequest) -> AsyncIterator[Cloud]:
    made = Cloud(local, free_port())
    name = request.node.callspec.params.get("name", "") if hasattr(request.node, "callspec") else ""
    async with serve(name, made):
        yield made
    await made.close()


@pytest.mark.parametrize("name", CLOUDS)
async def test_what_is_asked_of_the_cloud(cloud: Cloud, name: str) -> None:
    backend = cloud_backend(name, cloud)
    async with await backend.create(SPEC) as sandbox:
        assert (await sandbox.exec("whoami; echo $GIVEN; pwd")).stdout == b"agent\n1\n/workspace\n"
        (asked,) = cloud.created
        assert sandbox.facts["backend"] == name
        assert asked["image"] == "some-image"
        labels = asked.get("metadata") or asked.get("labels")
        assert labels["run"] == "r1"
        if name != "kubernetes":
            assert not owner.is_dead(labels)
        rule = {
            "e2b": asked.get("network") == {"deny_out": ["0.0.0.0/0"]},
            "modal": asked.get("block_network") is True,
            "daytona": asked.get("networkBlockAll") is True,
            "kubernetes": True,  # the template's
        }
        assert rule[name]
    assert cloud.running == {}
    await sandbox.kill()
    assert await backend.sweep() == 0
    checks = await backend.doctor()
    assert [(check.name, check.ok) for check in checks] == [(name, True)]
    await backend.close()


@pytest.mark.parametrize("name", CLOUDS)
async def test_what_cannot_be_done_is_refused_at_create(cloud: Cloud, name: str, tmp_path: Any) -> None:
    backend = cloud_backend(name, cloud)
    for spec, said in (
        (SandboxSpec(), "host"),
        (SandboxSpec(image="/some/file.tar"), "cannot boot"),
        (SandboxSpec(image="x", workdir="relative"), "absolute"),
        (SandboxSpec(image="x", layers=(Layer(tmp_path, "/opt/none"),)), "into the image"),
    ):
        with pytest.raises(SandboxUnavailableError, match=said):
            await backend.create(spec)
    if not backend.builds:
        with pytest.raises(SandboxUnavailableError, match="builds no Dockerfile"):
            await backend.create(SandboxSpec(image="dockerfile:/some/place"))
    if not backend.streams:
        with pytest.raises(SandboxUnavailableError, match=r"stdin open.*give an advertise_url"):
            await backend.create(SandboxSpec(image="x", network="gateway"))
    assert cloud.running == {}
    another = cloud_backend(name, cloud)
    if backend.snapshots:
        snapshot = await (await backend.create(SPEC)).snapshot()
        with pytest.raises(SandboxUnavailableError, match="no snapshots but its own"):
            await another.create(SandboxSpec(image="x", snapshot=snapshot))
        await snapshot.discard()
    else:
        async with await backend.create(SPEC) as sandbox:
            with pytest.raises(SandboxError, match="cannot freeze"):
                await sandbox.snapshot()
    assert cloud.running == {}
    await another.close()
    await backend.close()


async def test_what_the_cloud_does_not_find_is_no_lost_sandbox(cloud: Cloud) -> None:
    backend = cloud_backend("e2b", cloud)

    async def boot(**how: Any) -> str:
        raise cloud.gone("no such template")

    cloud.boot = boot  # type: ignore[method-assign]
    with pytest.raises(SandboxUnavailableError, match=r"cannot boot some-image.*no such template"):
        await backend.create(SPEC)
    await backend.close()


async def test_kubernetes_must_be_told_that_it_isolates(cloud: Cloud) -> None:
    from sandlot.sandbox.kubernetes import KubernetesBackend

    with pytest.raises(SandboxUnavailableError, match="isolated=True"):
        await KubernetesBackend(object()).create(SPEC)
    with pytest.raises(SandboxUnavailableError, match="warm pool"):
        await KubernetesBackend(object(), isolated=True).create(SandboxSpec(image="python:3.12"))


@pytest.mark.parametrize("name", ["e2b", "modal", "daytona", "kubernetes"])
async def test_a_missing_sdk_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"kubernetes": "k8s_agent_sandbox"}.get(name, name), None)
    options = {"isolated": True} if name == "kubernetes" else {}
    backend = SANDBOXES.get(name)(**options)
    with pytest.raises(MissingDependencyError, match=rf"sandlot\[{name}\]"):
        await backend.create(SPEC)
    (check,) = await backend.doctor()
    assert not check.ok
    await backend.close()


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_call_that_failed_is_not_made_again(cloud: Cloud, name: str) -> None:
    backend = cloud_backend(name, cloud)
    async with await backend.create(SPEC) as sandbox:
        await sandbox.exec("echo 1 >> /workspace/count")
        before = len(cloud.calls)
        cloud.fail_next = TimeoutError("the connection broke")
        with pytest.raises(SandboxError, match=BROKE):
            await sandbox.exec("echo 1 >> /workspace/count")
        assert len(cloud.calls) == before
        assert await sandbox.read_file("/workspace/count") == b"1\n"
        await cloud.end(sandbox.id)
        with pytest.raises(SandboxLostError, match="gone"):
            await sandbox.exec(["true"])
    await backend.close()


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_look_that_failed_is_made_again_and_a_start_is_not(cloud: Cloud, name: str) -> None:
    backend = cloud_backend(name, cloud)
    async with await backend.create(SPEC) as sandbox:
        for lost, ends in (("tail -c", True), ("nohup setsid", False)):
            cloud.fail_on, cloud.fail_next = lost, TimeoutError("the connection broke")
            running = asyncio.ensure_future(sandbox.exec("echo 1 >>count; sleep 0.5; echo done"))
            if ends:
                assert (await running).stdout == b"done\n"
            else:
                with pytest.raises(SandboxError, match=BROKE):
                    await running
            assert cloud.fail_next is None
        assert await sandbox.read_file("/workspace/count") == b"1\n"
    await backend.close()


@pytest.mark.parametrize("name", ["e2b", *MODAL, *DAYTONA])
async def test_what_a_dead_run_left_is_swept(cloud: Cloud, name: str) -> None:
    backend = cloud_backend(name, cloud)
    await backend.create(SPEC)
    async with await backend.create(SPEC) as alive:
        labels = cloud.created[0].get("metadata") or cloud.created[0]["labels"]
        labels["sandlot.until"] = "1000"
        assert await backend.sweep() == 1
        assert list(cloud.running) == [alive.id]
        assert await backend.sweep() == 0
    with pytest.raises(cloud.gone):
        await cloud.end("sb-0")
    await backend.close()


async def test_creation_is_spaced(cloud: Cloud) -> None:
    backend = cloud_backend("e2b", cloud, per_second=4.0)
    started = time.monotonic()
    made = await asyncio.gather(*(backend.create(SPEC) for _ in range(4)))
    assert time.monotonic() - started >= 0.75
    await asyncio.gather(*(one.kill() for one in made))
    await backend.close()


async def test_a_cancelled_create_leaves_nothing_once_the_backend_is_closed(cloud: Cloud) -> None:
    backend, booting, booted, names = cloud_backend("e2b", cloud), asyncio.Event(), cloud.boot, list[str]()

    async def boot(**how: Any) -> str:
        booting.set()
        names.append(await booted(**how))
        return names[0]

    cloud.boot = boot  # type: ignore[method-assign]
    task = asyncio.ensure_future(backend.create(SPEC))
    await booting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await backend.close()
    assert (len(names), cloud.running) == (1, {})


async def test_one_that_cannot_be_ended_keeps_no_other(cloud: Cloud) -> None:
    backend, end, ended = cloud_backend("e2b", cloud), cloud.end, list[str]()
    first = await backend.create(SPEC)
    for _ in range(2):
        await backend.create(SPEC)

    async def refuse(name: str) -> None:
        if name == first.id:
            raise OSError("the connection broke")
        await end(name)
        ended.append(name)

    cloud.end = refuse  # type: ignore[method-assign]
    with pytest.raises(SandboxError, match="the connection broke"):
        await backend.close()
    assert (list(cloud.running), len(ended)) == ([first.id], 2)
    await end(first.id)


async def test_the_clouds_own_processes_live_on(cloud: Cloud) -> None:
    backend = cloud_backend("e2b", cloud)
    booted = cloud.boot

    async def boot(**how: Any) -> str:
        name = await booted(**how)
        await cloud.running[name].spawn(["sleep", "95.5"], user="root", cwd="/")
        return name

    cloud.boot = boot  # type: ignore[method-assign]
    async with await backend.create(SPEC) as sandbox:
        await sandbox.exec("setsid sleep 96.5 & exit 0")
        root = await sandbox.spawn("setsid sleep 97.5 & sleep 97.5", user="root")
        assert b"96.5" in (await sandbox.exec("ps axww")).stdout
        await root.kill()
        listing = (await sandbox.exec("ps axww | grep -v grep")).stdout
        assert (b"95.5" in listing, b"96.5" in listing, b"97.5" in listing) == (True, True, False)
        await sandbox.kill_processes()
        listing = (await sandbox.exec("ps axww | grep -v grep")).stdout
        assert (b"95.5" in listing, b"96.5" in listing) == (True, False)
    await backend.close()


async def test_the_agent_sees_nothing_of_roots_commands(cloud: Cloud) -> None:
    backend = cloud_backend("e2b", cloud)
    booted = cloud.boot

    async def boot(**how: Any) -> str:
        name = await booted(**how)
        ours = "mkdir -p /tmp/.sandlot/x; chown -R 1000:1000 /tmp/.sandlot; chmod 777 /tmp/.sandlot; chown 1000 /tmp"
        await cloud.running[name].exec(ours, user="root", cwd="/")  # as an image may bring it
        return name

    cloud.boot = boot  # type: ignore[method-assign]
    async with await backend.create(SPEC) as sandbox:
        spool = ["stat", "-c", "%u %a", "/tmp", "/tmp/.sandlot"]
        assert (await sandbox.exec(spool, user="root")).stdout == b"0 1777\n0 700\n"
        line = "until [ -e /tmp/seen ]; do sleep 0.05; done; cat"
        secret = await sandbox.spawn(line, user="root", env={"TOLD": "s3cret"}, stdin=b"s3cret")
        seen = await sandbox.exec(
            "ls -R /tmp/.sandlot; cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | grep -ac 's3cre[t]'; "
            "mark=$(tr '\\0' '\\n' </proc/self/environ | sed -n s/^SANDLOT_EXEC=//p); cat /tmp/.sandlot/$mark/in; "
            "touch /tmp/seen"
        )
        assert seen.stdout == b"0\n"
        assert seen.stderr.count(b"ermission denied") == 2
        assert (await secret.wait(60)).stdout == b"s3cret"
    await backend.close()


async def test_output_that_is_late_is_waited_for(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_LEFTOVER_SECONDS", 60.0)
    backend = cloud_backend("e2b", cloud)
    async with await backend.create(SPEC) as sandbox:
        running = asyncio.ensure_future(sandbox.exec("touch up; until [ -e go ]; do sleep 0.05; done; echo said"))
        await sandbox.exec("until [ -e up ]; do sleep 0.05; done")
        others = (
            "for d in /tmp/.sandlot/*/; do case $d in *$SANDLOT_EXEC*) ;; *) p=$(cat $d/o.pid); break ;; esac; done; "
        )
        wait = "touch /workspace/go; until [ -e $d/code ]; do sleep 0.05; done; sleep 0.7; "
        held = await sandbox.exec(f"{others} kill -STOP $p && {{ {wait} kill -CONT $p; }}", user="root")
        assert held.ok, held.text()
        assert (await running).stdout == b"said\n"
    await backend.close()


WAYS = [(name, True) for name in CLOUDS] + [(name, False) for name in ("e2b", *MODAL, *DAYTONA)]


@pytest.mark.parametrize(("name", "dialled"), WAYS)
async def test_the_way_back_to_the_gateway(cloud: Cloud, name: str, dialled: bool) -> None:
    url = {"advertise_url": f"tcp://127.0.0.1:{cloud.tunnel_port}", "bind": f"127.0.0.1:{cloud.tunnel_port}"}
    backend = cloud_backend(name, cloud, **(url if dialled else {}))
    spec = SandboxSpec(image="some-image", network="gateway")
    async with await backend.create(spec) as first, await backend.create(spec) as second:

        async def serve(who: bytes, sandbox: Any) -> asyncio.Server:
            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(who + b" says " + await reader.readline())
                await writer.drain()
                writer.close()

            return await asyncio.start_server(answer, sock=sandbox.listen(9000))

        assert first.facts["gateway"] == ("tunnel" if dialled else "relay")
        servers = [await serve(b"first", first), await serve(b"second", second)]
        ask = "exec 3<>/dev/tcp/127.0.0.1/9000; echo hello >&3; cat <&3"
        for who, sandbox in ((b"first", first), (b"second", second), (b"first", first)):
            assert (await sandbox.exec(["bash", "-c", ask])).stdout == who + b" says hello\n"
            await sandbox.kill_processes()  # the forwarder is the cloud's, not the agent's
        if not dialled:
            for server in servers:
                server.close()
            assert cloud.created[0].get("network", {"deny_out": ["0.0.0.0/0"]}) == {"deny_out": ["0.0.0.0/0"]}
            assert cloud.created[0].get("block_network", True)
            assert cloud.created[0].get("networkBlockAll", True)
            await backend.close()
            return
        assert not (await first.exec("cat /tmp/.sandlot/forward-9000.secret")).ok
        reader, writer = await asyncio.open_connection("127.0.0.1", cloud.tunnel_port)
        writer.write(b"0" * 64 + b"hello\n")
        assert await reader.read() == b""
        writer.close()
        for server in servers:
            server.close()
    rule = {
        "e2b": cloud.created[0].get("network", {}).get("allow_out") == ["127.0.0.1"],
        "modal": cloud.created[0].get("outbound_cidr_allowlist") == ["127.0.0.1/32"],
        "daytona": cloud.created[0].get("networkAllowList") == "127.0.0.1/32",
        "kubernetes": True,
    }
    assert rule[name]
    await backend.close()


async def test_addresses_that_cannot_be_dialled_are_refused() -> None:
    for url in ("http://host:1", "tcp://host", "host:80", ""):
        with pytest.raises(ConfigError, match="advertise_url"):
            Tunnel(url)


async def test_gateways_that_route_by_a_key(cloud: Cloud) -> None:
    backend = cloud_backend("e2b", cloud, image_key="image", template="any")
    async with await backend.create(SPEC):
        assert cloud.created[0]["image"] == "any"
        assert cloud.created[0]["metadata"]["image"] == "some-image"
    await backend.close()


async def test_options_reach_a_backend_by_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('sandbox = "e2b"\n[sandbox_options]\nadvertise_url = "tls://here.example:443"\nper_second = 2.0\n')
    config = load_config(file)
    backend = make_backend(config.sandbox, config.sandbox_options)
    assert (backend.name, backend.tunnel.host, backend.tunnel.tls) == ("e2b", "here.example", True)
    with pytest.raises(ConfigError, match="e2b has no option 'advertise'"):
        make_backend("e2b", {"advertise": "x"})
