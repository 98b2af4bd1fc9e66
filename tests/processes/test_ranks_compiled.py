"""Two ranks, compiled, with taps of which each has a part, against one rank that runs eagerly.

What `test_ranks.py` is for engines that compile nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_vllm_worker import VLLM
from tests.conftest import _prepare
from tests.fixtures.meetings import meetings
from tests.fixtures.ranks import spread
from tests.processes.test_engine import PROMPT, SETTINGS
from tests.processes.test_ranks import GREEDY, same


@pytest.fixture(scope="module")
def tapped(processes: None) -> Iterator[tuple[Any, Any]]:
    """A Llama on one rank, eager; and on two, compiled, with taps that are split over them."""
    taps = ["resid", "model.layers.*.self_attn.qkv_proj.output"]
    taps += ["model.layers.*.mlp.gate_up_proj.output", "model.layers.*.mlp.down_proj.input"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions for an RPC
        with VLLM(_prepare("llama"), dispatch=True, **spread(1, **SETTINGS)) as one:
            patch.delenv("TORCH_COMPILE_DISABLE", raising=False)
            settings = spread(2, **{**SETTINGS, "enforce_eager": False})
            with (
                torch._dynamo.config.patch(disable=False),
                VLLM(_prepare("llama"), dispatch=True, taps=taps, **settings) as two,
            ):
                yield one, two


def test_taps_of_which_each_rank_has_a_part(tapped: tuple[Any, Any]) -> None:
    random = torch.Generator().manual_seed(0)
    vector = torch.randn(512, generator=random)
    seen, ways = [], []
    for model in tapped:
        layers = model.model.layers
        with model.trace(PROMPT, **GREEDY) as reading:
            looked = [].save()
            for _ in reading.all():
                looked.append(layers[1].self_attn.qkv_proj.output[0])
                looked.append(layers[2].mlp.gate_up_proj.output[0])
                looked.append(layers[2].mlp.down_proj.input)
                looked.append(layers[3].output[0])
        with model.trace(PROMPT, **GREEDY) as writing:
            logits = [].save()
            for _ in writing.all():
                layers[1].mlp.gate_up_proj.output[0][:] += vector
                layers[2].self_attn.qkv_proj.output[0][:, 32:96] = 0
                layers[2].self_attn.qkv_proj.output[0][:, 160:224] *= 2.0
                logits.append(model.logits)
        with model.trace(PROMPT, **GREEDY) as free:
            rest = [].save()
            for _ in free.all():
                rows = layers[1].mlp.gate_up_proj.output[0]
                rows[:, 200:300] = rows[:, 200:300].abs() + rows.mean()
                rest.append(layers[4].mlp.down_proj.input)
        outputs = [tracer.result for tracer in (reading, writing, free)]
        seen.append((looked, logits, rest, [o.outputs[0].token_ids for o in outputs]))
        ways.append([o.ways for o in outputs])
    assert ways[1] == [{"deferred": 4}, {"tables": 4}, {"interleaved": 4}]
    assert ways[0] == [{"eager": 4}] * 3
    same(seen[0][:3], seen[1][:3])
    assert seen[0][3] == seen[1][3]


def test_a_long_prompt_at_taps_of_which_each_rank_has_a_part(tapped: tuple[Any, Any]) -> None:
    """More rows than the taps have slots, and several pieces of a prompt."""
    seen = []
    for model in tapped:
        with model.trace([5 + i % 300 for i in range(200)], **GREEDY) as tracer:
            one = model.model.layers[1].self_attn.qkv_proj.output[0].save()
            two = model.model.layers[2].mlp.down_proj.input.save()
            out = tracer.result.save()
        assert one.shape == (200, 256) and two.shape == (200, 256)
        seen.append((one, two, out.outputs[0].token_ids))
    same(seen[0][:2], seen[1][:2])
    assert seen[0][2] == seen[1][2]


def test_ranks_meet_once_for_each_location_of_which_they_have_parts(
    tapped: tuple[Any, Any],
) -> None:
    _, model = tapped
    layers, first = model.model.layers, "gather"
    with meetings(model) as plain:
        model.generate([PROMPT], **GREEDY)
    with meetings(model) as deferred, model.trace(PROMPT, **GREEDY) as looking:
        rows = [].save()
        for _ in looking.all():
            rows.append(layers[1].self_attn.qkv_proj.output[0])
            rows.append(layers[1].mlp.gate_up_proj.output[0])
            rows.append(layers[2].mlp.down_proj.input)  # as wide on a rank as the first one
            rows.append(layers[3].output[0])  # held whole
    with meetings(model) as after, model.trace(PROMPT, **GREEDY) as drawing:
        for _ in drawing.all():
            qkv = layers[1].self_attn.qkv_proj.output[0][-1, :3]
            half = layers[1].mlp.gate_up_proj.output[0][-1, :3]
            down = layers[2].mlp.down_proj.input[-1, :3]
            model.logits[:, :3] = qkv + half + down
    with meetings(model) as tables, model.trace(PROMPT, **GREEDY) as writing:
        for _ in writing.all():
            layers[1].mlp.gate_up_proj.output[0][:] *= 2.0
            layers[2].self_attn.qkv_proj.output[0][:, 32:96] = 0
    with meetings(model) as interleaved, model.trace(PROMPT, **GREEDY) as free:
        for _ in free.all():
            half = layers[1].mlp.gate_up_proj.output[0]
            half[:, 200:300] = half[:, 200:300].abs() + half.mean()
            rows = layers[2].self_attn.qkv_proj.output[0]
            rows = layers[2].mlp.down_proj.input
            rows = layers[3].output[0]
    with meetings(model) as eager, model.trace(PROMPT, **GREEDY) as anywhere:
        for _ in anywhere.all():
            rows = layers[1].self_attn.qkv_proj.output[0]
            rows = layers[1].self_attn.o_proj.input
            rows = layers[2].mlp.down_proj.input
            rows = layers[3].output[0]
    with meetings(model) as together, model.trace(**GREEDY) as tracer:
        for _ in range(2):
            with tracer.invoke(PROMPT):
                for _ in tracer.all():
                    rows = layers[1].self_attn.o_proj.input
                    rows = layers[2].mlp.down_proj.input
    traces = (looking, drawing, writing, free, anywhere)
    ways = [trace.result.ways for trace in traces]
    names = ("deferred", "after", "tables", "interleaved", "eager")
    assert ways == [{name: 4} for name in names]
    every = (plain, deferred, after, tables, interleaved, eager, together)
    # The same on both ranks, in the same order, of the same shapes.
    assert all(seen.ranks[0] == seen.ranks[1] for seen in every)
    assert plain.ranks[0] == []
    assert deferred.collectives == [[first] * 2] * 4  # one for each kind of memory
    assert after.collectives == [[first] * 2 + ["broadcast"]] * 4  # and the logits that it wrote
    assert tables.collectives == [[]] * 4
    assert interleaved.collectives == [[first, "scatter", first, first]] * 4
    assert eager.collectives == [[first] * 3] * 4
    assert together.collectives == [[first] * 2] * len(together.passes)
    # One message before a pass that is not like the one before; where blocks run within, one at
    # each location, and three after it.
    assert [each.count("message") for each in deferred.passes] == [1] * 4
    assert [each.count("message") for each in tables.passes] == [1, 1, 0, 1]
    assert [each.count("message") for each in eager.passes] == [1 + 4 + 3] * 4


def test_passes_that_nobody_looks_at_any_more_are_not_held(tapped: tuple[Any, Any]) -> None:
    """A plan goes on when its blocks are over, and so do the copies that it makes."""
    _, model = tapped
    with model.trace(PROMPT, **{**GREEDY, "max_tokens": 30}) as tracer:
        seen = [].save()
        for _ in tracer.iter[:5]:
            seen.append(model.model.layers[3].output[0])
    assert len(seen) == 5 and tracer.result.ways["deferred"] == 5
    assert model._engine.llm.collective_rpc(_passes_held) == [0, 0]


def _passes_held(worker: Any) -> int:
    deferred = getattr(worker._nnsight_loaded.steps, "deferred", None)
    return 0 if deferred is None else len(deferred._passes)
