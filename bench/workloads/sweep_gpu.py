"""The sweep on one GPU; see `sweep`."""

from bench.workloads.sweep import measure, table

__all__ = ["measure", "table"]
