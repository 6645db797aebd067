"""The embedded model as a backend of the server: from the event loop to the compute thread and back."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path

from sandlot.engine.backend import BackendInfo, Completion, Request
from sandlot.engine.embedded.model import LlamaModel
from sandlot.engine.embedded.scheduler import Job, Scheduler
from sandlot.errors import EngineError


class EmbeddedBackend:
    """Serves one checkpoint directory."""

    def __init__(self, scheduler: Scheduler, info: BackendInfo) -> None:
        self.info = info
        self._scheduler = scheduler
        self._jobs: set[Job] = set()

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        name: str | None = None,
        max_context: int | None = None,
        max_running: int = 32,
        cache_bytes: int = 2 << 30,
    ) -> EmbeddedBackend:
        """Load the weights (seconds for a small model) and start the compute thread."""
        model = LlamaModel.from_directory(directory)
        config = model.config
        info = BackendInfo(
            engine="embedded",
            model=name or directory.resolve().name,
            version=version("sandlot"),
            max_context=min(config.max_context, max_context or config.max_context),
            vocab_size=config.vocab_size,
        )
        return cls(Scheduler(model, max_running=max_running, cache_bytes=cache_bytes), info)

    @property
    def weight_version(self) -> str:
        return self._scheduler.weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self._scheduler.weight_version = version

    async def generate(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Completion] = loop.create_future()

        def done(outcome: Completion | Exception) -> None:
            loop.call_soon_threadsafe(_settle, result, outcome)

        job = Job.of(request, done)
        self._jobs.add(job)
        try:
            self._scheduler.submit(job)
            return await result
        except asyncio.CancelledError:
            self._scheduler.abort(job)
            raise
        finally:
            self._jobs.discard(job)

    def abort(self, request_id: str) -> None:
        for job in self._jobs:
            if job.request.request_id == request_id:
                self._scheduler.abort(job)

    def running(self) -> int:
        return len(self._jobs)

    async def close(self) -> None:
        await asyncio.to_thread(self._scheduler.close)


def _settle(result: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    if result.done():
        return
    if isinstance(outcome, Exception):
        result.set_exception(EngineError(f"the embedded engine failed while computing: {outcome!r}"))
    else:
        result.set_result(outcome)
