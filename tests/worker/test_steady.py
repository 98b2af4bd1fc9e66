"""Passes like the one before: they need no new plan, and blocks see in them what they should."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_vllm_worker.steady import MOST, Repeats, _alike
from tests.worker.test_ways import PROMPT

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize(
    "steps",
    [range(sys.maxsize), range(3, 7), range(1, 20, 4), range(0), (), (0,), (2, 3, 9), (5,)],
    ids=str,
)
def test_steps_are_alike_for_no_longer_than_they_are(steps: Any) -> None:
    for step in range(25):
        chosen = [other in steps for other in range(step, step + 40)]
        same = next((i for i, is_in in enumerate(chosen) if is_in != chosen[0]), len(chosen))
        assert 0 <= min(_alike(steps, step), len(chosen) - 1) < same, step
    if isinstance(steps, range) and steps.step == 1 and steps:
        assert _alike(steps, steps.start) == steps.stop - 1 - steps.start
    if 24 not in steps:
        assert _alike(steps, 24) == sys.maxsize


def test_a_pass_repeats_one_over_the_same_requests_a_token_further() -> None:
    repeats = Repeats()
    repeats.begin([("a", 1), ("b", 1)], [7, 4])
    assert repeats.goes_on([("a", 1), ("b", 1)], np.array([8, 5]))
    assert repeats.goes_on([("a", 1), ("b", 1)], np.array([9, 6]))
    assert not repeats.goes_on([("b", 1), ("a", 1)], np.array([10, 7]))
    assert not repeats.goes_on([("a", 1)], np.array([10]))
    assert not repeats.goes_on([("a", 1), ("b", 2)], np.array([10, 7]))
    repeats.begin([("a", 1)], [7])
    assert not repeats.goes_on([("a", 1)], np.array([7]))


@contextmanager
def planned(model: Any) -> Iterator[dict[str, int]]:
    """Counts the passes that were planned, and those that were not."""
    core = model.llm.llm_engine.engine_core.engine_core
    steps = core.model_executor.driver_worker.worker._nnsight.steps
    counts = {"begin": 0, "again": 0}

    def counted(name: str, call: Any) -> Any:
        def counting(*args: Any) -> Any:
            counts[name] += 1
            return call(*args)

        return counting

    for name in counts:
        setattr(steps, name, counted(name, getattr(steps, name)))
    try:
        yield counts
    finally:
        for name in counts:
            delattr(steps, name)


def reads(model: Any, tracer: Any) -> None:
    with tracer.invoke(PROMPT, max_tokens=40):
        seen = [].save()
        for _ in tracer.all():
            seen.append((model.transformer.h[6].output, model.logits))


def reads_some_steps(model: Any, tracer: Any) -> None:
    with tracer.invoke(PROMPT, max_tokens=40):
        seen = [].save()
        for step in tracer.iter[[2, 3, 9, 30]]:
            seen.append((step, model.transformer.h[6].output))
        for step in tracer.iter[32::3]:
            seen.append((step, model.transformer.h[2].output))


def reads_another_layer_later(model: Any, tracer: Any) -> None:
    with tracer.invoke(PROMPT, max_tokens=40):
        seen = [].save()
        for step in tracer.iter[:20]:
            seen.append((step, model.transformer.h[3].output))
        for step in tracer.iter[20:]:
            seen.append((step, model.transformer.h[9].output))


def writes_in_windows(model: Any, tracer: Any) -> None:
    for first, last in ((0, 5), (7, 23), (30, 38)):
        with tracer.invoke(PROMPT[first:], max_tokens=40):
            for _ in tracer.iter[first:last]:
                model.transformer.h[4].output[:] *= 3.0


def some_end_before_others(model: Any, tracer: Any) -> None:
    for number, most in enumerate((3, 11, 40, 26)):
        with tracer.invoke(PROMPT[number:], max_tokens=most):
            seen = [].save()
            for _ in tracer.all():
                seen.append(model.transformer.h[2 * number].output)


def writes_and_reads(model: Any, tracer: Any) -> None:
    with tracer.invoke(PROMPT, max_tokens=40):
        seen = [].save()
        for _ in tracer.all():
            model.transformer.h[4].output[:] *= 1.5
            seen.append(model.transformer.h[8].output)
    with tracer.invoke(PROMPT[3:], max_tokens=33):
        for _ in tracer.all():
            model.transformer.h[5].output[:] *= 0.5
    with tracer.invoke("One without a block", max_tokens=37):
        pass


CASES = [
    reads,
    reads_some_steps,
    reads_another_layer_later,
    writes_in_windows,
    some_end_before_others,
    writes_and_reads,
]


@pytest.mark.local
@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_blocks_see_what_they_see_in_passes_that_are_planned(
    body: Any, compiled_gpt2: Any, gpt2: Any
) -> None:
    def run(model: Any) -> Any:
        with model.trace(**GREEDY) as tracer:
            body(model, tracer)
        return tracer

    with planned(compiled_gpt2) as counts:
        here = run(compiled_gpt2)
    there = run(gpt2)
    for one, other in zip(here.outputs, there.outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    torch.testing.assert_close(here.saves, there.saves, atol=2e-3, rtol=2e-3)
    if body is reads:
        # The prompt's, the one before the block has begun, the last, and one in so many others.
        assert counts["begin"] + counts["again"] == 40
        assert counts["begin"] == 3 + -(-37 // (MOST + 1))
    assert counts["again"] > 0 or body is reads_some_steps
