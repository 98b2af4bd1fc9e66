"""What clients send is refused unless it is well formed, and nothing of it runs in the server."""

from __future__ import annotations

import torch

from nnsight_client.encoding import TraceEncoder
from nnsight_core import ProtocolError
from nnsight_core.backend import EditSpec, Invoke
from nnsight_core.wire.frames import Frame, read_frame
from nnsight_core.wire.messages import BlockData
from nnsight_serve.incoming import install_of, trace_of
from tests.core.test_wire_fuzz import fuzz

COUNT = 20_000


def seeds() -> list[Frame]:
    """What clients send: traces with blocks and prompts of every kind, and an edit."""
    vector = torch.randn(8)
    large = torch.randn(100, 96)

    def block(tracer: object) -> torch.Tensor:
        return vector + large.sum()

    trace = TraceEncoder(lambda: None)
    sampling = {"max_tokens": 3, "temperature": 0.0, "stop": ["x"], "extra_args": {"mine": [1]}}
    trace.add(Invoke("Hello", sampling, function=block, edits=["a"]))
    trace.add(Invoke({"prompt_token_ids": torch.tensor([1, 2])}, {"n": 2}, function=block))
    edit = TraceEncoder(lambda: None)
    edit.block(Invoke(None, function=block))
    return [
        trace.frame(streams=True, freed=["k"]),
        edit.install(EditSpec(Invoke(None), "name", 0.5, 60.0), "ann"),
    ]


def read(data: bytes) -> None:
    frame = read_frame(data, 1 << 20)
    try:
        made = install_of(frame) if frame.header.get("kind") == "install" else trace_of(frame)
    except TypeError as error:
        # A sampling argument or a prompt that is none: the client raises the same.
        assert "sampling" in str(error) or "prompt" in str(error) or "lora" in str(error)
        raise
    assert all(isinstance(digest, str) for digest in made.needs)


def test_malformed_messages_are_refused() -> None:
    outcomes = fuzz(read, seeds(), (ProtocolError, TypeError), COUNT, seed=1)
    assert set(outcomes) <= {"taken", "ProtocolError", "FrameTooLarge", "TypeError"}, outcomes


def test_fields_that_are_out_of_range_are_refused() -> None:
    frame = seeds()[1]
    for field, value in (("share", 0), ("share", 1.5), ("share", "x"), ("ttl", -1), ("name", 3)):
        wrong = Frame({**frame.header, field: value}, frame.buffers)
        try:
            install_of(wrong)
        except ProtocolError as error:
            assert field in str(error)
        else:
            raise AssertionError(f"{field}={value!r} was taken")
    assert BlockData(source="x", filename="f", line=1, function="f", names={}).whole
