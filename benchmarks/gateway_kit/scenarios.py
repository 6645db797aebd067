"""The scenarios: one long session, many short ones, long histories posted at once. Figures as plain dicts."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from gateway_kit.agent import Agent, Connection
from gateway_kit.processes import Measured
from gateway_kit.workload import Workload


async def connect(gateway: Measured) -> Connection:
    """A new connection to a gateway."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", gateway.port)
    return connection


def agent_of(
    gateway: Measured, workload: Workload, name: str, offset: int = 0, forks: frozenset[int] = frozenset()
) -> Agent:
    """An agent with a session of its own."""
    return Agent(workload, name, gateway.ask("open", session=name)["key"], offset, forks)


async def warm(gateway: Measured, workload: Workload) -> None:
    """A few turns that are not measured: imports, caches of the head, connections to the engine."""
    agent, connection = agent_of(gateway, workload, "warm", 3), await connect(gateway)
    for turn in range(3):
        agent.take(await connection.post(agent.head, agent.body()), turn)
    connection.transport.close()


async def one_session(gateway: Measured, workload: Workload, turns: int, forks: int = 0) -> dict[str, Any]:
    """CPU of each turn of one session, what it adds by turn number, memory, and the time to make its samples."""
    await warm(gateway, workload)
    at = frozenset(turns * (k + 1) // (forks + 1) for k in range(forks))
    agent, connection = agent_of(gateway, workload, "long", forks=at), await connect(gateway)
    idle = gateway.memory_mb()
    spent: list[float] = []
    walls: list[float] = []
    for turn in range(turns):
        body = agent.body()
        before, began = gateway.cpu_s(), time.perf_counter()
        raw = await connection.post(agent.head, body)
        walls.append(time.perf_counter() - began)
        spent.append(await _settled(gateway) - before)
        agent.take(raw, turn)
    told = gateway.ask("finish", session="long")
    middle = [median(spent[max(0, k - 2) : k + 3]) * 1e3 for k in range(turns)]
    return {
        "cpu_s": sum(spent),
        "cpu_ms_at": {k: round(middle[k - 1], 2) for k in (1, 10, 20, 50, 100, 200) if k <= turns},
        "growth_ms_per_turn": _slope(spent[5:]) * 1e3,
        "turn_wall_ms": median(walls) * 1e3,
        "memory_mb": gateway.memory_mb("VmHWM") - idle,
        **told,
    }


async def _settled(gateway: Measured) -> float:
    """CPU seconds once the gateway has ended what it does after an answer."""
    spent = gateway.cpu_s()
    for _ in range(50):
        await asyncio.sleep(0.004)
        if (later := gateway.cpu_s()) == spent:
            break
        spent = later
    return spent


def _slope(values: list[float]) -> float:
    """Growth per turn: the slope between the medians of the first and last quarter."""
    quarter = max(1, len(values) // 4)
    rise = median(values[-quarter:]) - median(values[:quarter])
    return rise / max(1, len(values) - quarter)


async def many_sessions(
    gateway: Measured, workload: Workload, sessions: int, turns: int, *, delay: float = 0.0
) -> dict[str, Any]:
    """Throughput per core and the time added to the engine's. With a delay, the sessions begin spread over it."""
    await warm(gateway, workload)
    agents = [agent_of(gateway, workload, f"s{k:04d}", 7 * k) for k in range(sessions)]
    idle = gateway.memory_mb()
    added: list[float] = []

    async def live(agent: Agent, begin: float) -> None:
        await asyncio.sleep(begin)
        connection = await connect(gateway)
        for turn in range(turns):
            body, began = agent.body(), time.perf_counter()
            raw = await connection.post(agent.head, body)
            added.append(time.perf_counter() - began - delay)
            agent.take(raw, turn)
        connection.transport.close()

    before, began = gateway.cpu_s(), time.perf_counter()
    await asyncio.gather(*(live(agent, delay * k / sessions) for k, agent in enumerate(agents)))
    wall = time.perf_counter() - began
    spent = await _settled(gateway) - before
    return {
        "cpu_ms_per_turn": spent / len(added) * 1e3,
        "turns_per_core_s": len(added) / spent,
        "turns_per_s": len(added) / wall,
        "added_p50_ms": _quantile(added, 0.5) * 1e3,
        "added_p99_ms": _quantile(added, 0.99) * 1e3,
        "memory_mb": gateway.memory_mb("VmHWM") - idle,
    }


async def long_histories(gateway: Measured, workload: Workload, sessions: int, tokens: int) -> dict[str, Any]:
    """Many sessions post a long history at once that the gateway has never seen: how long its event loop stands."""
    await warm(gateway, workload)
    agents = []
    for k in range(sessions):
        agent = agent_of(gateway, workload, f"h{k:03d}", k)
        agent.invent(tokens)
        agents.append((agent, await connect(gateway), agent.body()))
    gateway.ask("watch")
    before, began = gateway.cpu_s(), time.perf_counter()
    answers = await asyncio.gather(*(c.post(a.head, body) for a, c, body in agents))
    wall = time.perf_counter() - began
    for (agent, _, _), raw in zip(agents, answers, strict=True):
        agent.take(raw, 0)
    stalls = gateway.ask("stalls")
    return {
        "stall_ms": stalls["longest_ms"],
        "stall_own_ms": stalls["own_ms"],
        "cpu_s": gateway.cpu_s() - before,
        "wall_s": wall,
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
