"""Commands: what they see, what comes back, and that an end means the end of everything they started."""

import asyncio
import os
import time

import pytest

from sandlot.errors import SandboxError
from sandlot.sandbox import ExecResult, Sandbox, SandboxSpec
from sandlot.sandbox.base import Limits, SandboxBackend
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.local.sandbox import LocalSandbox
from support.backends import EVERYWHERE, FROM_REMOTE

BACKENDS = EVERYWHERE
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_protocols_are_kept(backend: LocalBackend, shared: LocalSandbox) -> None:
    assert isinstance(shared, Sandbox)
    assert isinstance(backend, SandboxBackend)
    assert {"backend", "users", "limits", "isolation"} <= set(shared.facts)
    if shared.facts["backend"] == "local":
        assert shared.facts["users"] == os.environ.get("SANDLOT_TEST_USERS", shared.facts["users"])
        outside = shared.facts["ids_outside"]
        assert (outside["root"] != outside["agent"]) == (shared.facts["users"] == "range")


async def test_exit_codes_and_streams(shared: LocalSandbox) -> None:
    result = await shared.exec("printf out; printf err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out", b"err")
    assert not result.ok
    assert (await shared.exec(["true"])).ok


async def test_a_missing_command_fails_like_in_a_shell(shared: LocalSandbox) -> None:
    result = await shared.exec(["no-such-program", "x"])
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


async def test_a_signal_leaves_no_exit_code(shared: LocalSandbox) -> None:
    result = await shared.exec("kill -TERM $$")
    assert result.exit_code is None
    assert not result.timed_out


async def test_a_missing_directory_is_an_error_of_the_caller(shared: LocalSandbox) -> None:
    with pytest.raises(SandboxError, match="/nowhere"):
        await shared.exec(["true"], cwd="/nowhere")


async def test_unknown_users_are_refused(shared: LocalSandbox) -> None:
    with pytest.raises(SandboxError, match="no user 'www'"):
        await shared.exec(["true"], user="www")


async def test_the_environment_is_clean(shared: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    result = await shared.exec("env", env={"GIVEN": "x y"})
    names = {line.split("=")[0] for line in result.stdout.decode().splitlines()}
    added = FROM_REMOTE if shared.facts["backend"] != "local" else set()
    assert names - {"PWD", "OLDPWD", "SHLVL", "_"} - added == {"GIVEN", "PATH", "HOME", "USER", "LANG"}
    assert b"GIVEN=x y\n" in result.stdout


async def test_home_and_workdir_belong_to_the_agent(shared: LocalSandbox) -> None:
    result = await shared.exec("whoami; echo $HOME; pwd; touch ~/a /workspace/b /tmp/c && echo written")
    assert result.stdout == b"agent\n/home/agent\n/workspace\nwritten\n"


async def test_root_is_a_user_of_its_own_where_ids_allow_it(shared: LocalSandbox) -> None:
    result = await shared.exec("id -u; touch /opt/by-root && echo written", user="root")
    expected = b"0" if shared.facts["users"] == "range" else b"1000"
    assert result.stdout == expected + b"\nwritten\n"
    agent = await shared.exec("echo x > /opt/by-root")
    assert agent.ok == (shared.facts["users"] == "single")


async def test_stdin_is_given_and_ends(shared: LocalSandbox) -> None:
    data = bytes(range(256)) * 5000
    assert (await shared.exec(["cat"], stdin=data)).stdout == data
    assert (await shared.exec(["cat"])).stdout == b""


async def test_the_streams_can_be_opened_by_name(shared: LocalSandbox) -> None:
    for user in ("agent", "root"):
        result = await shared.exec("echo a > /dev/stdout; echo b > /dev/stderr; cat /dev/stdin", user=user, stdin=b"c")
        assert (result.stdout, result.stderr) == (b"a\nc", b"b\n")


async def test_bytes_that_are_no_text(shared: LocalSandbox) -> None:
    result = await shared.exec(r"printf 'ok \377\360\237 end'")
    assert result.stdout == b"ok \xff\xf0\x9f end"
    assert "ok" in result.text()
    assert "end" in result.text()


async def test_output_is_cut_at_the_limit_while_it_runs(backend: LocalBackend) -> None:
    async with await backend.create(SandboxSpec(limits=Limits(output=1 << 20))) as sandbox:
        flood = await sandbox.exec("head -c 100000000 /dev/zero; echo done >&2")
        assert flood.truncated
        assert flood.exit_code == 0
        assert len(flood.stdout) == 1 << 20
        assert flood.stderr == b"done\n"
        exact = await sandbox.exec(f"head -c {1 << 20} /dev/zero")
        assert len(exact.stdout) == 1 << 20
        assert not exact.truncated


async def test_a_daemon_does_not_hold_the_call_and_lives_on(shared: LocalSandbox) -> None:
    started = time.monotonic()
    result = await shared.exec("sleep 71.5 & echo started")
    assert result.stdout == b"started\n"
    assert time.monotonic() - started < 60
    assert b"sleep 71.5" in (await shared.exec("ps ax")).stdout
    await shared.kill_processes()
    assert b"sleep 71.5" not in (await shared.exec("ps ax")).stdout


async def test_a_timeout_kills_the_whole_tree(shared: LocalSandbox) -> None:
    command = (
        "echo begun; setsid sh -c 'trap \"\" TERM; while :; do date +%s%N >> /tmp/alive; sleep 0.05; done' & "
        "(setsid sleep 72.5 &) ; sleep 72.5"
    )
    result = await shared.exec(command, timeout=2.0)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"begun\n")
    first = await shared.read_file("/tmp/alive")
    assert b"72.5" not in (await shared.exec("ps ax")).stdout
    await asyncio.sleep(0.2)
    assert await shared.read_file("/tmp/alive") == first


