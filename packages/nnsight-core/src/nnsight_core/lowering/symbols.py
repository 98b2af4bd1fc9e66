"""Symbols: what an expression of a block is, before the block runs.

An expression is known (it comes from values that the block takes along), or it is a location's
value, or one affine operation on one, or nothing that a table could hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nnsight_core.lowering.affine import Kind
from nnsight_core.node import Node

Ids = frozenset[int]
"""The containers and tensor memories that a value was computed from."""
NONE: Ids = frozenset()
ROWS = 7
"""Rows of the tensors on which shapes are tried; no width that matters depends on it."""


class Refused(Exception):
    """Why something has no place in a table, in words that follow `... is written`."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the tree."""

    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A value known before the block runs."""

    value: Any
    of: Ids = NONE


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """Anything else: why it is not known, and the locations that it may depend on.

    Attributes:
        held: whether it may be the very value of such a location.
    """

    why: str
    of: Ids = NONE
    at: tuple[str, ...] = ()
    held: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A location's value, or the chosen part of one of its tensors.

    Attributes:
        index: which tensor; None for a tuple of them.
        like: a tensor of its shape and dtype; None for a tuple.
        base: as `like`, for the whole tensor.
        visit: in which loop of the block it was read.
        own: whether a write in it is a write in the location.
    """

    path: str
    index: int | None
    like: Tensor | None
    base: Tensor | None
    visit: int
    rows: Any = field(default_factory=lambda: slice(None))
    columns: Any = field(default_factory=lambda: slice(None))
    own: bool = True

    @property
    def whole(self) -> bool:
        return self.rows == self.columns == slice(None)

    def same(self, other: Part) -> bool:
        """Whether both are the same entries of the same value."""
        mine = (self.path, self.index, self.visit, self.rows, self.columns)
        return mine == (other.path, other.index, other.visit, other.rows, other.columns)


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A new tensor: one affine operation on a part, or (`kind` None) what such a one is built of.

    Attributes:
        kind: as in `Affine`; `dot` for `part @ operand`, `along` for that times a direction.
        column: whether a `dot` has an axis for the columns (or its part has no rows).
    """

    part: Part
    kind: Kind | str
    operand: Any
    like: Tensor
    of: Ids
    along: Tensor | None = None
    factor: float = 1.0
    column: bool = False


Symbol = Known | Unknown | Part | Made


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros to try shapes and dtypes on, all in the memory of one number."""
    return torch.zeros((), dtype=dtype, device="cpu").expand(tuple(shape))


def why_not(part: Part, symbol: Symbol) -> str:
    """Why what a part is written with is no operand, in words that follow `... is written`."""
    others = [at for at in locations_of(symbol) if at != f"{part.path}.output"]
    if others:
        return f"is written with a value that depends on {' and '.join(others)}"
    if isinstance(symbol, Unknown) and symbol.why:
        verb = "" if symbol.why.startswith("is ") else "is written with a value that "
        return verb + symbol.why
    if locations_of(symbol):
        return "is written with more than one sum, multiple or projection of it"
    return "is written with a value that is not known before the block runs"


def locations_of(symbol: Symbol) -> tuple[str, ...]:
    """The locations that a symbol depends on."""
    if isinstance(symbol, Unknown):
        return symbol.at
    if isinstance(symbol, Known):
        return ()
    return (f"{(symbol.part if isinstance(symbol, Made) else symbol).path}.output",)


def ids_of(value: Any) -> Ids:
    """The containers and tensor memories in a value: what a change of it would change."""
    found: set[int] = set()
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, _FIXED) or callable(held) or id(held) in found:
            continue
        found.add(id(held))
        if isinstance(held, Tensor):
            if type(held) in (Tensor, Parameter) and held.layout == torch.strided:
                found.add(held.untyped_storage().data_ptr())
        elif isinstance(held, dict):
            waiting.extend(held.values())
        elif isinstance(held, list | tuple):
            waiting.extend(held)
    return frozenset(found)


_FIXED = (int, float, complex, str, bytes, type(None), slice, range, torch.dtype, torch.device)
_FIXED += (Node, ModuleType)


def nodes_as_modules(value: Any) -> Any:
    if isinstance(value, Node):
        return Module(value._path)
    if type(value) in (list, tuple) and any(isinstance(v, Node) for v in value):
        return type(value)([nodes_as_modules(v) for v in value])
    return value


def rows_and_columns(index: Any) -> tuple[slice | int, slice | int | list[int]]:
    parts = list(index) if isinstance(index, tuple) else [index]
    if len(parts) == 2 and parts[0] is Ellipsis:
        parts[0] = slice(None)
    if len(parts) == 1:
        parts.append(slice(None))
    if len(parts) == 2 and parts[1] is Ellipsis:
        parts[1] = slice(None)
    rows, columns = parts if len(parts) == 2 else (None, None)
    if isinstance(columns, range):
        columns = list(columns)
    if type(rows) not in (slice, int) or type(columns) not in (slice, int, list):
        raise Refused("is indexed by more than a number or a slice of rows and of columns")
    if isinstance(columns, list) and any(type(c) is not int for c in columns):
        raise Refused("is indexed by columns that are not plain numbers")
    return rows, columns  # type: ignore[return-value]


def why_unknown(symbol: Symbol) -> str:
    at = locations_of(symbol)
    if at:
        return f"depends on {' and '.join(at)}"
    why = symbol.why if isinstance(symbol, Unknown) else ""
    return why or "is not known before the block runs"
