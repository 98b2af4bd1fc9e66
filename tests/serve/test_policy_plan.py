"""What is read from a block's text before it runs is the same under the restricted policy."""

# ruff: noqa: E501 - each text stands on a line of its own

from __future__ import annotations

import pytest
import torch

from nnsight_core.code import compile_block
from nnsight_core.effects import effects_of
from nnsight_core.lowering import lower
from nnsight_core.lowering.affine import NotLowered
from nnsight_serve.policy import RESTRICTED
from tests.core.test_lowering import Machine

TEXTS = [
    "model.layers[1].output[0][:] += v",
    "model.layers[1].output[0][-1] += 2 * v",
    "model.layers[2].mlp.output[:] = 0",
    "model.layers[2].mlp.output *= 0.5",
    "for i in (0, 2):\n    model.layers[i].mlp.output[:] += i * v",
    "for step in tracer.iter[:2]:\n    model.layers[1].mlp.output[:] -= v",
    "h = model.layers[1].mlp.output\nmodel.layers[1].mlp.output = h - (h @ v)[:, None] * v",
    "x = model.layers[1].mlp.output.save()\nmodel.layers[3].mlp.output[:] += v\ny = model.head.output.save()",
    "model.layers[1].mlp.output[:] = model.layers[1].mlp.output.relu()",
    "model.embed.output[:] += torch.zeros(6)",
]


def compiled(text, *policy):
    source = "".join(f"    {line}\n" for line in text.splitlines())
    return compile_block(source, "plan.py", 1, "f", False, *policy)


@pytest.mark.parametrize("text", TEXTS)
def test_the_plan_is_that_of_a_trusted_block(text):
    machine = Machine()
    names = {"model": machine.model, "v": torch.arange(6.0), "torch": torch}
    plans = []
    for policy in ((), (RESTRICTED,)):
        code = compiled(text, *policy)
        effects = effects_of(code, names, machine.tree, ["tracer"])
        found = lower(code, names, machine.tree, ["tracer"], tokens=4)
        writes = None if isinstance(found, NotLowered) else [str(w) for w in found.writes]
        rest = None if isinstance(found, NotLowered) else found.rest.source
        reasons = found.reasons if isinstance(found, NotLowered) else None
        plans.append((effects.reads, effects.writes, effects.calls, writes, rest, reasons))
        if not isinstance(found, NotLowered) and policy:
            assert found.rest.policy is RESTRICTED
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    "text",
    [
        "n = 7\nfor i in (1, 2, 3, 4, 5, 6, 7, 8, 9) * 1:\n    n = n * n\nmodel.embed.output[:] += n",
        "model.embed.output[:] += torch.zeros(10 ** 6, 10 ** 6)",
        "n = 3\n" + "n = n * n\n" * 60 + "model.embed.output[:] += n",
        "model.embed.output[:] += (w[:, None] * w[None]).sum()",
        "model.embed.output[:] += torch.outer(w, w)[0, 0]",
        "model.embed.output[:] += w.expand(10 ** 6, 100000).clone()[0, 0]",
        "model.embed.output[:] += torch.cat([w] * 10000)[0]",
    ],
)
def test_nothing_huge_is_made_before_a_block_runs(text):
    machine = Machine()
    names = {"model": machine.model, "torch": torch, "w": torch.ones(100_000)}
    found = lower(compiled(text, RESTRICTED), names, machine.tree, tokens=4)
    assert isinstance(found, NotLowered)
