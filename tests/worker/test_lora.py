"""LoRA: an adapter per invoke, mixed with the base model in one batch, against merged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nnsight_core import TorchModel

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def merged(llama_path: str, adapter: str) -> TorchModel:
    """The Llama in transformers with the adapter's product added to its weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(llama_path, dtype="float32").eval()
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    weights = load_file(Path(adapter) / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in weights.items():
            if name.endswith(".lora_A.weight"):
                at = name.removesuffix(".lora_A.weight")
                target = model.get_submodule(at.removeprefix("base_model.model."))
                up = weights[f"{at}.lora_B.weight"]
                target.weight += up @ down * config["lora_alpha"] / config["r"]
    return TorchModel(model, tokenizer=AutoTokenizer.from_pretrained(llama_path))


@pytest.fixture
def alike(near: Any) -> Any:
    """Asserts that values are equal; in half precision, that they point the same way."""

    def check(here: torch.Tensor, there: torch.Tensor) -> None:
        if here.dtype == torch.float32 and not torch.cuda.is_available():
            return near(here, there)
        cosine = torch.cosine_similarity(here.float(), there, dim=-1)
        assert cosine.min() > 0.995, cosine
        return None

    return check


def test_adapted_and_base_requests_in_one_batch(
    lora: Any, adapter: str, hf_llama: Any, merged: Any, alike: Any
) -> None:
    from vllm.lora.request import LoRARequest

    chosen = LoRARequest("probe", 1, adapter)
    with lora.trace(**GREEDY) as tracer:
        for request in (None, chosen, None, chosen):
            with tracer.invoke(PROMPT, lora_request=request):
                hidden = [].save()
                logits = [].save()
                for _ in tracer.all():
                    hidden.append(sum(lora.model.layers[3].output))
                    logits.append(lora.logits)
    for oracle, mine in ((hf_llama, (0, 2)), (merged, (1, 3))):
        with oracle.trace(PROMPT, **GREEDY) as tracer:
            expected = [].save()
            rows = [].save()
            for _ in tracer.all():
                expected.append(oracle.model.layers[3].output)
                rows.append(oracle.logits)
        for index in mine:
            for here, there in zip(hidden[index], expected, strict=True):
                alike(here, there)
            for here, there in zip(logits[index], rows, strict=True):
                alike(here, there)


def test_an_adapter_for_a_whole_trace_and_a_write_under_it(
    lora: Any, adapter: str, merged: Any, alike: Any
) -> None:
    from vllm.lora.request import LoRARequest

    found = []
    for model in (lora, merged):
        sampling = dict(GREEDY)
        if model is lora:
            sampling["lora_request"] = LoRARequest("probe", 1, adapter)
        with model.trace(**sampling) as tracer:
            with tracer.invoke(PROMPT):
                for _ in tracer.all():
                    model.model.layers[2].mlp.output[:] *= 0.5
                    logits = model.logits.save()
        found.append(logits)
    alike(*found)


def test_the_parts_of_an_adapted_layer_are_locations(lora: Any, adapter: str) -> None:
    from vllm.lora.request import LoRARequest

    with lora.trace(PROMPT, lora_request=LoRARequest("probe", 1, adapter), **GREEDY):
        down = lora.model.layers[1].mlp.down_proj.output[0].save()
        whole = lora.model.layers[1].mlp.output.save()
    assert down.shape[1] == 128 and torch.equal(down, whole)


def test_edits_see_and_change_adapted_values(
    lora: Any, adapter: str, merged: Any, alike: Any
) -> None:
    from vllm.lora.request import LoRARequest

    with lora.edit("halve") as (tracer, halve):
        for _ in tracer.all():
            lora.model.layers[2].mlp.output[:] *= 0.5
    with lora.edit("look") as (tracer, look):
        logits = [].save()
        for _ in tracer.all():
            logits.append(lora.logits)
    try:
        [output] = lora.generate(PROMPT, lora_request=LoRARequest("probe", 1, adapter), **GREEDY)
    finally:
        lora.clear_edits()
    with merged.trace(PROMPT, **GREEDY) as tracer:
        expected = [].save()
        for _ in tracer.all():
            merged.model.layers[2].mlp.output[:] *= 0.5
            expected.append(merged.logits)
    assert not output.errors and len(output.saves["logits"]) == 3
    for here, there in zip(output.saves["logits"], expected, strict=True):
        alike(here, there)
