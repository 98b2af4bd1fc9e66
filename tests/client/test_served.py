"""Traces on a real server mean what local ones mean."""

from __future__ import annotations

import linecache
import traceback
import warnings

import pytest
import torch

from nnsight_client import VLLM
from nnsight_core import Kept, LocationError, PolicyError, WriteError

PROMPT = "The Eiffel Tower is in the city of"
PROMPTS = ["The Eiffel Tower is in", "The capital of Japan is the city of", "Water boils at"]


@pytest.fixture(scope="module")
def model(server_url, gpt2_path):
    with VLLM(gpt2_path, serve=server_url) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_left(server):
    yield
    assert server.empty()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b.reshape(a.shape), atol=1e-4, rtol=1e-4)


def test_a_read_gives_what_transformers_computes(model, hf_gpt2):
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        mlp = model.transformer.h[6].mlp.output.save()
        logits = model.logits.save()
        result = tracer.result.save()
    with hf_gpt2.trace(PROMPT):
        expected = hf_gpt2.transformer.h[6].mlp.output.save()
        expected_logits = hf_gpt2.logits.save()
    ids = model.tokenizer(PROMPT)["input_ids"]
    assert mlp.shape[0] == len(ids) and logits.shape[0] == 1
    assert close(mlp, expected) and close(logits, expected_logits[..., -1, :])
    assert model.tokenizer.decode(logits.argmax(-1)) == " Paris" == result.outputs[0].text


def test_a_write_changes_what_comes_after_it(model, hf_gpt2):
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.transformer.h[8].mlp.output[:] = 0
        logits = model.logits.save()
    with hf_gpt2.trace(PROMPT):
        hf_gpt2.transformer.h[8].mlp.output[:] = 0
        expected = hf_gpt2.logits.save()
    assert close(logits, expected[..., -1, :])
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.transformer.h[8].output[:] = 0
        zeroed = model.logits.argmax(-1).save()
    assert model.tokenizer.decode(zeroed) != " Paris"


def test_several_prompts_give_a_list_in_their_order(model, hf_gpt2):
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for p in PROMPTS:
            with tracer.invoke(p):
                hidden = model.transformer.h[6].output.save()
    for prompt, value in zip(PROMPTS, hidden, strict=True):
        with hf_gpt2.trace(prompt):
            expected = hf_gpt2.transformer.h[6].output.save()
        expected = expected[0] if isinstance(expected, tuple) else expected
        assert close(value, expected)


def test_every_sequence_of_a_prompt_has_its_values(model):
    with model.trace(PROMPT, n=2, seed=0, temperature=1.0, max_tokens=2) as tracer:
        hidden = model.transformer.h[0].output.save()
        text = tracer.result.outputs[0].text
        text = text.save()
    assert len(hidden) == 2 and torch.equal(hidden[0], hidden[1])
    assert text == [output.text for output in tracer.result.outputs]


def test_prompts_of_every_form_mean_the_same(model):
    ids = model.tokenizer(PROMPT)["input_ids"]
    forms = [PROMPT, ids, torch.tensor(ids), {"prompt_token_ids": ids}]
    forms += [model.tokenizer(PROMPT), model.tokenizer(PROMPT, return_tensors="pt")]
    with model.trace(temperature=0.0, max_new_tokens=1) as tracer:
        for form in forms:
            with tracer.invoke(form):
                logits = model.logits.save()
    assert all(torch.allclose(value, logits[0], atol=1e-5) for value in logits)


def test_values_from_outside_go_along(model):
    steer = torch.randn(96)
    large = torch.nn.Linear(96, 96)
    small = 2.0
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for p in PROMPTS:
            with tracer.invoke(p):
                hidden = model.transformer.h[3].output
                mapped = (large(hidden) * small + steer).save()
                plain = hidden.save()
    for p, m in zip(plain, mapped, strict=True):
        assert torch.allclose(m, large(p) * small + steer, atol=1e-4)


