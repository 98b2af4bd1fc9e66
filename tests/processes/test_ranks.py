"""Two ranks against one: the same blocks on the same model see, write and draw the same.

What the rest of the tests do on two ranks is `NNSIGHT_TEST_RANKS=2`; here is what only the
comparison shows, on every location of some families; `NNSIGHT_TEST_FAMILIES=every` adds others.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch

from nnsight_core import EncodeError, LocationError
from nnsight_core.values import tensors
from nnsight_vllm_worker import VLLM
from nnsight_vllm_worker.known import Blocks
from tests.conftest import _prepare
from tests.fixtures.ranks import spread
from tests.fixtures.served import Served
from tests.processes.test_engine import PROMPT, SETTINGS

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
DEALT = ", experts dealt out"
FAMILIES = ("gpt2_wide", "llama", "qwen2_moe")
if os.environ.get("NNSIGHT_TEST_FAMILIES") == "every":
    FAMILIES += ("qwen3", "mixtral")
AMX = torch.cpu._is_amx_tile_supported() and not torch.cuda.is_available()
if torch.cuda.is_available():  # vLLM's kernels for the CPU cannot
    FAMILIES += tuple(name + DEALT for name in FAMILIES if name in ("qwen2_moe", "mixtral"))


class Pair(NamedTuple):
    """One model on one rank and on two."""

    one: Any
    two: Any
    layers: str


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, processes: None) -> Iterator[Pair]:
    if AMX and request.param in ("qwen2_moe", "mixtral"):
        pytest.skip("vLLM refuses experts of single precision on a CPU with AMX")
    path = _prepare(request.param.removesuffix(DEALT))
    dealt = {"enable_expert_parallel": True} if request.param.endswith(DEALT) else {}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        one, two = (
            stack.enter_context(VLLM(path, dispatch=True, **spread(n, **SETTINGS, **more)))
            for n, more in ((1, {}), (2, dealt))
        )
        layers = "transformer.h" if request.param == "gpt2_wide" else "model.layers"
        yield Pair(one, two, layers)


def same(here: Any, there: Any) -> None:
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)


def test_every_location_is_whole(pair: Pair) -> None:
    seen = []
    for model in (pair.one, pair.two):
        with model.trace(PROMPT, **GREEDY) as tracer:
            cache = tracer.cache(include_inputs=True)
            logits = [].save()
            for _ in tracer.all():
                logits.append(model.logits)
            out = tracer.result.save()
        seen.append((cache, logits, out.outputs[0].token_ids))
    one: Any
    two: Any
    (one, logits, ids), (two, others, same_ids) = seen
    assert pair.one.tree.ranks == 1 and pair.two.tree.ranks == 2
    assert ids == same_ids and len(ids) == 4
    same(logits, others)
    # What computes inside a layer of which each rank has a part is refused, and nothing else.
    assert [path for path in one if path in two or not refused(pair.two, path)] == list(two)
    assert len(two) > 40
    for path in two:
        entry = one[path]
        for visit, other in zip(entry.visits, two[path].visits, strict=True):
            for side in ("output", "inputs"):
                here, there = getattr(visit, side), getattr(other, side)
                assert [a for a, _ in tensors(here)] == [a for a, _ in tensors(there)]
                for (at, value), (_, whole) in zip(tensors(here), tensors(there), strict=True):
                    assert value.shape == whole.shape, f"{path}.{side}{at}"
                    same(value, whole)
    # Each shape of the tree is that of one rank.
    for path, info in pair.one.tree.modules.items():
        held = pair.two.tree.modules[path]
        for ours, theirs in ((info.output, held.output), (info.input, held.input)):
            assert [t.shape for t in ours or ()] == [t.shape for t in theirs or ()], path


def test_every_location_is_written(pair: Pair) -> None:
    at = f"{pair.layers}.1"
    inside = [p for p in pair.one.tree.modules if p == at or p.startswith(f"{at}.")]
    written = 0
    for path in inside:
        info = pair.one.tree.modules[path]
        for side in ("output", "input"):
            infos = getattr(info, side)
            if info.same_as or not infos or infos[-1].shape[0] != "tokens":
                continue
            if not infos[-1].dtype.startswith("float") or refused(pair.two, path):
                continue
            outcome = [changed(model, path, side) for model in (pair.one, pair.two)]
            same(outcome[0][0], outcome[1][0])
            same(outcome[0][1], outcome[1][1])
            assert outcome[0][2] == outcome[1][2]
            written += 1
    assert written > 15


def refused(model: Any, path: str) -> bool:
    """Whether a location is refused because several ranks work at it together."""
    try:
        with model.trace(PROMPT, **GREEDY):
            value = model.get(path).output.save()
    except LocationError as error:
        return "on several ranks" in str(error)
    return False


def changed(model: Any, path: str, side: str) -> tuple[Any, Any, list[int]]:
    """Write some columns of the last rows of every step, and see what comes of it."""
    with model.trace(PROMPT, **GREEDY) as tracer:
        node = model.get(path)
        rows, logits = [].save(), [].save()
        for _ in tracer.all():
            value = node.output if side == "output" else node.inputs
            parts = value if isinstance(value, tuple) else (value,)
            if side == "input":
                parts = (*value[0], *value[1].values())
            last = [part for part in parts if isinstance(part, torch.Tensor)][-1]
            flat = last.view(last.shape[0], -1)
            third = flat.shape[1] // 3
            flat[-1, third : 2 * third] *= -2.0
            flat[-1, : third // 2] += 0.5
            rows.append(last.clone())
            logits.append(model.logits)
        out = tracer.result.save()
    return rows, logits, out.outputs[0].token_ids


def test_heads_and_halves_are_those_of_one_rank(pair: Pair) -> None:
    if f"{pair.layers}.1.self_attn" not in pair.one.tree.modules:
        pytest.skip("these names are a Llama's")
    outcomes = []
    for model in (pair.one, pair.two):
        with model.trace(PROMPT, **GREEDY) as tracer:
            attention = model.model.layers[1].self_attn
            qkv = attention.qkv_proj.output[0]
            qkv[:, 32:64] = 0  # the second head of q, and the only one of v on the second rank
            qkv[:, 224:] *= 3
            z = attention.o_proj.input
            z[:, 96:] = 0
            out = attention.o_proj.output[0].save()
            result = tracer.result.save()
        outcomes.append((out, result.outputs[0].token_ids))
    same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


def test_operations_inside_forwards_are_whole_or_refused(pair: Pair) -> None:
    at = f"{pair.layers}.1"
    served, refused = 0, []
    for path, info in pair.one.tree.modules.items():
        if info.same_as or not (path == at or path.startswith(f"{at}.")):
            continue
        # Memory that nobody has written yet holds anything.
        for name in [n for n in info.operations or () if "empty" not in n]:
            outcome = [operation(model, path, name) for model in (pair.one, pair.two)]
            if isinstance(outcome[0], str):
                continue  # it does not run, or its rows are not known on one rank either
            if isinstance(outcome[1], str) and "was not reached" in outcome[1]:
                continue  # one rank has nothing to add up, and takes another branch there
            if isinstance(outcome[1], str):
                assert "it lies on several ranks" in outcome[1]
                refused.append(f"{path}.{name}")
                continue
            for (_, here), (_, there) in zip(*map(tensors, outcome), strict=True):
                assert here.shape == there.shape, f"{path}.{name}"
                same(here, there)
            served += 1
    # Inside layers that are split, it is the layer that says how.
    assert served > 10 and len(refused) < served // 2, refused


def operation(model: Any, path: str, name: str) -> Any:
    try:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            value = getattr(model.get(path).source, name).output.save()
    except (LocationError, EncodeError) as error:
        return str(error)
    return value


def test_modules_are_called_with_whole_tensors(pair: Pair) -> None:
    seen, at = [], f"{pair.layers}.1"
    for model in (pair.one, pair.two):
        with model.trace(PROMPT, **GREEDY) as tracer:
            hidden = model.get(at).output
            if isinstance(hidden, tuple):
                hidden = hidden[0] + hidden[1]
            lens = model.logits_processor(model.lm_head, hidden).save()
            out = tracer.result.save()
        seen.append((lens, out.outputs[0].token_ids))
    same(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1]
    if f"{at}.mlp.gate_up_proj" not in pair.one.tree.modules:
        return
    parts = []
    for model in (pair.one, pair.two):
        with model.trace(PROMPT, **GREEDY):
            mlp = model.model.layers[1].mlp
            hidden = mlp.input
            up = mlp.gate_up_proj(hidden)[0].save()
            down = mlp.down_proj(mlp.act_fn(up))[0].save()
            whole = mlp(hidden).save()
            done = mlp.output.save()
        same(down, whole)
        same(whole, done)
        parts.append((up, down))
    same(*parts)


def test_what_is_refused_as_a_location_is_refused_when_called(pair: Pair) -> None:
    at = f"{pair.layers}.1"
    for path, info in pair.two.tree.modules.items():
        if info.same_as or not path.startswith(f"{at}.") or not refused(pair.two, path):
            continue
        with pytest.raises(LocationError, match="cannot be called"):
            with pair.two.trace(PROMPT, **GREEDY):
                hidden = pair.two.get(f"{at}.mlp").input
                pair.two.get(path)(hidden).save()


def test_what_an_adapter_wraps_is_called_with_whole_tensors(processes: None) -> None:
    """Nothing calls these layers themselves, so that nothing was recorded of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        settings = spread(2, **SETTINGS, enable_lora=True, max_lora_rank=8)
        with VLLM(_prepare("llama"), dispatch=True, **settings) as model:
            layer = model.model.layers[1]
            with model.trace(PROMPT, **GREEDY):
                hidden = layer.self_attn.qkv_proj.input
                plain = layer.self_attn.qkv_proj.base_layer(hidden)[0].save()
                wrapped = layer.self_attn.qkv_proj(hidden)[0].save()
                qkv = layer.self_attn.qkv_proj.output[0].save()
                acts = layer.mlp.down_proj.input
                down = layer.mlp.down_proj.base_layer(acts)[0].save()
                done = layer.mlp.down_proj.output[0].save()
            assert qkv.shape[1] == 256 and done.shape[1] == 128
            same(plain, qkv)
            same(wrapped, qkv)
            same(down, done)


