"""One server, several people: whose the edits and the kept values are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from nnsight_client import VLLM
from nnsight_core import KeptError, PolicyError
from nnsight_core.kept import Kept
from tests.fixtures.server import Server, serving

PROMPT = "The Eiffel Tower is in the city of"
ONE: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}


@pytest.fixture(scope="module")
def shared(gpt2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = [part for name in ("ann", "ben", "admin") for part in ("--api-key", f"{name}:{name}!")]
    with serving(tmp_path_factory.mktemp("shared"), gpt2_path, *keys) as running:
        running.key = "ann!"
        yield running


@pytest.fixture
def people(shared: Server, gpt2_path: str) -> Iterator[tuple[VLLM, VLLM, VLLM]]:
    models = [VLLM(gpt2_path, serve=shared.url, api_key=f"{n}!") for n in ("ann", "ben", "admin")]
    yield models[0], models[1], models[2]
    models[2].clear_edits()
    for model in models:
        model.close()


def test_an_edit_runs_for_everyone_and_is_its_owners(people):
    ann, ben, admin = people
    with ann.edit("probe") as (tracer, edit):
        norm = ann.transformer.h[3].output.norm().save()
    assert edit.info.owner == "ann" and [info.id for info in ben.edits] == [edit.id]
    assert "norm" in ben.generate(PROMPT, **ONE)[0].saves
    assert ben.generate(PROMPT, edits=[], **ONE)[0].saves == {}
    assert ann.edits[0].requests == 1
    # What others have installed stays, whatever is cleared.
    ben.clear_edits()
    with pytest.raises(
        PolicyError, match=r"probe#\d+ is ann's; that key clears it, or the one nam"
    ):
        ben._edit_backend({}).clear([edit.id])
    assert [info.id for info in ben.edits] == [edit.id]
    admin.clear_edits()
    assert ann.edits == [] and edit.info is None


def test_edits_that_are_not_there_are_an_error_of_their_invoke(people):
    ann, _, _ = people
    with ann.edit("probe") as (tracer, edit):
        norm = ann.transformer.h[3].output.norm().save()
    with pytest.raises(ValueError, match="no edit 'prob' is installed; there: 'probe'"):
        with ann.trace(**ONE) as tracer:
            with tracer.invoke(PROMPT, edits=["prob"]):
                logits = ann.logits.save()
            with tracer.invoke(PROMPT, edits=["probe"]):
                logits = ann.logits.save()
    assert logits[0] is None and logits[1].shape[0] == 1 and tracer.outputs[1].saves["norm"] > 0


class Own(Exception):
    """An error of this file."""


def broken() -> None:
    raise Own("not here")


def test_an_edit_that_is_refused_raises_as_it_would_here(people):
    ann, _, _ = people
    with pytest.raises(AttributeError, match="hh"):
        with ann.edit() as (tracer, edit):
            seen = ann.transformer.hh[3].output.save()
    with pytest.raises(ValueError, match="share"):
        ann.edit(share=2.0)
    assert ann.edits == [] and edit.id == ""


def test_an_edit_that_fails_says_so_in_the_output(people):
    ann, _, _ = people
    with ann.edit("wrong"):
        if ann.transformer.h[3].output.shape[0] > 4:
            broken()
    with pytest.warns(match="The edit wrong#"):
        [output] = ann.generate(PROMPT, **ONE)
    [error] = output.errors
    assert type(error) is Own and output.outputs[0].text == " Paris"
    assert ann.edits[0].errors == 1


def test_kept_values_are_listed_to_who_keeps_them(people, gpt2_path, shared):
    ann, ben, _ = people
    with ann.trace(PROMPT, **ONE):
        hidden = ann.transformer.h[3].output.keep()
        here = ann.transformer.h[3].output.save()
    assert [info.name for info in ann.kept] == ["hidden"] and list(ben.kept) == []
    # Nor can others let them go.
    ben._servers.backend(shared.url, "ben!").let_go([hidden.id], "ben took it")
    with ann.trace(PROMPT, **ONE):
        there = (hidden * 1).save()
    assert torch.equal(here, there)
    with pytest.raises(KeptError, match="on another engine"):
        with ben.trace(PROMPT, **ONE):
            there = (hidden * 1).save()
    ann.kept.clear()
    with pytest.raises(KeptError, match=r"kept.clear\(\) was called"):
        with ann.trace(PROMPT, **ONE):
            there = (hidden * 1).save()


def forged(handle: Kept, model: VLLM, server: Server) -> Kept:
    """A handle of another's value, as if it had come home here."""
    made = Kept(handle.id, handle.what, handle.bytes, handle.shape, handle.dtype)
    made.name = "forged"
    made._home = model._servers.backend(server.url).kept
    return made


def test_a_kept_value_is_read_by_who_keeps_it_and_nobody_else(people, shared):
    ann, ben, _ = people
    with ann.trace(PROMPT, **ONE):
        hidden = ann.transformer.h[3].output.keep()
    others, never = (
        forged(hidden, ben, shared),
        forged(Kept("no such", "float32 [1]", 4), ben, shared),
    )
    told: list[str] = []
    for handle in (others, never):
        with pytest.raises(KeptError, match="'forged' cannot be had: it was freed") as traced:
            with ben.trace(PROMPT, **ONE):
                there = (handle * 1).save()
        with pytest.raises(KeptError, match="'forged' cannot be had: it was freed") as edited:
            with ben.edit("reads") as (tracer, edit):
                there = (handle * 1).save()
        told += [str(traced.value), str(edited.value)]
    # Nothing tells one from the other.
    assert len({*told}) == 1
    with ann.trace(PROMPT, **ONE):
        there = (hidden * 1).save()
    assert there.shape == hidden.shape
    ann.kept.clear()


def test_what_is_asked_for_is_checked(shared):
    with httpx.Client(base_url=shared.url, headers={"Authorization": "Bearer ann!"}) as http:
        assert http.post("/v1/edits", content=b"no frame").status_code == 400
        assert http.post("/v1/kept/free", json={"ids": "x"}).status_code == 400
        assert http.post("/v1/kept/free", content=b"{bad").status_code == 400
        large = http.post("/v1/kept/free", content=b"[" * (1 << 23))
        assert large.status_code == 413 and large.json()["error"]["limit"] == 1 << 22
        assert http.delete("/v1/edits", params={"id": "nobody#1"}).json()["edits"] == []
        assert http.get("/v1/kept").json() == {"kept": []}
        http.headers["Authorization"] = "Bearer ben"
        for method, path in (("GET", "/v1/edits"), ("POST", "/v1/edits"), ("GET", "/v1/kept")):
            assert http.request(method, path).status_code == 401
