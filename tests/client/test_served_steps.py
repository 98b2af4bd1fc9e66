"""Steps, caches and shared containers on a real server mean what local ones mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nnsight_core
from nnsight_client import VLLM
from nnsight_core import Cache, LoopOverrunWarning, NotATapError, OutOfOrderError, WriteError

PROMPT = "Count up to ten:"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(server_url, gpt2_path):
    with VLLM(gpt2_path, serve=server_url) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_left(server):
    yield
    assert server.empty()


def test_every_step_equals_transformers(model, hf_gpt2):
    found = []
    for side in (model, hf_gpt2):
        with side.trace(PROMPT, max_tokens=5, **GREEDY) as tracer:
            hidden = [].save()
            tokens = [].save()
            for step in tracer.all():
                if step:
                    side.transformer.h[3].mlp.output[:] *= 2
                hidden.append(side.transformer.h[7].mlp.output)
                tokens.append(side.samples.item())
            out = tracer.result.save()
        assert tokens == out.outputs[0].token_ids
        found.append((hidden, tokens))
    assert found[0][1] == found[1][1]
    for here, there in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=2e-4)


def test_an_overrun_warns_here_and_the_block_goes_on(model):
    with pytest.warns(LoopOverrunWarning, match="asked for 9 steps.*made 2") as caught:
        with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
            tokens = [].save()
            for _ in tracer.iter[:9]:
                tokens.append(model.samples.item())
            after = len(tokens).save()
    assert after == 2 and caught[0].filename == __file__


def test_how_the_steps_ran_comes_home(model):
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        hidden = model.transformer.h[3].output.save()
        out = tracer.result.save()
    assert hidden.shape[1] == 96
    assert out.ways == tracer.result.ways == {"eager": 1, "plain": 2}
    assert model.taps == () and "compiles nothing" in str(model.explain(tracer))
    with pytest.raises(NotATapError, match="this engine compiles nothing"):
        with model.trace(PROMPT, only_taps=True, max_tokens=3, **GREEDY):
            hidden = model.transformer.h[3].output.save()


def test_stop_ends_the_request(model):
    with model.trace(PROMPT, max_tokens=200, **GREEDY) as tracer:
        tokens = [].save()
        for step in tracer.all():
            tokens.append(model.samples.item())
            if step == 4:
                tracer.stop()
    output = tracer.result.outputs[0]
    assert output.token_ids == tokens and len(tokens) == 5
    assert (output.finish_reason, output.stop_reason) == ("stop", "tracer.stop")


def test_whatever_ends_a_request_its_loop_sees_the_steps_that_count(model):
    stops: list[dict[str, Any]] = [
        {"max_tokens": 30},
        {"max_tokens": 30, "stop": [" four"]},
        {"max_tokens": 30, "stop_token_ids": model.tokenizer(" three")["input_ids"]},
        {"max_tokens": 3},
    ]
    with model.trace(temperature=0.0) as tracer:
        for sampling in stops:
            with tracer.invoke(PROMPT, **sampling):
                tokens = [].save()
                for _ in tracer.all():
                    tokens.append(model.samples.item())
                length = len(tracer.result.outputs[0].token_ids).save()
    assert tokens == [out.outputs[0].token_ids for out in tracer.result]
    assert length == [len(made) for made in tokens] and len(set(length)) > 2


def test_caches_come_home(model):
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        cache = tracer.cache(modules=[model.transformer.h[2]], include_inputs=True)
        model.transformer.h[2].output[:] = 1
    assert isinstance(cache, Cache) and len(cache.transformer.h[2]) == 3
    assert cache["transformer.h.2"].output[0].eq(1).all()
    assert cache["transformer.h.2"].visits[1].inputs[0]


def test_containers_saved_above_the_invokes(model):
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        slots = nnsight_core.save([None, None])
        seen = nnsight_core.save([])
        for index, prompt in enumerate((PROMPT, "Water boils at")):
            with tracer.invoke(prompt):
                slots[index] = model.samples.item()
                seen.append(index)
    assert slots == [out.outputs[0].token_ids[0] for out in tracer.result] and seen == [0, 1]


def test_several_sequences(model):
    with model.trace(PROMPT, n=3, seed=2, temperature=1.5, max_tokens=4) as tracer:
        tokens = [].save()
        for _ in tracer.all():
            tokens.append(model.samples.item())
    assert tokens == [sequence.token_ids for sequence in tracer.result.outputs]


def test_errors_in_later_steps_and_prompts_that_do_not_fit(model):
    with pytest.raises(OutOfOrderError, match="in step 2"):
        with model.trace(PROMPT, max_tokens=5, **GREEDY) as tracer:
            kept = [].save()
            for step in tracer.all():
                kept.append(model.transformer.h[5].output.shape[0])
                if step == 2:
                    model.transformer.h[1].output
    assert len(kept) == 3
    # Longer than the model itself takes: vLLM's own refusal, not ours.
    with pytest.raises((ValueError, WriteError)):
        with model.trace([5] * 5000, max_tokens=1):
            model.transformer.h[1].output[:] = 0