async def test_a_timeout_kills_a_stopped_tree(shared: LocalSandbox) -> None:
    result = await shared.exec("sleep 73.5 & kill -STOP $!; kill -STOP $$", timeout=0.5)
    assert result.timed_out
    assert b"73.5" not in (await shared.exec("ps ax")).stdout


async def test_a_cancelled_call_kills_its_tree(shared: LocalSandbox) -> None:
    call = asyncio.ensure_future(shared.exec("setsid sleep 74.5 & sleep 74.5", timeout=None))
    await asyncio.sleep(0.3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for _ in range(100):
        if b"74.5" not in (await shared.exec("ps ax")).stdout:
            break
    else:
        pytest.fail("the tree of a cancelled call lives on")


async def test_a_spawned_process_is_waited_for_and_killed(shared: LocalSandbox) -> None:
    process = await shared.spawn("read line; echo got $line; exit 5", stdin=b"it\n")
    result = await process.wait(10)
    assert (result.exit_code, result.stdout) == (5, b"got it\n")
    assert await process.wait() == result
    long = await shared.spawn("(setsid sleep 75.5 &); echo up; sleep 75.5")
    assert long.running
    await asyncio.sleep(0.2)
    await long.kill()
    assert not long.running
    assert (await long.wait()).exit_code is None
    assert b"75.5" not in (await shared.exec("ps ax")).stdout


async def test_kill_reaches_what_a_finished_process_left(shared: LocalSandbox) -> None:
    process = await shared.spawn("setsid sleep 76.5 & exit 0")
    assert (await process.wait(10)).exit_code == 0
    assert b"76.5" in (await shared.exec("ps ax")).stdout
    await process.kill()
    assert b"76.5" not in (await shared.exec("ps ax")).stdout


async def test_wait_with_a_timeout_kills(shared: LocalSandbox) -> None:
    process = await shared.spawn("sleep 77.5")
    result = await process.wait(0.2)
    assert result.timed_out
    assert not process.running


async def test_many_calls_at_once_do_not_mix(shared: LocalSandbox) -> None:
    results: list[ExecResult] = await asyncio.gather(
        *(shared.exec(["sh", "-c", f"cat; exit {n}"], stdin=str(n).encode() * 1000) for n in range(32))
    )
    for n, result in enumerate(results):
        assert result.exit_code == n
        assert result.stdout == str(n).encode() * 1000


async def test_the_tools_of_the_host_image_work(shared: LocalSandbox) -> None:
    script = "git init -q r && cd r && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && git log"
    assert (await shared.exec(script)).ok
    assert (await shared.exec(["python3", "-c", "import ssl, sqlite3; print(6 * 7)"])).stdout == b"42\n"


async def test_long_arguments_and_strange_bytes(shared: LocalSandbox) -> None:
    assert (await shared.exec(["printf", "%s", "x" * 100_000])).stdout == b"x" * 100_000
    strange = b"\xff\xfe \n \x01".decode("utf-8", "surrogateescape")
    if shared.facts["backend"] == "local":
        assert (await shared.exec(["printf", "%s", strange])).stdout == b"\xff\xfe \n \x01"
    else:
        with pytest.raises(SandboxError, match="carries commands as text"):
            await shared.exec(["printf", "%s", strange])
    with pytest.raises(SandboxError):
        await shared.exec(["printf", "a\0b"])