class Cases(NamedTuple):
    """Blocks as functions, which mean the same on every engine of a model."""

    draws: Callable[[Any], Any]
    halves: Callable[[Any], Any]
    forces: Callable[[Any], Any]


def cases(model: Any, at: str) -> Cases:
    fused = next(
        path
        for end in (".gate_up_proj", ".c_fc", ".o_proj")
        for path in model.tree.modules
        if path.startswith(at) and path.endswith(end)
    )

    def draws(tracer: Any) -> Any:
        torch.manual_seed(3)
        noise, rows = torch.randn(3), []
        for _ in tracer.all():
            rows.append(model.get(at).output)
        return noise, rows

    def halves(tracer: Any) -> Any:
        logits = []
        for _ in tracer.all():
            value = model.get(fused).output[0]
            value[:, value.shape[1] // 2 :] *= -0.5
            logits.append(model.logits)
        return logits

    def forces(tracer: Any) -> Any:
        logits = []
        for step in tracer.all():
            logits.append(model.logits)
            model.samples[:] = 7 + step
        return logits

    return Cases(draws, halves, forces)


DRAWN: dict[str, Any] = {"seed": 7, "temperature": 1.0, "max_tokens": 6, "ignore_eos": True}


def outcome(tracer: Any, output: Any) -> tuple[list[torch.Tensor], list[int]]:
    return [tensor for _, tensor in tensors(tracer.value)], list(output.outputs[0].token_ids)


def test_repeats_are_identical(pair: Pair) -> None:
    at = f"{pair.layers}.1"
    here, there = cases(pair.one, at), cases(pair.two, at)
    for name in (*Cases._fields, "edited"):
        if name == "edited":
            pair.one.edit("halves", fn=here.halves)
            pair.two.edit("halves", fn=there.halves)
        seen = []
        for model, each in ((pair.one, here), *[(pair.two, there)] * 8):
            block = each.draws if name == "edited" else getattr(each, name)
            tracer = model.trace(PROMPT, fn=block, **DRAWN)
            seen.append(outcome(tracer, tracer.result))
        values, ids = zip(*seen, strict=True)
        same(values[0], values[1])
        for again in values[2:]:
            assert all(torch.equal(*two) for two in zip(values[1], again, strict=True))
        assert len(ids[0]) == 6 and list(ids) == [ids[0]] * 9
        assert name != "forces" or ids[0] == [7, 8, 9, 10, 11, 12]
    pair.one.clear_edits()
    pair.two.clear_edits()


def test_the_same_blocks_served(pair: Pair) -> None:
    if f"{pair.layers}.1.mlp.down_proj" not in pair.one.tree.modules:
        pytest.skip("one family is enough")
    at = f"{pair.layers}.1"
    with Served(_prepare("llama"), **spread(2, **SETTINGS)) as model:
        assert model.tree.ranks == 2
        for here, there in zip(cases(pair.two, at), cases(model, at), strict=True):
            traces = [
                where.trace(PROMPT, fn=block, **DRAWN)
                for where, block in ((pair.two, here), (model, there))
            ]
            (values, ids), expected = [outcome(trace, trace.result) for trace in traces]
            same(values, expected[0])
            assert ids == expected[1] and len(ids) == 6


def test_ranks_never_diverge(pair: Pair) -> None:
    """Blocks that no two processes would run alike, beside requests that look at nothing."""
    if f"{pair.layers}.1.mlp.down_proj" not in pair.one.tree.modules:
        pytest.skip("other families have no such parts")
    model = pair.two
    plain = model.generate([PROMPT], **GREEDY)[0].outputs[0].token_ids
    for _ in range(6):
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPT):
                quiet = model.logits.save()
            with tracer.invoke(PROMPT):
                # Which of these it reads, and what it writes, no other process would know.
                if time.perf_counter_ns() % 2 or random.random() < 0.3:
                    model.model.layers[0].self_attn.o_proj.input[:] *= random.random()
                for layer in {"1", "2", "3"} if random.random() < 0.5 else {"3"}:
                    if layer == "3":
                        kept = model.get("model.layers.3.mlp").output.save()
                noise = torch.randn(4).save()
                drawn = [].save()
                for _ in tracer.all():
                    model.logits[:] += torch.randn_like(model.logits)
                    drawn.append(int(model.samples[0, 0]))
        assert drawn == list(tracer.result[1].outputs[0].token_ids) and kept.shape[1] == 128
        assert quiet.shape[0] == 1 and noise.shape == (4,)
    # Nothing of it is left: neither in anybody's random numbers, nor in anybody's memory.
    assert model.generate([PROMPT], **GREEDY)[0].outputs[0].token_ids == plain
    counts = model._engine._rpc("nnsight_counts")
    assert len(counts) == 2
    assert all(c[name] == 0 for c in counts for name in c if name != "tap_bytes")


