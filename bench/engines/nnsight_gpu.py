"""Our `VLLM` on a GPU, with its default taps or none."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.engines.vllm_gpu import plain_cases
from bench.workloads.vllm_gpu import (
    ARGUMENTS,
    BLOCKS,
    GRAPHS,
    NEW,
    RANKS,
    SAMPLING,
    SHAPE,
    prompts,
    shape,
)
from bench.workloads.vllm_gpu2 import BLOCKS as RANKS_BLOCKS
from bench.workloads.vllm_gpu2 import SPLIT
from nnsight_vllm_worker import VLLM


def cases() -> dict[str, Callable[[], Any]]:
    taps = ["resid"] if os.environ.get("BENCH_TAPS", "resid") else []
    if RANKS > 1:
        taps.append(SPLIT)
    model = VLLM(shape(), dispatch=True, compilation_config=GRAPHS, taps=taps, **ARGUMENTS)
    layers = model.model.layers
    vector = 0.1 * torch.randn(SHAPE["hidden_size"], dtype=torch.bfloat16)
    middle, late = SHAPE["num_hidden_layers"] // 2, SHAPE["num_hidden_layers"] * 5 // 8

    def traced(block: Callable[[Any], Any]) -> Callable[[int], Any]:
        def run(count: int, tokens: int = NEW) -> Any:
            with model.trace(max_tokens=tokens, **SAMPLING) as tracer:
                for ids in prompts(count):
                    block(tracer.invoke(ids))
            return tracer.saves

        return run

    @traced
    def one_read(invoke: Any) -> Any:
        with invoke as tracer:
            seen = [].save()
            for _ in tracer.all():
                seen.append(layers[middle].output[0][-1])

    @traced
    def every_read(invoke: Any) -> Any:
        with invoke as tracer:
            seen = [].save()
            for _ in tracer.all():
                seen.append([layer.output[0][-1] for layer in layers])

    @traced
    def steering(invoke: Any) -> Any:
        with invoke as tracer:
            for _ in tracer.all():
                layers[middle].output[0][:] += vector

    @traced
    def ablation(invoke: Any) -> Any:
        with invoke as tracer:
            for _ in tracer.all():
                layers[middle].output[0][:, 128:256] = 0

    @traced
    def split_read(invoke: Any) -> Any:
        with invoke as tracer:
            seen = [].save()
            for _ in tracer.all():
                seen.append(layers[16].self_attn.attn.output[-1])

    @traced
    def split_ablation(invoke: Any) -> Any:
        with invoke as tracer:
            for _ in tracer.all():
                layers[16].self_attn.attn.output[:, 1920:2176] = 0  # one head on each rank

    @traced
    def free_write(invoke: Any) -> Any:
        with invoke as tracer:
            for _ in tracer.all():
                hidden = layers[middle].output[0]
                hidden[:] = hidden + hidden.mean(-1, keepdim=True)

    @traced
    def lens(invoke: Any) -> Any:
        with invoke as tracer:
            seen = [].save()
            for _ in tracer.all():
                hidden, residual = layers[late].output
                normed = model.model.norm((hidden + residual)[-1:])
                seen.append(model.logits_processor(model.lm_head, normed).argmax(-1))

    @traced
    def prompt_read(invoke: Any) -> Any:
        with invoke:
            seen = layers[middle].output.save()  # noqa: F841 - comes home

    def beside() -> Any:
        with model.trace(max_tokens=NEW, **SAMPLING) as tracer:
            for number, ids in enumerate(prompts(32)):
                with tracer.invoke(ids):
                    pass
                if number == 0:
                    with tracer.invoke(ids):
                        seen = layers[middle].mlp.output.save()  # noqa: F841 - comes home
        return tracer.saves

    blocks = {
        "one layer read": one_read,
        "every layer read": every_read,
        "steering": steering,
        "heads ablated": ablation if RANKS == 1 else split_ablation,
        "free write": free_write,
        "split read": split_read,
    }
    found = plain_cases(model.llm)
    for case in BLOCKS if RANKS == 1 else RANKS_BLOCKS:
        what, _, size = case.rpartition(" × ")
        found[case] = partial(blocks[what], int(size))
    found["logit lens × 1"], found["logit lens × 8"] = partial(lens, 1), partial(lens, 8)
    found["31 plain beside an eager step"] = beside
    found["read, first token"] = partial(prompt_read, 1, 1)
    return found
