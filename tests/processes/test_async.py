"""The model for asyncio: traces beside one another, saves as they are made, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

import nnsight_core as core
from nnsight_vllm_worker import VLLM
from nnsight_vllm_worker.async_requests import AHEAD
from tests.fixtures.ranks import RANKS, WIDTH
from tests.fixtures.served import SERVED, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The Eiffel Tower is in the city of"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
    "seed": 0,
    "max_num_seqs": 64,
}
if torch.cuda.is_available():
    SETTINGS["gpu_memory_utilization"] = 0.1
if RANKS > 1:
    SETTINGS["tensor_parallel_size"] = RANKS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(gpt2_path: str) -> AsyncIterator[Any]:
    if SERVED:
        model: Any = Served(gpt2_path, mode="async", **SETTINGS)
    else:
        model = VLLM(gpt2_path, mode="async", dispatch=True, **SETTINGS)
    yield model
    await model.aclose()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(model: VLLM) -> AsyncIterator[None]:
    """After each test, nothing is left in the engine."""
    yield
    await model.aclear_edits()
    for _ in range(50):
        counts = await held(model)
        if not counts["live"] and not counts["edits"]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(counts)


async def held(model: VLLM) -> dict[str, int]:
    if SERVED:
        return await asyncio.to_thread(model._engine.counts, 0.0)
    backend: Any = model._backend
    return await (await backend.ready()).counts()


async def test_each_step_brings_what_it_saved(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=6, **GREEDY) as tracer:
        seen = [].save()
        by_step = {}.save()
        for step in tracer.all():
            norm = model.transformer.h[3].output[-1].norm().save()
            token = model.samples.item()
            seen.append(token)
            by_step[step] = token
        after = core.save("the end")
    outputs = []
    told = 0
    async for output in tracer.backend:
        outputs.append(output)
        ids = output.outputs[0].token_ids
        assert output.saves["seen"] == ids
        assert output.saves["by_step"] == dict(enumerate(ids))
        # vLLM joins steps that nobody has taken yet; what they saved comes together, too.
        assert output.new_saves.get("seen", []) == ids[told:]
        told = len(ids)
        assert ("after" in output.saves) == output.finished
    assert len(outputs) >= 4
    # What was streamed stays what it was.
    assert [output.saves["seen"] for output in outputs] == [
        output.outputs[0].token_ids for output in outputs
    ]
    norms = {float(output.saves["norm"]) for output in outputs}
    assert len(norms) == len({len(output.outputs[0].token_ids) for output in outputs})
    last = outputs[-1]
    assert last.finished and last.saves["after"] == after == "the end"
    assert tracer.saves["seen"] == seen == last.outputs[0].token_ids
    assert float(norm) == float(last.saves["norm"])


async def test_awaited_again_and_again(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        hidden = model.transformer.h[3].output.save()
        result = tracer.result.save()
    first = await tracer.backend
    assert hidden.shape[1] == WIDTH and result.outputs[0].text == first.outputs[0].text
    assert first.ways == {"eager": 1, "plain": 2}
    second = await tracer.backend
    assert second is first
    assert [output async for output in tracer.backend] == [first]
    torch.testing.assert_close(first.saves["hidden"], hidden)


async def test_values_and_writes_are_those_of_transformers(
    model: VLLM, hf_gpt2: Any, near: Any
) -> None:
    found = []
    for where in (model, hf_gpt2):
        with where.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
            inner = where.transformer.h[3].mlp.c_proj.input.save()
            inner[:, 2 * WIDTH :] *= -0.5  # its second half: on two ranks, what the other one has
            later = where.transformer.h[9].mlp.output.save()
            logits = where.logits.save()
        if where is model:
            await tracer.backend
        found.append((inner, later, logits))
    for here, there in zip(*found, strict=True):
        near(here, there)


async def test_many_prompts_in_one_trace(model: VLLM) -> None:
    prompts = [PROMPT, "Hello", "One two three"]
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                first = model.samples.item().save()
    results = await tracer.backend
    assert first == [output.outputs[0].token_ids[0] for output in results]
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                token = [].save()
                for _ in tracer.all():
                    token.append(model.samples.item())
    seen: dict[str, list[int]] = {}
    async for output in tracer.backend:
        assert output.saves["token"] == output.outputs[0].token_ids
        seen[output.request_id] = output.outputs[0].token_ids
    assert sorted(seen.values()) == sorted(output.outputs[0].token_ids for output in results)


async def test_a_hundred_traces_at_once_each_with_its_own_steering(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        plain = model.transformer.h[6].output.save()
    await tracer.backend

    async def read(scale: float) -> torch.Tensor:
        vector = torch.full((WIDTH,), scale)
        with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
            model.transformer.h[6].output[:] += vector
            hidden = model.transformer.h[6].output.save()
        await tracer.backend
        return hidden

    found = await asyncio.gather(*(read(float(scale)) for scale in range(100)))
    for scale, hidden in enumerate(found):
        torch.testing.assert_close(hidden, plain + scale, rtol=1e-3, atol=1e-3)


async def test_values_are_taken_along_when_the_body_is_over(model: VLLM) -> None:
    vector = torch.zeros(WIDTH)
    tracers = []
    for scale in range(3):
        vector[:] = scale
        with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
            mean = (model.transformer.h[6].output[-1] * 0 + vector).mean().save()
        tracers.append(tracer)
    await asyncio.gather(*(tracer.backend for tracer in tracers))
    assert [float(tracer.saves["mean"]) for tracer in tracers] == [0.0, 1.0, 2.0]


async def test_large_values_are_taken_along_too(model: VLLM) -> None:
    vector = torch.zeros(200, WIDTH)
    tracers = []
    for scale in range(3):
        vector[:] = scale
        with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
            mean = (model.transformer.h[6].output[-1] * 0 + vector).mean().save()
        tracers.append(tracer)
    vector[:] = 7
    await asyncio.gather(*(tracer.backend for tracer in tracers))
    assert [float(tracer.saves["mean"]) for tracer in tracers] == [0.0, 1.0, 2.0]


async def test_leaving_the_loop_aborts_the_request(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=200, **GREEDY) as tracer:
        for _ in tracer.all():
            norm = model.transformer.h[3].output.norm().save()
    async for output in tracer.backend:
        if len(output.outputs[0].token_ids) >= 2:
            break
    await gone(model)
    with pytest.raises(core.EngineError, match="left before its end"):
        await tracer.backend


async def test_closing_and_cancelling_abort_the_request(model: VLLM) -> None:
    def long() -> Any:
        with model.trace(PROMPT, max_tokens=200, **GREEDY) as tracer:
            for _ in tracer.all():
                norm = model.transformer.h[3].output.norm().save()
        return tracer

    tracer = long()
    await asyncio.sleep(0.2)
    await tracer.backend.aclose()
    await gone(model)

    async def wait() -> None:
        await long().backend

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(model)

    def dropped() -> None:
        tracer = long()
        del tracer

    dropped()
    gc.collect()
    await gone(model)


async def gone(model: VLLM) -> None:
    for _ in range(100):
        if not (await held(model))["live"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("The request is still there.")


@pytest.mark.local
async def test_a_slow_reader_holds_up_its_own_request_alone(model: VLLM) -> None:
    def trace(tokens: int) -> Any:
        with model.trace(PROMPT, max_tokens=tokens, **GREEDY) as tracer:
            count = [].save()
            for step in tracer.all():
                count.append(step)
        return tracer

    slow = trace(200)
    reading = aiter(slow.backend)
    first = await anext(reading)
    begun = len(first.outputs[0].token_ids)
    assert first.saves["count"] == list(range(begun)) and begun < 5
    # Others go on meanwhile, as long as they like.
    for _ in range(3):
        other = await trace(100).backend
        assert other.saves["count"] == list(range(100))
    # What has waited for its reader is bounded.
    backend: Any = model._backend
    engine = backend.engine
    [running] = [r for r in engine.running.values() if not r._progress.ended]
    made = running._lengths[0]
    assert made < 4 * AHEAD
    await asyncio.sleep(0.3)
    assert running._lengths[0] == made
    lengths = [len(output.outputs[0].token_ids) async for output in reading]
    assert lengths[-1] == 200 and lengths == sorted(lengths) and len(lengths) > 40
    assert slow.saves["count"] == list(range(200))


async def test_an_error_of_a_block(model: VLLM) -> None:
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            fine = model.logits.save()
        with tracer.invoke("Hello"):
            fine = model.logits.save()
            raise KeyError("no")
    with pytest.raises(KeyError, match="no"):
        await tracer.backend
    assert tracer.saves["fine"][0].shape[0] == 1
    with pytest.raises(KeyError, match="no"):
        async for _ in tracer.backend:
            pass
    with pytest.raises(TypeError, match="temperature"):
        with model.trace(PROMPT, temprature=0.0):
            x = model.logits.save()
    with model.trace(PROMPT, max_tokens=1) as tracer:
        x = model.transformer.hh[3].output.save()
    with pytest.raises(core.LocationError):
        await tracer.backend


async def test_an_error_of_a_block_takes_the_runs_of_edits_along(model: VLLM) -> None:
    async with model.edit() as (tracer, edit):
        for _ in tracer.all():
            model.transformer.h[3].output
    with model.trace(PROMPT, max_tokens=200, **GREEDY) as tracer:
        model.transformer.h[2].output
        1 / 0
    with pytest.raises(ZeroDivisionError):
        await tracer.backend
    assert (await held(model))["live"] == 0


async def test_sequences_stream_side_by_side(model: VLLM) -> None:
    sampling = {"n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 4, "ignore_eos": True}
    with model.trace(PROMPT, **sampling) as tracer:
        ids = [].save()
        for _ in tracer.all():
            ids.append(model.samples.item())
    async for output in tracer.backend:
        for part in output.outputs:
            seen = output.saves["ids"][part.index]
            assert seen[: len(part.token_ids)] == part.token_ids
    assert tracer.saves["ids"] == [part.token_ids for part in output.outputs]


async def test_edits(model: VLLM) -> None:
    async with model.edit("probe") as (tracer, edit):
        norms = [].save()
        for _ in tracer.all():
            norms.append(model.transformer.h[3].output[-1].norm())
    assert edit.info.name == "probe" and [info.id for info in model.edits] == [edit.id]
    assert await model.aedits() == model.edits
    outputs = await model.generate([PROMPT, "Hello"], max_tokens=3, use_tqdm=False, **GREEDY)
    assert [len(output.saves["norms"]) for output in outputs] == [3, 3]
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        logits = model.logits.save()
    async for output in tracer.backend:
        assert len(output.saves["norms"]) == len(output.outputs[0].token_ids)
    assert len(output.saves["norms"]) == 3 and logits.shape[0] == 1
    assert (await model.generate("Hello", edits=[], max_tokens=1))[0].saves == {}
    with pytest.raises(core.NotSupportedError, match="await edit.aclear"):
        edit.clear()
    with pytest.raises(core.NotSupportedError, match="aclear_edits"):
        model.clear_edits()
    with pytest.raises(core.NotSupportedError, match="async with"):
        with model.edit():
            pass
    with pytest.raises(core.LocationError, match="hh"):
        async with model.edit() as (tracer, refused):
            x = model.transformer.hh[3].output.save()
    await edit.aclear()
    assert model.edits == []


async def test_an_edit_stays_with_the_requests_that_began_with_it(model: VLLM) -> None:
    async with model.edit() as (tracer, edit):
        steps = [].save()
        for step in tracer.all():
            steps.append(step)
    pending = asyncio.ensure_future(model.generate(PROMPT, max_tokens=60, **GREEDY))
    await asyncio.sleep(0.1)
    await edit.aclear()
    assert model.edits == []
    late = (await model.generate("Hello", max_tokens=2))[0]
    assert late.saves == {}
    assert (await pending)[0].saves["steps"] == list(range(60))


async def test_generate_and_chat(model: VLLM) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": PROMPT}]
    said = await model.chat(messages, chat_template=template, max_tokens=4, **GREEDY)
    plain = await model.generate(PROMPT, max_tokens=4, **GREEDY)
    assert said[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    both = await model.chat([messages, messages], chat_template=template, max_tokens=2, **GREEDY)
    assert len(both) == 2


async def test_kept_values(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        donor = model.transformer.h[3].output.keep()
        value = model.transformer.h[4].output.save()
    await tracer.backend
    assert len(model.kept) == 1 and donor.shape[1] == WIDTH
    with model.trace("Hello", max_tokens=1, **GREEDY) as tracer:
        model.transformer.h[3].output[-1] = donor[-1]
        patched = model.transformer.h[3].output[-1].save()
        expected = donor[-1].save()
    await tracer.backend
    torch.testing.assert_close(patched, expected)
    del donor
    gc.collect()
    await model.generate("Hello", max_tokens=1)
    assert (await held(model))["keep_bytes"] == 0


async def test_kept_values_while_others_are_streamed(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        donor = model.transformer.h[3].output.keep()
        first, second = (model.transformer.h[4].output, model.transformer.h[5].output).keep()
        steps = [].save()
        for step in tracer.all():
            steps.append(step)
    async for output in tracer.backend:
        last = output.saves
    assert last["steps"] == [0, 1, 2, 3] and len({h.id for h in (donor, first, second)}) == 3
    del output, last
    gc.collect()
    with model.trace("Hello", max_tokens=1, **GREEDY) as tracer:
        norms = [h.norm() for h in (donor, first, second)].save()
    await tracer.backend
    assert len(norms) == 3


async def test_the_tree_is_known_once_a_model_is_entered(model: VLLM) -> None:
    assert await model.__aenter__() is model
    assert not model.tree.provisional and len(model.transformer.h) == 12


async def test_aborted_before_it_began(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=100, **GREEDY) as tracer:
        logits = model.logits.save()
    await tracer.backend.aclose()
    with pytest.raises(core.EngineError, match="left before its end"):
        await tracer.backend


async def test_what_an_async_model_does_not_have(model: VLLM) -> None:
    with pytest.raises(core.NotSupportedError, match="await model.aclose"):
        model.close()
    with model.trace(PROMPT, max_tokens=1) as tracer:
        x = model.logits.save()
    other = asyncio.new_event_loop()

    def elsewhere() -> None:
        async def use() -> None:
            with model.trace(PROMPT, max_tokens=1):
                x = model.logits.save()

        with pytest.raises(core.EngineError, match="another event loop"):
            other.run_until_complete(use())
        other.close()

    await asyncio.to_thread(elsewhere)
    await tracer.backend
    assert x.shape[0] == 1

    def nowhere() -> None:
        with pytest.raises(core.EngineError, match="running event loop"):
            with model.trace(PROMPT, max_tokens=1):
                x = model.logits.save()

    await asyncio.to_thread(nowhere)
