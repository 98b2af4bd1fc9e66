"""A token that vLLM drops and draws again: its block is told, and never shown the step twice."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_core import EngineError, save
from nnsight_core.code import compile_block
from nnsight_core.run import Run
from nnsight_vllm_worker.rows import RowMap
from nnsight_vllm_worker.traced import Part, Traced
from nnsight_vllm_worker.vllm_ports.drawn import Drawn
from nnsight_vllm_worker.written import Allowance, Written
from tests.worker.test_ways import PROMPT


def again(drawn: Drawn, *parts: Part) -> list[bool]:
    return [part.again for part in drawn.begin([*parts])]


def test_a_token_is_drawn_again_if_no_more_is_known_than_when_it_was_drawn() -> None:
    drawn = Drawn()
    assert again(drawn, Part("a", 4, 0, 6), Part("b", 3, 0, 3)) == [False, False]
    # A piece of a prompt has drawn nothing, and may run once more.
    assert again(drawn, Part("a", 6, 0, 6), Part("b", 1, 3, 4)) == [False, False]
    drawn.again()
    drawn.again()
    assert again(drawn, Part("a", 9, 0, 9), Part("b", 6, 0, 6)) == [False, True]
    assert again(drawn, Part("a", 5, 0, 9), Part("b", 1, 6, 7)) == [True, False]
    assert again(drawn, Part("b", 1, 7, 8)) == [False]
    assert again(drawn, Part("a", 9, 0, 9)) == [True]
    drawn.gone(["a"])
    drawn.again()
    assert again(drawn, Part("a", 2, 0, 2)) == [False]


@pytest.mark.parametrize("alone", [False, True])
def test_a_block_that_looks_does_not_see_a_step_twice(alone: bool) -> None:
    run = Run(compile_block("    pass\n", "<block>", 1, "block"), {})
    traced = Traced("a", "a", 0, "", 3, run)
    traced.alone = alone
    traced.written = Written(RowMap(), Allowance())
    traced.enter(Part("a", 3, 0, 3))
    if alone:
        traced.enter(Part("a", 3, 0, 3, again=True))
        return
    with pytest.raises(EngineError, match="ran a step of the request again"):
        traced.enter(Part("a", 3, 0, 3, again=True))


@pytest.mark.local
@pytest.mark.parametrize("steps", [3, 12])
def test_what_was_read_of_a_dropped_pass_is_an_error(
    compiled_gpt2: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    model, calls = compiled_gpt2, 0
    engine = model.llm.llm_engine
    step = engine.step

    def resetting() -> Any:
        nonlocal calls
        calls += 1
        if calls == steps:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        return step()

    monkeypatch.setattr(engine, "step", resetting)
    under_way = engine.vllm_config.scheduler_config.async_scheduling
    try:
        with model.trace(PROMPT, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True) as tracer:
            tokens = save([])
            for _ in tracer.all():
                tokens.append(model.samples.item())
            out = tracer.result.save()
    except EngineError as error:
        assert under_way and "ran a step of the request again" in str(error)
    else:
        assert not under_way and tokens == out.outputs[0].token_ids
