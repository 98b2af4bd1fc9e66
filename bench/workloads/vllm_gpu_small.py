"""What blocks cost on one GPU where the model is small, so that little of a step can hide them.

The engines are those of `vllm_gpu`, with the shape of a Llama of one billion parameters.
"""

from __future__ import annotations

from bench.table import Table
from bench.turns import Measured, Turn
from bench.workloads import vllm_gpu
from bench.workloads.vllm_gpu import DEFAULT, FIRST, GENERATE, OURS, SIZES, two_in_turns

BLOCKS = [f"{what} × {n}" for what in ("one layer read", "steering", "free write") for n in SIZES]


def measure() -> Measured:
    """Both engines, in turns."""
    both = [Turn(case, 1, (DEFAULT, OURS)) for case in GENERATE[:3]]
    both += [Turn(FIRST[0], 3, (DEFAULT, OURS))]
    return two_in_turns({"BENCH_SMALL": "1"}, both, [*BLOCKS, "every layer read × 1"])


def table(measured: Measured) -> Table:
    """Each case as a share of vLLM's default speed in the same rounds."""
    return vllm_gpu.table(measured)
