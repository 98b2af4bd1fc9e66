"""What HTTP adds: the same traces on an engine of one's own and on a server of the same machine.

Both engines run in processes of their own. A small trace saves one location of one step; a large
one brings home a tensor of 256 MiB.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from bench.table import Table, typical_difference
from bench.turns import Engine, Measured, Turn, take_turns
from bench.workloads import vllm_cpu

LOCAL, SERVED = "local", "served"
SMALL, LARGE = "one location", "256 MiB"
BYTES = 256 << 20
ROUNDS = 10


def measure() -> Measured:
    """Both, in turns."""
    vllm_cpu.model_path()
    around = {**vllm_cpu.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    packages = ("vllm-cpu", "torch", "httpx", "uvicorn")
    engines = {
        way: Engine(
            "bench.engines.served", packages, Path(sys.executable), {**around, "BENCH_WAY": way}
        )
        for way in (LOCAL, SERVED)
    }
    turns = [Turn(SMALL, 50, (LOCAL, SERVED)), Turn(LARGE, 2, (LOCAL, SERVED))]
    return take_turns(engines, turns, ROUNDS, pause=0.2)


def table(measured: Measured) -> Table:
    """Each trace in milliseconds, and what HTTP adds to it; of the large one the rate as well."""
    rows = []
    for case, found in measured.seconds.items():
        more = typical_difference(found[SERVED], found[LOCAL])
        for way in (LOCAL, SERVED):
            took = median(found[way])
            rate = f"{BYTES / took / 1e9:.2f}" if case == LARGE else ""
            added = f"{more * 1e3:.2f}" if way == SERVED else ""
            rows.append([f"{case}, {way}", f"{took * 1e3:.2f}", added, rate])
    return Table(["", "ms", "ms more than local", "GB/s"], rows)
