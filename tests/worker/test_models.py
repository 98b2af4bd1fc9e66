"""Kinds of models on real vLLM: their values are those of transformers, and add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import nnsight_core

PROMPT = "The Eiffel Tower is in the city of"
COUNT = "Count up to ten:"
COUNTED = " one two three four five six seven eight nine ten"
DEPTHS = ("early", "middle", "late")
close = torch.testing.assert_close


@dataclass(frozen=True)
class Family:
    """Where a kind of model keeps what all kinds have. Parts of a layer are named from the layer.

    Attributes:
        layers: the layers.
        at: an early, a middle and a late layer.
        mixers: what mixes tokens, with what is looked at inside it before; for layer after layer,
            and again from the start.
        mlp: what follows, with what is looked at inside it before.
        norms: what the residual stream goes into before the mixer and before the MLP.
        after: the norms through which mixer and MLP go onto the stream, if there are any.
        scale: what they are multiplied with on the way.
        pair: whether a layer hands on two parts of the stream.
        final: the norm after the last layer.
        head: what makes logits of it.
        renamed: parts of paths that transformers calls otherwise.
    """

    layers: str = "model.layers"
    at: tuple[int, int, int] = (0, 3, 5)
    mixers: tuple[tuple[str, ...], ...] = (("self_attn",),)
    mlp: tuple[str, ...] = ("mlp",)
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, ...] = ()
    scale: float = 1.0
    pair: bool = True
    final: str = "model.norm"
    head: str = "lm_head"
    renamed: tuple[str, str] = ("", "")

    def layer(self, index: int) -> str:
        return f"{self.layers}.{index}"

    def mixer(self, index: int) -> tuple[str, ...]:
        return self.mixers[index % len(self.mixers)]

    def parts(self, index: int) -> list[str]:
        """The parts of a layer that are compared, in forward order; the layer itself comes last."""
        parts = [*self.mixer(index), *self.after[:1], *self.mlp, *self.after[1:]]
        return [*(f"{self.layer(index)}.{part}" for part in parts), self.layer(index)]

    def stream(self, output: Any) -> Tensor:
        """The residual stream, of what a layer of vLLM gives back."""
        return sum(output) if self.pair else _first(output)

    def there(self, path: str) -> str:
        """The path in transformers."""
        old, new = self.renamed
        return path.replace(old, new) if old else path


FAMILIES = {
    "gpt2": Family(
        layers="transformer.h",
        at=(0, 6, 11),
        mixers=(("attn",),),
        norms=("ln_1", "ln_2"),
        pair=False,
        final="transformer.ln_f",
    ),
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(mixers=(("self_attn.q_norm", "self_attn.k_norm", "self_attn"),)),
    "mixtral": Family(
        at=(0, 2, 3),
        mlp=("block_sparse_moe.gate", "block_sparse_moe"),
        renamed=("block_sparse_moe", "mlp"),
    ),
    "qwen2_moe": Family(at=(0, 2, 3), mlp=("mlp.gate", "mlp")),
    "gemma2": Family(
        at=(0, 2, 3),
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
        head="model.embed_tokens",
    ),
    "granitemoehybrid": Family(
        at=(0, 1, 4),
        mixers=(("mamba.in_proj", "mamba.norm", "mamba"), ("self_attn",)),
        mlp=("shared_mlp",),
        scale=0.75,
        pair=False,
    ),
}


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def family(name: str) -> Family:
    return FAMILIES[name]


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(name)


@pytest.fixture
def oracle(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"hf_{name}")


@pytest.mark.parametrize("depth", DEPTHS)
def test_values_are_those_of_transformers(
    family: Family, model: Any, oracle: Any, depth: str, near: Any
) -> None:
    index = family.at[DEPTHS.index(depth)]
    paths = [*family.parts(index), family.final]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        values = nnsight_core.save([])
        for path in paths:
            values.append(model.get(path).output)
        logits = model.logits.save()
    here = {path: _first(value) for path, value in zip(paths, values, strict=True)}
    here[family.layer(index)] = family.stream(values[-2])
    with oracle.trace(PROMPT, temperature=0.0, max_tokens=1):
        values = nnsight_core.save([])
        for path in paths:
            values.append(oracle.get(family.there(path)).output)
        hf_logits = oracle.logits.save()
    there = {path: _first(value) for path, value in zip(paths, values, strict=True)}
    near({**here, "logits": logits}, {**there, "logits": hf_logits})


def test_a_write_has_the_effect_it_has_in_transformers(
    family: Family, model: Any, oracle: Any, near: Any
) -> None:
    _, middle, late = family.at
    mlp, later, final = f"{family.layer(middle)}.{family.mlp[-1]}", family.layer(late), family.final
    hf_mlp = family.there(mlp)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        # A change of length alone would not pass a norm.
        model.get(mlp).output[1:, ::2] *= -2.5
        output = model.get(later).output.save()
        normed = model.get(final).output.save()
        logits = model.logits.save()
    with oracle.trace(PROMPT, temperature=0.0, max_tokens=1):
        oracle.get(hf_mlp).output[1:, ::2] *= -2.5
        hf_output = oracle.get(later).output.save()
        hf_normed = oracle.get(final).output.save()
        hf_logits = oracle.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        untouched = model.get(final).output.save()
    near(family.stream(output), _first(hf_output))
    near(_first(normed), hf_normed)
    near(logits, hf_logits)
    assert not torch.allclose(_first(normed)[1:], _first(untouched)[1:], atol=0.1)
    near(_first(normed)[0], _first(untouched)[0])


def test_a_layer_adds_its_parts_to_the_stream(family: Family, model: Any) -> None:
    for index in range(len(model.get(family.layers))):
        at = family.layer(index)
        before, between = family.norms
        mixer, mlp = family.after or (family.mixer(index)[-1], family.mlp[-1])
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            # A norm adds up what it is called with.
            entering = sum(model.get(f"{at}.{before}").inputs[0]).save()
            mixed = model.get(f"{at}.{mixer}").output.save()
            halfway = sum(model.get(f"{at}.{between}").inputs[0]).save()
            moved = model.get(f"{at}.{mlp}").output.save()
            leaving = model.get(at).output.save()
        close(halfway, entering + mixed * family.scale)
        close(family.stream(leaving), halfway + moved * family.scale)


def test_the_last_stream_makes_the_logits(family: Family, model: Any) -> None:
    last = model.get(family.layer(len(model.get(family.layers)) - 1))
    final, head, pair = model.get(family.final), model.get(family.head), family.pair
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        output = last.output
        stream = sum(output) if pair else output[0] if isinstance(output, tuple) else output
        lens = model.logits_processor(head, final(stream[-1:])).save()
        logits = model.logits.save()
    close(lens, logits)


def test_a_bare_save_is_the_clone_of_it(model: Any) -> None:
    places = [(model.get(path), side) for path, side in _served(model)]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for node, side in places:
            with tracer.invoke(PROMPT):
                # Nothing in this text can change a tensor, so that `save` need not copy any.
                if side == "output":
                    value = node.output
                    parts = value if isinstance(value, tuple) else (value,)
                else:
                    args, kwargs = node.inputs
                    parts = (*args, *kwargs.values())
                bare = [part for part in parts if isinstance(part, Tensor)].save()
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for node, side in places:
            with tracer.invoke(PROMPT):
                if side == "output":
                    value = node.output
                    parts = value if isinstance(value, tuple) else (value,)
                else:
                    args, kwargs = node.inputs
                    parts = (*args, *kwargs.values())
                clones = [part.clone() for part in parts if isinstance(part, Tensor)].save()
    for (node, side), one, other in zip(places, bare, clones, strict=True):
        same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
        assert same and all(same), f"{node!r}.{side}"


def test_generation_goes_on_from_the_prompt(model: Any) -> None:
    outs = model.generate([PROMPT, COUNT], temperature=0.0, max_tokens=16)
    assert [o.outputs[0].text for o in outs] == [" Paris", COUNTED]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"], indirect=True)
def test_the_router_chooses_the_experts(family: Family, model: Any, oracle: Any, near: Any) -> None:
    gate, mlp = (f"{family.layer(family.at[1])}.{part}" for part in family.mlp)
    hf_gate, hf_mlp = family.there(gate), family.there(mlp)
    wanted = torch.tensor([-3.0, 2.0, -9.0, 1.0])
    weights, experts = wanted.softmax(-1).topk(2)
    if oracle._backend.module.config.to_dict().get("norm_topk_prob", True):
        weights /= weights.sum()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.get(gate).output[0][:] = wanted
        output = model.get(mlp).output.save()
        logits = model.logits.save()
    with oracle.trace(PROMPT, temperature=0.0, max_tokens=1):
        # In transformers, what follows goes by the router's choice.
        _, scores, chosen = oracle.get(hf_gate).output
        own = chosen.clone().save()
        scores[:] = weights
        chosen[:] = experts
        hf_output = oracle.get(hf_mlp).output.save()
        hf_logits = oracle.logits.save()
    near(output, hf_output)
    near(logits, hf_logits)
    assert not torch.equal(own, experts.expand_as(own))


@pytest.mark.parametrize(
    "part", ["attn_logit_softcapping", "final_logit_softcapping", "sliding_window"]
)
def test_without_its_caps_and_window_gemma_2_would_say_something_else(
    hf_gemma2: Any, part: str
) -> None:
    # Else that its values are right would not say that these are in them.
    module, prompt = hf_gemma2._backend.module, hf_gemma2.tokenizer(PROMPT, return_tensors="pt")
    without = AutoModelForCausalLM.from_pretrained(
        module.name_or_path,
        dtype="float32",
        attn_implementation="eager",
        **{part: 512 if part == "sliding_window" else None},
    )
    with torch.no_grad():
        logits, other = module(**prompt).logits, without(**prompt).logits
    assert (logits - other)[0, -1].abs().max() > 0.05


def test_a_hybrid_has_its_rows_when_vllm_reorders_its_batch(
    granitemoehybrid: Any, near: Any
) -> None:
    model = granitemoehybrid
    engine = model.llm.llm_engine
    # One request leaves its place in front of another that goes on. The first that is traced gets
    # the place, and as vLLM's kernels for Mamba want prompts last, the two are swapped.
    for key, steps in (("leaves", 1), ("stays", 30)):
        params = model.llm.get_default_sampling_params()
        params.max_tokens, params.ignore_eos = steps, True
        prompt = model.llm._preprocess_cmpl_one({"prompt_token_ids": [287] * 5})
        engine.add_request(key, prompt, params)
    engine.step()
    prompts = [PROMPT, "Water boils at"]
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                mixed = model.model.layers[2].mamba.output.save()
                logits = model.logits.save()
    assert engine.has_unfinished_requests()
    while engine.has_unfinished_requests():
        engine.step()
    for index, prompt in enumerate(prompts):
        with model.trace(prompt, temperature=0.0, max_tokens=1):
            alone = model.model.layers[2].mamba.output.save()
            alone_logits = model.logits.save()
        near(mixed[index], alone)
        near(logits[index], alone_logits)


def _served(model: Any) -> Iterator[tuple[str, str]]:
    """Every output and input that the tree says can be had."""
    for path, info in model.tree.modules.items():
        for side, tensors in (("output", info.output), ("input", info.input)):
            if info.same_as is None and tensors and not any("?" in t.shape for t in tensors):
                yield path, side


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value
