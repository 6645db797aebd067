"""Measures the gateway next to a floor prototype, in the same run, on the same workload.

    python benchmarks/gateway.py                     every scenario, a few minutes on two quiet cores
    python benchmarks/gateway.py session --turns 50  one of them, smaller
    python benchmarks/gateway.py --json out.json     the figures as JSON as well

CPU time is the gateway process's time on a CPU as the kernel counts it, so a busy machine disturbs it little; figures
of the wall clock (added latency, stalls) need a quiet one. Ratios to the floor are what carries over to other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

from gateway_kit import scenarios
from gateway_kit.processes import Command, Measured, Served
from gateway_kit.workload import Workload

from sandlot.cache import cache_dir
from sandlot.engine.embedded_model import prepare_embedded_model

Measure = Callable[[Measured, Workload], Coroutine[Any, Any, dict[str, Any]]]
SCENARIOS = ("session", "forks", "many", "latency", "crowd", "histories", "workers")
WORKERS = {"1 process": 1, "2 workers": 2, "4 workers": 4}
WITHOUT_FLOOR = frozenset({"crowd", "histories"})


def plan(name: str, turns: int) -> tuple[Measure, float]:
    """How a scenario is measured, and the delay of its engine."""
    match name:
        case "session":
            return lambda gateway, work: scenarios.one_session(gateway, work, turns), 0.0
        case "forks":
            return lambda gateway, work: scenarios.one_session(gateway, work, turns, forks=30 * turns // 200), 0.0
        case "many":
            return lambda gateway, work: scenarios.many_sessions(gateway, work, 64, 20), 0.0
        case "latency":
            return lambda gateway, work: scenarios.many_sessions(gateway, work, 64, 20, delay=5.0), 5.0
        case "crowd":
            return lambda gateway, work: scenarios.many_sessions(gateway, work, 256, 20), 0.0
        case "histories":
            return lambda gateway, work: scenarios.long_histories(gateway, work, 64, 120_000), 0.0
        case "workers":
            return lambda gateway, work: scenarios.many_sessions(gateway, work, 64, 40), 0.0
    raise ValueError(name)


def contenders(name: str, only: str | None) -> list[str]:
    """Who is measured in a scenario."""
    if name == "workers":
        return list(WORKERS)
    return [w for w in ("floor", "sandlot") if only in (None, w) and not (w == "floor" and name in WITHOUT_FLOOR)]


def measure(name: str, who: str, model: Path, work: Workload, turns: int, journals: bool) -> dict[str, Any]:
    """One run of one scenario against one of its contenders."""
    scenario, delay = plan(name, turns)
    with (
        tempfile.TemporaryDirectory() as scratch,
        Served("engine", "--model", str(model), "--delay", str(delay)) as engine,
    ):
        url = f"http://127.0.0.1:{engine.port}"
        if name == "workers":
            with Command(model, url, WORKERS[who], Path(scratch) / "run") as gateway:
                return asyncio.run(scenario(gateway, work))
        arguments = ["--model", str(model), "--engine", url]
        if who == "sandlot" and journals:
            arguments += ["--journals", scratch]
        with Served("floor" if who == "floor" else "served", *arguments) as served:
            return asyncio.run(scenario(served, work))


def targets(found: dict[str, dict[str, dict[str, Any]]]) -> list[tuple[str, float, str, float]]:
    """(what, value, `<=` or `>=`, target) of all that was measured."""
    rows: list[tuple[str, float, str, float]] = []

    def row(what: str, value: float | None, sense: str, target: float) -> None:
        if value is not None:
            rows.append((what, value, sense, target))

    ours = {name: by.get("sandlot", {}) for name, by in found.items()}
    floor = {name: by.get("floor", {}) for name, by in found.items()}
    if one := ours.get("session"):
        if floor["session"]:
            row("CPU of one long session, ratio to the floor", one["cpu_s"] / floor["session"]["cpu_s"], "<=", 1.5)
        row("CPU growth, ms per turn number", one["growth_ms_per_turn"], "<=", 0.03)
        row("memory of one long session, MB", one["memory_mb"], "<=", 30)
        row("its samples, ms", one["linearize_ms"], "<=", 10)
        if forked := ours.get("forks"):
            row("CPU with forks, ratio to without", forked["cpu_s"] / one["cpu_s"], "<=", 1.6)
    if many := ours.get("many"):
        row("turns per core second, 64 sessions", many["turns_per_core_s"], ">=", 250)
    if late := ours.get("latency"):
        row("added p99, 64 sessions, 5 s engine, ms", late["added_p99_ms"], "<=", 30)
    if long := ours.get("histories"):
        row("longest stall of the event loop, ms", long["stall_ms"], "<=", 50)
        row("the same without what other processes took, ms", long["stall_own_ms"], "<=", 50)
    if spread := found.get("workers"):
        alone, two = spread["1 process"], spread["2 workers"]
        row(
            "CPU of a turn with 2 workers, ratio to 1 process",
            two["cpu_ms_per_turn"] / alone["cpu_ms_per_turn"],
            "<=",
            1.1,
        )
    return rows


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over several runs."""
    return {
        name: median(run[name] for run in runs)
        if isinstance(value, int | float)
        else {key: median(run[name][key] for run in runs) for key in value}
        for name, value in runs[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], default=[], help="all by default")
    parser.add_argument("--turns", type=int, default=200, help="turns of the one long session")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; medians are told")
    parser.add_argument("--only", choices=("sandlot", "floor"), help="leave the other one out")
    parser.add_argument("--no-journals", action="store_true", help="keep no journals, as the floor does")
    parser.add_argument("--model", type=Path, help="checkpoint directory with the embedded model's template")
    parser.add_argument("--json", type=Path, help="file for all figures")
    given = parser.parse_args()
    model = given.model or prepare_embedded_model(cache_dir(), print)
    work = Workload(model)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number in range(given.repeat):  # round by round, so that what is compared was measured at about the same time
        for name in given.scenarios or SCENARIOS:
            for who in contenders(name, given.only):
                print(f"round {number + 1} of {given.repeat}: {name}, {who}", file=sys.stderr, flush=True)
                run = measure(name, who, model, work, given.turns, not given.no_journals)
                runs.setdefault(name, {}).setdefault(who, []).append(run)
    found = {name: {who: middle(of_one) for who, of_one in by.items()} for name, by in runs.items()}
    for name, by in found.items():
        for who, figures in by.items():
            print(f"{name:10} {who:9}", "  ".join(_shown(key, value) for key, value in figures.items()), flush=True)
    print()
    for what, value, sense, target in targets(found):
        met = value <= target if sense == "<=" else value >= target
        print(f"{'ok  ' if met else 'MISS'} {what}: {value:.3g} ({sense} {target:g})")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{name} " + " ".join(f"{key}:{inner:g}" for key, inner in value.items())
    return f"{name} {value:.4g}"


if __name__ == "__main__":
    main()
