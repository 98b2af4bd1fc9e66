"""Outputs that are told by what is new of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnsight_core import ProtocolError
from nnsight_core.outputs import CompletionOutput, Logprob, RequestOutput
from nnsight_core.wire.frames import read_frame
from nnsight_core.wire.messages import PartData, WentMessage, expect
from nnsight_core.wire.went import WentReader, WentSender


def output(*texts: str, steps: int = 0, logprobs: bool = False) -> RequestOutput:
    found = [Logprob(logprob=-0.5, rank=1, decoded_token="x")] * steps if logprobs else None
    parts = [
        CompletionOutput(
            index=index,
            text=text,
            token_ids=list(range(steps)),
            cumulative_logprob=-0.5 * steps,
            logprobs=None if found is None else [{7: one} for one in found],
        )
        for index, text in enumerate(texts)
    ]
    return RequestOutput(request_id="r", prompt="p", prompt_token_ids=[1, 2], outputs=parts)


def over(message: WentMessage) -> WentMessage:
    return expect(read_frame(message.frame().to_bytes()), WentMessage)


@given(st.lists(st.lists(st.text(max_size=5), min_size=2, max_size=2), max_size=6), st.booleans())
def test_what_is_put_together_is_what_was_told(added: list[list[str]], logprobs: bool) -> None:
    sender, reader = WentSender("0"), WentReader()
    texts = ["", ""]
    for steps, parts in enumerate(added, 1):
        texts = [text + part for text, part in zip(texts, parts, strict=True)]
        told = output(*texts, steps=steps, logprobs=logprobs)
        assert reader.output(over(sender.message(told))) == told


def test_only_what_is_new_travels_after_the_first() -> None:
    sender = WentSender("0")
    first = sender.message(output("a" * 1000, "b", steps=500))
    second = sender.message(output("a" * 1000 + "c", "b", steps=501))
    assert first.output is not None and second.output is None
    (part, other) = second.parts
    assert (part.start, part.text, part.token_ids) == (1000, "c", [500])
    assert other.text == "" and other.token_ids == [500]
    assert len(second.frame().to_bytes()) < 500


def test_a_text_that_became_shorter_is_told_anew() -> None:
    sender, reader = WentSender("0"), WentReader()
    for text in ("stop word", "stop"):
        told = output(text, steps=1)
        assert reader.output(over(sender.message(told))) == told


def test_a_sequence_that_comes_later_is_told_whole() -> None:
    sender, reader = WentSender("0"), WentReader()
    for told in (output("a", steps=1), output("a", "b", steps=1), output("ab", "bc", steps=2)):
        assert reader.output(over(sender.message(told))) == told


def test_parts_that_follow_nothing_are_refused() -> None:
    part = PartData(index=0, start=0, text="x", token_ids=[1])
    with pytest.raises(ProtocolError, match="before it came whole"):
        WentReader().output(WentMessage(key="0", parts=[part]))
    reader = WentReader()
    reader.output(WentMessage(key="0", output=output("ab", steps=1)))
    for wrong in ({"index": 3}, {"start": 5}):
        with pytest.raises(ProtocolError, match="follows nothing"):
            reader.output(WentMessage(key="0", parts=[part.model_copy(update=wrong)]))
