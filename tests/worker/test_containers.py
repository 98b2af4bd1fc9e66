"""Containers: saved above the invokes, nested, with views in them, under several names."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

import nnsight_core
from nnsight_core import LocationError

PROMPT = "The Eiffel Tower is in the city of"
WATER = "Water boils at"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
Pair = namedtuple("Pair", "first second")


def test_slots_saved_above_the_invokes(gpt2: Any) -> None:
    with gpt2.trace(**GREEDY) as tracer:
        slots = nnsight_core.save([None] * 3)
        alias = slots
        with tracer.invoke(PROMPT):
            slots[0] = gpt2.transformer.h[1].output.sum()
        with tracer.invoke(WATER):
            slots[2] = gpt2.transformer.h[1].output.sum()
    assert slots is alias and slots[1] is None and tracer.saves["slots"] is slots
    with gpt2.trace(PROMPT, **GREEDY):
        alone = gpt2.transformer.h[1].output.sum().save()
    assert torch.equal(slots[0], alone) and not torch.equal(slots[2], alone)


def test_what_invokes_append_is_put_together_in_their_order(gpt2: Any) -> None:
    with gpt2.trace(**GREEDY) as tracer:
        lengths = nnsight_core.save(["start"])
        for prompt in (PROMPT, WATER, PROMPT):
            with tracer.invoke(prompt):
                lengths.append(gpt2.transformer.h[0].output.shape[0])
                lengths.append(gpt2.samples.item())
    count = [len(gpt2.tokenizer(p)["input_ids"]) for p in (PROMPT, WATER, PROMPT)]
    assert lengths[0] == "start" and lengths[1::2] == count and len(lengths) == 7


def test_dicts_sets_and_nested_containers(gpt2: Any) -> None:
    with gpt2.trace(**GREEDY) as tracer:
        found = nnsight_core.save({"kept": 0, "changed": 0, "inner": {"a": 1}})
        seen = nnsight_core.save({0})
        rows = nnsight_core.save([[], []])
        for index, prompt in enumerate((PROMPT, WATER)):
            with tracer.invoke(prompt):
                length = gpt2.transformer.h[0].output.shape[0]
                found[prompt] = length
                if index == 1:
                    found["changed"] = length
                found["inner"][prompt] = length
                seen.add(length)
                rows[index].append(length)
    assert found == {
        "kept": 0,
        "changed": 6,
        "inner": {"a": 1, PROMPT: 8, WATER: 6},
        PROMPT: 8,
        WATER: 6,
    }
    assert seen == {0, 6, 8} and rows == [[8], [6]]


def test_a_container_that_is_not_saved_above_stays_as_it_was(gpt2: Any) -> None:
    with gpt2.trace(**GREEDY) as tracer:
        plain: list[int] = []
        with tracer.invoke(PROMPT):
            plain.append(1)
            hidden = gpt2.logits.save()
    assert plain == [] and hidden.shape[0] == 1


def test_sequences_of_one_invoke_are_put_together_too(gpt2: Any) -> None:
    with gpt2.trace(max_tokens=1, n=3, seed=1) as tracer:
        drawn = nnsight_core.save([])
        with tracer.invoke(PROMPT):
            drawn.append(gpt2.samples.item())
    assert drawn == [s.token_ids[0] for s in tracer.result.outputs]


def test_saving_outside_any_trace_is_refused() -> None:
    with pytest.raises(LocationError, match="only inside a block"):
        nnsight_core.save([])


def test_a_failed_invoke_loses_no_other_invokes_part(gpt2: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        with gpt2.trace(**GREEDY) as tracer:
            slots = nnsight_core.save([None, None])
            with tracer.invoke(PROMPT):
                slots[0] = gpt2.samples.item()
            with tracer.invoke(PROMPT):
                slots[1] = 1 / 0
    assert isinstance(slots[0], int) and slots[1] is None


@pytest.mark.local
def test_containers_in_containers_keep_their_types_and_identities(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, **GREEDY):
        hidden = gpt2.transformer.h[2].output
        one = {"pair": Pair(hidden[0], [hidden[1], (hidden[2],)]), "same": hidden}.save()
        again = one
        view = hidden[-1, :4].save()
        pair = Pair(view, view).save()
    assert again is one and isinstance(one["pair"], Pair) and type(one["pair"].second[1]) is tuple
    assert torch.equal(one["same"][2], one["pair"].second[1][0])
    assert pair.first is pair.second and pair.first is view
    assert view.untyped_storage().nbytes() == 16


def test_one_object_under_two_names_stays_one(gpt2: Any) -> None:
    with gpt2.trace(PROMPT, **GREEDY):
        first = gpt2.transformer.h[2].output.save()
        second = first
        held = [first].save()
    assert first is second and held[0] is first


def test_an_unbound_save_beside_a_shared_container_warns(gpt2: Any) -> None:
    with pytest.warns(nnsight_core.UnboundSaveWarning):
        with gpt2.trace(**GREEDY) as tracer:
            slots = nnsight_core.save([])
            with tracer.invoke(PROMPT):
                slots.append(gpt2.samples.item().save())
                gpt2.samples.save()
    assert len(slots) == 1
