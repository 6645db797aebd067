"""A process of ours with the ids of the sandboxes, for a plain user with subordinate ids.

Only in their user namespace may files be given to those ids, and what belongs to them be removed. It ends with its
owner, and with it the hold on the images that it unpacked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from sandlot.errors import SandboxError, SandboxUnavailableError
from sandlot.sandbox.images import Image, ImageStore
from sandlot.sandbox.jail import ids as id_maps
from sandlot.sandbox.jail import leftovers, tree
from sandlot.sandbox.local.ids import AGENT_ID, Ids, candidates

_REMOVALS = {"tree": tree.remove, "sandbox": leftovers.remove_sandbox, "run": leftovers.remove_run}


class Attendant:
    """Asks such a process, which is started when it is needed. Calls block, one at a time."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._guard = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def get_image(self, directory: Path, max_bytes: int, name: str, workdir: str) -> Image:
        """See `ImageStore.get`."""
        answer = self._ask({"image": [str(directory), max_bytes, name, workdir]})
        return Image(tuple(answer["lowers"]), answer["env"])

    def remove(self, what: str, path: str) -> int:
        """Remove a `tree`, or what a `sandbox` or `run` left; how many sandboxes that were."""
        return int(self._ask({"remove": [what, path]})["removed"])

    def close(self) -> None:
        """Let it end."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._guard:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except OSError:
                line = ""
            if not line:
                raise SandboxError("the process with the sandboxes' ids died; try again")
        answer = cast("dict[str, Any]", json.loads(line))
        if "unavailable" in answer:
            raise SandboxUnavailableError(answer["unavailable"])
        if "error" in answer:
            raise SandboxError(answer["error"], retryable=answer["retryable"])
        return answer

    def _start(self) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(asdict(self._ids))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)


def find() -> Attendant | None:
    """An attendant where this user may need one."""
    best = next(candidates())
    return Attendant(best) if best.mapped_by == "helper" else None


def remove(what: str, path: str, attendant: Attendant | None) -> int:
    """Remove a `tree`, or what a `sandbox` or `run` left, with the help that it needs; how many sandboxes that were."""
    try:
        return _REMOVALS[what](path) or 0
    except PermissionError:
        if attendant is None:
            raise
        return attendant.remove(what, path)


def main() -> None:
    """Serve requests, one a line, until standard input ends."""
    id_maps.enter(json.loads(sys.argv[1]))
    stores: dict[tuple[str, int], ImageStore] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _removed(*request["remove"]) if "remove" in request else _image(stores, *request["image"])
        except SandboxUnavailableError as error:
            answer = {"unavailable": str(error)}
        except SandboxError as error:
            answer = {"error": str(error), "retryable": error.retryable}
        except OSError as error:
            answer = {"error": str(error), "retryable": True}
        print(json.dumps(answer), flush=True)


def _removed(what: str, path: str) -> dict[str, Any]:
    return {"removed": _REMOVALS[what](path) or 0}


def _image(
    stores: dict[tuple[str, int], ImageStore], directory: str, max_bytes: int, name: str, workdir: str
) -> dict[str, Any]:
    key = (directory, max_bytes)
    if key not in stores:
        stores[key] = ImageStore(Path(directory), 0, AGENT_ID, max_bytes=max_bytes)
    image = stores[key].get(name, workdir)
    return {"lowers": image.lowers, "env": dict(image.env)}
