"""vLLM's own metrics.

Relies on (vLLM 0.26.0 and 0.27.1): unless `disable_log_stats` is set, an engine keeps metrics named
`vllm:...` in the registry of Prometheus's client that `get_prometheus_registry()` gives.
"""

from __future__ import annotations

from typing import Any


def registry() -> Any:
    """The `prometheus_client.CollectorRegistry` with the metrics of this process's engines."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return get_prometheus_registry()