def test_what_fails_ends_its_request_alone(pair: Pair) -> None:
    if f"{pair.layers}.1.mlp.down_proj" not in pair.one.tree.modules:
        pytest.skip("other families have no such parts")
    model = pair.two
    with pytest.raises(IndexError):
        with model.trace(PROMPT, **GREEDY):
            read = model.model.layers[1].mlp.down_proj.input.save()
            read[100, 100]
    # None of these may leave a rank waiting for what the first one cannot hand out.
    for name, device in (("gate_up_proj", None), ("down_proj", None), ("down_proj", "meta")):
        with pytest.raises(RuntimeError, match="shape" if device is None else "on meta"):
            with model.trace(PROMPT, **GREEDY):
                mlp = model.model.layers[1].mlp
                wrong = mlp.input.new_ones(3, 7, device=device)
                getattr(mlp, name)(wrong).save()
    with model.trace(PROMPT, **GREEDY):
        after = model.model.layers[1].mlp.down_proj.input.save()
    assert after.shape[1] == model.tree.modules["model.layers.1.mlp.down_proj"].input[0].shape[1]


def test_what_one_rank_holds_is_refused(pair: Pair) -> None:
    if f"{pair.layers}.1.mlp.down_proj" not in pair.one.tree.modules:
        pytest.skip("other families have no such parts")
    model = pair.two
    for name in ("compute_logits", "q_size", "kv_cache", "quant_method", "_get_logits"):
        with pytest.raises(LocationError, match=f"{name} cannot be had: "):
            with model.trace(PROMPT, **GREEDY):
                if name == "compute_logits":
                    model.compute_logits(torch.ones(1, 128))
                elif name == "q_size":
                    model.model.layers[1].self_attn.q_size
                elif name == "kv_cache":
                    model.model.layers[1].self_attn.attn.kv_cache
                elif name == "quant_method":
                    model.model.layers[1].mlp.down_proj.quant_method
                else:
                    model.logits_processor._get_logits
    with model.trace(PROMPT, **GREEDY):
        norm = model.model.layers[1].input_layernorm.weight.save()
        eps = model.model.layers[1].input_layernorm.variance_epsilon.save()
        width = model.model.layers[1].self_attn.head_dim.save()
        heads = model.config.num_attention_heads.save()
        rows = model.model.embed_tokens.weight.shape[0].save()
    assert norm.shape == (128,) and eps < 1e-3 and rows >= 515
    assert (width, heads) == (32, 4)


