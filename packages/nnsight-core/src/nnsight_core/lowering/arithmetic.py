"""Arithmetic on symbols: which operations on a location's value are one affine write.

Shapes and dtypes are followed by PyTorch itself on small tensors of zeros (faster than on `meta`
tensors, whose operations are Python), so that what raises where the block runs raises here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nnsight_core.lowering.pure import moderate
from nnsight_core.lowering.symbols import (
    Known,
    Made,
    Part,
    Refused,
    Symbol,
    Unknown,
    blank,
    why_not,
)


class Arithmetic:
    """Arithmetic where values lie on a device.

    Args:
        device: of the locations' values.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def operand(self, part: Part, symbol: Symbol, sets: bool = False) -> Tensor | float:
        """A known value as what a table holds: a number, or one for each column of a part.

        Raises:
            Refused: it is not known, or PyTorch would do something else with it.
        """
        if not isinstance(symbol, Known):
            raise Refused(why_not(part, symbol))
        value, like = symbol.value, part.like
        assert like is not None
        if type(value) in (int, float):
            if type(value) is int and float(value) != value:
                raise Refused("is written with a whole number too large for a table")
            return float(value)
        if type(value) not in (Tensor, Parameter) or value.layout != torch.strided:
            raise Refused(f"is written with a {type(value).__name__}, not a number or a tensor")
        if not value.is_floating_point():
            raise Refused(f"is written with a tensor of {_dtype(value)}: only floats are lowered")
        value = value.detach()
        if not sets and value.device != self.device and value.dim():
            raise Refused(f"lies on {self.device}, and what it is written with on {value.device}")
        if not sets and value.dtype == torch.float64 != like.dtype and value.dim():
            raise Refused("is written with a float64 tensor, for which PyTorch computes in float64")
        if value.numel() == 1 and value.dim() <= like.dim():
            number = value.reshape(()).double()
            if not value.dim() and not sets and number != number.to(like.dtype):
                raise Refused("is written with a 0-dimensional tensor that its dtype cannot hold")
            return number.item()
        if isinstance(part.columns, int) or value.numel() != value.shape[-1]:
            raise Refused(
                f"is written with a tensor of shape {list(value.shape)}: only a number, or one for "
                "each column, is the same for every row"
            )
        return value.reshape(-1)

    def operate(self, op: Callable[..., Any] | None, left: Symbol, right: Symbol) -> Symbol | None:
        """`left op right`."""
        for symbol in (left, right):
            if isinstance(symbol, Unknown) and symbol.why:
                raise Refused(symbol.why)
        if op is None or isinstance(left, Unknown) or isinstance(right, Unknown):
            return None
        if isinstance(left, Known) and isinstance(right, Known):
            if op is operator.pow and type(left.value) is type(right.value) is int:
                return None  # it may take for ever
            if not moderate(left.value, right.value):
                return None
            return Known(
                op(number_or_tensor(left.value), number_or_tensor(right.value)), left.of | right.of
            )
        if getattr(left, "like", 0) is None or getattr(right, "like", 0) is None:
            return None
        for part, known in ((left, right), (right, left)):
            if isinstance(part, Part) and isinstance(known, Known) and op is not operator.matmul:
                self.operand(part, known)  # says more than PyTorch would
        like = op(_like(left), _like(right))
        match left, right:
            case Part() as part, Known() as known:
                return self._scaled(part, known, op, like)
            case Known() as known, Part() as part if op in (operator.add, operator.mul):
                return self._scaled(part, known, op, like)
            case (Part() as part, Made(kind="along") as taken) if op in (
                operator.add,
                operator.sub,
            ):
                return _projected(part, taken, op is operator.add, like)
            case (Made(kind="along") as taken, Part() as part) if op is operator.add:
                return _projected(part, taken, True, like)
            case Made(kind="dot" | "along") as made, Known() as known:
                if op in (operator.mul, operator.truediv):
                    return self._times(made, known, op, like)
            case (Known() as known, Made(kind="dot" | "along") as made) if op is operator.mul:
                return self._times(made, known, op, like)
        return None

    def _scaled(self, part: Part, known: Known, op: Any, like: Tensor) -> Symbol | None:
        if op is operator.matmul:
            return self._dot(part, known, like)
        if op is operator.truediv:
            by = self._divisor(self.operand(part, known), known.value)
            return Made(part, "scale", by, like, known.of)
        if op is operator.mul:
            return Made(part, "scale", self.operand(part, known), like, known.of)
        if op in (operator.add, operator.sub):
            number = self.operand(part, known)
            return Made(part, "add", -number if op is operator.sub else number, like, known.of)
        return None

    def _divisor(self, number: Tensor | float, given: Any) -> float:
        """What to multiply by instead of dividing, if that is what PyTorch does or the same."""
        if isinstance(number, Tensor):
            raise Refused("is divided by a tensor: multiply it by the reciprocal")
        number_itself = not isinstance(given, Tensor) or (not given.dim() and not given.is_cuda)
        exact = abs(math.frexp(number)[0]) == 0.5
        # On a GPU, PyTorch divides by a number by multiplying with its reciprocal.
        if not exact and not (number_itself and self.device.type == "cuda"):
            raise Refused("is divided by no power of two: multiply it by the reciprocal")
        return _reciprocal(number)

    def _dot(self, part: Part, known: Known, like: Tensor) -> Symbol | None:
        if not isinstance(known.value, Tensor) or known.value.dim() != 1:
            return None
        direction = self.operand(part, known)
        if not isinstance(direction, Tensor):
            return None
        return Made(part, "dot", direction, like, known.of, column=not like.dim())

    def _times(self, made: Made, known: Known, op: Any, like: Tensor) -> Symbol | None:
        number = self.operand(made.part, known)
        of = made.of | known.of
        if isinstance(number, float):
            by = _reciprocal(number) if op is operator.truediv else number
            return replace(made, factor=made.factor * by, like=like, of=of)
        if op is operator.truediv or not made.column or made.kind == "along":
            return None
        return replace(made, kind="along", along=number, like=like, of=of)


def as_column(made: Made) -> Made | None:
    """A product with a direction, with an axis for the columns."""
    if made.like.dim() != 1 or made.column:
        return None
    return replace(made, like=made.like[:, None], column=True)


def number_or_tensor(value: Any) -> Any:
    """A value with which arithmetic is followed."""
    if type(value) not in (int, float, Tensor, Parameter):
        raise Refused(f"is written with arithmetic on a {type(value).__name__}")
    return value


def _like(symbol: Symbol) -> Any:
    if isinstance(symbol, Known):
        value = number_or_tensor(symbol.value)
        return blank(value.shape, value.dtype) if isinstance(value, Tensor) else value
    assert isinstance(symbol, Part | Made)
    return symbol.like


def _projected(part: Part, taken: Made, plus: bool, like: Tensor) -> Made | None:
    if not part.same(taken.part) or part.like is None or taken.like.shape != part.like.shape:
        return None
    factor = -taken.factor if plus else taken.factor
    return replace(taken, kind="project", factor=factor, like=like)


def _reciprocal(number: Tensor | float) -> float:
    if isinstance(number, Tensor) or not math.isfinite(number) or not 1e-30 < abs(number) < 1e30:
        raise Refused("is divided by what has no reciprocal that a table can hold")
    return 1.0 / number


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
