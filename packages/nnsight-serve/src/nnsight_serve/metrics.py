"""What Prometheus is told: ours, named `nnsight_*`, beside vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nnsight_serve.bodies import Bodies
from nnsight_serve.limits import Limits
from nnsight_serve.pulse import Pulse
from nnsight_vllm_worker.async_engine import AsyncEngine

if TYPE_CHECKING:
    from nnsight_serve.accounts import Account

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_GAUGES = {
    "live": ("blocks_live", "Blocks in the engine that have not said everything yet."),
    "keep_bytes": ("kept_bytes", "Bytes of the values that blocks keep on the engine."),
    "blob_bytes": ("outside_bytes", "Bytes of the outside tensors that blocks use."),
    "entries": ("table_entries", "Entries of the tables that taps write from."),
}


class Metrics:
    """What is counted of the requests of one app.

    Attributes:
        registry: what is exposed.
        open: how many requests are not over.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.open = 0
        self._requests = Counter(
            "nnsight_requests",
            "Requests that are over, by what they asked for and how they ended.",
            ("kind", "outcome", "caller"),
            registry=registry,
        )
        self._open = Gauge(
            "nnsight_requests_open", "Requests that are not over.", ("kind",), registry=registry
        )
        self._seconds = Histogram(
            "nnsight_request_seconds",
            "From the first byte of a request to the last of its answer.",
            ("kind",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._received = Counter(
            "nnsight_received_bytes", "Bytes of bodies.", ("kind",), registry=registry
        )
        self._sent = Counter(
            "nnsight_sent_bytes", "Bytes of answers.", ("kind",), registry=registry
        )
        self._saved = Counter(
            "nnsight_saved_bytes", "Bytes of what came home from blocks.", registry=registry
        )
        self._block_seconds = Counter(
            "nnsight_block_seconds",
            "Seconds in which the blocks of requests that are over held the engine.",
            registry=registry,
        )
        self._steps = Counter(
            "nnsight_steps",
            "Steps of requests with blocks that are over, by the way in which they ran.",
            ("way",),
            registry=registry,
        )

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Everything as text, in the form that who asks accepts, and that form's media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

    def opened(self, account: Account) -> None:
        """A request has come."""
        self.open += 1
        self._open.labels(account.kind).inc()

    def closed(self, account: Account) -> None:
        """A request is over."""
        kind = account.kind
        self.open -= 1
        self._open.labels(kind).dec()
        self._requests.labels(kind, account.outcome, account.caller).inc()
        self._seconds.labels(kind).observe(account.seconds)
        self._received.labels(kind).inc(account.received)
        self._sent.labels(kind).inc(account.sent)

    def saved(self, size: int) -> None:
        """So many bytes of what a block saved go to a client."""
        self._saved.inc(size)

    def ran(self, seconds: float, ways: dict[str, int]) -> None:
        """Blocks have held the engine so long, and so many steps have run in each way."""
        self._block_seconds.inc(seconds)
        for way, steps in ways.items():
            self._steps.labels(way).inc(steps)


class EngineMetrics(Collector):
    """What is read off an engine, and off what counts for it, when it is asked for."""

    def __init__(self, engine: AsyncEngine, pulse: Pulse, limits: Limits, bodies: Bodies) -> None:
        self._engine = engine
        self._pulse = pulse
        self._limits = limits
        self._bodies = bodies

    def collect(self) -> Iterator[Metric]:
        yield _gauge("engine_up", "Whether the engine runs.", self._engine.alive)
        yield _gauge("engine_requests", "Requests in the engine.", self._limits.running)
        yield _gauge("body_bytes", "Bytes of bodies in memory.", self._bodies.held)
        yield _gauge("edits_installed", "Edits on the engine.", len(self._engine.edits.infos()))
        for key, (name, says) in _GAUGES.items():
            if key in self._pulse.counts:
                yield _gauge(name, says, self._pulse.counts[key])
        # Ours may be among the engine's, if Prometheus's client shares its files with others.
        own = self._engine.metrics().collect()
        yield from (metric for metric in own if not metric.name.startswith("nnsight_"))

    def describe(self) -> list[Metric]:
        # What is collected is not known before there is an engine; nothing else has these names.
        return []


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(f"nnsight_{name}", says, value)
