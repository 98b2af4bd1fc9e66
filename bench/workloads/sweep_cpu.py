"""The sweep on vLLM's CPU backend; see `sweep`."""

from bench.workloads.sweep import measure, table

__all__ = ["measure", "table"]
