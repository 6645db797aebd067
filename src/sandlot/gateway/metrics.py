"""Prometheus metrics of a gateway, read from its sessions when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from sandlot.gateway.gateway import Gateway


class Metrics(Collector):
    """Counts over all sessions this gateway has had; deleted ones are kept in the totals."""

    FIELDS: ClassVar[dict[str, str]] = {
        "turns": "Turns recorded.",
        "sampled_tokens": "Tokens sampled in recorded turns.",
        "prompt_tokens": "Prompt tokens of recorded turns.",
        "joined": "Requests that joined an equal one in flight.",
        "replayed": "Requests answered again with a recorded turn.",
        "abandoned": "Calls cancelled because their client went away.",
    }

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._gone = dict.fromkeys(self.FIELDS, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def forget(self, session_id: str) -> None:
        """Keep the counts of a session that is about to be deleted."""
        counters = self._gateway.sessions[session_id].counters
        for name in self.FIELDS:
            self._gone[name] += getattr(counters, name)

    def collect(self) -> Iterator[Metric]:
        sessions = list(self._gateway.sessions.values())
        for name, text in self.FIELDS.items():
            total = self._gone[name] + sum(getattr(s.counters, name) for s in sessions)
            yield CounterMetricFamily(f"sandlot_{name}", text, value=total)
        yield GaugeMetricFamily(
            "sandlot_sessions_open", "Sessions not sealed.", value=sum(not s.sealed for s in sessions)
        )
        yield GaugeMetricFamily(
            "sandlot_calls_sampling", "Calls at the engine.", value=sum(s.sampling for s in sessions)
        )

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
