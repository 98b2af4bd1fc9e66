"""What blocks cost on two GPUs, where whole tensors are put together of what each rank holds.

The engines are those of `vllm_gpu`, with `tensor_parallel_size=2`. The output of a layer is whole
on every rank; of what its attention gives back, each rank has half of the heads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.table import Table
from bench.turns import Engine, Measured, Turn, take_turns
from bench.workloads import vllm_gpu
from bench.workloads.vllm_gpu import DEFAULT, GENERATE, OURS, ROUNDS, SIZES, shape

SPLIT = "model.layers.16.self_attn.attn.output"
WHOLE_BLOCKS = [f"{what} × {n}" for what in ("one layer read", "steering") for n in SIZES]
SPLIT_BLOCKS = [f"{what} × {n}" for what in ("split read", "heads ablated") for n in (1, 8)]
BLOCKS = [*WHOLE_BLOCKS, "every layer read × 1", "every layer read × 8", *SPLIT_BLOCKS]


def measure() -> Measured:
    """Both engines, in turns."""
    shape()
    python, packages = Path(sys.executable), ("vllm", "torch")
    ranks = {"BENCH_RANKS": "2"}
    engines = {
        DEFAULT: Engine("bench.engines.vllm_gpu", packages, python, ranks),
        OURS: Engine("bench.engines.nnsight_gpu", packages, python, ranks),
    }
    turns = [Turn(case, 1, (DEFAULT, OURS)) for case in GENERATE[:3]]
    turns += [Turn(case, 1, (OURS,)) for case in BLOCKS]
    return take_turns(engines, turns, ROUNDS, at_once=True)


def table(measured: Measured) -> Table:
    """Each case as a share of vLLM's default speed on as many GPUs in the same rounds."""
    return vllm_gpu.table(measured)
