"""Edits on a real engine: installed once, in every request, exact beside everything else."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

import nnsight_core as core
from nnsight_vllm_worker import VLLM
from tests.fixtures.ranks import WIDTH

PROMPTS = ["The Eiffel Tower is in", "Hello", "One two three four five six seven"]
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(params=["gpt2", "compiled_gpt2"])
def model(request: pytest.FixtureRequest):
    """An eager engine, and a compiled one with taps."""
    model = request.getfixturevalue(request.param)
    yield model
    model.clear_edits()
    # What nobody needs any more has left the worker.
    assert model._engine.counts()["edits"] == 0


def traced(model: VLLM, prompt: str, **sampling):
    with model.trace(prompt, **{**GREEDY, **sampling}) as tracer:
        seen = [].save()
        for _ in tracer.all():
            seen.append(model.transformer.h[6].output[-1])
        out = tracer.result.save()
    return seen, out


def test_edit_reads_in_every_request(model):
    with model.edit("probe") as (tracer, edit):
        seen = [].save()
        for _ in tracer.all():
            seen.append(model.transformer.h[6].output[-1])
    outputs = model.generate(PROMPTS, use_tqdm=False, **GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected, out = traced(model, prompt, edits=None)
        assert output.outputs[0].token_ids == out.outputs[0].token_ids
        assert len(output.saves["seen"]) == 4
        # The reductions of several GPUs add up in an order of their own.
        seen = torch.stack(output.saves["seen"])
        torch.testing.assert_close(seen, torch.stack(expected), rtol=1e-5, atol=1e-4)
        assert not output.errors
    assert edit.info.requests == 6 and edit.info.errors == 0 and edit.info.seconds > 0
    assert repr(edit) == f"<Edit {edit.id}, installed>"
    edit.clear()
    edit.clear()
    assert model.edits == [] and edit.cleared and edit.info is None
    assert model.generate("Hello", **GREEDY)[0].saves == {}


def test_edit_writes_as_the_trace_does(model):
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)) * 5

    def steered(prompt):
        with model.trace(prompt, **GREEDY) as tracer:
            logits = [].save()
            for _ in tracer.all():
                model.transformer.h[6].output[:] += vector
                logits.append(model.logits[0])
            out = tracer.result.save()
        return logits, out

    plain = model.generate(PROMPTS, use_tqdm=False, **GREEDY)
    expected = [steered(prompt) for prompt in PROMPTS]
    with model.edit() as (tracer, edit):
        logits = [].save()
        for _ in tracer.all():
            model.transformer.h[6].output[:] += vector
            logits.append(model.logits[0])
    found = model.generate(PROMPTS, use_tqdm=False, **GREEDY)
    for output, (logits, out) in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == out.outputs[0].token_ids
        torch.testing.assert_close(
            torch.stack(output.saves["logits"]), torch.stack(logits), rtol=1e-4, atol=1e-4
        )
    edit.clear()
    again = model.generate(PROMPTS, use_tqdm=False, **GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in plain]
    assert [o.outputs[0].token_ids for o in found] != [o.outputs[0].token_ids for o in plain]


def test_edit_and_trace_on_one_request(model):
    with model.trace("Hello", **GREEDY):
        before = model.transformer.h[6].output.save()
    with model.edit("double") as (tracer, edit):
        model.transformer.h[6].output[:] *= 2
    with model.trace("Hello", **GREEDY) as tracer:
        after = model.transformer.h[6].output.save()
    torch.testing.assert_close(after, before * 2)
    # Written by Python, between two writes of the taps: in the order of installation.
    with model.edit() as (tracer, second):
        hidden = model.transformer.h[6].output
        hidden[:] = hidden + hidden.abs().sum(-1, keepdim=True) * 0 + 1
    with model.edit() as (tracer, third):
        model.transformer.h[6].output[:] *= 3
    with model.trace("Hello", **GREEDY) as tracer:
        model.transformer.h[6].output[:] -= 1
        after = model.transformer.h[6].output.save()
    torch.testing.assert_close(after, (before * 2 + 1) * 3 - 1)


def test_an_edit_sees_what_the_ones_before_it_left_and_nothing_later(model):
    with model.edit() as (tracer, reader):
        early = model.transformer.h[6].output.save()
        first_logits = model.logits.save()
    with model.edit() as (tracer, writer):
        model.transformer.h[6].output[:] *= 2
        model.logits[:] += 1
    with model.edit() as (tracer, later):
        late = model.transformer.h[6].output.save()
        last_logits = model.logits.save()
    saves = model.generate("Hello", **GREEDY)[0].saves
    torch.testing.assert_close(saves["late"], saves["early"] * 2)
    torch.testing.assert_close(saves["last_logits"], saves["first_logits"] + 1)


def test_choosing_edits(model):
    with model.edit("one") as (tracer, one):
        a = core.save(1)
    with model.edit("two") as (tracer, two):
        b = core.save(2)
    with model.edit("two") as (tracer, again):
        c = core.save(3)
    with model.edit() as (tracer, always):
        d = core.save(4)

    def names(**edits):
        return set(model.generate("Hello", max_tokens=1, **edits)[0].saves)

    assert names() == {"a", "b", "c", "d"}
    assert names(edits=["one"]) == {"a", "d"}
    assert names(edits=["two"]) == {"b", "c", "d"}
    assert names(edits=[]) == {"d"}
    always.clear()
    assert names(edits=[]) == set()
    with model.edit() as (tracer, always):
        d = core.save(4)
    with model.trace(max_tokens=1, edits=["one"]) as tracer:
        with tracer.invoke("Hello"):
            x = model.logits.save()
        with tracer.invoke("Hello", edits=["two"]):
            x = model.logits.save()
    assert [set(output.saves) for output in tracer.outputs] == [
        {"a", "d", "x"},
        {"b", "c", "d", "x"},
    ]
    with pytest.raises(ValueError, match="no edit 'three' is installed; there: 'one', 'two'"):
        model.generate("Hello", edits=["three"])
    with pytest.raises(ValueError, match="no edit 'three'"):
        with model.trace("Hello", edits=["three"]):
            x = model.logits.save()
    with pytest.raises(TypeError, match="list of edit names"):
        model.generate("Hello", edits="one")
    assert [info.name for info in model.edits] == ["one", "two", "two", None]
    assert [info.id for info in model.edits] == [e.id for e in (one, two, again, always)]
    two.clear()
    assert names(edits=["two"]) == {"c", "d"}
    model.clear_edits()
    assert model.edits == []


def test_names_of_edits_and_traces_meet(model):
    with model.edit("first") as (tracer, _):
        z = core.save(1)
        y = core.save(1)
    with model.edit("last") as (tracer, _):
        z = core.save(2)
    assert model.generate("Hello", max_tokens=1)[0].saves == {"z": 2, "y": 1}
    with model.trace("Hello", max_tokens=1) as tracer:
        z = core.save(3)
        result = tracer.result.save()
    assert z == 3
    assert result.saves["z"] == 3 and result.saves["y"] == 1


def test_an_error_of_an_edit_rides_its_output(model):
    with model.edit("bad") as (tracer, edit):
        norm = model.transformer.h[3].output.norm().save()
        raise KeyError("here")
    with model.edit("good") as (tracer, _):
        fine = model.transformer.h[4].output.norm().save()
    plain = model.generate("Hello", edits=["good"], **GREEDY)[0]
    with pytest.warns(core.EditErrorWarning, match=r"The edit bad#\d+ raised KeyError: 'here'"):
        output = model.generate("Hello", **GREEDY)[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    [error] = output.errors
    assert isinstance(error, KeyError) and error.args == ("here",)
    assert "edit bad#" in error.__notes__[0]
    assert set(output.saves) == {"norm", "fine"}
    with pytest.warns(core.EditErrorWarning):
        with model.trace("Hello", **GREEDY):
            hidden = model.transformer.h[6].output.save()
    assert hidden.shape[1] == WIDTH
    assert edit.info.errors == 2 and edit.info.requests == 2


def test_a_trace_that_fails_takes_the_runs_of_its_edits_along(model):
    with model.edit() as (tracer, edit):
        for _ in tracer.all():
            model.transformer.h[3].output
    with pytest.raises(ZeroDivisionError):
        with model.trace(PROMPTS[0], **GREEDY):
            model.transformer.h[2].output
            1 / 0
    assert model._engine.counts()["live"] == 0
    with pytest.raises(ZeroDivisionError):
        with model.trace(PROMPTS[0], **GREEDY) as tracer:
            1 / (len(tracer.result.outputs) - 1)
    assert model._engine.counts()["live"] == 0


def test_an_edit_that_would_be_lowered_sees_prompts_whole_where_it_cannot_be(compiled_tight):
    model = compiled_tight
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)) * 5
    prompts = [list(range(10 + start, 30 + start)) for start in range(6)]
    with model.edit() as (tracer, writes):
        for _ in tracer.all():
            model.transformer.h[4].output[:] += vector
    expected = [model.generate([prompt], **GREEDY)[0] for prompt in prompts]
    writes.clear()
    # What this one reads, no tap may have written before.
    with model.edit() as (tracer, reads):
        rows = core.save(len(model.transformer.h[4].output))
    with model.edit() as (tracer, writes):
        for _ in tracer.all():
            model.transformer.h[4].output[:] += vector
    found = model.generate(prompts, use_tqdm=False, **GREEDY)
    model.clear_edits()
    assert [output.errors for output in found] == [[]] * 6
    assert [output.saves["rows"] for output in found] == [20] * 6
    tokens = [[output.outputs[0].token_ids for output in each] for each in (found, expected)]
    assert tokens[0] == tokens[1]


def test_an_edit_that_cannot_be_is_refused_at_once(model):
    with pytest.raises(core.LocationError, match="no module 'transformer.hh"):
        with model.edit() as (tracer, edit):
            x = model.transformer.hh[3].output.save()
    assert model.edits == []
    with pytest.raises(ValueError, match="inplace"):
        model.edit(inplace=False)
    with pytest.raises(TypeError, match="name=3"):
        model.edit(3)
    with pytest.raises(ValueError, match="share"):
        model.edit(share=0)
    with pytest.raises(ValueError, match="ttl"):
        model.edit(ttl=-1)
    with pytest.raises(TypeError, match="Unknown argument 'shre'"):
        model.edit(shre=1)
    with pytest.raises(core.NotSupportedError, match="async with|with model.edit"):

        async def enter():
            async with model.edit():
                pass

        enter().send(None)


def test_each_request_has_its_own_copy(model):
    counts = [0]
    with model.edit() as (tracer, edit):
        counts[0] += 1
        total = core.save(counts[0])
        for _ in tracer.all():
            counts.append(model.logits.argmax().item())
        length = core.save(len(counts))
    for output in model.generate(PROMPTS, use_tqdm=False, **GREEDY):
        assert output.saves["total"] == 1 and output.saves["length"] == 5
    assert counts == [0]


def test_share_and_ttl(model):
    with model.edit(share=0.5) as (tracer, edit):
        seen = core.save(1)
    outputs = model.generate(["Hello"] * 60, max_tokens=1, use_tqdm=False)
    count = sum("seen" in output.saves for output in outputs)
    assert 10 < count < 50 and edit.info.requests == count
    edit.clear()
    with model.edit(ttl=0.3) as (tracer, edit):
        seen = core.save(1)
    assert model.generate("Hello", max_tokens=1)[0].saves == {"seen": 1}
    time.sleep(0.4)
    assert model.generate("Hello", max_tokens=1)[0].saves == {}
    assert model.edits == []


def test_several_sequences(model):
    with model.edit() as (tracer, edit):
        ids = [].save()
        for _ in tracer.all():
            ids.append(model.samples.item())
    sampling = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 4, "ignore_eos": True}
    output = model.generate("Hello", **sampling)[0]
    assert output.saves["ids"] == [part.token_ids for part in output.outputs]
    with model.trace("Hello", **sampling) as tracer:
        first = model.samples.item().save()
        result = tracer.result.save()
    assert first == [part.token_ids[0] for part in result.outputs]
    assert result.saves["ids"] == [part.token_ids for part in result.outputs]


def test_edits_that_stop_look_at_the_result_and_force_tokens(model):
    with model.edit("stop") as (tracer, _):
        for step in tracer.all():
            if step == 1:
                tracer.stop()
    with model.edit("look") as (tracer, _):
        text = core.save(tracer.result.outputs[0].text)
    output = model.generate("Hello", **GREEDY)[0]
    assert len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].stop_reason == "tracer.stop"
    assert output.saves["text"] == output.outputs[0].text
    model.clear_edits()
    with model.edit() as (tracer, _):
        for _ in tracer.all():
            model.samples[:] = 7
    assert model.generate("Hello", **GREEDY)[0].outputs[0].token_ids == [7] * 4


def test_a_prefix_in_the_cache_is_seen_whole_and_never_mixed(model):
    prompt = [(7 * i) % 400 + 10 for i in range(200)]
    plain = model.generate([prompt, prompt], use_tqdm=False, **GREEDY)[0]
    with model.edit("read") as (tracer, reader):
        rows = core.save(model.transformer.h[6].output.shape[0])
    assert model.generate([prompt], **GREEDY)[0].saves["rows"] == 200
    reader.clear()
    with model.edit("steer") as (tracer, writer):
        for _ in tracer.all():
            model.transformer.h[2].output[:] *= -2.0
    steered = model.generate([prompt], **GREEDY)[0]
    again = model.generate([prompt], **GREEDY)[0]
    assert steered.outputs[0].token_ids == again.outputs[0].token_ids
    assert steered.outputs[0].token_ids != plain.outputs[0].token_ids
    writer.clear()
    back = model.generate([prompt], **GREEDY)[0]
    assert back.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.local
def test_requests_of_others_on_the_same_engine(model):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    plain = model.llm.generate(PROMPTS, params, use_tqdm=False)
    with model.edit() as (tracer, edit):
        for _ in tracer.all():
            model.transformer.h[2].output[:] *= -2.0
    ours = model.generate(PROMPTS, use_tqdm=False, **GREEDY)
    theirs = model.llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in ours] == [list(o.outputs[0].token_ids) for o in theirs]
    assert list(theirs[0].outputs[0].token_ids) != list(plain[0].outputs[0].token_ids)
    assert edit.info.requests == 6
    edit.clear()
    model.generate("Hello", max_tokens=1)
    assert model._engine.counts()["edits"] == 0 and model._engine.counts()["live"] == 0


@pytest.mark.local
def test_sequences_of_others_on_the_same_engine(model):
    from vllm import SamplingParams

    sampling = {"n": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with model.edit() as (tracer, edit):
        for step in tracer.all():
            model.samples[:] = 20 + step
        text = core.save(tracer.result.outputs[0].text)
    [theirs] = model.llm.generate(
        ["Hello"], SamplingParams(max_tokens=6, **sampling), use_tqdm=False
    )
    assert [list(part.token_ids) for part in theirs.outputs] == [list(range(20, 26))] * 2
    [ours] = model.generate("Hello", max_tokens=6, **sampling)
    assert [part.token_ids for part in ours.outputs] == [list(range(20, 26))] * 2


def test_tensors_of_an_edit_stay_as_long_as_it_does(model):
    before = model._engine.counts()["blob_bytes"]
    big = torch.randn(200, WIDTH)
    with model.edit() as (tracer, edit):
        product = (model.transformer.h[6].output[-1] @ big.T).save()
    assert model.generate("Hello", max_tokens=1)[0].saves["product"].shape == (200,)
    with model.trace("Hello", max_tokens=1):
        x = (model.transformer.h[6].output[-1] @ big.T).save()
    assert model._engine.counts()["blob_bytes"] >= before
    assert model.generate("Hello", max_tokens=1)[0].saves["product"].shape == (200,)


def test_a_function_as_an_edit(model):
    def probe(tracer):
        return model.transformer.h[6].output.norm()

    edit = model.edit("probe", fn=probe)
    output = model.generate("Hello", max_tokens=1)[0]
    assert not output.errors and edit.id in {info.id for info in model.edits}


def test_prints_and_warnings_name_the_edit(model, capsys):
    with model.edit("chatty") as (tracer, edit):
        print("rows", model.transformer.h[0].output.shape[0])
        for _ in tracer.iter[:9]:
            x = model.logits.save()
    with pytest.warns(core.LoopOverrunWarning):
        model.generate("Hello", max_tokens=2)
    assert f"[invoke 0, edit {edit.id}] rows" in capsys.readouterr().out


def test_explain_of_an_edit(compiled_gpt2):
    model = compiled_gpt2
    with model.edit() as (tracer, lowered):
        for _ in tracer.all():
            model.transformer.h[6].output[:] += 1.0
    with model.edit() as (tracer, free):
        hidden = model.transformer.h[6].output
        hidden[:] = hidden.softmax(-1)
    assert "written by taps: line" in str(lowered.explain()) and "tables" in lowered.info.way
    assert "interleaved" in free.info.way and "not written by taps" in free.info.way
    free.clear()
    output = model.generate("Hello", **GREEDY)[0]
    assert output.ways == {"tables": 4}
    model.clear_edits()
    with pytest.raises(core.NotATapError):
        with model.edit(only_taps=True) as (tracer, edit):
            x = model.transformer.h[6].ln_1.output.save()
    assert model.edits == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate("Hello", **GREEDY)[0].saves == {}


def test_an_edit_reads_what_the_request_has_not_yet_written(model):
    """Also where it looks at more than taps, so that it sees everything in its place."""
    with model.edit("looking"):
        anywhere = model.transformer.h[2].attn.output.save()
        before = model.transformer.h[2].output.save()
    vector = torch.ones(WIDTH)

    plain = model.generate(PROMPTS[0], use_tqdm=False, **GREEDY)[0].saves["before"]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        model.transformer.h[2].output[:] += vector
        after = model.transformer.h[2].output.save()
        out = tracer.result.save()
    torch.testing.assert_close(out.saves["before"], plain)
    torch.testing.assert_close(after, plain + 1)


def test_an_edit_writes_over_what_a_block_skips(model):
    """What is put in the place of a module's output comes first, and then the writes in order."""
    vector = torch.ones(WIDTH)
    with model.edit("adding"):
        model.transformer.h[1].mlp.output[:] += vector
    with model.trace(PROMPTS[0], **GREEDY):
        rows = model.transformer.h[1].mlp.input.shape[0]
        model.transformer.h[1].mlp.skip(torch.zeros(rows, WIDTH))
        seen = model.transformer.h[1].mlp.output.save()
    torch.testing.assert_close(seen, torch.ones_like(seen))
