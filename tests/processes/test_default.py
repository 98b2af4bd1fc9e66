"""vLLM's own default engine: compiled, in processes of its own (on a GPU with CUDA graphs)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_core import NotATapError
from nnsight_vllm_worker import VLLM
from tests.processes.test_engine import PROMPT, SETTINGS, children

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def model(processes: None, gpt2_path: str) -> Iterator[VLLM]:
    settings = {name: SETTINGS[name] for name in SETTINGS if name != "enforce_eager"}
    with pytest.MonkeyPatch.context() as patch:
        # The engine's process is forked from this one, or starts with its environment.
        patch.delenv("TORCH_COMPILE_DISABLE", raising=False)
        with (
            torch._dynamo.config.patch(disable=False),
            VLLM(gpt2_path, **settings) as model,
        ):
            yield model


def test_each_block_runs_in_the_fastest_way_that_gives_it_what_it_wants(
    model: VLLM, hf_gpt2: Any, near: Any
) -> None:
    with pytest.raises(NotATapError, match="transformer.h.0.attn.output is not a tap"):
        with model.trace(PROMPT, only_taps=True, **GREEDY):
            away = model.transformer.h[0].attn.output.save()
    # That has built the engine, since nothing else knows its taps.
    assert children() and model.dispatched and model.tree.compiled
    assert model.taps == tuple(f"transformer.h.{layer}.output" for layer in range(12))
    v = torch.randn(96, generator=torch.Generator().manual_seed(0))
    seen = {}
    for one in (model, hf_gpt2):
        with one.trace(PROMPT, **GREEDY) as tracer:
            looked = [].save()
            for _ in tracer.all():
                looked.append(one.transformer.h[6].output)
            read = tracer.result.save()
        with one.trace(PROMPT, **GREEDY) as tracer:
            for _ in tracer.all():
                one.transformer.h[4].output[:] += v
                steered = one.logits.save()
            written = tracer.result.save()
        assert one is not model or "gets a tensor of 96 added" in str(model.explain(tracer))
        with one.trace(PROMPT, **GREEDY) as tracer:
            inside = one.transformer.h[5].mlp.c_fc.output.save()
            anywhere = tracer.result.save()
        seen[one] = (looked, steered, inside), (read, written, anywhere)
    (here, outputs), (there, expected) = seen[model], seen[hf_gpt2]
    near(here[0], there[0])
    near(here[1], there[1])
    near(here[2][0] if isinstance(here[2], tuple) else here[2], there[2])
    for one, other in zip(outputs, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert [output.ways for output in outputs] == [
        {"deferred": 4},
        {"tables": 4},
        {"eager": 1, "plain": 3},
    ]
    (untraced,) = model.generate(PROMPT, **GREEDY)
    assert untraced.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert untraced.ways == {}
