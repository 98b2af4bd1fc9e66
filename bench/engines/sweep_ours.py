"""Our `VLLM`, for the sweep."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from bench.workloads.sweep import EDIT, GENERATE, SAMPLING, SUBMIT, TRACE, arguments, prompts
from nnsight_vllm_worker import VLLM


def cases() -> dict[str, Callable[[], Any]]:
    way = os.environ["BENCH_WAY"]
    name, how = arguments(way == "eager")
    model = VLLM(name, dispatch=True, **how)
    layers = model.model.layers if torch.cuda.is_available() else model.transformer.h
    layer = layers[len(layers) // 2]
    given = prompts()

    def generate() -> Any:
        return model.generate(given, use_tqdm=False, **SAMPLING)

    def trace() -> Any:
        with model.trace(**SAMPLING) as tracer:
            for ids in given:
                with tracer.invoke(ids):
                    output = layer.output
                    hidden = (output[0] if isinstance(output, tuple) else output)[-1].save()
        assert len(hidden) == len(given)
        return hidden

    def edit() -> Any:
        with model.edit():
            output = layer.output
            hidden = (output[0] if isinstance(output, tuple) else output)[-1].save()  # noqa: F841
        outputs = generate()
        model.clear_edits()
        assert all("hidden" in output.saves for output in outputs)
        return outputs

    def submit() -> Any:
        engine: Any = model._engine
        engine.run = lambda *_: iter(())
        try:
            with model.trace(**SAMPLING) as tracer:
                for ids in given:
                    with tracer.invoke(ids):
                        output = layer.output
                        hidden = (output[0] if isinstance(output, tuple) else output)[-1].save()  # noqa: F841
        finally:
            del engine.run

    found = {GENERATE: generate, TRACE: trace, EDIT: edit, SUBMIT: submit}
    return {f"{case}, {way}": call for case, call in found.items()}
