"""Invokes as the one frame that asks a server to run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from nnsight_core.backend import Invoke
from nnsight_core.errors import EncodeError
from nnsight_core.wire.blocks import encode_block
from nnsight_core.wire.code import CodeEncoder
from nnsight_core.wire.data import Encoder, Json
from nnsight_core.wire.forms import tagged
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_core.wire.messages import BlockData, InvokeData, TraceMessage


class TraceEncoder:
    """Gathers invokes into one message; what several of them share goes into it once.

    Args:
        tokenizer: gives the model's tokenizer if this process has loaded it.

    Example:
        >>> encoder = TraceEncoder(lambda: None)
        >>> encoder.add(Invoke("Hello", {"max_tokens": 3}))
        >>> frame = encoder.frame()
    """

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._tokenizer = tokenizer
        self._message = TraceMessage(invokes=[])
        self._buffers: list[Buffer] = []
        self._known: dict[Any, int] = {}

    def add(self, invoke: Invoke) -> None:
        """Add an invoke.

        Raises:
            EncodeError: its prompt, a sampling argument or a name of its block cannot be shipped.
        """
        encoder = CodeEncoder(pickle=False, tokenizer=self._tokenizer())
        data = encode_block(invoke, encoder)
        prompt = invoke.prompt
        if isinstance(prompt, Mapping):  # a tokenizer's output is a mapping, but no dict
            prompt = dict(prompt)
        entry = InvokeData(
            prompt=self._plain(prompt, "The prompt"),
            sampling={
                name: self._plain(value, f"The sampling argument {name!r}")
                for name, value in invoke.sampling.items()
            },
            block=None if data is None else self._block(data, encoder),
        )
        self._message.invokes.append(entry)

    def frame(self) -> Frame:
        """The message with everything added so far."""
        return self._message.frame(self._buffers)

    def _plain(self, value: Any, what: str) -> Json:
        encoder = Encoder()
        try:
            form = encoder.encode(value, what)
        except EncodeError:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise EncodeError(
                f"{what} is a {kind}, which cannot be sent to a server: use texts, numbers, "
                "tensors, arrays, or lists, tuples and dicts of them."
            ) from None
        self._take(form, encoder.buffers)
        return form

    def _block(self, data: BlockData, encoder: CodeEncoder) -> int:
        for digest, content in encoder.blobs.items():
            if digest not in self._message.blobs:
                self._message.blobs[digest] = len(self._buffers)
                self._buffers.append(content)
        same = (orjson.dumps(data.model_dump()), tuple(bytes(b) for b in encoder.buffers))
        index = self._known.setdefault(same, len(self._message.blocks))
        if index == len(self._message.blocks):
            self._take(data.names, encoder.buffers)
            self._message.blocks.append(data)
        return index

    def _take(self, form: Json, buffers: list[Buffer]) -> None:
        """Put the buffers of some typed values behind those of the message."""
        first = len(self._buffers)
        for part in tagged(form):
            if "b" in part:
                part["b"] += first
        self._buffers += buffers
