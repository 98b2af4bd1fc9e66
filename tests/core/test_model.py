"""The model and its tracers: what is refused, and what a language model's trace means."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from nnsight_core import (
    Backend,
    EngineError,
    LocationError,
    Model,
    NotSupportedError,
    OutOfOrderError,
    TorchModel,
    Tracer,
)

from . import nets
from .nets import X, check_idle

close = torch.testing.assert_close
PROMPT = "The Eiffel Tower is in the city of"
model = nets.make()


# -- what is refused -------------------------------------------------------------------------------


def test_a_trace_without_prompt_and_invoke_is_refused() -> None:
    with pytest.raises(ValueError, match="The trace has no prompt"):
        with model.trace():
            pass


def test_an_invoke_without_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="An invoke needs a prompt"):
        with model.trace() as tracer:
            with tracer.invoke():
                pass


def test_an_invoke_in_a_trace_with_a_prompt_is_refused() -> None:
    with pytest.raises(LocationError, match="a trace that was given a prompt has no invokes"):
        with model.trace(X) as tracer:
            with tracer.invoke(X):
                pass


def test_an_invoke_after_its_trace_is_refused() -> None:
    with model.trace(X) as tracer:
        pass
    with pytest.raises(LocationError, match="inside the body of its own trace"):
        tracer.invoke(X)


def test_a_trace_in_the_block_of_another_is_refused() -> None:
    with pytest.raises(LocationError, match="cannot be opened inside the block of another"):
        with model.trace(X):
            with model.trace(X):
                pass
    check_idle(model)


def test_an_error_in_a_trace_before_its_invokes_runs_nothing() -> None:
    ran = []
    with pytest.raises(KeyError):
        with model.trace() as tracer:
            with tracer.invoke(X):
                ran.append(1)
            raise KeyError("stop")
    assert ran == [] and tracer.outputs == []


@pytest.mark.parametrize("side", ["output", "input", "inputs"])
def test_a_value_asked_for_outside_a_block_says_where_it_belongs(side: str) -> None:
    with pytest.raises(
        LocationError, match=rf"embed\.{side} has a value only inside a block: `with"
    ):
        getattr(model.embed, side)
    with pytest.raises(LocationError, match="only inside a block"):
        setattr(model.embed, side, X)


def test_everything_else_of_a_block_says_so_outside_one() -> None:
    for ask in (
        lambda: model.logits,
        lambda: model.samples,
        lambda: model.embed.skip(X),
        lambda: model.embed(X),
        lambda: setattr(model, "logits", X),
        lambda: model.layers[0].source.residual_0.output,
    ):
        with pytest.raises(LocationError, match="has a value only inside a block|Calling"):
            ask()


def test_the_result_before_the_end_says_so() -> None:
    with model.trace() as tracer:
        with pytest.raises(LocationError, match="once the trace has ended"):
            tracer.result
        with tracer.invoke(X):
            pass


def test_the_tracer_of_a_block_has_only_what_it_has() -> None:
    with pytest.raises(LocationError, match="does not have 'saves'"):
        with model.trace(X) as tracer:
            tracer.saves


def test_what_is_no_side_cannot_be_assigned() -> None:
    with pytest.raises(LocationError, match=r"embed\.weights cannot be assigned"):
        with model.trace(X):
            model.embed.weights = 1


# -- the attribute tree ----------------------------------------------------------------------------


def test_a_module_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(LocationError, match=r"Net has no module 'layers\.0\.mpl'.*layers\.0\.mlp"):
        model.layers[0].mpl
    with pytest.raises(LocationError, match=r"layers\[7\] does not exist: it has 2 entries"):
        model.layers[7]
    with pytest.raises(LocationError, match="no module 'head.x'"):
        model.get("head.x")


def test_nodes_are_walked_by_name_number_and_slice() -> None:
    assert model.layers[-1] is model.layers[1] is model.get("layers.1")
    assert len(model.layers) == 2 and list(model.layers) == model.layers[:]
    assert "output" in dir(model.layers[0]) and "mlp" in dir(model.layers[0])
    assert repr(model.layers[0].mlp) == "<layers.0.mlp>"
    assert bool(model.unused)
    assert model.head.out_features == 2


def test_the_model_prints_its_tree() -> None:
    text = str(model)
    assert text.startswith("Net\n") and "(layers): ModuleList" in text
    assert "(again): Linear (the same module as twice)" in text and "(0-1): Layer" in text


def test_closing_gives_every_module_its_own_forward_back() -> None:
    module = nets.Net()
    with TorchModel(module) as traced:
        assert "forward" in module.embed.__dict__
        with traced.trace(X):
            x = traced.layers[0].source.residual_0.output.save()
    assert all("forward" not in part.__dict__ for part in module.modules())


def test_two_models_in_one_process_do_not_meet() -> None:
    other = nets.make()
    with model.trace(X):
        x = model.embed.output.save()
    with other.trace(X):
        other.embed.output[:] = 0
        y = other.embed.output.save()
    assert y.eq(0).all() and not x.eq(0).any()


def test_a_model_without_backend_says_so() -> None:
    with pytest.raises(EngineError, match="no backend"):
        Model().trace("Hello")


def test_a_backend_is_what_has_the_three_methods() -> None:
    assert isinstance(model._backend, Backend) and not isinstance(model, Backend)


def test_an_unknown_tree_accepts_every_name() -> None:
    unknown = Model()
    assert repr(unknown.transformer.h[3].mlp) == "<transformer.h.3.mlp>"
    with pytest.raises(EngineError, match="no backend"):
        len(unknown.transformer.h)


def test_a_tree_is_learned_when_a_length_is_asked_for() -> None:
    late = Model(backend=model._backend)
    assert late._places.tree is None
    assert len(late.layers) == len(model.layers)
    with pytest.raises(LocationError, match="layrs"):
        len(late.layrs)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("scan", "model.tree"), ("session", "one trace after the other"), ("backward", "gradients")],
)
def test_what_cannot_be_is_refused_with_what_to_do_instead(name: str, instead: str) -> None:
    with pytest.raises(NotSupportedError, match=instead):
        getattr(model, name)


def test_what_is_not_there_yet_is_said_to_be_so() -> None:
    with pytest.raises(LocationError, match="not there yet"):
        model.std
    with pytest.raises(NotSupportedError, match="TorchBackend has no edits"):
        model.edit()
    with pytest.raises(NotSupportedError, match="TorchBackend has no edits"):
        model.trace(X, edits=["steer"])


def test_a_finished_trace_keeps_no_run_alive() -> None:
    backend: Any = model._backend
    alive = []

    class Watched:
        pass

    def read() -> None:
        watched = Watched()
        alive.append(weakref.ref(watched))
        with model.trace(X) as tracer:
            inside = watched
            x = model.embed.output.save()
        assert isinstance(tracer, Tracer)

    read()
    gc.collect()
    assert alive[0]() is None and backend.interleaver.waiting == {}


# -- a language model ------------------------------------------------------------------------------


def test_a_trace_reads_logits_samples_and_the_finished_output(hf_gpt2: Any) -> None:
    with hf_gpt2.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        mlp = hf_gpt2.transformer.h[6].mlp.output.save()
        logits = hf_gpt2.logits.save()
        samples = hf_gpt2.samples.save()
        result = tracer.result.save()
        text = tracer.result.outputs[0].text.save()
    count = len(hf_gpt2.tokenizer(PROMPT)["input_ids"])
    assert mlp.shape == (count, 96) and logits.shape[0] == 1
    assert hf_gpt2.tokenizer.decode(samples[0]) == " Paris"
    assert result is tracer.result and text == result.outputs[0].text
    assert text.startswith(" Paris") and len(result.outputs[0].token_ids) == 3
    assert result.outputs[0].finish_reason == "length" and result.finished
    with pytest.raises(OutOfOrderError, match="logits"):
        with hf_gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
            hf_gpt2.samples
            hf_gpt2.logits


def test_a_write_changes_what_is_generated(hf_gpt2: Any) -> None:
    with hf_gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        hf_gpt2.transformer.h[8].output[:] = 0
        zeroed = hf_gpt2.logits.argmax(-1).save()
    assert hf_gpt2.tokenizer.decode(zeroed) != " Paris"
    want = hf_gpt2.tokenizer(" Tokyo")["input_ids"][0]
    with hf_gpt2.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        hf_gpt2.logits[:, want] = 1e9
    assert tracer.result.outputs[0].token_ids == [want]
    with hf_gpt2.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        hf_gpt2.samples[:] = want
    assert tracer.result.outputs[0].token_ids == [want]


def test_layers_of_a_llama_equal_its_hidden_states(hf_llama: Any) -> None:
    module = hf_llama._backend.module
    ids = torch.tensor([hf_llama.tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        want = module(ids, output_hidden_states=True)
    with hf_llama.trace(PROMPT, max_tokens=1):
        hidden = [layer.output for layer in hf_llama.model.layers].save()
        logits = hf_llama.logits.save()
    for here, there in zip(hidden[:-1], want.hidden_states[1:], strict=False):
        close(here, there[0])
    close(logits, want.logits[0, -1:])


def test_prompts_may_be_texts_ids_and_what_a_tokenizer_made(hf_gpt2: Any) -> None:
    ids = hf_gpt2.tokenizer(PROMPT)["input_ids"]
    prompts = [PROMPT, ids, torch.tensor(ids), hf_gpt2.tokenizer(PROMPT, return_tensors="pt")]
    with hf_gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                logits = hf_gpt2.logits.save()
    for value in logits[1:]:
        close(value, logits[0])
    assert [o.prompt_token_ids for o in tracer.result] == [ids] * 4


def test_sampling_arguments_of_an_invoke_win_over_the_traces(hf_gpt2: Any) -> None:
    with hf_gpt2.trace(temperature=0.0, max_tokens=1, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT):
            x = hf_gpt2.logits.save()
        with tracer.invoke(PROMPT, max_new_tokens=3):
            x = hf_gpt2.logits.save()
        with tracer.invoke(PROMPT, seed=3, temperature=2.0):
            x = hf_gpt2.logits.save()
    assert [len(o.outputs[0].token_ids) for o in tracer.result] == [1, 3, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("temprature", "Did you mean 'temperature'"), ("zzz", "Known: ignore_eos, max_tokens, seed")],
)
def test_a_misspelt_sampling_argument_is_a_type_error_that_suggests(
    hf_gpt2: Any, wrong: str, message: str
) -> None:
    arguments: dict[str, Any] = {wrong: 0.0}
    x = None
    with pytest.raises(TypeError, match=f"Unknown sampling argument '{wrong}'. {message}"):
        with hf_gpt2.trace(PROMPT, **arguments):
            x = hf_gpt2.logits.save()
    with pytest.raises(TypeError, match=message):
        with hf_gpt2.trace() as tracer:
            with tracer.invoke(PROMPT):
                x = hf_gpt2.logits.save()
            with tracer.invoke(PROMPT, **arguments):
                x = hf_gpt2.logits.save()
    assert x is None and hf_gpt2._backend.interleaver.waiting == {}


@pytest.mark.parametrize("prompt", ["", [], torch.tensor([])])
def test_an_empty_prompt_is_refused_and_the_others_run(hf_gpt2: Any, prompt: Any) -> None:
    with pytest.raises(ValueError, match="Empty prompt"):
        with hf_gpt2.trace(temperature=0.0, max_tokens=1) as tracer:
            with tracer.invoke(prompt):
                x = hf_gpt2.logits.save()
            with tracer.invoke(PROMPT):
                x = hf_gpt2.logits.save()
    assert tracer.saves["x"][0] is None and tracer.saves["x"][1].shape[0] == 1
    assert tracer.outputs[0] is None and tracer.outputs[1] is not None
    assert hf_gpt2._backend.interleaver.waiting == {}


def test_a_result_asked_for_early_waits_until_the_request_has_finished(hf_gpt2: Any) -> None:
    with hf_gpt2.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        count = len(tracer.result.outputs[0].token_ids).save()
        pair = (tracer.result, {"r": [tracer.result]}).save()
    assert count == 2
    assert pair[0] is tracer.result and pair[1]["r"][0] is tracer.result
    with pytest.raises(OutOfOrderError, match="logits"):
        with hf_gpt2.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
            tracer.result.outputs
            hf_gpt2.logits


def test_printing_shows_in_order(hf_gpt2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with hf_gpt2.trace(PROMPT, temperature=0.0, max_tokens=1):
        print("first")
        print("second", hf_gpt2.logits.shape[0])
    assert capsys.readouterr().out == "first\nsecond 1\n"


def test_the_module_stays_usable_and_untouched_by_many_traces() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    traced = TorchModel(net)
    before = net(X)
    for _ in range(3):
        with traced.trace(X):
            traced[0].output[:] = 0
    close(net(X), before)
    net(X).sum().backward()
    assert net[0].weight.grad is not None


def test_a_node_of_another_model_is_refused() -> None:
    other = nets.make()
    for held in (other, other.layers[0], [other.layers[0]]):
        with pytest.raises(LocationError, match="of another model"):
            with model.trace(X):
                found = held.embed.output.save()
