"""What blocks cost on one GPU where the model is small, so that little of a step can hide them.

The engines are those of `vllm_gpu`, with the shape of a Llama of one billion parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.table import Table
from bench.turns import Engine, Measured, Turn, take_turns
from bench.workloads import vllm_gpu
from bench.workloads.vllm_gpu import DEFAULT, FIRST, GENERATE, OURS, ROUNDS, SIZES, shape

BLOCKS = [f"{what} × {n}" for what in ("one layer read", "steering", "free write") for n in SIZES]


def measure() -> Measured:
    """Both engines, in turns."""
    shape()
    python, packages = Path(sys.executable), ("vllm", "torch")
    small = {"BENCH_SMALL": "1"}
    engines = {
        DEFAULT: Engine("bench.engines.vllm_gpu", packages, python, small),
        OURS: Engine("bench.engines.nnsight_gpu", packages, python, small),
    }
    turns = [Turn(case, 1, (DEFAULT, OURS)) for case in GENERATE[:3]]
    turns += [Turn(FIRST[0], 3, (DEFAULT, OURS))]
    turns += [Turn(case, 1, (OURS,)) for case in (*BLOCKS, "every layer read × 1")]
    return take_turns(engines, turns, ROUNDS, at_once=True)


def table(measured: Measured) -> Table:
    """Each case as a share of vLLM's default speed in the same rounds."""
    return vllm_gpu.table(measured)
