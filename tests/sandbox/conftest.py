"""One backend and one sandbox per module; tests that leave something behind boot their own."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from sandlot.sandbox import SandboxSpec
from sandlot.sandbox.local.sandbox import LocalSandbox
from support.backends import opened


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module with `BACKENDS` runs over each of them; the others are about `local`."""
    if "backend" in metafunc.fixturenames and (names := getattr(metafunc.module, "BACKENDS", None)):
        metafunc.parametrize("backend", names, indirect=True, scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with opened(getattr(request, "param", "local")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(backend: Any) -> AsyncIterator[LocalSandbox]:
    async with await backend.create(SandboxSpec(network="gateway")) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(backend: Any) -> AsyncIterator[LocalSandbox]:
    async with await backend.create(SandboxSpec()) as made:
        yield made
