"""Invokes as a message: what is shared goes once, and every buffer is found again."""

from __future__ import annotations

import pytest
import torch

from nnsight_client.encoding import TraceEncoder
from nnsight_core.backend import Backend, Invoke
from nnsight_core.model import Model
from nnsight_core.wire.data import Decoder
from nnsight_core.wire.forms import tagged
from nnsight_core.wire.frames import read_frame
from nnsight_core.wire.messages import TraceMessage, expect


class Gathering(Backend):
    def __init__(self):
        self.invokes: list[Invoke] = []

    def submit(self, invokes):
        self.invokes += invokes
        return iter(())


def message_of(invokes: list[Invoke]):
    encoder = TraceEncoder(lambda: None)
    for invoke in invokes:
        encoder.add(invoke)
    frame = read_frame(encoder.frame().to_bytes())
    return expect(frame, TraceMessage), frame


def test_prompts_and_sampling_arguments_come_back_as_they_were():
    ids = torch.tensor([5, 6, 7])
    message, frame = message_of(
        [Invoke("Hello", {"stop": ["a", "b"], "seed": 3}), Invoke(ids), Invoke({"input_ids": ids})]
    )
    decoder = Decoder(frame.buffers)
    assert message.invokes[0].prompt == "Hello"
    sampling = message.invokes[0].sampling
    assert {k: decoder.decode(v) for k, v in sampling.items()} == {"stop": ["a", "b"], "seed": 3}
    assert torch.equal(Decoder(frame.buffers).decode(message.invokes[1].prompt), ids)
    assert torch.equal(Decoder(frame.buffers).decode(message.invokes[2].prompt)["input_ids"], ids)


def test_a_block_of_several_invokes_goes_once():
    backend = Gathering()
    model = Model(backend=backend)
    small, large = torch.arange(3.0), torch.randn(200, 200)
    with model.trace() as tracer:
        for p in ("a", "b", "c"):
            with tracer.invoke(p):
                hidden = (model.layer.output @ large + small).save()
    message, frame = message_of(backend.invokes)
    assert [invoke.block for invoke in message.invokes] == [0, 0, 0]
    assert len(message.blocks) == len(message.blobs) == 1 and len(frame.buffers) == 2


def test_blocks_with_other_values_keep_them_apart():
    backend = Gathering()
    model = Model(backend=backend)
    with model.trace() as tracer:
        for number in (1.0, 2.0):
            steer = torch.full((4,), number)
            with tracer.invoke(steer):
                hidden = (model.layer.output + steer).save()
    message, frame = message_of(backend.invokes)
    assert [invoke.block for invoke in message.invokes] == [0, 1]
    for number, block in zip((1.0, 2.0), message.blocks, strict=True):
        (form,) = [part for part in tagged(block.names) if part["$"] == "tensor"]
        assert torch.equal(Decoder(frame.buffers).decode(form), torch.full((4,), number))


def test_adapters_that_say_something_else_are_told_apart() -> None:
    from nnsight_vllm_worker.prompts import lora_of

    first, other, again = (lora_of({"name": "mine", "path": p}) for p in ("/a", "/b", "/a"))
    assert first.lora_int_id == again.lora_int_id != other.lora_int_id
    assert first.lora_name == again.lora_name != other.lora_name
    assert (first.lora_path, other.lora_path) == ("/a", "/b") and lora_of(first) is first
    for wrong in ({"name": "mine"}, {"name": "mine", "path": "/a", "id": 1}, "mine", 3):
        with pytest.raises(TypeError, match="lora_request"):
            lora_of(wrong)
