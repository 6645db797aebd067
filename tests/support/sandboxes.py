"""The real sandbox backend for tests, one per module, closed at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from sandlot.sandbox import SandboxBackend
from sandlot.sandbox.local import LocalBackend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[SandboxBackend]:
    made = LocalBackend()
    try:
        yield made
    finally:
        await made.close()
