"""What a served model for asyncio says of its server without ever waiting for it."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio

from nnsight_client import VLLM
from nnsight_client.told import Told
from nnsight_core import EditInfo, Kept, KeptError, NotSupportedError
from nnsight_core.backend import EditList
from tests.fixtures.server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The Eiffel Tower is in the city of"
ONE: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


@pytest_asyncio.fixture(loop_scope="module")
async def model(server: Server, gpt2_path: str) -> AsyncIterator[VLLM]:
    model = VLLM(gpt2_path, serve=server.url, mode="async")
    yield model
    await model.aclear_edits()
    await model.aclose()


@pytest.fixture
def other(server: Server, gpt2_path: str) -> Iterator[VLLM]:
    """Somebody else."""
    with VLLM(gpt2_path, serve=server.url) as model:
        yield model
        model.clear_edits()


@contextmanager
def standing(server: Server) -> Iterator[None]:
    """While the server stands still, so that whoever waits for it waits in vain."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


async def two_kept(model: VLLM) -> tuple[Kept, Kept]:
    with model.trace(PROMPT, **ONE) as tracer:
        hidden = model.transformer.h[3].output.keep()
        other = model.transformer.h[4].output.keep()
    await tracer.backend
    return hidden, other


def kept_bytes(server: Server) -> int:
    return server.described()["counts"]["keep_bytes"]


async def test_before_the_first_answer_edits_are_asked_for(model: VLLM, other: VLLM) -> None:
    with other.edit("theirs") as (tracer, edit):
        norm = other.transformer.h[3].output.norm().save()
    with pytest.raises(NotSupportedError, match=r"await model\.aedits\(\)"):
        model.edits
    assert [info.id for info in await model.aedits()] == [edit.id]
    assert [info.name for info in model.edits] == ["theirs"]


async def test_edits_are_as_the_last_answer_told_them(model: VLLM, other: VLLM) -> None:
    async with model.edit("mine") as (tracer, mine):
        norm = model.transformer.h[3].output.norm().save()
    assert [info.id for info in model.edits] == [mine.id] and mine.info.requests == 0
    with other.edit("theirs") as (tracer, theirs):
        total = other.transformer.h[3].output.sum().save()
    with model.trace(PROMPT, **ONE) as tracer:
        logits = model.logits.save()
    output = await tracer.backend
    assert {"norm", "total"} <= {*output.saves}
    assert [info.id for info in model.edits] == [mine.id, theirs.id]
    assert mine.info.requests == 1 and mine.info.seconds > 0
    theirs.clear()
    await model.generate("Hello", **ONE)
    assert [info.id for info in model.edits] == [mine.id] and mine.info.requests == 2
    await mine.aclear()
    assert model.edits == [] and mine.info is None


async def test_an_edit_whose_time_is_over_is_not_listed(model: VLLM) -> None:
    async with model.edit("short", ttl=0.5) as (tracer, edit):
        norm = model.transformer.h[3].output.norm().save()
    assert edit.info.until is not None
    await asyncio.sleep(0.6)
    assert model.edits == [] == await model.aedits()


async def test_nothing_waits_for_a_server_that_stands_still(model: VLLM, server: Server) -> None:
    async with model.edit("probe") as (tracer, edit):
        norm = model.transformer.h[3].output.norm().save()
    hidden, other = await two_kept(model)
    assert kept_bytes(server) == hidden.bytes + other.bytes
    with standing(server):
        assert [info.name for info in model.edits] == ["probe"] and edit.info.id == edit.id
        assert [kept.name for kept in model.kept] == ["hidden", "other"]
        assert model.kept.bytes == hidden.bytes + other.bytes and "hidden" in repr(model.kept)
        del other
        gc.collect()
        assert len(model.kept) == 1
        model.kept.clear()
        assert len(model.kept) == 0
        with model.trace("Hello", **ONE) as tracer:
            norm = model.logits.norm().save()
        await asyncio.sleep(0)
    # What was let go of has left before anything else of this model runs.
    await tracer.backend
    assert kept_bytes(server) == 0
    with pytest.raises(KeptError, match=r"kept\.clear\(\) was called"):
        with model.trace("Hello", **ONE) as tracer:
            norm = hidden.norm().save()
    assert (await model.aedits())[0].requests == 2


async def test_what_is_kept_leaves_with_the_model(server: Server, gpt2_path: str) -> None:
    model = VLLM(gpt2_path, serve=server.url, mode="async")
    hidden, other = await two_kept(model)
    left = other.bytes
    del hidden
    gc.collect()
    await model.aclose()
    assert kept_bytes(server) == left  # whose handle is there
    # It goes by its time limit; here it is not to be in the way of others.
    model = VLLM(gpt2_path, serve=server.url)
    model._servers.backend(server.url).let_go([other.id], "the test is over")
    model.close()
    assert kept_bytes(server) == 0


async def test_the_tree_is_known_once_a_model_is_entered(server: Server, gpt2_path: str) -> None:
    async with VLLM(gpt2_path, serve=server.url, mode="async") as model:
        with standing(server):
            assert len(list(model.transformer.h)) == 12
            assert not model.tree.provisional and model.taps == model.tree.taps
        with model.trace(PROMPT, **ONE) as tracer:
            norm = model.transformer.h[-1].output.norm().save()
        assert (await tracer.backend).saves["norm"] > 0
    async with VLLM(gpt2_path, mode="async") as model:
        with model.trace(PROMPT, serve=server.url, **ONE) as tracer:
            norm = model.logits.norm().save()
        assert (await tracer.backend).saves["norm"] > 0


async def test_answers_that_overtake_one_another_are_told_apart() -> None:
    told = Told()
    told.take(EditList(edits=[EditInfo(id="a#1")], now=2.0))
    told.take(EditList(edits=[], now=1.0))
    assert [info.id for info in told.edits()] == ["a#1"]
    told.take(EditList(edits=[EditInfo(id="a#1"), EditInfo(id="b#2", until=4.0)], now=5.0))
    assert [info.id for info in told.edits()] == ["a#1"]
