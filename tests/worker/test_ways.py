"""The ways a step can run on a compiled engine: each gives what the eager engine gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_core import NotATapError, WriteError
from nnsight_core.errors import EngineError
from nnsight_core.wants import Want, Wants, Way
from nnsight_vllm_worker import copies, known
from nnsight_vllm_worker.taps import Taps
from tests.fixtures.ranks import WIDTH

PROMPT = "The Eiffel Tower is in the city of"
STEPS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def layers(model: Any) -> Any:
    return model.transformer.h if "transformer" in model.tree.modules else model.model.layers


# -- one block for each way --------------------------------------------------------------------


def looks(model: Any) -> Any:
    layer = layers(model)
    with model.trace(PROMPT, **STEPS) as tracer:
        seen = [].save()
        for step in tracer.all():
            seen.append((step, layer[1].output, layer[4].output, model.logits, model.samples))
        out = tracer.result.save()
    return seen, out


def looks_at_the_prompt(model: Any) -> Any:
    layer = layers(model)
    with model.trace(PROMPT, **STEPS) as tracer:
        seen = layer[3].output.save()
        out = tracer.result.save()
    return seen, out


def writes_logits(model: Any) -> Any:
    layer = layers(model)
    with model.trace(PROMPT, **STEPS) as tracer:
        seen = [].save()
        for _ in tracer.all():
            seen.append(layer[2].output)
            model.logits[:, 60:] = float("-inf")
            seen.append(model.samples)
        out = tracer.result.save()
    return seen, out


def runs_modules(model: Any) -> Any:
    layer, gpt2 = layers(model), "transformer" in model.tree.modules
    norm = model.transformer.ln_f if gpt2 else model.model.norm
    with model.trace(PROMPT, **STEPS) as tracer:
        seen = [].save()
        for _ in tracer.iter[:3]:
            hidden = layer[2].output if gpt2 else sum(layer[2].output)
            seen.append(norm(hidden))
        out = tracer.result.save()
    return seen, out


def writes_at_a_tap(model: Any) -> Any:
    layer, gpt2 = layers(model), "transformer" in model.tree.modules
    with model.trace(PROMPT, **STEPS) as tracer:
        seen = [].save()
        for step in tracer.all():
            hidden = layer[2].output if gpt2 else layer[2].output[0]
            hidden[:] = hidden.flip(-1) * (1 + 0.1 * step)
            seen.append((layer[3].output, model.logits))
        out = tracer.result.save()
    return seen, out


def assigns_at_a_tap(model: Any) -> Any:
    layer, gpt2 = layers(model), "transformer" in model.tree.modules
    with model.trace(PROMPT, **STEPS) as tracer:
        if gpt2:
            layer[3].output = torch.tanh(layer[3].output)
        else:
            layer[3].output = (torch.tanh(layer[3].output[0]), layer[3].output[1])
        seen = layer[4].output.save()
        out = tracer.result.save()
    return seen, out


def is_a_function(model: Any) -> Any:
    layer = layers(model)

    def look(tracer: Any) -> Any:
        return [layer[2].output for _ in tracer.iter[:3]]

    tracer = model.trace(PROMPT, fn=look, **STEPS)
    return tracer.value, tracer.result


def reads_what_is_no_tap(model: Any) -> Any:
    layer = layers(model)
    with model.trace(PROMPT, **STEPS) as tracer:
        seen = [].save()
        for _ in tracer.iter[:2]:
            seen.append(layer[1].mlp.input)
        out = tracer.result.save()
    return seen, out


BLOCKS: dict[Callable[[Any], Any], dict[str, int]] = {
    looks: {"deferred": 6},
    looks_at_the_prompt: {"deferred": 1, "plain": 5},
    writes_logits: {"after": 6},
    runs_modules: {"after": 3, "plain": 3},
    writes_at_a_tap: {"interleaved": 6},
    assigns_at_a_tap: {"interleaved": 1, "plain": 5},
    is_a_function: {"eager": 3, "plain": 3},
    reads_what_is_no_tap: {"eager": 2, "plain": 4},
}


def agree(here: Any, there: Any, near: Any) -> None:
    assert type(here) is type(there)
    if isinstance(here, torch.Tensor):
        assert here.shape == there.shape
        near(here, there)
    elif isinstance(here, dict):
        agree(list(here.items()), list(there.items()), near)
    elif isinstance(here, list | tuple):
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            agree(one, other, near)
    else:
        assert here == there


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_way_gives_what_the_eager_engine_gives(
    request: pytest.FixtureRequest, near: Any, name: str, block: Any
) -> None:
    model = request.getfixturevalue(f"compiled_{name}")
    eager = request.getfixturevalue(name)
    seen, out = block(model)
    there, expected = block(eager)
    agree(seen, there, near)
    assert out.outputs[0].token_ids == expected.outputs[0].token_ids
    assert out.ways == BLOCKS[block]
    assert set(expected.ways) <= {"eager", "plain"}


def test_taps_of_inputs_and_submodules(compiled_gpt2: Any, gpt2: Any, near: Any) -> None:
    def run(model: Any) -> Any:
        with model.trace(PROMPT, **STEPS) as tracer:
            seen = [].save()
            for _ in tracer.all():
                for layer in model.transformer.h[2:5]:
                    seen.append((layer.attn.input, layer.mlp.output))
            out = tracer.result.save()
        return seen, out

    (seen, out), (there, _) = run(compiled_gpt2), run(gpt2)
    agree(seen, there, near)
    assert out.ways == {"deferred": 6}


def test_requests_of_every_way_at_once(compiled_gpt2: Any, gpt2: Any, near: Any) -> None:
    def run(model: Any) -> Any:
        layer = model.transformer.h
        with model.trace(**STEPS) as tracer:
            with tracer.invoke(PROMPT):
                looked = [].save()
                for _ in tracer.all():
                    looked.append(layer[5].output)
            with tracer.invoke("The Colosseum"):
                banned = [].save()
                for _ in tracer.all():
                    model.logits[:, :80] = float("-inf")
                    banned.append(model.samples.item())
            with tracer.invoke("Big Ben is"):
                for _ in tracer.iter[2:4]:
                    layer[6].output[:] *= -1
                written = model.logits.save()
            with tracer.invoke("One"):
                eager = layer[3].mlp.c_fc.output.save()
            with tracer.invoke("Two three four"):
                pass
        return (looked, banned, written, eager), tracer.outputs

    (seen, outputs), (there, expected) = run(compiled_gpt2), run(gpt2)
    agree(seen, there, near)
    for one, other in zip(outputs, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.local
def test_a_prompt_of_more_rows_than_slots(compiled_gpt2: Any, gpt2: Any, near: Any) -> None:
    taps = _taps(compiled_gpt2)
    slots, taps.slots = taps.slots, 8
    prompt = list(range(60, 160))

    def run(model: Any) -> Any:
        with model.trace(prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            seen = [].save()
            for _ in tracer.all():
                seen.append((model.transformer.h[2].output, model.transformer.h[9].output))
            out = tracer.result.save()
        return seen, out

    try:
        seen, out = run(compiled_gpt2)
    finally:
        taps.slots = slots
    there, _ = run(gpt2)
    agree(seen, there, near)
    assert seen[0][0].shape == (100, WIDTH)
    assert out.ways == {"deferred": 3}


def _taps(model: Any) -> Any:
    core = model.llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker._nnsight_loaded.taps


@pytest.mark.local
def test_a_location_that_the_text_does_not_show(
    compiled_gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a block asks for against its text is an error of its request, never another value."""
    nothing = Want(Way.DEFERRED, (), "")
    monkeypatch.setattr(known, "wants_of", lambda *_: Wants(nothing, nothing, True))
    with pytest.raises(NotATapError, match=r"h\.3\.output.*did not say"):
        with compiled_gpt2.trace(PROMPT, **STEPS):
            seen = compiled_gpt2.transformer.h[3].output.save()
    assert compiled_gpt2._engine.counts()["live"] == 0


