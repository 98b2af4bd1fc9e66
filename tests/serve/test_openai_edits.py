"""Edits in the requests of OpenAI clients: which ones they have, and what is told of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from nnsight_serve import Settings
from nnsight_serve.openai import openai_app
from nnsight_vllm_worker import VLLM

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The Eiffel Tower is in the city of"
NAME = "tiny"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
    "served_model_name": NAME,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(gpt2_path: str) -> AsyncIterator[VLLM]:
    model = VLLM(gpt2_path, mode="async", dispatch=True, **ENGINE)
    yield model
    await model.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model: VLLM, gpt2_path: str) -> AsyncIterator[openai.AsyncOpenAI]:
    backend: Any = model._backend
    settings = Settings(gpt2_path, ENGINE, openai={"chat_template": "{{ messages[0].content }}"})
    app = await openai_app(await backend.ready(), settings)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    async with openai.AsyncOpenAI(
        base_url="http://server/v1", api_key="x", http_client=http, max_retries=0
    ) as client:
        yield client


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(model: VLLM) -> AsyncIterator[None]:
    """After each test, nothing is left in the engine."""
    yield
    await model.aclear_edits()
    backend: Any = model._backend
    for _ in range(50):
        engine = await backend.ready()
        await engine.sweep()
        counts = await engine.counts()
        if not counts["live"] and not counts["edits"]:
            assert not engine.edits._asked
            return
        await asyncio.sleep(0.1)
    raise AssertionError(counts)


async def complete(client: openai.AsyncOpenAI, edits: Any = ..., **options: Any) -> Any:
    extra = {"ignore_eos": True, **({} if edits is ... else {"edits": edits})}
    given = {k: v for k, v in GREEDY.items() if k != "ignore_eos"}
    return await client.completions.create(
        **{"model": NAME, "prompt": PROMPT, "extra_body": extra, **given, **options}
    )


async def texts(model: VLLM, **options: Any) -> list[str]:
    output = await model.generate(PROMPT, **GREEDY, **options)
    return [output[0].outputs[0].text]


async def steer(model: VLLM, name: str | None = "steer") -> Any:
    layers = model.transformer.h
    async with model.edit(name) as (tracer, edit):
        for _ in tracer.all():
            layers[3].output[:] *= -2.0
    return edit


async def test_an_edit_belongs_to_every_request_and_names_choose(model, client):
    plain = (await complete(client)).choices[0].text
    edit = await steer(model)
    steered = await complete(client)
    assert steered.choices[0].text == (await texts(model))[0] != plain
    assert steered.model_extra["nnsight"] == {"edits": [edit.id], "errors": []}
    for edits, text in ((["steer"], steered.choices[0].text), ([], plain)):
        assert (await complete(client, edits)).choices[0].text == text
    assert "nnsight" not in (await complete(client, [])).model_extra
    await steer(model, None)
    unnamed = await complete(client, [])
    assert unnamed.choices[0].text == steered.choices[0].text
    with pytest.raises(openai.BadRequestError, match="no edit 'other' is installed; there: 'st"):
        await complete(client, ["other"])


async def test_chats_have_edits_as_well(model, client):
    await steer(model)
    messages = [{"role": "user", "content": PROMPT}]
    for edits in (["steer"], []):
        extra = {"edits": edits, "ignore_eos": True}
        made = await client.chat.completions.create(
            model=NAME, messages=messages, temperature=0.0, max_tokens=4, extra_body=extra
        )
        assert made.choices[0].message.content == (await complete(client, edits)).choices[0].text


async def test_what_edits_raise_is_told_and_logged_and_the_request_goes_on(model, client, caplog):
    async with model.edit("broken") as (tracer, edit):
        raise ValueError("here")
    plain = (await complete(client, [])).choices[0].text
    made = await complete(client, prompt=[PROMPT, "Hello"], n=2, temperature=1.0)
    assert len(made.choices) == 4
    error = {"edit": edit.id, "name": "broken", "type": "ValueError", "message": "here"}
    assert made.model_extra["nnsight"] == {"edits": [edit.id], "errors": [error]}
    assert f"The edit {edit.id} has failed once, last with ValueError: here" in caplog.text
    assert (await complete(client)).choices[0].text == plain
    [info] = model.edits
    assert info.errors == info.requests == 5


async def test_a_stream_says_it_at_the_end_to_who_names_edits(model, client):
    edit = await steer(model)
    whole = (await complete(client)).choices[0].text
    parts = [part async for part in await complete(client, ["steer"], stream=True)]
    assert "".join(p.choices[0].text for p in parts[:-1]) == whole
    last = parts[-1]
    assert last.choices == [] and last.id == parts[0].id and last.model == NAME
    assert last.model_extra["nnsight"] == {"edits": [edit.id], "errors": []}
    others = [part async for part in await complete(client, stream=True)]
    assert "".join(p.choices[0].text for p in others) == whole
    assert all(part.choices for part in others)


async def test_a_request_keeps_its_edits_when_they_are_cleared(model, client):
    edit = await steer(model)
    whole = (await complete(client, max_tokens=40)).choices[0].text
    running = [asyncio.create_task(complete(client, max_tokens=40)) for _ in range(3)]
    while model.edits[0].requests < 4:
        await asyncio.sleep(0)
    await edit.aclear()
    assert {(await each).choices[0].text for each in running} == {whole}
    assert (await complete(client, max_tokens=40)).choices[0].text != whole


async def test_edits_that_wait_for_the_output_do_not_hold_the_answer(model, client):
    async with model.edit("late") as (tracer, edit):
        text = tracer.result.outputs[0].text.save()
    made = await complete(client)
    assert json.loads(made.model_dump_json())["nnsight"]["edits"] == [edit.id]
