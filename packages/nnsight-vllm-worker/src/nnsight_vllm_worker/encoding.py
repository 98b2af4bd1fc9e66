"""Blocks on their way to an engine in this process's hands, each encoded once per trace."""

from __future__ import annotations

from typing import Any

from nnsight_core.backend import Invoke
from nnsight_core.kept import KeptValues
from nnsight_core.tree import ModelTree
from nnsight_core.wire.blocks import check_block, encode_block
from nnsight_core.wire.code import CodeEncoder
from nnsight_core.wire.frames import Buffer
from nnsight_vllm_worker.prompts import Samplings
from nnsight_vllm_worker.submission import Carried, Request, request_of


class BlockEncoder:
    """Encodes the blocks of one trace.

    Args:
        tree: the tree that they are checked against; None to check nothing yet.
        pickle: whether they may hold what only cloudpickle ships.
        kept: the values that stay on the engine.

    Attributes:
        blobs: the bytes of the outside tensors that they need, by content.
    """

    def __init__(
        self, tree: ModelTree | None, tokenizer: Any, pickle: bool, kept: KeptValues
    ) -> None:
        self.blobs: dict[str, Buffer] = {}
        self._kept = kept
        self._tree = tree
        self._tokenizer = tokenizer
        self._pickle = pickle
        self._known: dict[Any, Carried | None] = {}
        self._samplings = Samplings()

    def block(self, invoke: Invoke) -> Carried | None:
        """The block of an invoke, if it has one.

        Raises:
            LocationError: its text surely names a location that does not exist.
            EncodeError: a name that it needs holds what cannot be shipped.
        """
        sign = invoke.sign()
        if sign not in self._known:
            check_block(invoke, self._tree)
            encoder = CodeEncoder(self._pickle, self._tokenizer)
            data = encode_block(invoke, encoder)
            self._kept.check(encoder.handles)
            self.blobs.update(encoder.blobs)
            self._known[sign] = None
            if data is not None:
                needs = (encoder.blobs, encoder.handles)
                self._known[sign] = Carried.of(data, encoder.buffers, *needs)
        return self._known[sign]

    def request(self, invoke: Invoke) -> Request:
        """The request of an invoke.

        Raises:
            TypeError, ValueError: as `request_of` does, or as `block` does.
        """
        block = self.block(invoke)
        return request_of(invoke.prompt, invoke.sampling, block, invoke.edits, self._samplings)
