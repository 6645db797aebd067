"""Makes local sandboxes: starts the zygote, chooses what this machine offers, and sweeps what dead runs left."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandlot.cache import cache_dir
from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.base import AGENT_USER, Check, Running, SandboxSpec, Snapshot
from sandlot.sandbox.images import Image, ImageStore, reference
from sandlot.sandbox.jail import cgroups, leftovers, tree, wire
from sandlot.sandbox.local import image, limits, state
from sandlot.sandbox.local.boot import boot
from sandlot.sandbox.local.sandbox import LocalSandbox

AGENT_ID = 1000
_BASE_ID = 0x53420000
"""First of the 65536 ids outside that a sandbox's ids are when the machine lets us map a range."""
_PACKAGE = Path(__file__).resolve().parents[2]
_START = """
import sys, types
for name, path in (("sandlot", sys.argv[1]), ("sandlot.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = types.ModuleType(name)  # the packages themselves would import much more than is needed
    sys.modules[name].__path__ = [path]
from sandlot.sandbox.jail.zygote import main
main(int(sys.argv[2]), sys.argv[3])
"""
_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class _Machine:
    """What was found at the start: id mapping (`range` or `single`) and limit tier."""

    users: str
    tier: limits.Tier


@dataclass(frozen=True)
class _Base:
    """The read-only files below a sandbox: directories of the image, uppermost first, and trees mounted on them.

    `prepared`: owners are the sandbox's already; otherwise they are mapped at each boot.
    """

    lowers: tuple[str, ...]
    prepared: bool
    binds: tuple[tuple[str, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class LocalSnapshot:
    """See `Snapshot`. `layers` are frozen upper directories, newest first, shared with what was booted from them."""

    def __init__(self, backend: LocalBackend, layers: tuple[str, ...], base: _Base) -> None:
        self.layers, self.base = layers, base
        self._backend = backend
        self._discarded = False

    async def discard(self) -> None:
        """Free the files as soon as no sandbox or later snapshot stands on them."""
        if not self._discarded:
            self._discarded = True
            await self._backend.release(self.layers)


class LocalBackend:
    """See `SandboxBackend`. Its state lies in one directory per run, which ends with the run, however that ends."""

    name = "local"

    def __init__(self, state_dir: Path | None = None, *, image_cache: int = 64 << 30) -> None:
        """`state_dir`: where runs and images are kept instead of the cache. `image_cache`: bytes of images to keep."""
        self._state_dir, self._image_cache = state_dir, image_cache
        self._guard = threading.Lock()
        self._machine: _Machine | None = None
        self.run_dir = Path()
        self._lock_fd = -1
        self._control: socket.socket | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._host_binds: list[tuple[str, str]] = []
        self._numbers = itertools.count(1)
        self._sandboxes: dict[str, LocalSandbox] = {}
        self._layers: Counter[str] = Counter()
        self._stood_on: dict[str, tuple[str, ...]] = {}
        self._bases: dict[str, _Base] = {}
        self._images: ImageStore | None = None
        self._flattening: dict[tuple[str, str], asyncio.Task[Image]] = {}

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxBackend.create`."""
        machine = await asyncio.to_thread(self._start)
        identity = f"{next(self._numbers)}-{secrets.token_hex(4)}"
        layers, base = await self._files(spec, machine.users)
        body = {
            "id": identity,
            "dir": str(self.run_dir / identity),
            "users": machine.users,
            "base": _BASE_ID,
            "agent_id": AGENT_ID,
            "workdir": spec.workdir,
            "lowers": [*layers, *base.lowers[:-1]],
            "image": base.lowers[-1],
            "image_is_prepared": base.prepared,
            "binds": [*base.binds, *_binds(spec)],
            "limits": asdict(spec.limits),
            "shm_bytes": min(spec.limits.memory // 4, _SHM_BYTES),
            "cgroups": machine.tier.groups(identity, spec.limits),
            "cpu_affinity": spec.limits.cpu is not None and not {"", "cpu"} & set(machine.tier.parents),
        }
        facts = {
            "backend": self.name,
            "isolation": "namespaces",
            "users": machine.users,
            "limits": machine.tier.facts(spec.limits),
            "network": spec.network,
            "seccomp": True,
            "image": spec.image if spec.snapshot is None else "snapshot",
        }
        about = {"image": facts["image"], "started": time.time(), "labels": dict(spec.labels)}
        self._make_directory(body, machine.users, about)
        self._layers.update(layers)
        self._stood_on[identity], self._bases[identity] = layers, base
        try:
            owners = {"root": _BASE_ID, AGENT_USER: _BASE_ID + AGENT_ID} if machine.users == "range" else {}
            sandbox = await boot(self._send, body, spec, facts, owners, base.env, self._on_end)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.to_thread(leftovers.remove_sandbox, str(self.run_dir / identity))
            del self._bases[identity]
            await asyncio.shield(self.release(self._stood_on.pop(identity)))
            raise
        self._sandboxes[identity] = sandbox
        return sandbox

    async def sweep(self) -> int:
        """See `SandboxBackend.sweep`."""
        return await asyncio.to_thread(self._sweep)

    async def running(self) -> list[Running]:
        """See `Lists.running`."""
        return await asyncio.to_thread(lambda: [one for parent in self._parents() for one in state.running(parent)])

    async def doctor(self) -> list[Check]:
        """See `SandboxBackend.doctor`."""
        from sandlot.sandbox.local.doctor import examine

        return await examine(self)

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        await asyncio.gather(*(sandbox.kill() for sandbox in list(self._sandboxes.values())))
        await asyncio.to_thread(self._stop)

    def trial(self, what: str, **details: Any) -> str | None:
        """Run a trial of `jail.probe` in a child of the zygote; why it failed, None when it works. Blocks."""
        ours, theirs = wire.packet_pair()
        with ours:
            with theirs:
                self._send_op(b"p", {"what": what, **details}, [theirs.fileno()])
            ours.settimeout(20)
            try:
                answer, _ = wire.receive_packet(ours)
            except TimeoutError:
                return "it did not end within 20 s"
        return "it was killed" if answer is None else answer["error"]

    def _start(self) -> _Machine:
        with self._guard:
            if self._machine is not None:
                self._revive()
                return self._machine
            if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
                raise SandboxUnavailableError(
                    f"local sandboxes need Linux on x86_64 or aarch64, not {sys.platform} on {platform.machine()}; "
                    "use another sandbox backend"
                )
            self._machine = self._choose()
            return self._machine

    def _choose(self) -> _Machine:
        self._sweep()
        why = ""
        for parent in self._parents():
            try:
                self._open_run(parent)
            except OSError as error:
                why = f"{parent}: {error.strerror}"
                continue
            if (refused := self.trial("namespaces")) is not None:
                self._stop()
                raise SandboxUnavailableError(state.namespaces_cure(refused))
            users = "range" if os.geteuid() == 0 and self.trial("range", base=_BASE_ID) is None else "single"
            trial = self.run_dir / "trial"
            for name in ("lower", "upper", "work", "root"):
                (trial / name).mkdir(parents=True)
            refused = self.trial("overlay", directory=str(trial), users=users)
            tree.remove(str(trial))
            if refused is None:
                owner = _BASE_ID if users == "range" else None
                self._host_binds = image.make_skeleton(self.run_dir / "host", owner, AGENT_ID)
                tier = limits.detect().below(f"sandlot-{self.run_dir.name}")
                cgroups.make_parents([str(path) for path in tier.parents.values()], str(self.run_dir / "groups"))
                return _Machine(users, tier)
            why = f"{parent}: {refused}"
            self._stop()
        raise SandboxUnavailableError(
            f"no directory here can hold an overlay file system ({why}); "
            "put XDG_CACHE_HOME on ext4, xfs, btrfs or tmpfs (overlay needs kernel 5.11 for plain users)"
        )

    def _open_run(self, parent: Path) -> None:
        self.run_dir, self._lock_fd = state.open_run(parent)
        self._start_zygote()

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START]
        with theirs:
            self._zygote = subprocess.Popen(
                [*command, str(_PACKAGE), str(theirs.fileno()), str(self.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=[theirs.fileno(), self._lock_fd],
                start_new_session=True,
            )
        ours.settimeout(20)
        self._control = ours

    def _revive(self) -> None:
        """A zygote that was killed is replaced; its sandboxes live on with their keepers."""
        if self._zygote is None or self._zygote.poll() is not None:
            if self._control is not None:
                self._control.close()
            self._start_zygote()

    def _send(self, body: dict[str, Any], fds: Sequence[int]) -> None:
        self._send_op(b"c", body, fds)

    def _send_op(self, op: bytes, body: dict[str, Any], fds: Sequence[int]) -> None:
        assert self._control is not None
        try:
            wire.send_request(self._control, op, body, fds)
        except (OSError, TimeoutError) as error:
            raise SandboxError(f"the process that forks sandboxes is gone ({error}); try again") from error

    async def _files(self, spec: SandboxSpec, users: str) -> tuple[tuple[str, ...], _Base]:
        """(snapshot layers, what lies below them) of a spec."""
        _check(spec)
        if spec.snapshot is not None:
            if not isinstance(spec.snapshot, LocalSnapshot):
                raise SandboxUnavailableError("a local sandbox boots from snapshots of local sandboxes only")
            return spec.snapshot.layers, spec.snapshot.base
        if spec.image == "host":
            return (), _Base((str(self.run_dir / "host"),), True, tuple(self._host_binds))
        if not await asyncio.to_thread(_is_packed, spec.image):
            return (), _Base((spec.image,), False)
        if self._images is None:
            owner = _BASE_ID if users == "range" else None
            directory = (self._state_dir or cache_dir()) / "images"
            self._images = ImageStore(directory, owner, AGENT_ID, max_bytes=self._image_cache)
        key = (spec.image, spec.workdir)
        if key not in self._flattening:  # one thread waits for it, however many sandboxes do
            self._flattening[key] = asyncio.create_task(asyncio.to_thread(self._images.get, *key))
            self._flattening[key].add_done_callback(lambda _: self._flattening.pop(key))
        image = await asyncio.shield(self._flattening[key])
        return (), _Base(image.lowers, True, (), image.env)

    def _make_directory(self, body: dict[str, Any], users: str, about: dict[str, Any]) -> None:
        directory = Path(body["dir"])
        directory.mkdir(mode=0o700)
        for name in ("upper", "work", "root", "image"):
            (directory / name).mkdir(mode=0o755)
        if users == "range":
            os.chown(directory / "upper", _BASE_ID, _BASE_ID)
        (directory / "about.json").write_text(json.dumps(about))
        if body["cgroups"]:
            (directory / "groups").write_text("\n".join(body["cgroups"].values()))

    async def _on_end(self, sandbox: LocalSandbox, keep_files: bool) -> Snapshot | None:
        """Forget a sandbox whose keeper is gone; freeze its files, or make sure that they are gone."""
        if self._sandboxes.pop(sandbox.id, None) is None:
            return None
        stood_on, base = self._stood_on.pop(sandbox.id), self._bases.pop(sandbox.id)
        snapshot: LocalSnapshot | None = None
        if keep_files and (self.run_dir / sandbox.id / "upper").is_dir():
            frozen = str(self.run_dir / f"snapshot-{sandbox.id}")
            os.rename(self.run_dir / sandbox.id / "upper", frozen)
            snapshot = LocalSnapshot(self, (frozen, *stood_on), base)
            self._layers.update(snapshot.layers)
        if state.present(self.run_dir / sandbox.id):  # the keeper was killed, or left the rest of a snapshot
            await asyncio.to_thread(leftovers.remove_sandbox, str(self.run_dir / sandbox.id))
        await self.release(stood_on)
        return snapshot

    async def release(self, layers: Sequence[str]) -> None:
        """Drop one use of snapshot layers, and the files of those that nobody uses."""
        for layer in layers:
            self._layers[layer] -= 1
            if self._layers[layer] <= 0:
                del self._layers[layer]
                await asyncio.to_thread(tree.remove, layer)

    def _sweep(self) -> int:
        return sum(state.sweep(parent) for parent in self._parents())

    def _parents(self) -> list[Path]:
        """Where runs keep their state; a later one is taken when an earlier one cannot hold an overlay."""
        if self._state_dir:
            return [self._state_dir]
        fallbacks = (Path(base) / f"sandlot-{os.getuid()}" for base in ("/var/tmp", "/dev/shm"))
        return [cache_dir() / "sandboxes", *fallbacks]

    def _stop(self) -> None:
        if self._images is not None:
            self._images.close()
            self._images = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            with suppress(subprocess.TimeoutExpired):
                self._zygote.wait(30)
            self._zygote = None
        if self._lock_fd >= 0:
            leftovers.remove_run(str(self.run_dir))
            os.close(self._lock_fd)
            self._lock_fd = -1
        self._machine = None


def _check(spec: SandboxSpec) -> None:
    """Refuse what no image can do."""
    for layer in spec.layers:
        if not layer.source.is_dir():
            raise SandboxUnavailableError(f"the layer {layer.source} is not a directory")
        if not layer.mount_point.startswith("/"):
            raise SandboxUnavailableError(f"the mount point {layer.mount_point!r} is not an absolute path")
    if not spec.workdir.startswith("/"):
        raise SandboxUnavailableError(f"the workdir {spec.workdir!r} is not an absolute path")


def _binds(spec: SandboxSpec) -> list[tuple[str, str]]:
    return [(str(layer.source.resolve()), layer.mount_point) for layer in spec.layers]


def _is_packed(image: str) -> bool:
    """Whether an image must be unpacked before it can be used; a root directory need not be."""
    path = Path(image)
    if not path.is_absolute() and not path.exists():
        reference.parse(image)
        return True
    if not path.is_absolute() or not path.exists():
        raise SandboxUnavailableError(
            f"image {image!r} is neither `host`, nor a name as Docker takes it, nor an absolute path of a root directory, "
            "rootfs archive, OCI layout or docker-archive"
        )
    return not path.is_dir() or (path / "index.json").is_file()
