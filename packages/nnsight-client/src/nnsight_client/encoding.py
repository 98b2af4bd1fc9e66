"""Invokes and edits as the one frame that asks a server for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson

from nnsight_core.backend import EditSpec, Invoke
from nnsight_core.errors import EncodeError
from nnsight_core.kept import Kept, KeptValues
from nnsight_core.wire.blocks import encode_block
from nnsight_core.wire.code import CodeEncoder, check_content
from nnsight_core.wire.data import Encoder, Json
from nnsight_core.wire.forms import tagged
from nnsight_core.wire.frames import Buffer, Frame
from nnsight_core.wire.messages import BlockData, InstallMessage, InvokeData, TraceMessage

LORA = ("lora_name", "lora_path")


class TraceEncoder:
    """Gathers invokes into one message; what several of them share goes into it once.

    Args:
        tokenizer: gives the model's tokenizer if this process has loaded it.
        kept: the values that stay on the server's engine; None refuses none.

    Attributes:
        blobs: the bytes of the large tensors that the blocks need, by content.
        handles: the kept values that they use, to be held until the server has read them.

    Example:
        >>> encoder = TraceEncoder(lambda: None)
        >>> encoder.add(Invoke("Hello", {"max_tokens": 3}))
        >>> frame = encoder.frame()
    """

    def __init__(self, tokenizer: Callable[[], Any], kept: KeptValues | None = None) -> None:
        self.blobs: dict[str, Buffer] = {}
        self.handles: list[Kept] = []
        self._tokenizer = tokenizer
        self._kept = kept
        self._invokes: list[InvokeData] = []
        self._blocks: list[BlockData] = []
        self._buffers: list[Buffer] = []
        self._known: dict[Any, int | None] = {}
        self._same: dict[Any, int] = {}

    def add(self, invoke: Invoke) -> None:
        """Add an invoke.

        Raises:
            EncodeError: its prompt, a sampling argument or a name of its block cannot be shipped.
            KeptError: it uses a kept value that is not on that server.
        """
        prompt = invoke.prompt
        if isinstance(prompt, Mapping):  # a tokenizer's output is a mapping, but no dict
            prompt = dict(prompt)
        entry = InvokeData(
            prompt=self._plain(prompt, "The prompt"),
            sampling={
                name: self._plain(_sendable(name, value), f"The sampling argument {name!r}")
                for name, value in invoke.sampling.items()
            },
            # Last, since each block that is sent belongs to an invoke that is.
            block=self.block(invoke),
            edits=invoke.edits,
        )
        self._invokes.append(entry)

    def block(self, invoke: Invoke) -> int | None:
        """Add the block of an invoke, if it has one; its index."""
        sign = invoke.sign()
        if sign not in self._known:
            encoder = CodeEncoder(pickle=False, tokenizer=self._tokenizer())
            data = encode_block(invoke, encoder)
            if self._kept is not None:
                self._kept.check(encoder.handles)
            self._known[sign] = None if data is None else self._put(data, encoder)
        return self._known[sign]

    def take_along(self, without: Collection[str]) -> None:
        """Copy what may change before it is sent.

        Args:
            without: contents that the server has.
        """
        self._buffers = [bytes(buffer) for buffer in self._buffers]
        for digest, content in self.blobs.items():
            if digest not in without:
                self.blobs[digest] = bytes(content)

    def check_unchanged(self) -> None:
        """Refuse to send contents that have changed since they were taken along.

        Raises:
            EngineError: one has.
        """
        for digest, content in self.blobs.items():
            check_content(digest, content)

    def frame(self, without: Collection[str] = (), **about: Any) -> Frame:
        """The message with everything added so far.

        Args:
            without: contents that the server has.
            **about: the other fields of the message.
        """
        blobs, buffers = self._sent(without)
        message = TraceMessage(invokes=self._invokes, blocks=self._blocks, blobs=blobs, **about)
        return message.frame(buffers)

    def install(self, edit: EditSpec, owner: str, without: Collection[str] = ()) -> Frame:
        """The message that asks for an edit, whose block was added."""
        blobs, buffers = self._sent(without)
        about = {"name": edit.name, "share": edit.share, "ttl": edit.ttl, "owner": owner}
        return InstallMessage(block=self._blocks[0], blobs=blobs, **about).frame(buffers)

    def _sent(self, without: Collection[str]) -> tuple[dict[str, int], list[Buffer]]:
        """Which buffers the large tensors are, and all buffers."""
        blobs: dict[str, int] = {}
        buffers = list(self._buffers)
        for digest, content in self.blobs.items():
            if digest not in without:
                blobs[digest] = len(buffers)
                buffers.append(content)
        return blobs, buffers

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

    def _put(self, data: BlockData, encoder: CodeEncoder) -> int:
        self.blobs.update(encoder.blobs)
        self.handles += encoder.handles
        # Bodies that were captured one by one may say the same.
        same = (orjson.dumps(data.model_dump()), tuple(bytes(b) for b in encoder.buffers))
        index = self._same.setdefault(same, len(self._blocks))
        if index == len(self._blocks):
            self._take(data.names, encoder.buffers)
            self._blocks.append(data)
        return index

    def _take(self, form: Json, buffers: list[Buffer]) -> None:
        """Put the buffers of some typed values behind those of the message."""
        first = len(self._buffers)
        for part in tagged(form):
            if "b" in part:
                part["b"] += first
        self._buffers += buffers


def _sendable(name: str, value: Any) -> Any:
    """A sampling argument as data; vLLM's own `LoRARequest` becomes what it is made of."""
    if name == "lora_request" and all(hasattr(value, part) for part in LORA):
        return dict(zip(("name", "path"), (getattr(value, part) for part in LORA), strict=True))
    return value