def test_a_block_that_looks_in_a_mode_of_its_own(compiled_gpt2: Any, gpt2: Any, near: Any) -> None:
    """In inference mode PyTorch counts no versions, by which writes are told."""
    seen = []
    for model in (compiled_gpt2, gpt2):
        layers = model.transformer.h
        with model.trace(PROMPT, **STEPS) as tracer:
            found = [].save()
            with torch.inference_mode():
                for _ in tracer.all():
                    found.append(layers[3].output.clone())
                    found.append(layers[5].output.clone())
        seen.append(found)
    assert len(seen[0]) == len(seen[1]) > 2
    near(seen[0], seen[1])


def test_only_taps(compiled_gpt2: Any) -> None:
    with pytest.raises(NotATapError, match=r"line \d+: transformer.h.1.input is not a tap"):
        with compiled_gpt2.trace(PROMPT, only_taps=True):
            hidden = compiled_gpt2.transformer.h[1].input.save()
    with compiled_gpt2.trace(PROMPT, only_taps=True, max_tokens=1):
        hidden = compiled_gpt2.transformer.h[1].output.save()
    assert hidden.shape[1] == WIDTH


def test_explain(compiled_gpt2: Any, gpt2: Any) -> None:
    with compiled_gpt2.trace(PROMPT, **STEPS) as tracer:
        first = compiled_gpt2.transformer.h[1].input.save()
        for _ in tracer.iter[1:]:
            later = compiled_gpt2.transformer.h[2].output.save()
    found = compiled_gpt2.explain(tracer)
    assert found.first.way is Way.EAGER and "transformer.h.1.input is not a tap" in found.first.why
    assert found.later.way is Way.DEFERRED and found.later.taps == ("transformer.h.2.output",)
    assert str(found).startswith("step 0: eager") and "later steps: deferred" in str(found)
    assert tracer.result.ways == {"eager": 1, "deferred": 5}
    assert "compiles nothing" in str(gpt2.explain(tracer))


