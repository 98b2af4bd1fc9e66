"""Our `VLLM`, with and without blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.workloads.vllm_cpu import ARGUMENTS, EVERY, LOADS, ONE, SAMPLING, model_path
from nnsight_core import save
from nnsight_vllm_worker import VLLM


def cases() -> dict[str, Callable[[], Any]]:
    model = VLLM(model_path(), dispatch=True, **ARGUMENTS)

    def generate(prompts: list[str], tokens: int) -> Any:
        return model.generate(prompts, max_tokens=tokens, **SAMPLING)

    def one_read(prompts: list[str], tokens: int) -> Any:
        with model.trace(max_tokens=tokens, **SAMPLING) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    hidden = model.transformer.h[6].output.save()
        return hidden

    def every_read(prompts: list[str], tokens: int) -> Any:
        with model.trace(max_tokens=tokens, **SAMPLING) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    hidden = save([layer.output for layer in model.transformer.h])
        return hidden

    return {
        name + suffix: partial(run, *load)
        for name, load in LOADS.items()
        for suffix, run in (("", generate), (ONE, one_read), (EVERY, every_read))
    }
