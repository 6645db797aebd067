"""The same suite as a user with no rights at all, made for the purpose when the tests run as root."""

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandlot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this run is a plain user's already")


@pytest.fixture
def plain_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pwd.struct_passwd]:
    name = f"sandlot{os.getpid()}"
    home = Path(f"/var/tmp/{name}")
    subprocess.run(["useradd", "--create-home", "--home-dir", str(home), name], check=True)
    try:
        yield pwd.getpwnam(name)
    finally:
        subprocess.run(["userdel", "--remove", name], check=False, capture_output=True)


@pytest.mark.slow
def test_the_suite_as_a_plain_user(plain_user: pwd.struct_passwd) -> None:
    here = Path(__file__).parent
    home = plain_user.pw_dir
    paths = [str(Path(sandlot.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    environment = {"PATH": os.environ["PATH"], "HOME": home, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": home}

    def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-B", *arguments]
        identity = {"user": plain_user.pw_uid, "group": plain_user.pw_gid, "extra_groups": []}
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, **identity)

    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            if run(python, "-c", "import pytest, pytest_asyncio, hypothesis, sandlot").returncode == 0:
                break
        except OSError:
            continue
    else:
        pytest.skip("no interpreter that a plain user may run has the test tools")
    rootdir = here.parents[1]
    options = [
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(rootdir),
        "-c",
        str(rootdir / "pyproject.toml"),
    ]
    result = run(python, "-m", "pytest", *options, "--basetemp", f"{home}/t", str(here))
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
