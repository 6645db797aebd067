"""The control side over HTTP: another port, another key, unreachable from sandboxes."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandlot.engine.base import SamplingParams
from sandlot.errors import AuditError, ConfigError, JournalError
from sandlot.gateway.limits import SessionLimits
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.store import to_json

if TYPE_CHECKING:
    from sandlot.gateway.gateway import Gateway
    from sandlot.gateway.session import Session

T = TypeVar("T", bound=BaseModel)
_BODY_BYTES = 1 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Sampling(_Strict):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    max_tokens: int | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)


class _Limits(_Strict):
    turns: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)
    wall_clock: float | None = Field(None, gt=0)
    concurrent: int = Field(16, gt=0)
    body_bytes: int | None = Field(None, gt=0)


class OpenBody(_Strict):
    """What a session is opened with."""

    session_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    sampling: _Sampling | None = None
    max_context_tokens: int | None = Field(None, gt=0)
    limits: _Limits | None = None
    metadata: dict[str, Any] = {}


class _Finish(_Strict):
    reward: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    group_id: str = ""
    metadata: dict[str, Any] = {}


class PauseBody(_Strict):
    """How engine calls are held back."""

    mode: Literal["drain", "abort"] = "drain"


class ResumeBody(_Strict):
    """Which weights are in force from now on."""

    weight_version: str | None = None


class Control(Protocol):
    """What answers the control side."""

    async def open(self, request: web.Request) -> web.StreamResponse: ...

    async def state(self, request: web.Request) -> web.StreamResponse: ...

    async def finish(self, request: web.Request) -> web.StreamResponse: ...

    async def delete(self, request: web.Request) -> web.StreamResponse: ...

    async def pause(self, request: web.Request) -> web.StreamResponse: ...

    async def resume(self, request: web.Request) -> web.StreamResponse: ...

    async def health(self, request: web.Request) -> web.StreamResponse: ...

    async def metrics(self, request: web.Request) -> web.StreamResponse: ...


def control_app(gateway: Gateway, admin_key: str, base_url: str) -> web.Application:
    """The control application of one gateway. `base_url` is where agents reach it."""
    return control_routes(_Control(gateway, base_url), admin_key)


def control_routes(control: Control, admin_key: str) -> web.Application:
    """The control application over whatever answers it."""
    app = web.Application(middlewares=[_errors, _authorized(admin_key)], client_max_size=_BODY_BYTES)
    app.router.add_post("/control/sessions", control.open)
    app.router.add_get("/control/sessions/{id}", control.state)
    app.router.add_post("/control/sessions/{id}/finish", control.finish)
    app.router.add_delete("/control/sessions/{id}", control.delete)
    app.router.add_post("/control/pause", control.pause)
    app.router.add_post("/control/resume", control.resume)
    app.router.add_get("/healthz", control.health)
    app.router.add_get("/metrics", control.metrics)
    return app


class _Control:
    def __init__(self, gateway: Gateway, base_url: str) -> None:
        self._gateway = gateway
        self._base_url = base_url

    async def open(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request, OpenBody)
        opened = self._gateway.open(
            body.session_id,
            sampling=SamplingParams(**body.sampling.model_dump()) if body.sampling else None,
            max_context=body.max_context_tokens,
            limits=SessionLimits(**body.limits.model_dump()) if body.limits else None,
            metadata=body.metadata,
        )
        answer = {"session_id": opened.session.id, "api_key": opened.api_key, "base_url": self._base_url}
        return json_answer(answer, status=201)

    async def state(self, request: web.Request) -> web.StreamResponse:
        return json_answer(session_state(self._gateway.session(request.match_info["id"])))

    async def finish(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request, _Finish)
        finished = await self._gateway.finish(
            request.match_info["id"], reward=body.reward, group_id=body.group_id, metadata=body.metadata
        )
        # One at a time: a session with many branches has a hundred megabytes, and others are served between.
        samples = [await self._gateway.in_thread(_encoded, sample) for sample in finished.samples]
        return json_answer({"samples": samples, "audit": asdict(finished.report)})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        await self._gateway.delete(request.match_info["id"])
        return web.Response(status=204)

    async def pause(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request, PauseBody)
        await self._gateway.pause(body.mode)
        return json_answer({"paused": True})

    async def resume(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request, ResumeBody)
        self._gateway.resume(body.weight_version)
        return json_answer({"paused": False, "weight_version": self._gateway.weight_version})

    async def health(self, request: web.Request) -> web.StreamResponse:
        gateway = self._gateway
        out = gateway.engines_out
        status = "degraded" if out else "ok"
        told = {"status": status, "sessions": len(gateway.sessions), "paused": gateway.paused, "engines_out": out}
        return json_answer(told)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return prometheus(self._gateway.metrics.text())


def _encoded(sample: Sample) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(to_json(sample)))


def session_state(session: Session) -> dict[str, Any]:
    """What the control side tells of a session."""
    counters = session.counters
    return {
        "session_id": session.id,
        "state": "sealed" if session.sealed else "open",
        "turns": counters.turns,
        "sampled_tokens": counters.sampled_tokens,
        "prompt_tokens": counters.prompt_tokens,
        "joined": counters.joined,
        "replayed": counters.replayed,
        "abandoned": counters.abandoned,
        "calls": dict(counters.calls),
        "forks": [{"turn": turn, "reason": reason} for turn, reason in session.forks],
        "stopped_by": counters.stopped_by,
        "engine_error": counters.engine_error,
        "unserved_seconds": round(session.clock.stood, 3),
        "metadata": session.metadata,
    }


def _authorized(admin_key: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/healthz":
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {admin_key}".encode()):
                return json_answer({"error": "the control side needs its admin key as a bearer token"}, status=401)
        return await handler(request)

    return check


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConfigError as error:
        return json_answer({"error": str(error)}, status=404 if "there is no session" in str(error) else 409)
    except _BodyError as error:
        return json_answer({"error": str(error)}, status=400)
    except web.HTTPMethodNotAllowed as error:
        allowed = " or ".join(sorted(error.allowed_methods))
        return json_answer({"error": f"{request.path} takes {allowed}, not {request.method}"}, status=405)
    except web.HTTPNotFound:
        return json_answer({"error": f"there is no {request.method} {request.path} here"}, status=404)
    except web.HTTPRequestEntityTooLarge:
        return json_answer({"error": f"the body is larger than {_BODY_BYTES} bytes"}, status=413)
    except JournalError as error:
        return json_answer({"error": str(error)}, status=409)
    except AuditError as error:
        return json_answer({"error": str(error)}, status=500)


class _BodyError(Exception):
    """A body that cannot be understood; the text says why, and what can."""


async def body_of(request: web.Request, model: type[T]) -> T:
    """The JSON body of a request; an empty one has every default."""
    raw = await request.read()
    try:
        return model.model_validate(msgspec.json.decode(raw) if raw.strip() else {})
    except msgspec.DecodeError as error:
        raise _BodyError(f"the body is no JSON: {error}") from error
    except RecursionError as error:
        raise _BodyError("the body is no JSON: it is nested too deeply") from error
    except ValidationError as error:
        raise _BodyError(_problem(error, model)) from error


def _problem(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] != "extra_forbidden":
        return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r:.80})"
    for part in first["loc"][:-1]:  # the section that it stands in
        held = model.model_fields[str(part)].annotation
        model = next(kind for kind in (held, *get_args(held)) if isinstance(kind, type) and issubclass(kind, BaseModel))
    return f"there is no field {where!r}; there are: {', '.join(model.model_fields)}"


def prometheus(text: bytes) -> web.Response:
    """An answer to a scrape."""
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})


def json_answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
