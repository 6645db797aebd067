"""Machines that allow less: imitated by user namespaces with fewer rights, in a process of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandlot.sandbox.local import state

TRY = """
import asyncio, sys
from pathlib import Path
from sandlot.errors import SandboxError
from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend

async def main():
    backend = LocalBackend(Path(sys.argv[1]))
    try:
        async with await backend.create(SandboxSpec()) as sandbox:
            result = await sandbox.exec("id -un; echo x > ~/x && cat ~/x", user="root")
            print(sandbox.facts["users"], sandbox.facts["limits"]["tier"], result.text().split())
    except SandboxError as error:
        print(type(error).__name__, error)
    await backend.close()

asyncio.run(main())
"""

pytestmark = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")


def _in_a_namespace(state_dir: Path, prepare: str) -> str:
    source = str(Path(state.__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, *filter(None, sys.path)])}
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{prepare}\nexec "$@"', "sh"]
    command += [sys.executable, "-c", TRY, str(state_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_root_of_a_container_with_one_id(tmp_path: Path) -> None:
    said = _in_a_namespace(tmp_path, "")
    assert said.startswith("single ")
    assert said.endswith(" ['agent', 'x']\n")
    assert os.listdir(tmp_path) == [".lock"]


def test_no_more_user_namespaces(tmp_path: Path) -> None:
    said = _in_a_namespace(tmp_path, "echo 0 > /proc/sys/user/max_user_namespaces")
    assert said.startswith("SandboxUnavailableError local sandboxes need user namespaces, which this machine refuses")
    assert said.endswith("; allow them: sysctl user.max_user_namespaces=15000\n")
    assert os.listdir(tmp_path) == [".lock"]


def test_no_mount_of_a_fresh_proc(tmp_path: Path) -> None:
    said = _in_a_namespace(tmp_path, "mount -t tmpfs none /proc/fs")
    assert said.startswith("SandboxUnavailableError ")
    assert "mount proc" in said
    assert "systempaths=unconfined" in said
    assert os.listdir(tmp_path) == [".lock"]
