"""A model whose blocks travel as they do to an engine, and come home as they do from one.

It runs them in this process, so that the way can be tested without an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nnsight_core import TorchModel
from nnsight_core.backend import Ended, Event, Finished, Invoke
from nnsight_core.run import Run
from nnsight_core.torch_backend import TorchBackend
from nnsight_core.wire.blocks import (
    decode_event,
    decode_run,
    encode_block,
    encode_ended,
    known_errors,
)
from nnsight_core.wire.code import CodeDecoder, CodeEncoder
from nnsight_core.wire.data import tensor_of
from nnsight_core.wire.frames import read_frame
from nnsight_core.wire.messages import BlockMessage, expect, read_message

X = torch.ones(1, 2)


def make(wired: bool = True) -> TorchModel:
    """A small model; with `wired`, its blocks travel."""
    model = TorchModel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    if wired:
        model._backend.__class__ = WiredBackend
        model._backend.root = model  # type: ignore[union-attr]
    return model


class WiredBackend(TorchBackend):
    """Runs blocks of which it has nothing but their frames."""

    root: Any
    pickle = True

    def submit(self, invokes: list[Invoke]) -> Iterator[Event]:
        for index, invoke in enumerate(invokes):
            run = self._ship(invoke, index)
            output = self._run(invoke, run)
            self.interleaver.drop(run)
            frame = read_frame(encode_ended(run, str(index), 0, []).to_bytes())
            event = decode_event(read_message(frame), frame, index, known_errors(invoke))
            assert isinstance(event, Ended)
            yield event
            yield Finished(index, output)

    def _ship(self, invoke: Invoke, index: int) -> Run:
        encoder = CodeEncoder(pickle=self.pickle)
        data = encode_block(invoke, encoder)
        assert data is not None
        sent = BlockMessage(key=str(index), block=data).frame(encoder.buffers)
        frame = read_frame(sent.to_bytes())
        decoder = CodeDecoder(
            frame.buffers,
            self.root,
            blob=lambda h, dtype, shape: tensor_of(encoder.blobs[h], dtype, shape),
            pickle=self.pickle,
        )
        return decode_run(expect(frame, BlockMessage).block, decoder, index, {})
