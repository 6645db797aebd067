"""The same suite as a user with no rights at all, made for the purpose when the tests run as root."""

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandlot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this run is a plain user's already")


SHORT = ["image_boot", "sandbox_escapes", "sandbox_exec", "sandbox_isolation", "sandbox_snapshot"]
WHOLE = [*SHORT, *(f"sandbox_{name}" for name in ("background", "files", "kill", "limits", "machines"))]


@pytest.fixture(params=["one id", "subordinate ids"])
def plain_user(request: pytest.FixtureRequest) -> Iterator[tuple[pwd.struct_passwd, list[str], str]]:
    """A new user, the tests for it, and what `facts["users"]` must say."""
    many = request.param == "subordinate ids"
    if many and shutil.which("newuidmap") is None:
        pytest.skip("no newuidmap here")
    name = f"sandlot{os.getpid()}"
    home = Path(f"/var/tmp/{name}")
    subprocess.run(["useradd", "--create-home", "--home-dir", str(home), name], check=True)
    try:
        _set_subordinate_ids(name, many)
        yield (pwd.getpwnam(name), SHORT, "range") if many else (pwd.getpwnam(name), WHOLE, "single")
    finally:
        subprocess.run(["userdel", "--remove", name], check=False, capture_output=True)


def _set_subordinate_ids(name: str, many: bool) -> None:
    """Whatever this machine gives to new users, give a range of ids or none."""
    for path in (Path("/etc/subuid"), Path("/etc/subgid")):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if not line.startswith(f"{name}:")]
        path.write_text("\n".join([*kept, *([f"{name}:700000000:65536"] if many else []), ""]))


@pytest.mark.slow
def test_the_suite_as_a_plain_user(plain_user: tuple[pwd.struct_passwd, list[str], str]) -> None:
    user, files, users = plain_user
    here = Path(__file__).parent
    home = user.pw_dir
    paths = [str(Path(sandlot.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": home,
        "PYTHONPATH": os.pathsep.join(paths),
        "TMPDIR": home,
        "SANDLOT_TEST_USERS": users,
    }

    def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-B", *arguments]
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
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
    result = run(
        python, "-m", "pytest", *options, "--basetemp", f"{home}/t", *(str(here / f"test_{file}.py") for file in files)
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
