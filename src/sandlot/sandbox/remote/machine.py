"""What an adapter gives of each sandbox of its cloud; `cloud.py` and `cloud_sandbox.py` make the rest of that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sandlot.errors import SandboxError, SandlotError
from sandlot.sandbox.remote.process import Stream


@contextmanager
def errors_as(ours: Callable[[Exception], SandboxError]) -> Iterator[None]:
    """What an SDK raises in the block becomes an error of ours, told by the name of its class: to import that would
    need the SDK."""
    try:
        yield
    except SandlotError:
        raise
    except Exception as error:
        raise ours(error) from error


@dataclass(frozen=True)
class Frozen:
    """Files that a cloud keeps: what boots from them, and what removes them."""

    source: Any
    remove: Callable[[], Awaitable[Any]]


class Machine(ABC):
    """One sandbox of a cloud, as its SDK offers it."""

    id: str

    @abstractmethod
    async def call(self, line: str, seconds: float) -> tuple[int, str]:
        """Run a shell line as root, once: its exit code and stdout. `SandboxLostError` when the sandbox is gone."""

    @abstractmethod
    async def put(self, path: str, data: bytes) -> None:
        """Write a file as root."""

    async def gone(self) -> bool:
        """Look whether the sandbox is gone, for clouds whose errors do not say so."""
        return False

    async def stream(self, line: str) -> Stream:
        """Start a shell line as root whose stdin stays open, for backends that have `streams`."""
        raise NotImplementedError

    async def freeze(self) -> Frozen:
        """Keep the files as something to boot from, for backends that have `snapshots`."""
        raise NotImplementedError

    @abstractmethod
    async def end(self) -> None:
        """End the sandbox. May be repeated."""
