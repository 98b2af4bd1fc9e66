"""Outside tensors on the engine's device, once per content.

The process that holds the engine decides what is kept and what is dropped (`Ledger`), so that the
two sides never disagree; the worker keeps what it is told to (`Store`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from nnsight_core.errors import LateWriteError
from nnsight_core.wire.data import tensor_of
from nnsight_core.wire.frames import Buffer

KEEP = 4 << 30
"""How many bytes of outside tensors stay on the engine; the least recently used leave first."""


class Ledger:
    """What the workers hold, in the order of last use.

    Args:
        keep: how many bytes may stay.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self.keep = keep
        self._held: OrderedDict[str, int] = OrderedDict()
        self._used: dict[str, int] = {}
        self._doubtful: set[str] = set()

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Which of some contents the workers do not hold yet."""
        return [d for d in digests if d not in self._held]

    def put(self, digest: str, size: int) -> None:
        """Note that the workers hold a content."""
        self._held[digest] = size

    def use(self, digests: Iterable[str]) -> None:
        """Keep contents while a trace needs them; `release` ends that."""
        for digest in digests:
            self._held.move_to_end(digest)
            self._used[digest] = self._used.get(digest, 0) + 1

    def release(self, digests: Iterable[str], doubtful: Iterable[str] = ()) -> list[str]:
        """The contents that must leave now, least recently used first.

        Args:
            doubtful: contents that a block which failed may have changed; they leave as well.
        """
        self._doubtful.update(doubtful)
        for digest in digests:
            self._used[digest] -= 1
            if not self._used[digest]:
                del self._used[digest]
        leaving: list[str] = []
        total = sum(self._held.values())
        if total <= self.keep and not self._doubtful:
            return leaving
        for digest in list(self._held):
            over = total > self.keep or digest in self._doubtful
            if over and digest not in self._used:
                total -= self._held.pop(digest)
                self._doubtful.discard(digest)
                leaving.append(digest)
        return leaving


class Store:
    """The tensors that a worker holds for blocks.

    A block that may write in place gets copies. One that surely does not gets the tensor itself,
    whose version is checked when the block has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[str, tuple[Tensor, int]] = {}

    def put(self, digest: str, data: Buffer) -> None:
        """Place some bytes on the device."""
        with torch.inference_mode(False):
            tensor = tensor_of(data, "uint8", [memoryview(data).nbytes]).to(self.device)
        self._tensors[digest] = (tensor, tensor._version)

    def get(self, digest: str, dtype: str, shape: list[int], copy: bool) -> Tensor:
        """Some bytes as a tensor for a block."""
        tensor = self._tensors[digest][0].view(getattr(torch, dtype)).view(shape)
        return tensor.clone() if copy else tensor

    def drop(self, digests: Iterable[str]) -> None:
        """Let tensors go."""
        for digest in digests:
            self._tensors.pop(digest, None)

    def check(self, digests: Iterable[str]) -> LateWriteError | None:
        """An error if a block changed a tensor that it was not to change.

        Whoever uses the tensor at that time gets it, too, until the holder of the engine, who sees
        that a request has failed, lets the tensor go.
        """
        for digest in digests:
            held = self._tensors.get(digest)
            if held is not None and held[0]._version != held[1]:
                return LateWriteError(
                    "The block, or another that uses the same tensor, changed a tensor from "
                    "outside in place through a call that its text does not show. Clone it in the "
                    "block first."
                )
        return None

    @property
    def bytes(self) -> int:
        """How many bytes are held."""
        return sum(t.numel() * t.element_size() for t, _ in self._tensors.values())
