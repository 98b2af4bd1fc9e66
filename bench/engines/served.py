"""Our `VLLM` on an engine of its own, or on a server that it starts."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.workloads import vllm_cpu
from bench.workloads.served import BYTES, LARGE, LOCAL, SMALL
from nnsight_client import VLLM as Served
from nnsight_vllm_worker import VLLM


def cases() -> dict[str, Callable[[], Any]]:
    path = vllm_cpu.model_path()
    model: Any = _local(path) if os.environ["BENCH_WAY"] == LOCAL else _served(path)
    prompt, sampling = vllm_cpu.PROMPTS[0], {"temperature": 0.0, "max_tokens": 1}

    def small() -> Any:
        with model.trace(prompt, **sampling):
            hidden = model.transformer.h[6].output.save()
        return hidden

    def large() -> Any:
        with model.trace(prompt, **sampling):
            large = torch.ones(BYTES // 4).save()
        assert large.numel() * 4 == BYTES
        return large

    return {SMALL: small, LARGE: large}


def _local(path: str) -> VLLM:
    return VLLM(path, dispatch=True, enforce_eager=True, **vllm_cpu.ARGUMENTS)


def _served(path: str) -> Served:
    command = [str(Path(sys.executable).with_name("nnsight-serve")), path, "--port", "0"]
    command.append("--enforce-eager")
    for name, value in vllm_cpu.ARGUMENTS.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(server.terminate)
    assert server.stdout is not None
    for line in server.stdout:
        found = re.search(r"nnsight-serve: (http://\S+) serves", line)
        if found:
            return Served(path, serve=found[1])
    raise RuntimeError("The server did not become ready.")
