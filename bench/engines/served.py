"""Our `VLLM` on an engine of its own, or on a server that it starts."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from bench.serving import serving
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
    flags = ["--enforce-eager"]
    for name, value in vllm_cpu.ARGUMENTS.items():
        flags += ["--" + name.replace("_", "-"), str(value)]
    running = ExitStack()
    _, url = running.enter_context(serving(path, *flags))
    atexit.register(running.close)
    return Served(path, serve=url)