def test_a_function_runs_instead_of_a_body(model):
    def read(_):
        return model.transformer.h[2].output.sum().item()

    assert isinstance(model.trace(PROMPT, fn=read, max_tokens=1).value, float)


def test_plain_generation_needs_no_block(model):
    one = model.generate(PROMPT, temperature=0.0, max_tokens=1)
    assert [output.outputs[0].text for output in one] == [" Paris"]
    several = model.generate(PROMPTS, temperature=0.0, max_tokens=2)
    assert [output.prompt for output in several] == PROMPTS


def test_the_tree_comes_from_the_server(server_url, gpt2_path):
    fresh = VLLM(gpt2_path, serve=server_url)
    assert fresh.tree.modules["transformer.h.6.mlp"].output[0].shape == ("tokens", 96)
    assert len(fresh.transformer.h) == 12
    assert "(mlp): GPT2MLP" in str(fresh)


def test_a_trace_may_name_the_server(server_url, gpt2_path):
    model = VLLM(gpt2_path)
    with model.trace(PROMPT, max_tokens=1, serve=server_url, api_key="none is wanted"):
        hidden = model.transformer.h[0].output.save()
    assert hidden.shape[1] == 96
    assert len(model.generate(PROMPT, max_tokens=1, serve=server_url)) == 1


def test_what_a_block_prints_and_warns_of_comes_home(model, capsys):
    with pytest.warns(UserWarning, match="careful"):
        with model.trace(PROMPT, max_tokens=1):
            print("rows:", model.transformer.h[0].output.shape[1])
            warnings.warn("careful", stacklevel=1)
            logits = model.logits.save()
    assert capsys.readouterr().out == "[invoke 0] rows: 96\n"


def helper(value):
    return value.no_such_attribute


def test_an_error_has_its_own_class_and_the_users_lines(model):
    with pytest.raises(AttributeError, match="no_such_attribute") as caught:
        with model.trace(PROMPT, max_tokens=1):
            hidden = model.transformer.h[0].output.save()
            helper(hidden)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames][-1] == "helper"
    assert frames[-1].filename == __file__
    assert linecache.getline(__file__, frames[-2].lineno).strip() == "helper(hidden)"


def test_a_users_own_error_is_raised_as_what_it_is(model):
    class Mine(Exception):
        pass

    with pytest.raises(Mine, match="of my own"):
        with model.trace(PROMPT, max_tokens=1):
            if model.logits.shape[0] == 1:
                raise Mine("of my own")


def test_a_bad_invoke_does_not_lose_the_good_ones(model):
    with pytest.raises(ExceptionGroup) as caught:
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                first = model.logits.argmax(-1).save()
            with tracer.invoke(PROMPT):
                model.transformer.h[0].output[:] = torch.zeros(1, 2, 3)
            with tracer.invoke(""):
                second = model.logits.save()
            with tracer.invoke("long " * 300):
                second = model.logits.save()
            with tracer.invoke(PROMPT):
                last = model.transformer.h[1].output.save()
    kinds = sorted(type(e).__name__ for e in caught.value.exceptions)
    assert kinds == ["RuntimeError", "ValueError", "ValueError"]
    assert model.tokenizer.decode(first) == " Paris" and last.shape[1] == 96


def test_a_failed_block_takes_the_other_sequences_of_its_prompt_along(model):
    with pytest.raises((ValueError, ExceptionGroup)):
        with model.trace(PROMPT, n=8, temperature=2.0, seed=0, max_tokens=200) as tracer:
            if model.samples.item() % 2:
                raise ValueError("an odd one")
            text = tracer.result.outputs[0].text.save()


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "says"),
    [
        (PROMPT, {"temprature": 0.0}, TypeError, "Did you mean 'temperature'"),
        (PROMPT, {"temperature": -1.0}, ValueError, "temperature"),
        ("", {}, ValueError, "Empty prompt"),
        ([], {}, ValueError, "Empty prompt"),
        ("long " * 300, {}, ValueError, "maximum context length is 256"),
        (3.5, {}, TypeError, "no prompt"),
        (object(), {}, TypeError, "The prompt is a builtins.object"),
        (PROMPT, {"seed": object()}, TypeError, "The sampling argument 'seed'"),
        (PROMPT, {"lora_request": 1}, TypeError, "lora_request"),
    ],
)
def test_a_wrong_prompt_or_sampling_argument_is_named(model, prompt, sampling, error, says):
    with pytest.raises(error, match=says):
        with model.trace(prompt, **sampling):
            logits = model.logits.save()


