"""The ranks of an engine, and how tensors pass between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nnsight_vllm_worker import layouts
from nnsight_vllm_worker.layouts import Shared, Split


class Group:
    """The ranks over which the layers of an engine are split, as one of them sees them.

    All of them call the same methods in the same order. Tensors travel as bytes, whatever their
    dtype.

    Args:
        ranks: their global ranks.
        rank: the place of this one among them.
        tensors: the process group for tensors.
        objects: the process group for everything else.

    Attributes:
        rank: the place of this one.
        size: how many there are.
    """

    def __init__(self, ranks: list[int], rank: int, tensors: Any, objects: Any) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._first = ranks[0]
        self._tensors = tensors
        self._objects = objects

    def agree(self, mine: Any) -> list[Any]:
        """What all ranks hand in, in their order."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine, group=self._objects)
        return every

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On the first rank: everybody's tensor, all of one shape. Elsewhere nothing."""
        own = _bytes(tensor)
        every = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, every, dst=self._first, group=self._tensors)
        return [_as(data, tensor) for data in every or ()]

    def scatter(self, parts: list[Tensor] | None, like: Tensor) -> Tensor:
        """This rank's part of what the first rank has.

        Args:
            parts: on the first rank, one for each; None elsewhere.
            like: a tensor of the shape and dtype of a part.
        """
        own = torch.empty_like(_bytes(like))
        given = None if parts is None else [_bytes(part) for part in parts]
        dist.scatter(own, given, src=self._first, group=self._tensors)
        return _as(own, like)

    def join(self, layout: Shared, tensor: Tensor, axis: int = 1) -> Tensor | None:
        """On the first rank: the whole tensor of which each has a part. Elsewhere None."""
        shards = self.gather(tensor)
        return layouts.join(layout, shards, axis) if shards else None

    def deal(self, layout: Split, whole: Tensor | None, like: Tensor, axis: int = 1) -> Tensor:
        """This rank's part of a whole tensor that the first rank has.

        Args:
            whole: on the first rank, the tensor; None elsewhere.
            like: a tensor of the shape and dtype of a part.
        """
        if whole is None:
            return self.scatter(None, like)
        parts = [layouts.part(layout, whole, rank, self.size, axis) for rank in range(self.size)]
        return self.scatter(parts, like)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """The tensor that the first rank has.

        Args:
            tensor: on the first rank, the tensor; None elsewhere.
            like: a tensor of its shape and dtype.
        """
        own = torch.empty_like(_bytes(like)) if tensor is None else _bytes(tensor)
        dist.broadcast(own, src=self._first, group=self._tensors)
        return _as(own, like)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _as(data: Tensor, like: Tensor) -> Tensor:
    return data.view(like.dtype).view(like.shape)
