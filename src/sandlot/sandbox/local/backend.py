"""Makes local sandboxes: starts the zygote, chooses what this machine offers, and sweeps what dead runs left."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sandlot.cache import cache_dir
from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.background import all_of
from sandlot.sandbox.base import Check, Running, SandboxSpec, Snapshot
from sandlot.sandbox.images import Image, ImageStore
from sandlot.sandbox.jail import cgroups, tree
from sandlot.sandbox.local import attendant, image, limits, state, systemd
from sandlot.sandbox.local.base import Base, is_packed, layer_binds
from sandlot.sandbox.local.boot import boot
from sandlot.sandbox.local.ids import AGENT_ID, Ids, candidates
from sandlot.sandbox.local.sandbox import LocalSandbox
from sandlot.sandbox.local.zygote import Zygote
from sandlot.sandbox.refusals import check_paths

_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class _Machine:
    """What was found at the start: the ids of sandboxes and the tier of their limits."""

    ids: Ids
    tier: limits.Tier


class LocalSnapshot:
    """See `Snapshot`. `layers` are frozen upper directories, newest first, shared with what was booted from them."""

    def __init__(self, backend: LocalBackend, layers: tuple[str, ...], base: Base) -> None:
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
        self._zygote: Zygote | None = None
        self._host_binds: list[tuple[str, str]] = []
        self._numbers = itertools.count(1)
        self._sandboxes: dict[str, LocalSandbox] = {}
        self._layers: Counter[str] = Counter()
        self._stood_on: dict[str, tuple[str, ...]] = {}
        self._bases: dict[str, Base] = {}
        self._images: ImageStore | None = None
        self._attendant = attendant.find()
        self._flattening: dict[tuple[str, str], asyncio.Task[Image]] = {}

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxBackend.create`."""
        machine = await asyncio.to_thread(self._start)
        identity = f"{next(self._numbers)}-{secrets.token_hex(4)}"
        layers, base = await self._files(spec, machine.ids)
        body = {
            "id": identity,
            "run": str(self.run_dir),
            "dir": str(self.run_dir / identity),
            "owner": machine.ids.owner,
            "users": machine.ids.users,
            "agent_id": AGENT_ID,
            "workdir": spec.workdir,
            "lowers": [*layers, *base.lowers[:-1]],
            "image": base.lowers[-1],
            "image_is_prepared": base.prepared,
            "is_lasting": base.prepared and not layers,
            "has_accounts": base.prepared and not layers and machine.ids.mapped_by != "helper",
            "binds": [*base.binds, *layer_binds(spec)],
            "limits": asdict(spec.limits),
            "shm_bytes": min(spec.limits.memory // 4, _SHM_BYTES),
            "cgroups": machine.tier.groups(identity, spec.limits),
            "cpu_affinity": spec.limits.cpu is not None and not machine.tier.cpu,
        }
        facts = {
            "backend": self.name,
            "isolation": "namespaces",
            "users": machine.ids.users,
            "ids_outside": machine.ids.outside(),
            "limits": machine.tier.facts(spec.limits),
            "network": spec.network,
            "seccomp": True,
            "image": spec.image if spec.snapshot is None else "snapshot",
        }
        about = {"image": facts["image"], "started": time.time(), "labels": dict(spec.labels)}
        self._make_directory(body, about)
        self._layers.update(layers)
        self._stood_on[identity], self._bases[identity] = layers, base
        assert self._zygote is not None
        try:
            owners = machine.ids.outside() if machine.ids.owner is not None else {}
            sandbox = await boot(self._zygote.boot, body, spec, facts, owners, base.env, self._on_end)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.to_thread(self._remove, "sandbox", str(self.run_dir / identity))
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
        try:
            await all_of(sandbox.kill() for sandbox in list(self._sandboxes.values()))
        finally:
            await asyncio.to_thread(self._stop)

    def trial(self, what: str, **details: Any) -> str | None:
        """See `Zygote.trial`."""
        assert self._zygote is not None
        return self._zygote.trial(what, **details)

    def _start(self) -> _Machine:
        with self._guard:
            if self._machine is not None:
                self._machine = self._revived(self._machine)
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
                tier = self._open_run(parent)
            except OSError as error:
                why = f"{parent}: {error.strerror}"
                continue
            if (refused := self.trial("namespaces")) is not None:
                self._stop()
                raise SandboxUnavailableError(state.namespaces_cure(refused))
            ids = next(i for i in candidates() if i.mapped_by == "self" or self.trial("ids", ids=asdict(i)) is None)
            trial = self.run_dir / "trial"
            for name in ("lower", "upper", "work", "root"):
                (trial / name).mkdir(parents=True)
            refused = self.trial("overlay", directory=str(trial), ids=asdict(ids))
            tree.remove(str(trial))
            if refused is None:
                assert self._zygote is not None
                self._zygote.prepare(ids)
                for name in ("root", "image", "spares"):  # see `jail.ground`
                    (self.run_dir / name).mkdir(mode=0o700)
                self._host_binds = image.make_skeleton(self.run_dir / "host", ids.owner, AGENT_ID)
                return _Machine(ids, self._make_groups(tier))
            why = f"{parent}: {refused}"
            self._stop()
        raise SandboxUnavailableError(
            f"no directory here can hold an overlay file system ({why}); "
            "put XDG_CACHE_HOME on ext4, xfs, btrfs or tmpfs (overlay needs kernel 5.11 for plain users)"
        )

    def _open_run(self, parent: Path) -> limits.Tier:
        """Open a run and start its zygote, in a scope of systemd where that gives limits; the tier of limits."""
        self.run_dir, self._lock_fd = state.open_run(parent)
        tier, point = limits.detect(), limits.unified()
        if tier == limits.RLIMITS and point is not None and systemd.refusal() is None:
            self._zygote = Zygote(self.run_dir, self._lock_fd, in_scope=True)
            try:
                return limits.systemd_tier(*self._zygote.settle(point))
            except SandboxError:
                self._zygote.kill()
        self._zygote = Zygote(self.run_dir, self._lock_fd)
        return tier

    def _make_groups(self, tier: limits.Tier) -> limits.Tier:
        """Make the groups of this run; the tier below them."""
        own = tier.below(f"sandlot-{self.run_dir.name}")
        cgroups.make_parents([str(path) for path in own.parents.values()], str(self.run_dir / "groups"))
        return own

    def _revived(self, machine: _Machine) -> _Machine:
        """The machine with a zygote that lives: one in a scope brings new groups."""
        assert self._zygote is not None
        point = limits.unified()
        if self._zygote.revive() and machine.tier.name == "systemd" and point is not None:
            return replace(machine, tier=self._make_groups(limits.systemd_tier(*self._zygote.settle(point))))
        return machine

    async def _files(self, spec: SandboxSpec, ids: Ids) -> tuple[tuple[str, ...], Base]:
        """(snapshot layers, what lies below them) of a spec."""
        check_paths(spec)
        if spec.snapshot is not None:
            if not isinstance(spec.snapshot, LocalSnapshot):
                raise SandboxUnavailableError("a local sandbox boots from snapshots of local sandboxes only")
            return spec.snapshot.layers, spec.snapshot.base
        if spec.image == "host":
            return (), Base((str(self.run_dir / "host"),), True, tuple(self._host_binds))
        if not await asyncio.to_thread(is_packed, spec.image):
            return (), Base((spec.image,), False)
        key = (spec.image, spec.workdir)
        if key not in self._flattening:  # one thread waits for it, however many sandboxes do
            self._flattening[key] = asyncio.create_task(asyncio.to_thread(self._get_image, ids, *key))
            self._flattening[key].add_done_callback(lambda _: self._flattening.pop(key))
        image = await asyncio.shield(self._flattening[key])
        return (), Base(image.lowers, True, (), image.env)

    def _get_image(self, ids: Ids, name: str, workdir: str) -> Image:
        directory = (self._state_dir or cache_dir()) / "images"
        if self._attendant is not None and ids.mapped_by == "helper":
            return self._attendant.get_image(directory, self._image_cache, name, workdir)
        with self._guard:
            if self._images is None:
                self._images = ImageStore(directory, ids.owner, AGENT_ID, max_bytes=self._image_cache)
        return self._images.get(name, workdir)

    def _make_directory(self, body: dict[str, Any], about: dict[str, Any]) -> None:
        directory = Path(body["dir"])
        directory.mkdir(mode=0o700)
        about["groups"] = list(body["cgroups"].values())
        (directory / "about.json").write_text(json.dumps(about))

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
            await asyncio.to_thread(self._remove, "sandbox", str(self.run_dir / sandbox.id))
        await self.release(stood_on)
        return snapshot

    async def release(self, layers: Sequence[str]) -> None:
        """Drop one use of snapshot layers, and the files of those that nobody uses."""
        for layer in layers:
            self._layers[layer] -= 1
            if self._layers[layer] <= 0:
                del self._layers[layer]
                await asyncio.to_thread(self._remove, "tree", layer)

    def _sweep(self) -> int:
        return sum(state.sweep(parent, self._remove) for parent in self._parents())

    def _remove(self, what: str, path: str) -> int:
        return attendant.remove(what, path, self._attendant)

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
        if self._zygote is not None:
            self._zygote.stop()
            self._zygote = None
        if self._lock_fd >= 0:
            self._remove("run", str(self.run_dir))
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._attendant is not None:
            self._attendant.close()
        self._machine = None
