"""Layouts: how the tensors that the ranks of an engine hold make up the one that a single GPU has.

A layout is `None` for a tensor that every rank holds whole, a `Split` for one of which each holds
some columns, `SUM` for one of which each holds a summand, and an `Unknown` (a reason) otherwise.
Columns are counted over everything after a tensor's first axis, so that a layout survives a view
(`[tokens, heads * width]` as `[tokens, heads, width]`).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Columns that lie together on a rank: how many, and how many ranks in a row hold the same.

    The `q`, `k` and `v` of a fused projection are three pieces. Where there are more ranks than
    heads of `k`, several ranks hold the same ones.
    """

    width: int
    replicas: int = 1


class Split(NamedTuple):
    """Each rank holds some columns: its part of each piece, one after the other."""

    pieces: tuple[Piece, ...]

    @property
    def width(self) -> int:
        """How many columns a rank holds."""
        return sum(piece.width for piece in self.pieces)

    def whole(self, ranks: int) -> int:
        """How many columns there are."""
        return sum(piece.width * ranks // piece.replicas for piece in self.pieces)

    def between(self, start: int, stop: int) -> Split | None:
        """The layout of the columns `start:stop` of a rank; None if they cut a piece."""
        edges = [0, *itertools.accumulate(piece.width for piece in self.pieces)]
        if start not in edges or stop not in edges or start >= stop:
            return None
        return Split(self.pieces[edges.index(start) : edges.index(stop)])


class Sum(NamedTuple):
    """Each rank holds a summand."""


class Unknown(NamedTuple):
    """It is not known how the ranks' tensors make up the whole one."""

    why: str


SUM = Sum()
Shared = Split | Sum
Layout = Shared | Unknown | None


def split(*widths: int) -> Split:
    """Pieces of these widths on each rank, none of which another rank has."""
    return Split(tuple(Piece(width) for width in widths))


def join(layout: Shared, shards: list[Tensor], axis: int = 1) -> Tensor:
    """The whole tensor, in the order that a single GPU has.

    Args:
        shards: what each rank holds, in the order of the ranks.
        axis: where columns begin; everything from it on counts as columns.

    Example:
        >>> qkv = Split((Piece(4), Piece(2), Piece(2)))
        >>> join(qkv, [torch.zeros(5, 8), torch.ones(5, 8)]).shape
        torch.Size([5, 16])
    """
    if isinstance(layout, Sum):
        return functools.reduce(torch.add, shards)
    inner = layout.width // shards[0].shape[axis]
    parts = [
        shards[rank].narrow(axis, start // inner, piece.width // inner)
        for start, piece in _placed(layout)
        for rank in range(0, len(shards), piece.replicas)
    ]
    return torch.cat(parts, axis)


def part(layout: Shared, whole: Tensor, rank: int, ranks: int, axis: int = 1) -> Tensor:
    """What a rank holds of a whole tensor: the inverse of `join`.

    Of a sum the first rank holds everything and the others nothing, which adds up exactly.
    """
    if isinstance(layout, Sum):
        return whole if rank == 0 else torch.zeros_like(whole)
    inner = layout.whole(ranks) // whole.shape[axis]
    parts, start = [], 0
    for piece in layout.pieces:
        mine = start + rank // piece.replicas * piece.width
        parts.append(whole.narrow(axis, mine // inner, piece.width // inner))
        start += piece.width * ranks // piece.replicas
    return torch.cat(parts, axis)


def whole_shape(layout: Layout, shape: tuple[Any, ...], ranks: int) -> tuple[Any, ...]:
    """The shape of the whole tensor whose part on a rank has this one."""
    if not isinstance(layout, Split):
        return shape
    return (shape[0], shape[1] * layout.whole(ranks) // layout.width, *shape[2:])


def fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a rank's tensor of this shape can have a layout: pieces end between its heads."""
    if not isinstance(layout, Split):
        return True
    if len(shape) < 2:
        return False
    inner = torch.Size(shape[2:]).numel()
    return torch.Size(shape[1:]).numel() == layout.width and not any(
        piece.width % inner for piece in layout.pieces
    )


def _placed(layout: Split) -> list[tuple[int, Piece]]:
    starts = [0, *itertools.accumulate(piece.width for piece in layout.pieces)]
    return list(zip(starts, layout.pieces, strict=False))
