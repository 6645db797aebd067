"""`sandlot gateway`: the gateway alone, for agents that something else runs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from sandlot.cli.common import JsonFlag, answer, console, print_json
from sandlot.cli.rollout import ConfigFile, Engine, Kind, Model, Temperature


def command(
    engine: Engine = None,
    engine_kind: Kind = None,
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address agents reach.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port agents reach; 0 picks one.")] = 8400,
    control_host: Annotated[str, typer.Option(help="Address of the control side.")] = "127.0.0.1",
    control_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the control side; 0 picks one.")] = 8401,
    base_url: Annotated[str, typer.Option(help="How agents reach this gateway, when not by host and port.")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run directory for journals and samples.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that serve; a session stays at one.")] = 1,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without a sign of life after which a worker is replaced.")
    ] = 60.0,
    temperature: Temperature = None,
    served_model: Annotated[str | None, typer.Option(help="Model name at the engine.")] = None,
    config: ConfigFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve agents and their control side until interrupted. The admin key is $SANDLOT_ADMIN_KEY, or a new one."""
    from sandlot.config import load_config
    from sandlot.gateway.process import serve
    from sandlot.rollout.serve import Places, serve_gateway

    flags = {
        "engine": engine,
        "engine_kind": engine_kind,
        "model": model,
        "served_model": served_model,
        "sampling": {"temperature": temperature},
    }
    settings = load_config(config, flags)
    admin_key = os.environ.get("SANDLOT_ADMIN_KEY") or secrets.token_urlsafe(32)

    def ready(agents_url: str, control_url: str) -> None:
        told = {"base_url": agents_url, "control_url": control_url, "admin_key": admin_key}
        if as_json:
            print_json(told)
        else:
            for name, value in told.items():
                answer.print(f"{name.replace('_', ' '):>12}  {value}", highlight=False)

    serve(
        serve_gateway(
            settings,
            admin_key=admin_key,
            places=Places((host, port), (control_host, control_port), base_url),
            out=out,
            workers=workers,
            heartbeat_timeout=heartbeat_timeout,
            ready=ready,
            say=lambda text: console.print(text, style="dim"),
        )
    )
