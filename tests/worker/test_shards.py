"""What is believed of the tensors of two ranks, and what is not: both are played in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nnsight_core.locations import Location
from nnsight_vllm_worker.layouts import SUM, Layout, Piece, Split, Unknown, split
from nnsight_vllm_worker.shards import Shards, close, some

ROWS, WIDTH, HEADS = 11, 16, 8
Layouts = dict[str, tuple[Layout, ...]]


class Layers:
    """What layers say, by the names of locations; `joint` ones have ranks working together."""

    def __init__(self, told: dict[str, Layout], joint: tuple[str, ...]) -> None:
        self._told = told
        self._joint = joint

    def told(
        self, path: str, side: str, tensors: list[Tensor], entry: list[Layout]
    ) -> dict[int, Layout]:
        name = f"{path}.{side}"
        return {0: self._told[name]} if name in self._told else {}

    def splits(self, path: str) -> bool:
        return False

    def together(self, path: str) -> bool:
        return path in self._joint

    def unfilled(self, path: str) -> bool:
        return False


Reach = Callable[[str, Any], None]


def found(
    body: Callable[[int, Reach, Shards], None],
    told: dict[str, Layout],
    joint: tuple[str, ...] = (),
    ranks: int = 2,
    dummy: bool = False,
) -> Layouts:
    """The layouts that ranks agree on, each of which has run `body`."""
    every = [Shards(Layers(told, joint), rank) for rank in range(ranks)]
    for rank, shards in enumerate(every):

        def reach(name: str, value: Any, shards: Shards = shards) -> None:
            shards.see(Location(*name.rsplit(".", 1)), value)

        body(rank, reach, shards)
    claims = copy.deepcopy([shards._claims for shards in every])
    answers = [shards.layouts(lambda mine: claims, dummy) for shards in every]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def alike() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))


def own(rank: int, width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(rank))


def why(layout: Layout) -> str:
    assert isinstance(layout, Unknown), layout
    return layout.why


def test_what_each_holds_a_part_of_is_followed() -> None:
    def body(rank: int, reach: Reach, shards: Shards) -> None:
        hidden, q = alike(), own(rank, HEADS)
        reach("q.input", hidden)
        reach("q.output", q)
        reach("heads.input", q.view(ROWS, 2, 4))
        reach("down.output", own(rank))
        made = alike()
        shards.whole(made)
        reach("sum.output", made)
        reach("next.input", made)

    seen = found(body, {"q.output": split(4, 4), "down.output": SUM})
    assert seen["q.input"] == seen["sum.output"] == seen["next.input"] == (None,)
    assert seen["q.output"] == seen["heads.input"] == (split(4, 4),)
    assert seen["down.output"] == (SUM,)


def test_what_is_summed_unseen_is_refused_and_not_multiplied() -> None:
    def body(rank: int, reach: Reach, shards: Shards) -> None:
        part = own(rank)
        reach("attn.output", part)
        reach("fused.input", (part, alike()))
        part.copy_(alike())  # a kernel that no collective of the group is seen to run in
        reach("fused.output", (alike() * 3, part))
        reach("mlp.input", part)

    seen = found(body, {"attn.output": SUM})
    assert seen["attn.output"] == (SUM,)
    norm, rest = seen["fused.output"]
    assert "summed up" in why(norm)
    assert "summand" in why(rest) and "summand" in why(seen["mlp.input"][0])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf")])
def test_a_module_that_computes_nothing_for_nobody_says_nothing(value: float) -> None:
    def body(rank: int, reach: Reach, shards: Shards) -> None:
        for name in ("attn", "norm"):
            hidden = alike()
            reach(f"{name}.input", hidden)
            reach(f"{name}.output", torch.full_like(hidden, value))

    seen = found(body, {}, joint=("attn",))
    assert "nothing says" in why(seen["attn.output"][0])
    assert seen["norm.output"] == (None,)  # one rank alone computes all of it


def test_a_view_of_memory_that_nobody_wrote_is_no_more_known_than_it() -> None:
    def body(rank: int, reach: Reach, shards: Shards) -> None:
        reach("q.output", own(rank))
        held = torch.zeros(ROWS, 2, HEADS)
        reach("attn.source.empty_0.output", held)
        reach("attn.source.view_0.output", held.view(ROWS, -1))
        shards.whole(held)
        reach("attn.source.reduced_0.output", held)

    seen = found(body, {"q.output": split(WIDTH)})
    assert "nothing says" in why(seen["attn.source.view_0.output"][0])
    assert seen["attn.source.reduced_0.output"] == (None,)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_entry_without_an_end_hides_no_other(value: float) -> None:
    def body(rank: int, reach: Reach, shards: Shards) -> None:
        reach("q.output", own(rank))
        scores = own(rank + 10)
        scores[:, 0] = value
        reach("scores.output", scores)

    assert "differ" in why(found(body, {"q.output": split(WIDTH)})["scores.output"][0])


def test_complex_values_are_compared() -> None:
    one, other = torch.tensor([1 + 2j, 3 + 0j]), torch.tensor([1 + 2j, 3 + 1j])
    assert some(one) == [1, 2, 3, 0]
    assert close(torch.tensor(some(one)), torch.tensor(some(one)))
    assert not close(torch.tensor(some(one)), torch.tensor(some(other)))


def replicated(copies: int) -> Layouts:
    """Four ranks with two heads of `k`, each of which two of them hold."""

    def body(rank: int, reach: Reach, shards: Shards) -> None:
        reach("qk.output", torch.cat([own(rank, 4), own(10 + rank // 2, 2)], 1))

    return found(body, {"qk.output": Split((Piece(4), Piece(2, copies)))}, ranks=4)


def test_heads_that_ranks_share_are_no_columns_of_each() -> None:
    assert replicated(2)["qk.output"] == (Split((Piece(4), Piece(2, 2))),)
    assert "same of it" in why(replicated(1)["qk.output"][0])
    assert "different" in why(replicated(4)["qk.output"][0])


def test_visits_that_differ_leave_a_location_unknown() -> None:
    def body(rank: int, reach: Reach, shards: Shards) -> None:
        for layer in ("a", "b"):
            q = own(rank, 4)
            reach(f"{layer}.k.output", q)
            reach("rotary.input", q)
            reach("norm.input", q if layer == "a" else q[:, :2])

    seen = found(body, {"a.k.output": split(4), "b.k.output": split(2, 2)})
    assert "several times" in why(seen["rotary.input"][0])
    assert "several times" in why(seen["norm.input"][0])
    alike = found(body, {"a.k.output": split(2, 2), "b.k.output": split(2, 2)})
    assert alike["rotary.input"] == (split(2, 2),)


def test_later_visits_are_compared_as_well() -> None:
    def body(rank: int, reach: Reach, shards: Shards) -> None:
        reach("layer.input", alike())
        reach("layer.input", own(rank))

    assert "differ" in why(found(body, {})["layer.input"][0])


def test_equal_values_of_weights_that_were_never_loaded_say_nothing() -> None:
    def body(rank: int, reach: Reach, shards: Shards) -> None:
        reach("q.output", alike())
        reach("down.output", alike() * 2)
        reach("other.input", alike() * 3)

    seen = found(body, {"q.output": split(WIDTH), "down.output": SUM}, dummy=True)
    assert seen["q.output"] == (split(WIDTH),) and seen["down.output"] == (SUM,)
    assert "nothing says" in why(seen["other.input"][0])