def test_what_one_rank_holds_of_experts_is_refused(pair: Pair) -> None:
    held = [p for p in pair.one.tree.modules if p.endswith(".1.mlp.experts.routed_experts")]
    if not held:
        pytest.skip("other families have no such parts")
    model = pair.two
    for name in ("local_num_experts", "intermediate_size_per_partition", "w2_weight", "run"):
        with pytest.raises(LocationError, match="cannot be had: "):
            with model.trace(PROMPT, **GREEDY):
                experts = model.get(held[0])
                if name == "run":
                    hidden = model.model.layers[1].mlp.input
                    experts.forward_monolithic(hidden, hidden).save()
                else:
                    getattr(experts, name).save()
    with model.trace(PROMPT, **GREEDY):
        mlp = model.model.layers[1].mlp
        hidden = mlp.input
        again = mlp.experts(hidden, mlp.gate(hidden)[0]).save()
        chosen = mlp.experts.routed_experts.top_k.save()
        done = mlp.experts.output.save()
    same(again, done)
    assert chosen == 2


def test_what_comes_with_a_block_leaves_the_random_numbers_of_the_engine() -> None:
    nothing: Any = None
    blocks = Blocks(nothing, nothing, nothing, False, {})
    before = torch.default_generator.get_state()
    blocks.apart = True
    drawn = [blocks.call(torch.rand, 3) for _ in range(2)]
    assert torch.equal(*drawn)  # each begins where the engine is
    assert torch.equal(torch.default_generator.get_state(), before)
    blocks.apart = False
    blocks.call(torch.rand, 3)
    assert not torch.equal(torch.default_generator.get_state(), before)
