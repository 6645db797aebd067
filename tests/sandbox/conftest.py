"""One backend and one sandbox per module; tests that leave something behind boot their own."""

from collections.abc import AsyncIterator

import pytest_asyncio

from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local import LocalBackend
from sandlot.sandbox.local.sandbox import LocalSandbox


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend() -> AsyncIterator[LocalBackend]:
    made = LocalBackend()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(backend: LocalBackend) -> AsyncIterator[LocalSandbox]:
    async with await backend.create(SandboxSpec(network="gateway")) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(backend: LocalBackend) -> AsyncIterator[LocalSandbox]:
    async with await backend.create(SandboxSpec()) as made:
        yield made
