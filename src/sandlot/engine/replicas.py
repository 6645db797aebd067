"""One engine or several as one: each session stays at one of them, and moves only while that one is down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from sandlot.engine.aborted import Abortable
from sandlot.engine.base import Engine, EngineInfo, Generation, SamplingParams
from sandlot.engine.client import EngineGoneError, EngineUnreachableError
from sandlot.errors import ConfigError, EngineError

log = logging.getLogger(__name__)
Examine = Callable[[Engine, Engine | None], Awaitable[None]]
"""Asked of a replica that was away and one that serves, if there is one: raises where the first must not serve."""
_DOWN = "it does not answer"
_REFUSED = 15
"""One that is refused is asked again so many times later than one that does not answer: it takes somebody's doing."""


def placed(session_id: str, names: Sequence[str]) -> list[str]:
    """`names` in the order in which a session wants them (rendezvous hashing).

    When one goes, only its sessions move, each to the next of its own list; when it comes back, they return.
    """
    return sorted(names, key=lambda name: blake2b(f"{name}\0{session_id}".encode(), digest_size=8).digest())


class ReplicatedEngine:
    """Replicas of one model, by address. A session's prefix cache is at one replica, so its calls go there.

    A replica that cannot be reached is left out until it answers `info` again, which is asked every `recheck_s`
    seconds; the call that found it down goes on at the session's next replica. One that has come back may have been
    started in another way: it serves again when it is what it was and `examine` finds nothing. One that is alone is
    asked again at once, unless nothing listened there.
    """

    def __init__(self, replicas: Mapping[str, Engine], *, recheck_s: float = 2.0) -> None:
        if not replicas:
            raise ConfigError("no engine address was given")
        self.replicas = dict(replicas)
        self.examine: Examine = _nothing
        self.refused: dict[str, str] = {}
        """Addresses of replicas that answer but must not serve, and why."""
        self._recheck_s = recheck_s
        self._down: dict[str, asyncio.Task[None]] = {}
        self._where: dict[str, Engine] = {}
        self._infos: dict[str, EngineInfo] = {}
        self._turn = 0

    @property
    def up(self) -> list[str]:
        """Addresses that are not known to be down."""
        return [name for name in self.replicas if name not in self._down]

    @property
    def out(self) -> dict[str, str]:
        """Addresses that are left out, and why."""
        return {name: self.refused.get(name, _DOWN) for name in self._down}

    async def info(self) -> EngineInfo:
        """What the replicas have in common. At first all must answer: an address that never does is a mistake."""
        for name in list(self.replicas):
            if name not in self._infos or name not in self._down:
                try:
                    self._infos[name] = self._same(name, await self.replicas[name].info())
                except EngineUnreachableError:
                    if name not in self._infos:
                        raise
                    self._lost(name)
        infos = list(self._infos.values())
        sizes = [i.vocab_size for i in infos if i.vocab_size is not None]
        modes = {i.logprobs_mode for i in infos}
        return EngineInfo(
            name=infos[0].name,
            model=infos[0].model,
            max_context=min(i.max_context for i in infos),
            logprobs_mode=modes.pop() if len(modes) == 1 else "unknown",
            weight_version=infos[0].weight_version,
            vocab_size=min(sizes) if sizes else None,
            extra={"replicas": {name: info.weight_version for name, info in self._infos.items()}},
        )

    def _same(self, name: str, info: EngineInfo) -> EngineInfo:
        first = next((i for n, i in self._infos.items() if n != name), None)
        if first is not None and first.model != info.model:
            raise EngineError(
                f"the replicas serve different models: {name} serves {info.model!r}, another one {first.model!r}",
                retryable=False,
            )
        return info

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, session_id: str
    ) -> Generation:
        missing: EngineUnreachableError | None = None
        began = time.monotonic()
        for name in placed(session_id, list(self.replicas)):
            if name in self._down:
                continue
            engine = self._where[request_id] = self.replicas[name]
            lost_s = 0.0 if missing is None else time.monotonic() - began
            try:
                done = await engine.generate(prompt_ids, sampling, request_id=request_id, session_id=session_id)
                return replace(done, lost_s=lost_s) if lost_s else done
            except EngineUnreachableError as error:
                missing = error
                self._failed(name, error)
            finally:
                self._where.pop(request_id, None)
        raise self._nobody(missing)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        missing: EngineUnreachableError | None = None
        for name in self._next_up():
            try:
                return await self.replicas[name].score(token_ids)
            except EngineUnreachableError as error:
                missing = error
                self._failed(name, error)
        raise self._nobody(missing)

    def _nobody(self, missing: EngineUnreachableError | None) -> EngineError:
        if missing is not None and len(self.replicas) == 1:
            return missing
        reasons = "; ".join(f"{name}: {why}" for name, why in self.out.items())
        many = (
            f"none of the {len(self.replicas)} engines serves"
            if len(self.replicas) > 1
            else "the engine does not serve"
        )
        return EngineError(f"{many}: {missing or reasons}")

    def _next_up(self) -> list[str]:
        names = self.up
        self._turn += 1
        at = self._turn % len(names) if names else 0
        return names[at:] + names[:at]

    async def abort(self, request_id: str) -> None:
        """End a request early at the replica that has it."""
        engine = self._where.get(request_id)
        if isinstance(engine, Abortable):
            await engine.abort(request_id)

    async def close(self) -> None:
        for task in self._down.values():
            task.cancel()
        await asyncio.gather(*self._down.values(), return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.replicas.values()))

    def _failed(self, name: str, error: EngineUnreachableError) -> None:
        if len(self.replicas) > 1 or isinstance(error, EngineGoneError):
            self._lost(name)

    def _lost(self, name: str) -> None:
        if name not in self._down:
            log.warning("the engine at %s is down; its sessions go on at others, where there are some", name)
            self._down[name] = asyncio.get_running_loop().create_task(self._until_back(name))

    async def _until_back(self, name: str) -> None:
        wait = self._recheck_s
        while True:
            await asyncio.sleep(wait)
            try:
                self._infos[name] = await self._examined(name)
            except EngineUnreachableError:
                self.refused.pop(name, None)
                wait = self._recheck_s
            except Exception as error:  # whatever it is that answers there now
                said = str(error) or type(error).__name__
                if self.refused.get(name) != said:
                    log.warning("the engine at %s stays out: %s", name, said)
                self.refused[name] = said
                wait = _REFUSED * self._recheck_s
            else:
                log.warning("the engine at %s is back", name)
                self.refused.pop(name, None)
                del self._down[name]
                return

    async def _examined(self, name: str) -> EngineInfo:
        """What a replica that was away says of itself, if it may serve again."""
        replica, before = self.replicas[name], self._infos.get(name)
        info = self._same(name, await replica.info())
        if before is not None and info.vocab_size != before.vocab_size:
            raise EngineError(f"it has {info.vocab_size} tokens and had {before.vocab_size}: start the same model")
        if info.max_context < (least := min((i.max_context for i in self._infos.values()), default=0)):
            raise EngineError(f"its context has {info.max_context} tokens and must have {least}: start it as before")
        await self.examine(replica, next((self.replicas[other] for other in self.up), None))
        return info


async def _nothing(replica: Engine, other: Engine | None) -> None: ...
