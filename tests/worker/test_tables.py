"""Table writes: what taps do inside compiled code equals what the block's Python does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from nnsight_core import EngineError, LoopOverrunWarning
from tests.fixtures.ranks import WIDTH
from tests.worker.test_ways import PROMPT, STEPS, agree


def _vector(seed: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(model: Any, body: Any) -> Any:
    """What a block draws and saves, and how its steps ran."""
    with model.trace(**STEPS) as tracer:
        body(model, tracer)
    return tracer.saves, [output.outputs[0].token_ids for output in tracer.outputs], tracer.outputs


# Blocks for the GPT-2, whose layers give one tensor.


def steering(model: Any, tracer: Any) -> None:
    v = _vector(1, WIDTH)
    with tracer.invoke(PROMPT):
        seen = [].save()
        for _ in tracer.all():
            model.transformer.h[4].output[:] += 4.0 * v
            seen.append((model.transformer.h[4].output, model.logits))


def scaled_in_the_prompt(model: Any, tracer: Any) -> None:
    with tracer.invoke(PROMPT):
        model.transformer.h[2].output *= 0.5
        seen = model.transformer.h[3].output.save()


def head_ablation(model: Any, tracer: Any) -> None:
    with tracer.invoke(PROMPT):
        seen = [].save()
        for _ in tracer.all():
            model.transformer.h[5].mlp.output[:, 8:16] = 0
            seen.append(model.transformer.h[5].mlp.output)


def last_row(model: Any, tracer: Any) -> None:
    v = _vector(2, WIDTH)
    with tracer.invoke(PROMPT):
        model.transformer.h[6].output[-1] = v
        seen = model.transformer.h[7].output.save()


def projected_out(model: Any, tracer: Any) -> None:
    d = _vector(3, WIDTH)
    d = d / d.norm()
    with tracer.invoke(PROMPT):
        seen = [].save()
        for _ in tracer.all():
            hidden = model.transformer.h[3].output
            hidden -= (hidden @ d)[:, None] * d
            seen.append(model.transformer.h[8].output)


def some_steps(model: Any, tracer: Any) -> None:
    v = _vector(4, WIDTH)
    with tracer.invoke(PROMPT):
        seen = [].save()
        for _ in tracer.iter[1:4]:
            model.transformer.h[4].output[:] -= v
            seen.append(model.logits)


def every_layer(model: Any, tracer: Any) -> None:
    v = [_vector(layer, WIDTH) for layer in range(12)]
    with tracer.invoke(PROMPT):
        seen = [].save()
        for _ in tracer.all():
            for i in range(12):
                model.transformer.h[i].output[:] += v[i]
            seen.append(model.logits)


def two_parts_of_one_row(model: Any, tracer: Any) -> None:
    with tracer.invoke(PROMPT):
        seen = [].save()
        for _ in tracer.all():
            model.transformer.h[4].output[:, :10] = 0
            model.transformer.h[4].output[:, 20:30] *= 2.0
            seen.append(model.transformer.h[4].output)


def different_requests(model: Any, tracer: Any) -> None:
    for number in range(6):
        v = _vector(10 + number, WIDTH)
        with tracer.invoke(PROMPT[: 10 + 3 * number]):
            seen = [].save()
            for _ in tracer.all():
                model.transformer.h[number].output[:] += v
                seen.append(model.transformer.h[11].output)
    with tracer.invoke("A plain one"):
        pass


def one_token_of_a_prompt(model: Any, tracer: Any) -> None:
    """The pass of the prompt is as large as each later one, and writes something else."""
    v, w = _vector(20, WIDTH), _vector(21, WIDTH)
    with tracer.invoke([15]):
        seen = [].save()
        model.transformer.h[2].output[:] += v
        for _ in tracer.iter[1:]:
            two = model.transformer.h[2].output
            model.transformer.h[5].output[:] += w
            seen.append((two, model.transformer.h[5].output))


WRITES = [
    steering,
    scaled_in_the_prompt,
    head_ablation,
    last_row,
    projected_out,
    some_steps,
    every_layer,
    two_parts_of_one_row,
    different_requests,
    one_token_of_a_prompt,
]


@pytest.mark.parametrize("body", WRITES, ids=lambda body: body.__name__)
def test_tables_do_what_python_does(compiled_gpt2: Any, gpt2: Any, near: Any, body: Any) -> None:
    seen, tokens, outputs = run(compiled_gpt2, body)
    there, expected, _ = run(gpt2, body)
    agree(seen, there, near)
    assert tokens == expected
    for output in outputs:
        assert set(output.ways) <= {"tables", "plain", "deferred"}
    assert outputs[0].ways["tables"] >= 1
    counts = compiled_gpt2._engine.counts()
    assert counts["live"] == 0
    compiled_gpt2.generate(PROMPT, max_tokens=2)  # what is over is known with the next pass
    assert compiled_gpt2._engine.counts()["entries"] == 0


def test_a_write_changes_its_own_request_only(compiled_gpt2: Any) -> None:
    alone = compiled_gpt2.generate(["The Colosseum is", "Big Ben"], **STEPS)
    v = 10 * _vector(5, WIDTH)
    with compiled_gpt2.trace(**STEPS) as tracer:
        with tracer.invoke("The Colosseum is"):
            pass
        with tracer.invoke(PROMPT):
            for _ in tracer.all():
                compiled_gpt2.transformer.h[1].output[:] += v
        with tracer.invoke("Big Ben"):
            pass
    mixed = [tracer.outputs[0], tracer.outputs[2]]
    assert [o.outputs[0].token_ids for o in mixed] == [o.outputs[0].token_ids for o in alone]
    plain = compiled_gpt2.generate(PROMPT, **STEPS)[0]
    assert tracer.outputs[1].outputs[0].token_ids != plain.outputs[0].token_ids


def test_either_tensor_of_a_pair(compiled_llama: Any, llama: Any, near: Any) -> None:
    v = _vector(6, 128)

    def body(model: Any, tracer: Any) -> None:
        for index in (0, 1):
            with tracer.invoke(PROMPT):
                seen = [].save()
                for _ in tracer.all():
                    model.model.layers[2].output[index][:] += v
                    seen.append((model.model.layers[2].output, model.logits))

    seen, tokens, outputs = run(compiled_llama, body)
    there, expected, _ = run(llama, body)
    agree(seen, there, near)
    assert tokens == expected
    assert outputs[0].ways == {"tables": 6}


def test_what_is_not_lowered_says_why(compiled_gpt2: Any) -> None:
    with compiled_gpt2.trace(PROMPT, **STEPS) as tracer:
        for step in tracer.all():
            compiled_gpt2.transformer.h[2].output[:] *= 1 + step
    found = str(compiled_gpt2.explain(tracer))
    assert "interleaved" in found and "step number" in found
    with compiled_gpt2.trace(PROMPT, **STEPS) as tracer:
        for _ in tracer.all():
            compiled_gpt2.transformer.h[2].output[:] *= 2.0
    found = str(compiled_gpt2.explain(tracer))
    assert "transformer.h.2.output is multiplied by 2, at every step" in found


@pytest.mark.local
def test_more_writes_than_entries_run_interleaved(compiled_gpt2: Any, gpt2: Any, near: Any) -> None:
    tables = _tables(compiled_gpt2)
    free, tables._free = tables._free, []
    try:
        seen, tokens, outputs = run(compiled_gpt2, steering)
    finally:
        tables._free = free
    there, expected, _ = run(gpt2, steering)
    agree(seen, there, near)
    assert tokens == expected
    assert outputs[0].ways == {"interleaved": 6}


def _tables(model: Any) -> Any:
    core = model.llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker._nnsight.tracing.tables


@pytest.mark.local
def test_blocks_that_are_alike_share_entries(compiled_gpt2: Any) -> None:
    tables, used = _tables(compiled_gpt2), []
    install = tables.install

    def noted(*args: Any) -> Any:
        table = install(*args)
        used.append(tables.used)
        return table

    def body(model: Any, tracer: Any, scale: float) -> None:
        for _ in range(4):
            with tracer.invoke(PROMPT):
                for _ in tracer.all():
                    model.transformer.h[4].output[:] *= scale

    tables.install = noted
    try:
        for scale in (0.5, 2.0):
            with compiled_gpt2.trace(**STEPS) as tracer:
                body(compiled_gpt2, tracer, scale)
            tokens = {tuple(o.outputs[0].token_ids) for o in tracer.outputs}
            assert len(tokens) == 1
    finally:
        del tables.install
    compiled_gpt2.generate(PROMPT, max_tokens=2)
    # One entry for all four of a trace, and another one for the other number.
    assert len(used) == 8 and max(used) <= 2 and tables.used == 0


def test_a_loop_that_outruns_its_request_warns_where_taps_do_it_all(compiled_gpt2: Any) -> None:
    with pytest.warns(LoopOverrunWarning, match="made 3"):
        with compiled_gpt2.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            for _ in tracer.iter[:9]:
                compiled_gpt2.transformer.h[4].output[:] *= 0.5
    assert tracer.result.ways == {"tables": 3}


def test_an_end_token_ends_what_taps_do_alone(compiled_gpt2: Any, gpt2: Any) -> None:
    """Where a token may end the request, each one is looked at."""

    def run_until(model: Any) -> Any:
        with model.trace(PROMPT, temperature=0.0, max_tokens=40, stop=["e"]) as tracer:
            for _ in tracer.all():
                model.transformer.h[4].output[:] *= 0.9
        return tracer.result

    here, there = run_until(compiled_gpt2), run_until(gpt2)
    assert here.outputs[0].token_ids == there.outputs[0].token_ids
    assert here.outputs[0].finish_reason == there.outputs[0].finish_reason == "stop"
    assert here.ways == {"tables": len(here.outputs[0].token_ids)}


def test_what_taps_do_alone_ends_while_others_go_on(compiled_gpt2: Any, gpt2: Any) -> None:
    """Its request is gone from the engine before its block hears of the last token."""

    def run_both(model: Any) -> Any:
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(PROMPT, max_tokens=30, stop=["e"]):
                for _ in tracer.all():
                    model.transformer.h[4].output[:] *= 0.9
            with tracer.invoke("The Colosseum", max_tokens=40, ignore_eos=True):
                model.transformer.h[2].mlp.output[:] = model.transformer.h[2].mlp.output.tanh()
                seen = [].save()
                for _ in tracer.all():
                    seen.append(model.transformer.h[9].output[-1])
            with tracer.invoke("Big Ben", max_tokens=35, ignore_eos=True):
                for _ in tracer.iter[20:30]:
                    model.transformer.h[4].output[:] = model.transformer.h[4].output.flip(-1)
        return tracer

    here, there = run_both(compiled_gpt2), run_both(gpt2)
    for one, other in zip(here.outputs, there.outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert here.outputs[0].ways == {"tables": len(here.outputs[0].outputs[0].token_ids)}
    assert compiled_gpt2._engine.counts()["live"] == 0


@pytest.mark.local
def test_no_room_while_a_request_runs_is_its_error_alone(compiled_gpt2: Any) -> None:
    """Two writes to one row need an entry more than either, when the row is first met."""
    tables = _tables(compiled_gpt2)
    free, tables._free = tables._free, tables._free[-2:]
    try:
        with pytest.raises(EngineError, match="no room for what the block writes"):
            run(compiled_gpt2, two_parts_of_one_row)
    finally:
        tables._free = free
    compiled_gpt2.generate(PROMPT, max_tokens=2)
    assert compiled_gpt2._engine.counts()["live"] == 0 and tables.used == 0


@pytest.mark.local
def test_what_has_failed_is_written_no_longer(compiled_gpt2: Any) -> None:
    """The request goes on without an edit that has failed, two passes later at most."""
    model = compiled_gpt2
    core = model.llm.llm_engine.engine_core.engine_core
    steps = core.model_executor.driver_worker.worker._nnsight.steps
    end, tables, written = steps.end, _tables(model), []

    def noted() -> Any:
        written.append(tables.placed)
        return end()

    with model.edit("failing") as (tracer, _):
        for step in tracer.all():
            model.transformer.h[4].output[:] *= 0.5
            rows = model.transformer.h[8].output * (1 / (5 - step))
    steps.end = noted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = model.generate(PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True)[0]
    finally:
        del steps.end
        model.clear_edits()
    [error] = output.errors
    assert "ZeroDivisionError" in repr(error)
    assert len(written) >= 30
    assert written[:6] == [True] * 6 and not any(written[8:])


def test_a_module_that_a_block_calls_is_written_by_nobody(compiled_gpt2: Any) -> None:
    """Its rows are the block's own, and not those of the batch, which taps write and copy."""
    model, v = compiled_gpt2, 10 * _vector(22, WIDTH)

    def called(beside: bool) -> Any:
        with model.trace(**STEPS) as tracer:
            if beside:
                with tracer.invoke(PROMPT):
                    for _ in tracer.all():
                        model.transformer.h[3].mlp.output[:] += v
            with tracer.invoke(PROMPT):
                made = [].save()
                for _ in tracer.all():
                    made.append(model.transformer.h[3].mlp(model.transformer.h[2].output))
                    made.append(model.transformer.h[5].mlp.output)
        return tracer.saves["made"], tracer.outputs[-1]

    alone, _ = called(False)
    mixed, output = called(True)
    assert output.ways == {"after": 6}
    torch.testing.assert_close(mixed, alone, atol=1e-4, rtol=1e-4)
