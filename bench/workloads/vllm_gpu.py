"""What blocks cost on an engine at vLLM's own speed: compiled, with CUDA graphs, on one GPU.

Weights are random, since only their shape matters here. Every engine has vLLM's defaults, but for
prefix caching (each round asks the same again), the sizes of graphs (fewer are captured sooner) and
a fixed space for keys and values (the engines share the GPU).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.table import Table, typical_ratio
from bench.turns import Engine, Measured, Turn, take_turns
from bench.workloads.vllm_cpu import model_path

DEFAULT, EAGER, OURS, UNTAPPED = "vLLM", "vLLM, eager", "ours", "ours, no taps"
ROUNDS = 4
NEW, PROMPT = 128, 512
SIZES = (1, 8, 32)
_BAR = 25

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SMALL: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
if os.environ.get("BENCH_SMALL"):
    SHAPE.update(SMALL)
ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 9000,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 8 << 30,
    "seed": 0,
}
GRAPHS: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
RANKS = int(os.environ.get("BENCH_RANKS", "1"))
if RANKS > 1:
    ARGUMENTS["tensor_parallel_size"] = RANKS
    # vLLM 0.26 dies on two H200s with this pass.
    GRAPHS["pass_config"] = {"fuse_allreduce_rms": False}
SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}

GENERATE = [f"generate × {size}" for size in (*SIZES, 128)]
FIRST = ["first token, 512", "first token, 8000"]
BLOCKS = [
    f"{what} × {size}"
    for what in ("one layer read", "every layer read", "steering", "heads ablated", "free write")
    for size in SIZES
]
OTHERS = ["logit lens × 1", "logit lens × 8", "31 plain beside an eager step", "read, first token"]


def shape() -> str:
    """A folder with the shape of a Llama of 8 billion parameters, or of one, and some tokenizer."""
    folder = Path(tempfile.gettempdir()) / f"nnsight-bench-llama-{SHAPE['num_hidden_layers']}"
    folder.mkdir(exist_ok=True)
    for file in Path(model_path("llama")).glob("token*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return str(folder)


def prompts(count: int, length: int = PROMPT) -> list[list[int]]:
    """Different prompts of token ids."""
    return [[(7 * i + 13 * j) % 5000 + 10 for i in range(length)] for j in range(count)]


def measure() -> Measured:
    """All engines, in turns."""
    shape()
    python = Path(sys.executable)
    plain = ("vllm", "torch")
    ours = ("vllm", "torch")
    engines = {
        DEFAULT: Engine("bench.engines.vllm_gpu", plain, python),
        EAGER: Engine("bench.engines.vllm_gpu", plain, python, {"BENCH_EAGER": "1"}),
        OURS: Engine("bench.engines.nnsight_gpu", ours, python),
        UNTAPPED: Engine("bench.engines.nnsight_gpu", ours, python, {"BENCH_TAPS": ""}),
    }
    every = (DEFAULT, OURS, UNTAPPED, EAGER)
    turns = [Turn(case, 1, every) for case in GENERATE[:3]]
    turns += [Turn(GENERATE[3], 1, (DEFAULT, OURS, UNTAPPED))]
    turns += [Turn(case, 3, (DEFAULT, OURS)) for case in FIRST]
    turns += [Turn(case, 1, (OURS,)) for case in (*BLOCKS, *OTHERS)]
    return take_turns(engines, turns, ROUNDS, at_once=True)


def two_in_turns(around: dict[str, str], both: list[Turn], blocks: list[str]) -> Measured:
    """Plain vLLM and ours in turns, with these variables around them; blocks on ours alone."""
    shape()
    python, packages = Path(sys.executable), ("vllm", "torch")
    engines = {
        DEFAULT: Engine("bench.engines.vllm_gpu", packages, python, around),
        OURS: Engine("bench.engines.nnsight_gpu", packages, python, around),
    }
    turns = [*both, *(Turn(case, 1, (OURS,)) for case in blocks)]
    return take_turns(engines, turns, ROUNDS, at_once=True)


def table(measured: Measured) -> Table:
    """Each case as a share of vLLM's default speed in the same rounds."""
    seconds = measured.seconds
    rows = []
    for case, engines in seconds.items():
        base = seconds[_base(case)][DEFAULT]
        for engine, took in engines.items():
            share = typical_ratio(base, took)
            ms, filled = f"{median(took) * 1e3:.1f}", min(round(_BAR * share), _BAR)
            bar = "█" * filled + "░" * (_BAR - filled)
            rows.append([f"{case}, {engine}", ms, f"{share:.3f}", bar])
    return Table(["", "ms", "speed as a share of vLLM's default", "up to 1"], rows)


def _base(case: str) -> str:
    """The plain case that generates as much."""
    if case in GENERATE or case in FIRST:
        return case
    if case == "read, first token":
        return FIRST[0]
    if "×" not in case:
        return "generate × 32"
    return f"generate ×{case.rpartition('×')[2]}"
