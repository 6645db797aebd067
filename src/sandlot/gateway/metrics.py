"""Prometheus metrics of a gateway, read from its sessions when they are scraped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
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
        if (engines := self._gateway.replicas) is not None:
            states = GaugeMetricFamily(
                "sandlot_engines", "Replicas by state, as each process sees them.", labels=("engine", "state")
            )
            for name in engines.replicas:
                out = "refused" if name in engines.refused else "down"
                states.add_metric((name, "serving" if name in engines.up else out), 1)
            yield states

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class Merged(Collector):
    """Metrics of several processes as those of one: sums, in which what an ended one had counted stays."""

    def __init__(self) -> None:
        self._told: dict[int, list[Metric]] = {}
        self._gone = _Sums()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def told(self, process: int, text: str) -> None:
        """Take in what a process exposes now."""
        self._told[process] = list(text_string_to_metric_families(text))

    def ended(self, process: int) -> None:
        """Keep what a process had counted when it was asked last."""
        self._gone.add(metric for metric in self._told.pop(process, []) if metric.type == "counter")

    def collect(self) -> Iterator[Metric]:
        sums = _Sums()
        for metrics in (self._gone.metrics(), *self._told.values()):
            sums.add(metrics)
        yield from sums.metrics()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class _Sums:
    """Sums of equally named samples."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        self._values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]] = {}

    def add(self, metrics: Iterable[Metric]) -> None:
        for metric in metrics:
            self._families.setdefault(metric.name, metric)
            values = self._values.setdefault(metric.name, defaultdict(float))
            for sample in metric.samples:
                values[sample.name, frozenset(sample.labels.items())] += sample.value

    def metrics(self) -> Iterator[Metric]:
        for name, family in self._families.items():
            metric = Metric(name, family.documentation, family.type)
            for (sample, labels), value in self._values[name].items():
                metric.add_sample(sample, dict(labels), value)
            yield metric