def test_a_misspelt_argument_is_refused_before_anything_runs(model, capsys):
    with pytest.raises(TypeError, match="max_tokens"):
        with model.trace() as tracer:
            with tracer.invoke(PROMPT):
                print(model.logits.shape)
            with tracer.invoke(PROMPT, max_token=3):
                print(model.logits.shape)
    assert capsys.readouterr().out == ""


def test_a_wrong_location_names_the_nearest(server_url, gpt2_path):
    fresh = VLLM(gpt2_path, serve=server_url)
    for _ in range(2):  # before the tree is known here, and after
        with pytest.raises(LocationError, match=r"Nearest: transformer\.h\.1\.mlp"):
            with fresh.trace(PROMPT):
                hidden = fresh.transformer.h[1].mpl.output.save()
        fresh.tree


def test_a_write_of_another_width_is_refused(model):
    with pytest.raises(WriteError, match="95"):
        with model.trace(PROMPT, max_tokens=1):
            model.transformer.h[0].output = model.transformer.h[0].output[:, :95]


def test_what_cannot_be_shipped_is_named(model):
    lines = (n for n in range(3))
    with pytest.raises(TypeError, match="lines is a builtins.generator"):
        with model.trace(PROMPT):
            first = next(lines).save()


def test_a_large_body_is_refused_with_the_limit(model):
    huge = torch.zeros(2_000_000)
    with pytest.raises(ValueError, match="4000000 bytes"):
        with model.trace(PROMPT):
            total = huge.sum().save()


def test_pickled_values_are_not_taken(server_url, gpt2_path):
    from nnsight_client.http_backend import HttpBackend
    from nnsight_core.backend import Invoke
    from nnsight_core.wire.messages import BlockData, InvokeData, TraceMessage

    block = BlockData(
        source="    x\n", filename="f", line=1, function="f", names={"x": {"$": "pickle", "b": 0}}
    )
    message = TraceMessage(invokes=[InvokeData(prompt=PROMPT, block=0)], blocks=[block])
    backend = HttpBackend(server_url)
    frames = list(backend._frames(lambda _: message.frame([b"cos\nsystem\n"]), set()))
    assert frames[0].header["error"]["name"] == PolicyError.__name__
    assert next(backend.submit([Invoke(PROMPT, {"max_tokens": 1})])).error is None


def test_the_worker_packages_model_takes_a_server_too(server_url: str, gpt2_path: str) -> None:
    from nnsight_vllm_worker import VLLM as Local

    with Local(gpt2_path, serve=server_url) as model:
        assert len(model.transformer.h) == 12
        with model.trace("The Eiffel Tower is in the city of", temperature=0.0, max_tokens=1) as tr:
            hidden = model.transformer.h[6].output.save()
            out = tr.result.save()
        (plain,) = model.generate("The capital of France is", temperature=0.0, max_tokens=1)
        assert not model.dispatched
    assert plain.outputs[0].text == " Paris"
    assert hidden.shape == (8, 96) and out.outputs[0].text == " Paris"


def test_a_kept_value_is_used_by_a_later_trace(model):
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        there = model.transformer.h[6].output.keep()
        here = model.transformer.h[6].output.clone().save()
    assert type(there) is Kept and there.shape == here.shape
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        home = (there * 1).save()
    assert torch.equal(home, here)
    [kept] = model.kept
    assert (kept.id, kept.name, kept.bytes) == (there.id, "there", here.numel() * 4)
    del there
    assert list(model.kept) == []
