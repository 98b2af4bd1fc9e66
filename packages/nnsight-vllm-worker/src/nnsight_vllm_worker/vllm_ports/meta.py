"""A model's classes on the meta device: its tree without an engine, weights or a GPU.

Run as a process of its own (`python -m nnsight_vllm_worker.vllm_ports.meta MODEL ARGUMENTS`),
because building a model leaves state behind (process groups, rotary caches) that a real engine in
the same process would then use. Prints the tree as JSON.

Relies on (vLLM 0.26.0 and 0.27.1): `EngineArgs.create_engine_config`, `set_current_vllm_config`,
`init_distributed_environment`, `ensure_model_parallel_initialized`, `initialize_model`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

from nnsight_core.errors import EngineError
from nnsight_core.tree import ModelTree
from nnsight_core.watch import bare_tree
from nnsight_vllm_worker.vllm_ports.startup import engine

# The tree is that of one rank, and this process sees no GPU to deal ranks out to.
_RANKS = ("tensor_parallel_size", "distributed_executor_backend")


def tree_of(model: str, arguments: dict[str, Any]) -> ModelTree:
    """The provisional tree of a model, from vLLM's own classes.

    Raises:
        EngineError: vLLM cannot build the model, with the root cause.
    """
    plain = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, str | int | float | bool | None) and name not in _RANKS
    }
    command = [sys.executable, "-m", __name__, model, json.dumps(plain)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        cause = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineError(f"The tree of {model} cannot be built. {cause}")
    return ModelTree.model_validate_json(lines[-1])


def build(model: str, arguments: dict[str, Any]) -> ModelTree:
    """Build the model on the meta device, in this process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(model=model, **{**arguments, "enforce_eager": True}).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            built = initialize_model(config)
        return bare_tree(built, model, engine(), provisional=True)


if __name__ == "__main__":
    try:
        tree = build(sys.argv[1], json.loads(sys.argv[2]))
    except Exception as error:
        # On one line, which is what `tree_of` tells.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    print(tree.model_dump_json())
