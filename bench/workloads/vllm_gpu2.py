"""What blocks cost on two GPUs, where whole tensors are put together of what each rank holds.

The engines are those of `vllm_gpu`, with `tensor_parallel_size=2`. The output of a layer is whole
on every rank; of what its attention gives back, each rank has half of the heads.
"""

from __future__ import annotations

from bench.table import Table
from bench.turns import Measured, Turn
from bench.workloads import vllm_gpu
from bench.workloads.vllm_gpu import DEFAULT, GENERATE, OURS, SIZES, two_in_turns

SPLIT = "model.layers.16.self_attn.attn.output"
WHOLE_BLOCKS = [f"{what} × {n}" for what in ("one layer read", "steering") for n in SIZES]
SPLIT_BLOCKS = [f"{what} × {n}" for what in ("split read", "heads ablated") for n in (1, 8)]
BLOCKS = [*WHOLE_BLOCKS, "every layer read × 1", "every layer read × 8", *SPLIT_BLOCKS]


def measure() -> Measured:
    """Both engines, in turns."""
    both = [Turn(case, 1, (DEFAULT, OURS)) for case in GENERATE[:3]]
    return two_in_turns({"BENCH_RANKS": "2"}, both, BLOCKS)


def table(measured: Measured) -> Table:
    """Each case as a share of vLLM's default speed on as many GPUs in the same rounds."""
    return vllm_gpu.table(measured)
