"""Saves that come while a request goes on, put together with what came before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_core import ProtocolError
from nnsight_core.backend import Ended, Finished, Invoke, Saved, Went
from nnsight_core.code import compile_block
from nnsight_core.outcome import Outcome
from nnsight_core.outputs import CompletionOutput, RequestOutput
from nnsight_core.run import Run
from nnsight_core.wire.blocks import encode_ended, encode_saved
from nnsight_core.wire.told import News, Told


def output(*tokens: int, finished: bool = False) -> RequestOutput:
    part = CompletionOutput(index=0, text="", token_ids=list(tokens))
    return RequestOutput(request_id="0", outputs=[part], finished=finished)


def take(outcome: Outcome, *events: Any) -> RequestOutput:
    for event in events:
        outcome.take(event)
    assert outcome.output is not None
    return outcome.output


def test_each_output_keeps_what_it_was_given() -> None:
    outcome = Outcome(0, Invoke(None))
    first = take(outcome, Saved(0, saves={"t": [1]}), Went(0, output(5)))
    second = take(outcome, Saved(0, more={"t": [2, 3]}), Went(0, output(5, 6)))
    last = take(outcome, Ended(0, more={"t": [4]}), Finished(0, output(5, 6, 7, finished=True)))
    assert [o.saves["t"] for o in (first, second, last)] == [[1], [1, 2, 3], [1, 2, 3, 4]]
    assert [o.new_saves["t"] for o in (first, second, last)] == [[1], [2, 3], [4]]


def test_blocks_of_one_request_keep_their_saves_apart() -> None:
    outcome = Outcome(0, Invoke(None))
    take(
        outcome,
        Saved(0, saves={"t": ["a0"]}, edit="a#1"),
        Saved(0, saves={"t": ["b0"]}, edit="b#2"),
        Went(0, output(5)),
    )
    both = take(
        outcome,
        Saved(0, more={"t": ["b1"]}, edit="b#2"),
        Saved(0, more={"t": ["a1"]}, edit="a#1"),
        Saved(0, saves={"t": torch.ones(2)}),
        Went(0, output(5, 6)),
    )
    assert torch.equal(both.saves["t"], torch.ones(2))
    last = take(
        outcome,
        Ended(0, gone=["t"]),
        Ended(0, more={"t": ["b2"]}, edit="b#2"),
        Ended(0, edit="a#1"),
        Finished(0, output(5, 6, 7, finished=True)),
    )
    assert last.saves["t"] == ["b0", "b1", "b2"] and last.new_saves["t"] == ["b2"]


def test_sequences_are_lists() -> None:
    outcome = Outcome(0, Invoke(None, {"n": 2}))
    first = take(outcome, Saved(0, 1, saves={"t": [1]}), Went(0, output(5)))
    assert first.saves == first.new_saves == {"t": [None, [1]]}


def news(told: Told, found: dict[str, Any]) -> News:
    """What is new, all of which is told."""
    new = told.news(found)
    told.went(new, found)
    return new


def test_what_changes_in_place_is_told_again_at_the_end() -> None:
    told, tensor = Told(), torch.zeros(2)
    seen, named = [tensor], {"a": 1}
    first = news(told, {"seen": seen, "named": named, "n": 3, "x": tensor})
    assert first.saves.keys() == {"seen", "named", "n", "x"} and not first.more
    seen.append(4)
    named["b"] = 2
    second = news(told, {"seen": seen, "named": named, "n": 3, "x": tensor})
    assert second == ({}, {"seen": [4], "named": {"b": 2}}, [])
    assert told.rest({"seen": seen, "named": named, "n": 3, "x": tensor}) == ({}, {}, [])
    tensor += 1
    named["a"] = 5
    last = told.rest({"seen": seen, "named": named, "x": tensor})
    assert last.saves.keys() == {"seen", "named", "x"} and last.gone == ["n"]


def test_a_list_that_holds_itself_is_told() -> None:
    told = Told()
    ring: list[Any] = [1]
    ring.append(ring)
    assert news(told, {"ring": ring}).saves == {"ring": ring}
    ring.append(2)
    assert news(told, {"ring": ring}).more == {"ring": [2]}
    # What holds itself is not compared, but told again.
    assert "ring" in told.rest({"ring": ring}).saves


def test_a_dict_whose_keys_have_another_order_is_told_again() -> None:
    told, named = Told(), {"a": 1, "b": 2}
    news(told, {"named": named})
    named["a"] = named.pop("a")
    assert list(told.rest({"named": named}).saves["named"]) == ["b", "a"]


@pytest.mark.parametrize("before", [[], [1]], ids=["first", "later"])
def test_what_could_not_be_told_is_the_error_at_the_end(before: list[Any]) -> None:
    told, good, seen = Told(), [1], [*before]
    run = Run(compile_block("    seen\n", "user.py", 1, "f"), {"seen": seen, "good": good})
    run.saves.add(good, (0, 0))
    if before:
        run.saves.add(seen, (0, 0))
        assert encode_saved(run, told, key="0").header["saves"].keys() == {"seen", "good"}
    seen.append(torch.eye(2).to_sparse())
    if not before:
        run.saves.add(seen, (0, 0))
        assert encode_saved(run, told, key="0").header["saves"].keys() == {"good"}
    good.append(2)
    seen.append(3)
    header = encode_saved(run, told, key="0").header
    assert header["more"].keys() == {"good"} and not header["saves"]
    error = encode_ended(run, "0", 0, [], told).header["error"]
    assert error["name"] == "EncodeError" and f"seen[{len(before)}]" in error["message"]


def test_growth_of_what_was_never_told_is_refused() -> None:
    with pytest.raises(ProtocolError, match="what 't' has grown by"):
        Outcome(0, Invoke(None)).take(Saved(0, more={"t": [1]}))
