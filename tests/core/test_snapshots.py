"""Invokes see what they name, and their prompts, as these were at the `with` of each."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from nnsight_core import TorchModel, save
from nnsight_core.snapshots import Snapshots
from tests.core import nets, wired

X = nets.X
M = nets.make()


def test_invokes_see_what_they_name_as_it_was_at_their_with() -> None:
    scale, config, array = torch.zeros(1), {"k": 0}, numpy.zeros(1)
    with M.trace() as tracer:
        for i in range(3):
            scale += 1
            array += 1
            config["k"] = i
            with tracer.invoke(X):
                seen = [scale.clone(), config["k"], i, float(array[0])].save()
    assert seen == [[torch.tensor([i + 1.0]), i, i, i + 1.0] for i in range(3)]


def test_invokes_that_travel_see_it_so_too() -> None:
    model, scale, grown = wired.make(), torch.zeros(1), [1]
    with model.trace() as tracer:
        for i in range(3):
            scale += 1
            grown.append(i)
            with tracer.invoke(wired.X):
                seen = [scale.item(), len(grown)].save()
    assert seen == [[1.0, 2], [2.0, 3], [3.0, 4]]


def test_a_prompt_is_the_one_of_the_with() -> None:
    x = torch.zeros(3, 4)
    with M.trace() as tracer:
        for _ in range(2):
            x += 1
            with tracer.invoke(x):
                given = M.embed.input.save()
    first, second = given
    assert torch.equal(first, torch.ones(3, 4)) and torch.equal(second, torch.full((3, 4), 2.0))


def test_sampling_arguments_are_those_of_the_with() -> None:
    stop, seen = ["a"], []
    with pytest.raises(KeyError), M.trace() as tracer:
        for text in ("b", "c"):
            with tracer.invoke(X, stop=stop):
                M.embed.output.save()
            stop.append(text)
        seen = [along.as_it_was()[1]["stop"] for _, along in tracer._along]
        raise KeyError  # the model here samples nothing
    assert seen == [["a"], ["a", "b"]]


def test_what_was_saved_above_the_invokes_is_shared() -> None:
    with M.trace() as tracer:
        slots = save([None, None])
        held = {"slots": slots}
        for i in range(2):
            with tracer.invoke(X):
                held["slots"][i] = i
                slots[i] = i
    assert slots == [0, 1]


def taken(snapshots: Snapshots, value: Any) -> Any:
    return snapshots.take([value]).copies[0]


@pytest.mark.parametrize(
    "value",
    [[1, "a"], {"a": [1]}, {1, 2}, ([1], 2), numpy.ones(2), torch.ones(2), [torch.ones(2)]],
    ids=repr,
)
def test_a_copy_serves_until_the_original_changes(value: Any) -> None:
    snapshots = Snapshots()
    first = taken(snapshots, value)
    assert first is not value and taken(snapshots, value) is first


def test_a_change_anywhere_below_makes_a_new_copy() -> None:
    snapshots, inner, tensor = Snapshots(), [1], torch.zeros(1)
    value = {"a": (inner, [tensor])}
    first = taken(snapshots, value)
    inner.append(2)
    second = taken(snapshots, value)
    tensor += 1
    third = taken(snapshots, value)
    assert first == {"a": ([1], [torch.zeros(1)])}
    assert second["a"][0] == [1, 2] and second["a"][1] is first["a"][1]
    assert third["a"][0] is second["a"][0] and third["a"][1] == [torch.ones(1)]


def test_a_part_that_was_taken_anew_by_itself_is_new_in_the_whole_too() -> None:
    snapshots, inner = Snapshots(), [1]
    whole = [inner]
    taken(snapshots, whole)
    inner.append(2)
    assert taken(snapshots, inner) == [1, 2]
    assert taken(snapshots, whole) == [[1, 2]]
    inner.pop()
    one, other = snapshots.take([inner, whole]).copies
    assert other[0] is one and one == [1]


def test_two_names_of_one_object_stay_one_object() -> None:
    snapshots, inner = Snapshots(), [1]
    for _ in range(2):
        one, two, three = snapshots.take([inner, inner, (inner, 1)]).copies
        assert one is two is three[0] is not inner


def test_containers_that_hold_themselves() -> None:
    snapshots = Snapshots()
    loop: list[Any] = [1]
    pair = (loop,)
    loop += [loop, pair]
    for _ in range(2):
        first, held = snapshots.take([loop, pair]).copies
        assert first is not loop and first[1] is first and first[2] is held and held[0] is first
    again = taken(snapshots, loop)
    assert again is first
    loop[0] = 2
    changed = taken(snapshots, loop)
    assert changed[0] == 2 and changed[1] is changed and changed[2][0] is changed


def test_equal_parts_of_another_type_are_other_parts() -> None:
    snapshots, value = Snapshots(), [1]
    taken(snapshots, value)
    value[0] = True
    assert taken(snapshots, value)[0] is True


class Odd:
    """Is asked for nothing."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


class Own(list[int]):
    """A container of somebody's own."""


@pytest.mark.parametrize("value", [Odd(), Own([1]), nn.Linear(1, 1), lambda: 1, (1, "a")])
def test_other_objects_stay_themselves(value: Any) -> None:
    snapshots = Snapshots()
    assert taken(snapshots, value) is value
    assert taken(snapshots, [value])[0] is value and taken(snapshots, [value])[0] is value


def test_parameters_and_tensors_of_inference_mode() -> None:
    parameter = nn.Parameter(torch.ones(2))
    with torch.inference_mode():
        frozen = torch.ones(2)
        one, two = Snapshots().take([parameter, frozen]).copies
    assert type(one) is nn.Parameter and one.requires_grad and one is not parameter
    assert not two.is_inference() and torch.equal(two, frozen)


def test_a_function_knows_what_the_block_names_where_nothing_has_changed() -> None:
    held = [1]

    def add(number: int) -> None:
        held.append(number)

    model = wired.make()
    with model.trace() as tracer:
        for number in range(2):
            with tracer.invoke(wired.X):
                add(number)
                seen = list(held).save()
    assert seen == [[1, 0], [1, 1]] and held == [1]


def test_a_trace_holds_no_copies_when_it_is_over() -> None:
    values: list[Tensor] = [torch.ones(1)]
    with M.trace() as tracer, tracer.invoke(X):
        y = (M.embed.output + values[0]).save()
    assert tracer._snapshots._last == {}
    assert y.shape == (3, 4)


def test_a_model_takes_any_prompt_of_an_invoke_that_it_takes_of_a_trace() -> None:
    model = TorchModel(nn.Linear(4, 4))
    with model.trace((X,)) as tracer:
        alone = model.output.save()
    with model.trace() as tracer, tracer.invoke((X,)):
        among = model.output.save()
    assert torch.equal(alone, among)