@pytest.mark.local
def test_the_runner_is_the_one_that_vllm_chooses(compiled_gpt2: Any) -> None:
    core = compiled_gpt2.llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    expected = "RunnerV2" if worker.vllm_config.use_v2_model_runner else "RunnerV1"
    assert type(worker._nnsight_loaded.port).__name__ == expected
    if torch.cuda.is_available() and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:
        assert expected == "RunnerV2"


@pytest.mark.local
def test_settings_say_what_taps_take(compiled_gpt2: Any, gpt2: Any) -> None:
    said = compiled_gpt2.engine_settings()
    assert "36 locations" in said and "MiB of device memory" in said
    assert "0 locations" in gpt2.engine_settings()


def test_a_prompt_in_pieces_is_seen_whole(compiled_tight: Any, gpt2: Any, near: Any) -> None:
    """What runs one pass later sees the prompt whole, though the request is further on by then."""
    prompt = list(range(60, 130))

    def run(model: Any) -> Any:
        with model.trace(prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            seen = [].save()
            for _ in tracer.all():
                seen.append((model.transformer.h[2].output, model.transformer.h[9].output))
            out = tracer.result.save()
        return seen, out

    seen, out = run(compiled_tight)
    there, expected = run(gpt2)
    agree(seen, there, near)
    assert seen[0][0].shape == (70, WIDTH) and out.ways == {"deferred": 4}
    assert out.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.local
def test_a_write_to_an_input_at_a_tap_is_its_error_alone(
    compiled_gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that the text does not show must not take the forward pass along."""
    wanted = Want(Way.INTERLEAVED, ("transformer.h.3.attn.input",), "")
    monkeypatch.setattr(known, "wants_of", lambda *_: Wants(wanted, wanted, True))
    with pytest.raises(WriteError, match="in a step that runs compiled it can only be read"):
        with compiled_gpt2.trace(**STEPS) as tracer:
            with tracer.invoke(PROMPT):
                attn = compiled_gpt2.transformer.h[3].attn
                attn.input = attn.input * 2
            with tracer.invoke("Big Ben"):
                seen = compiled_gpt2.transformer.h[3].attn.input.save()
    assert seen.shape[1] == WIDTH and compiled_gpt2._engine.counts()["live"] == 0


@pytest.mark.local
@pytest.mark.parametrize("long", [False, True])
def test_short_memory_for_copies_is_the_error_of_those_they_are_for(
    compiled_gpt2: Any, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model, layer = compiled_gpt2, layers(compiled_gpt2)
    prompt = list(range(1, 200)) if long else PROMPT
    with monkeypatch.context() as patch:
        patch.setattr(copies, "cut_rows", short)
        patch.setattr(Taps, "copies", short)
        with pytest.raises(EngineError, match="no memory for copies"):
            with model.trace(**STEPS) as tracer:
                with tracer.invoke(prompt):
                    value = layer[4].output.save()
                with tracer.invoke(PROMPT):
                    out = tracer.result.save()
    assert len(out.outputs[0].token_ids) == STEPS["max_tokens"]
    with model.trace(PROMPT, **STEPS):
        value = layer[4].output.save()
    assert value.shape[0] == len(out.prompt_token_ids)
    assert model._engine.counts()["live"] == 0
